"""The dtypes in which a step computes and stores; dynamic loss scaling.

Parameters stay in the dtype that they were built in, and are cast where they are used:
a cast inside the differentiated function makes their gradients full precision again.
"""

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from meshlayout import _checks, _paths, _render
from meshlayout._annotations import DType, Leaf, PyTree
from meshlayout.errors import StateError, did_you_mean


@dataclass(frozen=True)
class PrecisionPolicy:
    """Dtypes of a step; None leaves a dtype unchanged.

    Use this for a combination that has no name; `precision="bfloat16"` and
    `"float16"` cover the usual ones.

    Attributes:
        param: The dtype in which parameters are stored; a model with another one is
            refused.
        compute: The dtype in which layers compute. Parameters are cast where they are
            used; a layer that was given a dtype keeps it. Statistics of normalization,
            losses and norms stay in float32.
        output: The dtype of what the model returns.

    Raises:
        StateError: If one of them is not a floating-point dtype.
    """

    param: Any = None
    compute: Any = None
    output: Any = None

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            if value is None:
                continue
            try:
                dtype = jnp.dtype(value)
            except TypeError:
                dtype = None
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                msg = (
                    f"PrecisionPolicy({name}={value!r}): expected a floating-point "
                    "dtype, as 'bfloat16'."
                )
                raise StateError(msg)
            object.__setattr__(self, name, dtype)  # as a dtype, to compare and hash by


Precision: TypeAlias = str | PrecisionPolicy | Mapping[str, "str | PrecisionPolicy"]

_NAMED = {
    "float32": PrecisionPolicy(),
    "bfloat16": PrecisionPolicy(compute="bfloat16", output="float32"),
    "float16": PrecisionPolicy(compute="float16", output="float32"),
}


@dataclass(frozen=True)
class Policies:
    """A policy for the model, and others for some of its paths.

    Attributes:
        default: The policy of paths that no pattern matches.
        by_path: Patterns, searched for in paths, and their policies; the first match
            wins.
    """

    default: PrecisionPolicy
    by_path: tuple[tuple[str, PrecisionPolicy], ...] = ()

    def at(self, path: str) -> PrecisionPolicy:
        """Returns the policy of the parameter or submodule with this path."""
        for pattern, policy in self.by_path:
            if re.search(pattern, path):
                return policy
        return self.default

    @property
    def casts(self) -> bool:
        """Whether anything is computed or returned in a different dtype."""
        return bool(self.computes_in) or self.default.output is not None

    @property
    def computes_in(self) -> frozenset[Any]:
        """All compute dtypes of the policies, without None."""
        policies = [self.default, *(policy for _, policy in self.by_path)]
        dtypes = {policy.compute for policy in policies}
        return frozenset(dtypes - {None})


def parse_precision(precision: Any) -> Policies:
    """Returns the policies that a `precision=` argument means.

    Args:
        precision: `"float32"`, `"bfloat16"`, `"float16"`, a `PrecisionPolicy`, or a
            dict from patterns of paths to any of these, with `""` for the rest.

    Raises:
        StateError: If it is none of these.

    Example:
        >>> policies = parse_precision({"router": "float32", "": "bfloat16"})
        >>> policies.at("mlp/up/kernel").compute
        dtype(bfloat16)
    """
    if not isinstance(precision, Mapping):
        return Policies(_policy(precision))
    if not precision:
        msg = (
            "precision={} is empty. Give patterns of paths and their dtypes, as "
            '{"router": "float32", "": "bfloat16"}.'
        )
        raise StateError(msg)
    rules = []
    for pattern, policy in precision.items():
        _checks.pattern("pattern", pattern, where="precision", error=StateError)
        parsed = _policy(policy)
        if pattern and isinstance(policy, str):
            # The name stands for an output dtype as well, which a part does not have.
            parsed = PrecisionPolicy(compute=parsed.compute)
        if pattern and parsed.output is not None:
            msg = (
                f"precision: the policy of {pattern!r} sets output=, which is of the "
                "whole model. Set it for the pattern ''."
            )
            raise StateError(msg)
        rules.append((pattern, parsed))
    # The empty pattern would match every path, so it is the default, wherever it is.
    default = dict(rules).get("", PrecisionPolicy())
    return Policies(default, tuple(rule for rule in rules if rule[0]))


