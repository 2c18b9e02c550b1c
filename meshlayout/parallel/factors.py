"""Dims of arrays as products of factors, which the operations of a program link.

To shard a dim of one array is to shard every array whose dim has to lie the same way.
So each dim is a list of factors, the major one first: `(batch, 12, 64)` reshaped to
`(batch, 768)` has the factors 12 and 64 in its last dim. An addition makes the factors
of its operands the same ones, a matmul those that it sums over. What is the same in the
end (a union-find) is sharded together or not at all.

A factor that an operation cannot work on in pieces is blocked, with the reason. So is
every factor below another one in its dim, because a sharding divides the major one,
unless both are sharded together.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias


OF_INPUTS = "it is a dim of the example inputs"
"""The reason that comes before all others, because no program changes it."""

_MISALIGNED = "reshapes split it in two ways that do not line up"


@dataclass(slots=True, eq=False)
class Factor:
    """One factor of a dim; the same one in every array in which it is linked."""

    size: int
    _block: str = ""  # why it cannot be sharded
    _below: str = ""  # why not, unless the factors above it are sharded as well
    _link: "Factor | None" = None
    _parts: "tuple[Factor, Factor] | None" = None

    @property
    def root(self) -> "Factor":
        """The factor that stands for all that it is linked with."""
        root = self
        while root._link is not None:
            root = root._link
        if root is not self:  # shorter next time
            self._link = root
        return root

    @property
    def leaves(self) -> "list[Factor]":
        """The factors, major first, into which reshapes elsewhere have split it."""
        root = self.root
        return leaves_of(root._parts) if root._parts else [root]

    def refusal(self, *, with_those_above: bool = False) -> str:
        """Returns why it cannot be sharded, or not even with the factors above it."""
        root = self.root
        return root._block or ("" if with_those_above else root._below)

    def put_below(self, size: int) -> None:
        """Records that it lies below a factor of some size in one dim."""
        for leaf in self.leaves:
            reason = f"{leaf.size} lies below a factor of {size} in one dim"
            leaf._below = leaf._below or reason

    def split(self, major: int) -> "tuple[Factor, Factor]":
        """Splits a leaf in two, everywhere."""
        root = self.root
        first = Factor(major, root._block, root._below)
        second = Factor(root.size // major, root._block, root._below)
        second.put_below(major)
        root._parts = (first, second)
        return root._parts


Dim: TypeAlias = tuple[Factor, ...]
Dims: TypeAlias = tuple[Dim, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A value of the program; one of parameters alone is as good as a parameter."""

    shape: tuple[int, ...]
    dims: Dims  # no factors for a dim of size 1
    params: int = 0  # what parameters it depends on, as bits
    of_inputs: bool = False  # whether it depends on the example inputs
    history: int = 0  # the contractions that it depends on, as bits
    source: object = field(
        default_factory=object
    )  # what it has in common with its casts

    @property
    def size(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    @property
    def weights(self) -> int:
        """The parameters that it was made from, if from these alone, as bits."""
        return 0 if self.of_inputs else self.params


def made_of(
    args: Iterable[Value],
    shape: tuple[int, ...],
    dims: Dims,
    history: int = 0,
) -> Value:
    """Returns a value that depends on what some arrays do, and on contractions."""
    params, of_inputs = 0, False
    for arg in args:
        params |= arg.params
        of_inputs |= arg.of_inputs
        history |= arg.history
    return Value(shape, dims, params, of_inputs, history)


def fresh_dims(shape: Iterable[int], block: str = "") -> Dims:
    """Returns dims of one new factor each."""
    empty = "an array without elements"
    return tuple(
        () if size == 1 else (Factor(size, block if size else empty),) for size in shape
    )


def leaves_of(dim: Iterable[Factor]) -> list[Factor]:
    """Returns the factors of a dim, or of several, as finely as they were split."""
    return [leaf for factor in dim for leaf in factor.leaves]


def block(dims: Iterable[Dim], reason: str) -> None:
    """Records why the factors of some dims cannot be sharded; the first one counts."""
    for leaf in leaves_of(itertools.chain.from_iterable(dims)):
        leaf._block = leaf._block or reason


def link(first: Dim, second: Dim) -> None:
    """Makes two dims of the same size have the same factors.

    Dims that do not split alike, such as 4 x 3 and 3 x 4, cannot be sharded.
    """
    # The major factor is last, to be popped.
    left, right = leaves_of(first)[::-1], leaves_of(second)[::-1]
    while left and right:
        a, b = _pop(left), _pop(right)
        if a is b:
            continue
        if a.size == b.size:
            _unite(a, b)
        elif a.size and b.size % a.size == 0:
            right += b.split(a.size)[::-1]
            left.append(a)
        elif b.size and a.size % b.size == 0:
            left += a.split(b.size)[::-1]
            right.append(b)
        else:
            block([(a, b), tuple(left), tuple(right)], _MISALIGNED)
            return


def link_all(first: Dims, second: Dims) -> None:
    """Links the dims of two arrays one by one."""
    for a, b in zip(first, second, strict=True):
        link(a, b)


def _pop(stack: list[Factor]) -> Factor:
    """Removes the last factor, or the first part of it if it was split by now."""
    first, *others = stack.pop().leaves
    stack += others[::-1]
    return first


def _unite(first: Factor, second: Factor) -> None:
    second._link = first
    is_of_inputs = OF_INPUTS in (first._block, second._block)
    first._block = OF_INPUTS if is_of_inputs else first._block or second._block
    first._below = first._below or second._below


def regroup(dims: Dims, shape: Sequence[int]) -> Dims:
    """Returns the dims of a reshaped array."""
    if 0 in shape:
        return fresh_dims(shape)
    rest = leaves_of(itertools.chain.from_iterable(dims))[::-1]
    grouped: list[Dim] = []
    for index, size in enumerate(shape):
        group: list[Factor] = []
        while size > 1:
            factor = _pop(rest)
            if size % factor.size == 0:
                group.append(factor)
                size //= factor.size
            elif factor.size % size == 0:
                rest += factor.split(size)[::-1]
            else:
                block([(factor,), tuple(group), tuple(rest)], _MISALIGNED)
                return (*grouped, *fresh_dims(shape[index:], _MISALIGNED))
        for factor in group[1:]:
            factor.put_below(group[0].size)
        grouped.append(tuple(group))
    return tuple(grouped)
