"""What a program does with the factors of its arrays: which come together and where.

A sharded factor costs communication in two places: where a sum goes over it (forward),
and where the gradient of an array is summed over it because all its parts read that
array (backward). These are noted down while the operations are walked through; which
factors to shard is decided afterwards, when all links are known.
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from meshlayout.parallel.factors import Dim, Dims, Factor, Value


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
    # Dims of arrays in which factors come together for the first time.
    together: list[Dims] = field(default_factory=list)
    # Groups of look-ups whose results are added up, as bits of contractions.
    added_lookups: set[int] = field(default_factory=set)
    # Factors of stacked weights that a product batches over.
    experts: list[Factor] = field(default_factory=list)
    # Parameters, as bits: something is multiplied with them, or looked up in them.
    multiplied: int = 0
    looked_up: int = 0
    # Kernels of grouped convolutions, as bits, with the dim of groups.
    grouped: list[tuple[int, Dim]] = field(default_factory=list)
    # The shapes of activations that loops carry and nothing constrains, with the
    # parameters that these loops read, as bits.
    loops: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    # Of the operation that is walked through: its contraction, as a bit; the bytes of
    # an element of its result; how many loops are around it.
    new_bits: int = 0
    itemsize: int = 1
    depth: int = 0
    _lookups: int = 0
    _runs: int = 1

    def _nbytes(self, size: int) -> int:
        return size * self._runs * self.itemsize

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
        before = union(operand.history for operand in operands)
        nbytes = self._nbytes(size)
        self.contractions.append(
            Contraction(factors, source, size, nbytes, weights, bit, before)
        )

    def sum_gradient(
        self, of: Value, dims: Iterable[Dim], other: int, weights: int = 0
    ) -> None:
        """Notes that the gradient of an array is summed over dims that it lacks."""
        nbytes = self._nbytes(of.size)
        self.gradient_sums += [
            GradientSum(factor, of, nbytes, other, weights)
            for factor in itertools.chain.from_iterable(dims)
            if of.params
        ]

    def reduce(self, dims: Iterable[Dim], size: int) -> None:
        """Notes that a reduction to an array of some size ends dims."""
        factors = itertools.chain.from_iterable(dims)
        self.reductions += [(factor, self._nbytes(size)) for factor in factors]

    def look_up(self, table: Value, dims: Iterable[Dim], size: int) -> None:
        """Notes that an array of some size is looked up along dims of a table."""
        if table.weights:
            self.contract(dims, (table,), size)
            self._lookups |= self.new_bits
            self.looked_up |= table.params
        else:
            self.reduce(dims, size)

    def add_lookups(self, args: Iterable[Value]) -> None:
        """Notes that arrays are combined, if all of them were only looked up."""
        bits = [arg.history for arg in args if arg.history]
        if len(bits) > 1 and not union(bits) & ~self._lookups:
            self.added_lookups.add(union(bits))

    @contextlib.contextmanager
    def repeated(self, length: int) -> Iterator[None]:
        """Returns a context for the body of a loop."""
        self._runs, self.depth = self._runs * length, self.depth + 1
        yield
        self._runs, self.depth = self._runs // length, self.depth - 1


def union(bits: Iterable[int]) -> int:
    """Returns the bits that are set in any number."""
    return functools.reduce(operator.or_, bits, 0)
