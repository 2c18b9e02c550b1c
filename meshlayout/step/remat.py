"""Recomputation of chosen submodules in the backward pass.

By path, because what to recompute is a decision about a machine, not about a model,
which should not have to change for it. The submodules are wrapped in `nnx.remat` or
`nn.remat` at the moment they are called.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from flax import linen as nn, nnx

from meshlayout import _checks, _paths
from meshlayout._annotations import PyTree
from meshlayout.errors import StepError
from meshlayout.step.model_call import Module, ModuleCall


# What is saved, not recomputed: a policy of jax.checkpoint_policies; None for nothing.
Policy: TypeAlias = Callable[..., Any] | None
Remat: TypeAlias = str | Policy | Mapping[str, Policy]


@dataclass(frozen=True)
class RematRule:
    """Which submodules are recomputed, and which of their values are saved.

    Attributes:
        pattern: Searched for in a submodule's path; None for the blocks.
        policy: What is saved, as for `jax.checkpoint`.
    """

    pattern: str | None
    policy: Policy


def parse_remat(remat: object) -> tuple[RematRule, ...]:
    """Returns the rules that `remat=` stands for, unless it is "none".

    Raises:
        StepError: If it is not a valid choice.
    """
    if remat == "full":
        return (RematRule("^$", None),)
    if remat == "blocks":
        return (RematRule(None, None),)
    if callable(remat):
        return (RematRule(None, remat),)
    if not isinstance(remat, Mapping):
        msg = (
            f"remat={remat!r} is none of 'none', 'blocks', 'full', a policy of "
            "jax.checkpoint_policies (for the blocks), or a dict from patterns of "
            "paths to policies (None saves nothing)."
        )
        raise StepError(msg)
    for pattern, policy in remat.items():
        _checks.pattern("pattern", pattern, where="remat", error=StepError)
        if policy is not None and not callable(policy):
            msg = (
                f"remat: the policy of {pattern!r} is {policy!r}; give None, or one "
                "of jax.checkpoint_policies."
            )
            raise StepError(msg)
    return tuple(RematRule(pattern, policy) for pattern, policy in remat.items())


class Rematting:
    """Recomputes the submodules that rules choose; an `Interceptor`.

    Submodules of a chosen one are recomputed with it, once.

    Args:
        rules: What chooses.
        params: The model's parameters, whose paths show which submodules are blocks.
    """

    def __init__(self, rules: tuple[RematRule, ...], params: PyTree) -> None:
        self._rules = rules
        self._blocks = block_paths(leaf.path for leaf in _paths.flatten(params).leaves)
        self._used: set[RematRule] = set()
        self._submodules: set[str] = set()  # paths of what can be called
        self._is_inside = False

    def _rule_for(self, path: str) -> RematRule | None:
        for rule in self._rules:
            if rule.pattern is None and path in self._blocks:
                return rule
            if rule.pattern is not None and re.search(rule.pattern, path):
                return rule
        return None

    def wants(self, path: str, module: Module) -> bool:
        """Returns whether a rule chooses a submodule."""
        if path and callable(module):
            self._submodules.add(path)
        return self._rule_for(path) is not None

    def call(
        self, call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a submodule so that its insides are recomputed."""
        if self._is_inside:
            return call.proceed(*args, **kwargs)
        rule = self._rule_for(call.path)
        assert rule is not None
        self._used.add(rule)
        # An NNX object is a pytree as well. Flattened here, it would be a copy, whose
        # random streams do not advance those of the caller.
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_paths.is_nnx_object)
        objects: dict[int, Any] = {}
        arrays: dict[int, Any] = {}
        for index, leaf in enumerate(leaves):
            # First, because an nnx.Rngs has any attribute, also a shape and a dtype.
            if _paths.is_nnx_object(leaf):
                objects[index] = leaf
            elif hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
                arrays[index] = leaf

        def inner(module: Any, objects: dict[int, Any], arrays: dict[int, Any]) -> Any:
            filled = {**dict(enumerate(leaves)), **objects, **arrays}
            args, kwargs = treedef.unflatten(filled.values())
            # The module inside is a copy, whose call is intercepted again.
            self._is_inside = True
            try:
                return module(*args, **kwargs)
            finally:
                self._is_inside = False

        if isinstance(call.module, nnx.Module):
            return nnx.remat(inner, policy=rule.policy)(call.module, objects, arrays)
        return _linen_remat(inner, rule.policy, call.module, objects, arrays)

    def check_used(self) -> None:
        """Raises StepError if a rule chose nothing that was called."""
        for rule in self._rules:
            if rule in self._used:
                continue
            if rule.pattern is None:
                msg = (
                    "remat: the model has no blocks (numbered submodules, as "
                    "'layers/0', that hold submodules with parameters). Name what to "
                    "recompute by path: remat={'encoder': None}."
                )
            else:
                msg = self._unused(rule.pattern)
            raise StepError(msg)

    def _unused(self, pattern: str) -> str:
        """Returns a sentence on a pattern that chose nothing."""
        paths = sorted(self._submodules)
        matching = [path for path in paths if re.search(pattern, path)]
        if matching:
            return (
                f"remat: {pattern!r} matches {matching[0]!r}, which is not called, or "
                "only inside what is recomputed as a whole."
            )
        there = f"; there are {', '.join(map(repr, paths[:4]))}" if paths else ""
        more = ", ..." if paths[4:] else ""
        return f"remat: no submodule that was called matches {pattern!r}{there}{more}."


def _linen_remat(
    inner: Callable[..., Any],
    policy: Policy,
    module: nn.Module,
    objects: dict[int, Any],
    arrays: dict[int, Any],
) -> Any:
    """Calls `inner` through Linen's remat, which does not know NNX objects.

    So their arrays are passed in and returned.
    """
    graphdef, state = nnx.split(objects)

    def pure(module: nn.Module, state: Any, arrays: dict[int, Any]) -> Any:
        inside = nnx.merge(graphdef, state)
        result = inner(module, inside, arrays)
        return result, nnx.state(inside)

    remat: Any = nn.remat(pure, policy=policy)
    result, after = remat(module, state, arrays)
    nnx.update(objects, after)
    return result


def block_paths(paths: Iterable[str]) -> frozenset[str]:
    """Returns the outermost numbered paths that hold submodules with parameters.

    Args:
        paths: The paths of a model's parameters.

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
        end = next(ends, None)
        if end is not None:
            blocks.add("/".join(names[:end]))
    return frozenset(blocks)
