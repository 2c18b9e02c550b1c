"""The parts of a train state: a model's, a checked optimizer, and leaves in a pickle.

Everything here runs while a state is created, copied or pickled, never in a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import jax
import optax
from flax import linen as nn, nnx
from flax.core import meta

from meshlayout import _jax
from meshlayout._annotations import Leaf, PyTree
from meshlayout._checks import shown
from meshlayout.errors import StateError
from meshlayout.layout import Layout


class ModelParts(NamedTuple):
    """A built model, taken apart.

    Attributes:
        params: The trainable parameters, as nested dicts.
        model_state: The model's other arrays, likewise.
        graphdef: The structure of an NNX module; None for Linen.
        boxed: The structure of Linen's parameters with the boxes that hold their
            metadata; None for NNX, whose graphdef has the metadata.
    """

    params: PyTree
    model_state: PyTree
    graphdef: Any
    boxed: Any


def split_model(built: PyTree, module: object, where: str) -> ModelParts:
    """Returns the parts of what a builder returned.

    Args:
        built: An NNX module, or Linen's variables.
        module: For Linen, the module; otherwise None.
        where: The public function, for messages.

    Raises:
        StateError: If `built` is neither, or has no parameters.
    """
    what = "None" if built is None else f"a {type(built).__name__}"
    if module is not None:
        if not isinstance(module, nn.Module) or not isinstance(built, Mapping):
            msg = (
                f"{where}: module= is for Linen: a Linen module, with a builder that "
                "returns what module.init(key, sample) returns. Got "
                f"{shown(module)}, and a builder that returns {what}."
            )
            raise StateError(msg)
        variables = dict(built)
        boxed = variables.pop("params", None)
        # Steps work on plain arrays; the boxes are put back to resolve layouts.
        params = meta.unbox(boxed)
        if not jax.tree.leaves(params):
            msg = (
                f"{where}: the builder's variables have the collections "
                f"{sorted(built)}, and no parameters in 'params'. Return what "
                "module.init(key, sample) returns."
            )
            raise StateError(msg)
        boxed_structure = jax.tree.structure(boxed)
        return ModelParts(params, meta.unbox(variables), None, boxed_structure)
    if isinstance(built, nnx.Module):
        # Into plain dicts: flattening an nnx.State takes JAX several times as long,
        # and every call of a step flattens its state.
        graphdef, params, rest = nnx.split(built, nnx.Param, ...)
        if not jax.tree.leaves(params):
            msg = (
                f"{where}: the {type(built).__name__} has no parameters to train: none "
                "of its variables is an nnx.Param. Use create(build, layouts) for it."
            )
            raise StateError(msg)
        return ModelParts(
            nnx.to_pure_dict(params), nnx.to_pure_dict(rest), graphdef, None
        )
    hint = " A function that ends without `return` gives None." * (built is None)
    msg = (
        f"{where}: the builder returned {what}, and must return an NNX "
        f"module, or Linen's variables together with module=.{hint} For any other "
        "pytree use create(build, layouts)."
    )
    raise StateError(msg)


def as_transformation(
    optimizer: optax.GradientTransformation | optax.MultiSteps, where: str
) -> optax.GradientTransformation:
    """Returns an optimizer as a plain Optax transformation.

    Raises:
        StateError: If it is not an Optax optimizer.
    """
    if isinstance(optimizer, optax.MultiSteps):
        # Its own gradient_transformation() does not pass on extra arguments such as
        # value=, which some optimizers need.
        update: Any = optimizer.update
        return optax.GradientTransformationExtraArgs(optimizer.init, update)
    if not isinstance(optimizer, optax.GradientTransformation):
        msg = (
            f"{where} takes an Optax optimizer, got {shown(optimizer)}. Write "
            "TrainState.create(build, optax.adam(1e-3), layouts)."
        )
        raise StateError(msg)
    return optimizer


def check_rng(rng: object, where: str) -> None:
    """Raises StateError unless this is a seed or a PRNG key."""
    is_seed = isinstance(rng, Integral) and not isinstance(rng, bool)
    if not is_seed and not (isinstance(rng, jax.Array) and _jax.is_key(rng)):
        msg = (
            f"{where}: rng must be a seed or a PRNG key, got {shown(rng)}. Write rng=0 "
            "or rng=jax.random.key(0)."
        )
        raise StateError(msg)


@dataclass(frozen=True)
class PickledLeaf:
    """A leaf in the form that is pickled: gathered to the host.

    Attributes:
        value: The host value; the raw data of a PRNG key.
        layout: The layout to restore; None for a leaf that was on the host.
        key_impl: The implementation of a PRNG key.
    """

    value: Leaf
    layout: Layout | None
    key_impl: str | None

    @classmethod
    def of(cls, leaf: Leaf) -> "PickledLeaf":
        """Returns a leaf in this form."""
        if not isinstance(leaf, jax.Array):
            return cls(leaf, None, None)
        layout = Layout.of(leaf)
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):  # NumPy has none
            data = _jax.to_host(jax.random.key_data(leaf))
            return cls(data, layout, str(jax.random.key_impl(leaf)))
        return cls(_jax.to_host(leaf), layout, None)

    def restored(self) -> Leaf:
        """Returns the leaf, on the devices that it came from."""
        if self.layout is None:
            return self.value
        value = self.value
        if self.key_impl is not None:
            value = jax.random.wrap_key_data(value, impl=self.key_impl)
        return _jax.put(value, self.layout.sharding)
