"""What differs between the versions of Flax that are tested."""

from typing import Any

from flax import nnx


# A module holds a list of modules: in flax 0.11 as it is, since then wrapped.
module_list = getattr(nnx, "List", list)


def set_value(variable: Any, value: Any) -> None:
    """Sets the whole value of a Variable."""
    if hasattr(variable, "set_value"):
        variable.set_value(value)
    else:
        variable.value = value
