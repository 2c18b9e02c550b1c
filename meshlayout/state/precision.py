"""The dtypes in which a step computes.

Parameters keep their dtype, and are cast where they are used: inside the differentiated
function, so that their gradients have full precision again.
"""

import contextlib
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from meshlayout import _checks, _paths
from meshlayout._annotations import DType, Leaf, PyTree
from meshlayout.errors import StateError


@_checks.user_call
@dataclass(frozen=True)
class PrecisionPolicy:
    """Dtypes of a step, for a combination that `precision=` has no name for.

    Attributes:
        compute: The dtype in which layers compute; None for that of the parameters. A
            layer that was given a dtype keeps it. Statistics of normalization, losses
            and norms stay in float32.
        output: The dtype of what the model returns; None leaves it unchanged.
    """

    compute: Any = None
    output: Any = None

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            if value is None:
                continue
            dtype = None
            with contextlib.suppress(TypeError):
                dtype = jnp.dtype(value)
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                msg = f"PrecisionPolicy({name}={value!r}): expected a floating-point "
                raise StateError(f"{msg}dtype, as 'bfloat16'.")
            object.__setattr__(self, name, dtype)  # as a dtype, to compare and hash by


Precision: TypeAlias = str | PrecisionPolicy

_NAMED = {
    "float32": PrecisionPolicy(),
    "bfloat16": PrecisionPolicy("bfloat16", "float32"),
    "float16": PrecisionPolicy("float16", "float32"),
}


def parse_precision(precision: Precision) -> PrecisionPolicy:
    """Returns the policy that a `precision=` argument means."""
    if isinstance(precision, PrecisionPolicy):
        return precision
    if isinstance(precision, str) and precision in _NAMED:
        return _NAMED[precision]
    text = getattr(precision, "__name__", str(precision))  # as of jnp.bfloat16
    marks = {"bf": "bfloat16", "16": "float16", "32": "float32"}
    near = next((f" Did you mean {marks[x]!r}?" for x in marks if x in text), "")
    msg = (
        f"precision={precision!r} is none of {', '.join(map(repr, _NAMED))}, or a "
        "PrecisionPolicy(compute, output). A layer that should compute in another "
        f"dtype names it itself: dtype=.{near}"
    )
    raise StateError(msg)


def cast(tree: PyTree, dtype: DType | None) -> Any:
    """Casts the floating-point arrays in a tree, and copies no NNX object."""
    if dtype is None:
        return tree

    def cast_leaf(leaf: Leaf) -> Any:
        kind = None if _paths.is_nnx_object(leaf) else getattr(leaf, "dtype", None)
        is_float = kind is not None and jnp.issubdtype(kind, jnp.floating)
        return leaf.astype(dtype) if is_float else leaf

    return jax.tree.map(cast_leaf, tree, is_leaf=_paths.is_nnx_object)
