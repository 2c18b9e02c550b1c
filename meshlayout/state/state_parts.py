"""What a train state is made of: the parts of a model, and a checked optimizer."""

from collections.abc import Mapping
from numbers import Integral
from typing import Any, NamedTuple

import jax
import optax
from flax import linen as nn, nnx
from flax.core import meta

from meshlayout import _jax
from meshlayout._annotations import PyTree
from meshlayout._checks import shown
from meshlayout.errors import StateError


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
