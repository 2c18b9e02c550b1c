"""Recomputation in the backward pass: of the blocks of a model, or of all of it.

Blocks are wrapped in `nnx.remat` or `nn.remat` at the moment they are called, so that
the model does not change for a machine with less memory.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax
from flax import linen as nn, nnx

from meshlayout import _checks, _paths
from meshlayout._annotations import PyTree
from meshlayout.errors import StepError
from meshlayout.step.model_call import ModuleCall


# "none", "blocks", "full", or what is saved of blocks: one of jax.checkpoint_policies.
Remat: TypeAlias = str | Callable[..., Any]


def check_remat(remat: Remat) -> None:
    """Raises StepError if `remat=` is not a valid choice."""
    if remat not in ("none", "blocks", "full") and not callable(remat):
        msg = (
            f"remat={_checks.shown(remat)} is none of 'none', 'blocks', 'full', or a "
            "policy of jax.checkpoint_policies, for the blocks."
        )
        raise StepError(msg)


class Rematting:
    """Recomputes submodules; an `Interceptor`. What is inside of one is not done twice.

    Args:
        remat: What is recomputed.
        params: The model's parameters, whose paths show which submodules are blocks.
    """

    def __init__(self, remat: Remat, params: PyTree) -> None:
        self._policy = remat if callable(remat) else None
        paths = [leaf.path for leaf in _paths.flatten(params).leaves]
        self._paths = {""} if remat == "full" else block_paths(paths)
        self._is_inside = False
        if not self._paths:
            msg = (
                "remat: the model has no blocks (numbered submodules, as 'layers/0', "
                "that hold submodules with parameters). Use nnx.remat or nn.remat in "
                "the model, or remat='full'."
            )
            raise StepError(msg)

    def __call__(self, call: ModuleCall) -> Callable[..., Any]:
        """Returns a call whose insides are recomputed, of a chosen submodule."""
        is_chosen = call.path in self._paths and not self._is_inside
        return functools.partial(self._recomputed, call) if is_chosen else call.proceed

    def _recomputed(self, call: ModuleCall, /, *args: Any, **kwargs: Any) -> Any:
        # An NNX object is a pytree as well. Flattened here, it would be a copy, whose
        # random streams do not advance those of the caller. Everything else (flags,
        # None) is no argument of what is traced.
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_paths.is_nnx_object)
        objects = {i: x for i, x in enumerate(leaves) if _paths.is_nnx_object(x)}
        arrays = {
            i: x
            for i, x in enumerate(leaves)
            # An nnx.Rngs has any attribute, also a shape and a dtype.
            if i not in objects and hasattr(x, "dtype") and hasattr(x, "shape")
        }

        def inner(module: Any, objects: dict[int, Any], arrays: dict[int, Any]) -> Any:
            filled = {**dict(enumerate(leaves)), **objects, **arrays}
            args, kwargs = treedef.unflatten(filled.values())
            # The module inside is a copy, whose call is intercepted again.
            self._is_inside = True
            try:
                return module(*args, **kwargs)
            finally:
                self._is_inside = False

        def pure(module: Any, state: Any, arrays: dict[int, Any]) -> Any:
            inside = nnx.merge(graphdef, state)
            return inner(module, inside, arrays), nnx.state(inside)

        if isinstance(call.module, nnx.Module):
            return nnx.remat(inner, policy=self._policy)(call.module, objects, arrays)
        # Linen's remat does not know NNX objects.
        graphdef, state = nnx.split(objects)
        remat: Any = nn.remat(pure, policy=self._policy)
        result, after = remat(call.module, state, arrays)
        nnx.update(objects, after)
        return result


def block_paths(paths: Iterable[str]) -> set[str]:
    """Returns the outermost numbered paths that hold submodules with parameters.

    Example:
        >>> sorted(block_paths(["blocks/0/mlp/kernel", "blocks/1/mlp/kernel"]))
        ['blocks/0', 'blocks/1']
        >>> sorted(block_paths(["layers/0/kernel", "output/kernel"]))
        []
    """
    blocks: set[str] = set()
    for path in paths:
        names = path.split("/")
        ends = (n for n in range(1, len(names) - 1) if names[n - 1][-1:].isdecimal())
        if (end := next(ends, None)) is not None:
            blocks.add("/".join(names[:end]))
    return blocks
