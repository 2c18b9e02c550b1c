"""What a program does with the factors of its arrays: which come together and where.

A sharded factor costs communication in two places: where a sum goes over it (forward),
and where the gradient of an array is summed over it because all its parts read that
array (backward). These are noted down while the operations are walked through; which
factors to shard is decided afterwards, when all links are known.
"""

import contextlib
import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from meshlayout.parallel.factors import Dim, Dims, Factor, FactoredArray


@dataclass(frozen=True, eq=False)
class Contraction:
    """A sum over factors, of products or of what a look-up finds: forward.

    Attributes:
        factors: What it sums over.
        operand: What is multiplied with a weight, or the larger one of two operands.
        size: Elements of the result.
        nbytes: Bytes of the results in one step, in the loops around it.
        weights: The parameters that it multiplies with, as bits.
        bit: Its own bit in the history of what depends on it.
        before: The contractions that it depends on.
    """

    factors: tuple[Factor, ...]
    operand: FactoredArray
    size: int
    nbytes: int
    weights: int
    bit: int
    before: int


@dataclass(frozen=True, eq=False)
class GradientSum:
    """A sum over a factor in the gradient of an array without it: backward.

    Attributes:
        factor: What the gradient is summed over.
        of: The array, which all parts of the factor read.
        nbytes: Bytes of the gradient in one step, in the loops around it.
        other_size: Elements of what the array is multiplied with; for a broadcast, of
            the result.
        weights: The parameters that those are, as bits, as in a matmul by columns.
    """

    factor: Factor
    of: FactoredArray
    nbytes: int
    other_size: int
    weights: int


@dataclass(eq=False)
class Flow:
    """What is known of a program's factors while it is walked, and afterwards.

    Attributes:
        contractions: The contractions of parameters or of two other arrays.
        gradient_sums: Where gradients are summed over a factor.
        reductions: Factors that reductions end, and the bytes of the results.
        together: Dims of arrays in which factors come together for the first time.
        added_lookups: Groups of look-ups whose results are added up, as bits.
        experts: Factors of stacked weights that a product batches over.
        multiplied: The parameters that something is multiplied with, as bits.
        looked_up: The parameters that rows are looked up in, as bits.
        grouped: Kernels of grouped convolutions, as bits, with the dim of groups.
        loops: The shapes of activations that loops carry and nothing constrains, with
            the parameters that these loops read, as bits.
        new_bits: The contraction of the operation that is walked through, as a bit.
        itemsize: Bytes of an element of its result.
        depth: How many loops are around it.
    """

    contractions: list[Contraction] = field(default_factory=list)
    gradient_sums: list[GradientSum] = field(default_factory=list)
    reductions: list[tuple[Factor, int]] = field(default_factory=list)
    together: list[Dims] = field(default_factory=list)
    added_lookups: set[int] = field(default_factory=set)
    experts: list[Factor] = field(default_factory=list)
    multiplied: int = 0
    looked_up: int = 0
    grouped: list[tuple[int, Dim]] = field(default_factory=list)
    loops: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    new_bits: int = 0
    itemsize: int = 1
    depth: int = 0
    _lookups: int = 0
    _runs: int = 1

    def _nbytes(self, size: int) -> int:
        return size * self._runs * self.itemsize

    def contract(
        self, dims: Iterable[Dim], operands: Sequence[FactoredArray], size: int
    ) -> None:
        """Notes a sum over dims of products of some arrays."""
        factors = tuple(factor for dim in dims for factor in dim)
        weights = before = 0
        for operand in operands:
            weights |= operand.weights
            before |= operand.history
        self.multiplied |= weights
        if not factors:
            return
        others = [operand for operand in operands if not operand.weights] or operands
        source = max(others, key=lambda array: array.size).source
        bit = self.new_bits = 1 << len(self.contractions)
        nbytes = self._nbytes(size)
        self.contractions.append(
            Contraction(factors, source, size, nbytes, weights, bit, before)
        )

    def sum_gradient(
        self, of: FactoredArray, dims: Iterable[Dim], other: int, weights: int = 0
    ) -> None:
        """Notes that the gradient of an array is summed over dims that it lacks."""
        if of.params:
            self.gradient_sums += [
                GradientSum(factor, of.source, self._nbytes(of.size), other, weights)
                for dim in dims
                for factor in dim
            ]

    def reduce(self, dims: Iterable[Dim], size: int) -> None:
        """Notes that a reduction to an array of some size ends dims."""
        nbytes = self._nbytes(size)
        self.reductions += [(factor, nbytes) for dim in dims for factor in dim]

    def look_up(self, table: FactoredArray, dims: Iterable[Dim], size: int) -> None:
        """Notes that an array of some size is looked up along dims of a table."""
        if table.weights:
            self.contract(dims, (table,), size)
            self._lookups |= self.new_bits
            self.looked_up |= table.params
        else:
            self.reduce(dims, size)

    def add_lookups(self, args: Iterable[FactoredArray]) -> None:
        """Notes that arrays are combined, if all of them were only looked up."""
        bits = [arg.history for arg in args if arg.history]
        if len(bits) > 1 and not any(each & ~self._lookups for each in bits):
            self.added_lookups.add(functools.reduce(operator.or_, bits))

    @contextlib.contextmanager
    def repeated(self, length: int) -> Iterator[None]:
        """Returns a context for the body of a loop."""
        self._runs, self.depth = self._runs * length, self.depth + 1
        yield
        self._runs, self.depth = self._runs // length, self.depth - 1