def _policy(precision: Any) -> PrecisionPolicy:
    if isinstance(precision, PrecisionPolicy):
        return precision
    if isinstance(precision, str) and precision in _NAMED:
        return _NAMED[precision]
    names = ", ".join(map(repr, _NAMED))
    msg = (
        f"precision={precision!r} is none of {names}, a PrecisionPolicy(param, "
        "compute, output), or a dict from paths to those."
        f"{did_you_mean(precision, _NAMED)}"
    )
    raise StateError(msg)


def cast_for_compute(
    tree: PyTree, policies: Policies, casting: Collection[str] = ()
) -> Any:
    """Casts floating-point parameters to their compute dtypes.

    Args:
        tree: Parameters.
        policies: The policies.
        casting: Paths of layers that cast their own parameters, which are skipped.
    """
    if not policies.computes_in:  # most steps: nothing is flattened
        return tree
    flat = _paths.flatten(tree)
    return flat.unflatten(
        [
            leaf.value
            if leaf.path.rpartition("/")[0] in casting
            else cast(leaf.value, policies.at(leaf.path).compute)
            for leaf in flat.leaves
        ]
    )


def cast(value: PyTree, dtype: DType | None) -> Any:
    """Casts floating-point arrays in a tree, but not in NNX objects.

    Those have to keep their identity: the caller would otherwise get a copy of a module
    back, whose updates are lost.

    Args:
        value: The tree.
        dtype: The dtype; None casts nothing.
    """
    if dtype is None:
        return value

    def cast_leaf(leaf: Leaf) -> Any:
        kind = None if _paths.is_nnx_object(leaf) else getattr(leaf, "dtype", None)
        is_float = kind is not None and jnp.issubdtype(kind, jnp.floating)
        return leaf.astype(dtype) if is_float else leaf

    return jax.tree.map(cast_leaf, value, is_leaf=_paths.is_nnx_object)


def check_params(params: PyTree, policies: Policies) -> None:
    """Refuses parameters whose dtype is not their policy's, and unused patterns."""
    leaves = _paths.flatten(params).leaves
    paths: set[str] = set()
    for leaf in leaves:  # with the paths of the modules that contain it
        paths.update(itertools.accumulate(leaf.path.split("/"), "{}/{}".format))
    for pattern, _ in policies.by_path:
        if not any(re.search(pattern, path) for path in paths):
            names = [repr(leaf.path) for leaf in leaves]
            more = ", ..." if names[4:] else ""
            msg = (
                f"precision: {pattern!r} matches no parameter; there are "
                f"{', '.join(names[:4])}{more}."
            )
            raise StateError(msg)
    for leaf in leaves:
        # Refused rather than cast: parameters that were built in another dtype have
        # other values, and an optimizer's slots would keep the old one.
        stored = policies.at(leaf.path).param
        dtype = leaf.value.dtype
        is_float = jnp.issubdtype(dtype, jnp.floating)
        if stored is not None and is_float and dtype != stored:
            msg = (
                f"{leaf.path} {_render.array_text(dtype, leaf.value.shape)}: the "
                f"precision policy stores parameters in {stored}. Build the model with "
                f"param_dtype={str(stored)!r}, or leave param out of the policy."
            )
            raise StateError(msg)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """A factor that keeps small float16 gradients from underflowing to zero.

    It doubles after `GROWTH_INTERVAL` steps with finite gradients and halves after one
    without (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2, with
    the backoff of NVIDIA's and PyTorch's scalers). A power of 2 changes no mantissa.

    Attributes:
        scale: The factor, float32.
        finite_steps: Steps since it last changed, int32.
    """

    scale: jax.Array
    finite_steps: jax.Array

    @classmethod
    def create(cls, scale: float = 2.0**15) -> "LossScale":
        """Returns an initial loss scale."""
        return cls(jnp.float32(scale), jnp.int32(0))

    def after(self, finite: jax.Array) -> "LossScale":
        """Returns the loss scale after a step whose gradients are `finite` or not."""
        # Without `if`: it is part of the compiled step.
        steps = jnp.where(finite, self.finite_steps + 1, 0)
        grown = steps >= GROWTH_INTERVAL
        scale = jnp.where(
            finite,
            jnp.where(grown, jnp.minimum(self.scale * 2, MAX_SCALE), self.scale),
            jnp.maximum(self.scale / 2, 1.0),
        )
        return LossScale(scale, jnp.where(grown, 0, steps).astype("int32"))


# As in PyTorch's and NVIDIA's scalers. The maximum is far above what gradients need: it
# keeps a model whose gradients are all 0 from scaling its loss to infinity.
GROWTH_INTERVAL = 2000
MAX_SCALE = 2.0**24
