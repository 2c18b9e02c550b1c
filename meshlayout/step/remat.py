"""Recomputation of chosen submodules in the backward pass."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from flax import linen as nn, nnx

from meshlayout import _checks, _paths
from meshlayout._annotations import Leaf, PyTree
from meshlayout.errors import StepError
from meshlayout.step.interception import Call, Module


# What may be kept: a policy of jax.checkpoint_policies, or None for nothing.
Policy: TypeAlias = Callable[..., Any] | None
Remat: TypeAlias = str | Policy | Mapping[str, Policy]


@dataclass(frozen=True)
class RematRule:
    """Which submodules are recomputed, and what of them is kept.

    Attributes:
        pattern: Searched for in a submodule's path; None for the blocks.
        policy: What is kept: as for `jax.checkpoint`.
    """

    pattern: str | None
    policy: Policy


def parse_remat(remat: Any) -> tuple[RematRule, ...]:
    """Returns the rules that `remat=` stands for.

    Raises:
        StepError: If it is none of what it may be.
    """
    if remat == "none":
        return ()
    if remat == "full":
        return (RematRule("^$", None),)
    if remat == "blocks":
        return (RematRule(None, None),)
    if callable(remat):
        return (RematRule(None, remat),)
    if isinstance(remat, Mapping):
        return tuple(_rule(pattern, policy) for pattern, policy in remat.items())
    msg = (
        f"remat={remat!r} is none of 'none', 'blocks', 'full', a policy of "
        "jax.checkpoint_policies (for the blocks), or a dict from patterns of paths to "
        "policies (None keeps nothing)."
    )
    raise StepError(msg)


def _rule(pattern: Any, policy: Any) -> RematRule:
    _checks.pattern("pattern", pattern, where="remat", error=StepError)
    if policy is not None and not callable(policy):
        msg = (
            f"remat: the policy of {pattern!r} is {policy!r}; give None, or one of "
            "jax.checkpoint_policies."
        )
        raise StepError(msg)
    return RematRule(pattern, policy)


class Rematting:
    """Recomputes the submodules that rules choose; see `calls.Interceptor`.

    What is called inside a chosen submodule is recomputed with it, once.

    Args:
        rules: What chooses.
        params: The model's parameters, whose paths tell which submodules are blocks.
    """

    def __init__(self, rules: tuple[RematRule, ...], params: PyTree) -> None:
        self._rules = rules
        self._blocks = block_paths(
            [leaf.path for leaf in _paths.flatten(params).leaves]
        )
        self._used: set[RematRule] = set()
        self._submodules: set[str] = set()  # paths of what can be called
        self._is_inside = False

    def _rule_for(self, path: str) -> RematRule | None:
        for rule in self._rules:
            if (
                path in self._blocks
                if rule.pattern is None
                else re.search(rule.pattern, path)
            ):
                return rule
        return None

    def wants(self, path: str, module: Module) -> bool:
        """Returns whether a rule chooses a submodule."""
        if path and callable(module):
            self._submodules.add(path)
        return self._rule_for(path) is not None

    def call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a submodule so that its insides are recomputed."""
        if self._is_inside:
            return call.proceed(*args, **kwargs)
        rule = self._rule_for(call.path)
        assert rule is not None
        self._used.add(rule)
        # An NNX object is a pytree as well: taken apart here, it would be a copy, whose
        # random streams do not advance those of the caller.
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_paths.is_nnx_object)
        objects = [i for i, leaf in enumerate(leaves) if _paths.is_nnx_object(leaf)]
        # Rngs have every attribute that they are asked for, a shape and a dtype, too.
        lifted = [
            i for i, leaf in enumerate(leaves) if i not in objects and _is_array(leaf)
        ]

        def inner(module: Any, objects_in: list[Any], arrays: list[Any]) -> Any:
            filled = list(leaves)
            for i, value in zip(
                [*objects, *lifted], [*objects_in, *arrays], strict=True
            ):
                filled[i] = value
            args, kwargs = treedef.unflatten(filled)
            # The module inside is another object: its call comes by here again.
            self._is_inside = True
            try:
                return module(*args, **kwargs)
            finally:
                self._is_inside = False

        recomputed = _lifted(call.module, inner, rule.policy)
        return recomputed([leaves[i] for i in objects], [leaves[i] for i in lifted])

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
        """Returns what to say of a pattern that chose nothing."""
        paths = sorted(self._submodules)
        matching = [path for path in paths if re.search(pattern, path)]
        if matching:
            return (
                f"remat: {pattern!r} matches {matching[0]!r}, which is not called, or "
                "only inside of what is recomputed as a whole."
            )
        there = f"; there are {', '.join(map(repr, paths[:4]))}" if paths else ""
        more = ", ..." if paths[4:] else ""
        return f"remat: no submodule that was called matches {pattern!r}{there}{more}."


def block_paths(paths: Iterable[str]) -> frozenset[str]:
    """Returns the outermost numbered places that hold submodules with parameters.

    Args:
        paths: The paths of a model's parameters.

    Example:
        >>> sorted(block_paths(["blocks/0/mlp/kernel", "blocks/1/mlp/kernel"]))
        ['blocks/0', 'blocks/1']
        >>> sorted(block_paths(["layers/0/kernel", "output/kernel"]))
        []
    """
    found: set[str] = set()
    for path in paths:
        names = path.split("/")
        numbered = [
            n for n in range(1, len(names) - 1) if names[n - 1][-1:].isdecimal()
        ]
        if numbered:
            found.add("/".join(names[: numbered[0]]))
    return frozenset(found)


def _lifted(
    module: Module, inner: Callable[..., Any], policy: Policy
) -> Callable[[list[Any], list[Any]], Any]:
    """Returns `inner` on a module, its insides recomputed in the backward pass."""
    if isinstance(module, nnx.Module):
        return functools.partial(nnx.remat(inner, policy=policy), module)

    # Linen's remat knows no NNX objects: their arrays go in and come back.
    def recomputed(objects: list[Any], arrays: list[Any]) -> Any:
        graphdef, state = nnx.split(objects)

        def pure(module: nn.Module, state: Any, arrays: list[Any]) -> Any:
            inside = nnx.merge(graphdef, state)
            result = inner(module, inside, arrays)
            return result, nnx.state(inside)

        remat: Any = nn.remat(pure, policy=policy)
        result, after = remat(module, state, arrays)
        nnx.update(objects, after)
        return result

    return recomputed


def _is_array(leaf: Leaf) -> bool:
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")
