"""What differs between the versions of Flax that are tested."""

from flax import nnx


# A module holds a list of modules: in flax 0.11 as it is, since then wrapped.
module_list = getattr(nnx, "List", list)
