"""The dtypes in which a step computes and stores; dynamic loss scaling."""

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
    """Dtypes of a step; None leaves one unchanged.

    Attributes:
        param: The dtype the parameters are stored in; one that differs is refused.
        compute: The dtype that layers compute in. Parameters are cast as they are
            used; a layer that names a dtype of its own keeps it. Statistics of
            normalization, losses and norms stay in float32.
        output: The dtype of what the model returns.
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
            object.__setattr__(self, name, dtype)


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
        default: For what no pattern matches.
        by_path: Patterns, searched for in paths, and their policies; the first counts.
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
        """Whether anything is computed or returned in another dtype."""
        return bool(self.computes_in) or self.default.output is not None

    @property
    def computes_in(self) -> frozenset[Any]:
        """All compute dtypes there are; without None."""
        policies = [self.default, *(policy for _, policy in self.by_path)]
        dtypes = {policy.compute for policy in policies}
        return frozenset(dtypes - {None})


def parse_precision(precision: Any) -> Policies:
    """Returns the policies that `precision=` stands for.

    Args:
        precision: `"float32"`, `"bfloat16"`, `"float16"`, a
            `PrecisionPolicy`, or a dict from patterns of paths to those, `""` for the
            rest.

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
            "precision={} says nothing. Give patterns of paths and their dtypes, as "
            '{"router": "float32", "": "bfloat16"}.'
        )
        raise StateError(msg)
    rules = []
    for pattern, policy in precision.items():
        _checks.pattern("pattern", pattern, where="precision", error=StateError)
        parsed = _policy(policy)
        if pattern and isinstance(policy, str):  # of a part, only what it computes in
            parsed = PrecisionPolicy(compute=parsed.compute)
        if pattern and parsed.output is not None:
            msg = (
                f"precision: the policy of {pattern!r} names output=, which is that of "
                "the whole model: give it to the pattern ''."
            )
            raise StateError(msg)
        rules.append((pattern, parsed))
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
    """Casts floating-point parameters to the dtypes they are used in.

    Those of the layers `casting`, by path, are left to the layers themselves.
    """
    if not policies.computes_in:
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
    """Casts floating-point arrays in a tree, not in NNX objects; None casts nothing."""
    if dtype is None:
        return value

    def cast_leaf(leaf: Leaf) -> Any:
        kind = None if _paths.is_nnx_object(leaf) else getattr(leaf, "dtype", None)
        is_float = kind is not None and jnp.issubdtype(kind, jnp.floating)
        return leaf.astype(dtype) if is_float else leaf

    return jax.tree.map(cast_leaf, value, is_leaf=_paths.is_nnx_object)


def check_params(params: PyTree, policies: Policies) -> None:
    """Refuses parameters of another dtype than their policy's, and unused patterns."""
    leaves = _paths.flatten(params).leaves
    paths: set[str] = set()
    for leaf in leaves:  # also those of the modules around it
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
    """A factor that keeps float16 gradients from vanishing, and how it is doing.

    It doubles after `GROWTH_INTERVAL` finite steps and halves after one that is not
    (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2, with the
    back-off that NVIDIA's and PyTorch's scalers use).

    Attributes:
        scale: The factor, float32.
        finite_steps: Steps since it changed last, int32.
    """

    scale: jax.Array
    finite_steps: jax.Array

    @classmethod
    def create(cls, scale: float = 2.0**15) -> "LossScale":
        """Returns a loss scale to begin with."""
        return cls(jnp.float32(scale), jnp.int32(0))

    def after(self, finite: jax.Array) -> "LossScale":
        """Returns the loss scale after a step whose gradients are `finite`, or not."""
        steps = jnp.where(finite, self.finite_steps + 1, 0)
        grown = steps >= GROWTH_INTERVAL
        scale = jnp.where(
            finite,
            jnp.where(grown, jnp.minimum(self.scale * 2, MAX_SCALE), self.scale),
            jnp.maximum(self.scale / 2, 1.0),
        )
        return LossScale(scale, jnp.where(grown, 0, steps).astype("int32"))


GROWTH_INTERVAL = 2000
MAX_SCALE = 2.0**24
