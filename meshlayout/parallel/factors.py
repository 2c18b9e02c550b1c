"""Dims of arrays as products of factors, which the operations of a program link.

To shard a dim of one array is to shard every array whose dim has to lie the same way.
So each dim is a list of factors, the major one first: `(batch, 12, 64)` reshaped to
`(batch, 768)` has the factors 12 and 64 in its last dim. An addition unites the factors
of its operands, a matmul those that it sums over. What is one factor in the end (a
union-find) is sharded together or not at all.

A factor that an operation cannot work on in pieces is blocked, with the reason. So is
one below another in its dim, unless both are sharded: shards divide the major one.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias


# The reason that comes before all others, because no program changes it.
OF_INPUTS = "it is a dim of the example inputs"

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
            leaf._below = leaf._below or f"it lies below a factor of {size} in one dim"

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
    source: object = field(default_factory=object)  # in common with its casts

    @property
    def size(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    @property
    def weights(self) -> int:
        """The parameters that it was made from, if from these alone, as bits."""
        return 0 if self.of_inputs else self.params


def union(bits: Iterable[int]) -> int:
    """Returns the bits that are set in any number."""
    return functools.reduce(operator.or_, bits, 0)


def made_of(
    args: Iterable[Value], shape: tuple[int, ...], dims: Dims, history: int = 0
) -> Value:
    """Returns a value that depends on what some arrays do, and on contractions."""
    args = [*args]
    history |= union(arg.history for arg in args)
    of_inputs = any(arg.of_inputs for arg in args)
    return Value(shape, dims, union(x.params for x in args), of_inputs, history)


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
    """Gives two dims of a size the same factors; 4 x 3 and 3 x 4 cannot be sharded."""
    # The major factor is last, to be popped.
    left, right = leaves_of(first)[::-1], leaves_of(second)[::-1]
    while left and right:
        a, b = _pop(left), _pop(right)
        if a is b:
            continue
        if a.size == b.size:
            b._link = a
            is_of_inputs = OF_INPUTS in (a._block, b._block)
            a._block = OF_INPUTS if is_of_inputs else a._block or b._block
            a._below = a._below or b._below
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


# What a program does with factors. A sharded one costs communication in two places:
# where a sum goes over it (forward), and where the gradient of an array is summed over
# it because all its parts read that array (backward). These are noted down while the
# operations are walked; which factors to shard is decided when all links are known.


@dataclass(frozen=True, eq=False)
class Contraction:
    """A sum over factors, of products or of what a look-up finds: forward."""

    factors: Dim
    operand: Value  # multiplied with a weight, or the larger one of two others
    size: int  # elements of the result
    nbytes: int  # of the results in one step, in the loops around it
    weights: int  # the parameters that it multiplies with, as bits
    bit: int  # its own in the history of what depends on it
    before: int  # the contractions that it depends on, as bits


@dataclass(frozen=True, eq=False)
class GradientSum:
    """A sum over a factor in the gradient of an array without it: backward."""

    factor: Factor
    of: Value  # the array, which all parts of the factor read
    nbytes: int  # of the gradient in one step, in the loops around it
    other_size: int  # elements of what it is multiplied with, or broadcast to
    weights: int  # the parameters that those are, as bits, as in a matmul by columns


@dataclass(eq=False)
class Flow:
    """What is known of a program's factors while it is walked, and afterwards."""

    contractions: list[Contraction] = field(default_factory=list)
    gradient_sums: list[GradientSum] = field(default_factory=list)
    # Factors that reductions end, and the bytes of the results.
    reductions: list[tuple[Factor, int]] = field(default_factory=list)
    together: list[Dims] = field(default_factory=list)  # where factors first meet
    # Groups of look-ups whose results are added up, as bits of contractions.
    added_lookups: set[int] = field(default_factory=set)
    # Factors of stacked weights that a product batches over.
    experts: list[Factor] = field(default_factory=list)
    multiplied: int = 0  # parameters that something is multiplied with, as bits
    lookups: int = 0  # the contractions that are look-ups in parameters, as bits
    # Kernels of grouped convolutions, as bits, with the dim of groups.
    grouped: list[tuple[int, Dim]] = field(default_factory=list)
    # The shapes of activations that loops carry and nothing constrains, with the
    # parameters that these loops read, as bits.
    loops: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    # Of the operation that is walked through: its contraction, as a bit; the bytes of
    # an element of its result; how many loops are around it, and how often these run.
    new_bits: int = 0
    itemsize: int = 1
    depth: int = 0
    runs: int = 1
    visit: Callable[..., None] = lambda *_: None  # after every operation and its body

    def _nbytes(self, size: int) -> int:
        return size * self.runs * self.itemsize

    def contract(
        self, dims: Iterable[Dim], operands: Sequence[Value], size: int
    ) -> None:
        """Notes a sum over dims of products of some arrays."""
        factors = tuple(itertools.chain.from_iterable(dims))
        weights = union(operand.weights for operand in operands)
        self.multiplied |= weights
        if not factors:
            return
        others = [operand for operand in operands if not operand.weights] or operands
        source = max(others, key=lambda array: array.size)
        bit = self.new_bits = 1 << len(self.contractions)
        before, nbytes = union(x.history for x in operands), self._nbytes(size)
        new = Contraction(factors, source, size, nbytes, weights, bit, before)
        self.contractions.append(new)

    def sum_gradient(
        self, of: Value, dims: Iterable[Dim], other: int, weights: int = 0
    ) -> None:
        """Notes that the gradient of an array is summed over dims that it lacks."""
        self.gradient_sums += [
            GradientSum(factor, of, self._nbytes(of.size), other, weights)
            for factor in itertools.chain.from_iterable(dims)
            if of.params
        ]

    def reduce(self, dims: Iterable[Dim], size: int) -> None:
        """Notes that a reduction to an array of some size ends dims."""
        nbytes = self._nbytes(size)
        self.reductions += [(factor, nbytes) for dim in dims for factor in dim]
