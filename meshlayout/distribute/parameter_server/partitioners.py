"""How a variable is divided over parameter servers: tf.distribute's three rules.

A partitioner returns the number of shards along each dim; only the first dim may be
divided. The arithmetic is TensorFlow's, so that a program that comes from there places
its variables alike: where the number of bytes does not divide, `MinSizePartitioner`
rounds the number of shards up.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshlayout import _checks
from meshlayout._annotations import DType
from meshlayout.errors import StrategyError


class Partitioner:
    """The base of partitioners; any function of (shape, dtype) works as well."""

    def __call__(self, shape: Sequence[int], dtype: DType, axis: int = 0) -> list[int]:
        """Returns the number of shards along each dim of a variable.

        Args:
            shape: The shape of the variable, which has at least one dim.
            dtype: Its dtype.
            axis: The dim to divide. Parameter servers take the first alone.

        Returns:
            One number per dim: 1 for all but `axis`.

        Raises:
            StrategyError: If there is no such dim.
        """
        sizes = _checks.shape(shape, error=StrategyError, where=type(self).__name__)
        if not isinstance(axis, int) or not -len(sizes) <= axis < len(sizes):
            msg = (
                f"{type(self).__name__}: axis must be a dim of the shape {sizes}, got "
                f"{_checks.shown(axis)}."
            )
            raise StrategyError(msg)
        partitions = [1] * len(sizes)
        if sizes[axis] > 0:
            itemsize = _itemsize(dtype, type(self).__name__)
            most = sizes[axis]
            wanted = self._num_shards(most, math.prod(sizes) * itemsize)
            partitions[axis] = max(1, min(most, wanted))
        return partitions

    def _num_shards(self, size: int, nbytes: int) -> int:
        """Returns the number of shards of a dim, of a variable of so many bytes."""
        raise NotImplementedError

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"


class FixedShardsPartitioner(Partitioner):
    """Divides every variable into the same number of shards.

    Use this for a few large variables of similar size.

    Args:
        num_shards: The number of shards; variables with fewer rows have fewer.

    Raises:
        StrategyError: If it is not a positive integer.

    Example:
        >>> FixedShardsPartitioner(num_shards=2)((10, 3), "float32")
        [2, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self.num_shards = _count(self, "num_shards", num_shards)

    def _num_shards(self, size: int, nbytes: int) -> int:
        return self.num_shards


class MinSizePartitioner(Partitioner):
    """Makes as many shards as possible that have a minimum size.

    Use this to spread large variables over all servers and leave small ones whole.

    Args:
        min_shard_bytes: The bytes of a shard. The number of shards is rounded up, as
            TensorFlow does, so that one may have somewhat fewer.
        max_shards: The largest number of shards.

    Raises:
        StrategyError: If one of them is not a positive integer.

    Example:
        >>> MinSizePartitioner(min_shard_bytes=4, max_shards=2)((6, 1), "float32")
        [2, 1]
        >>> MinSizePartitioner(min_shard_bytes=4, max_shards=10)((6, 1), "float32")
        [6, 1]
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1) -> None:
        self.min_shard_bytes = _count(self, "min_shard_bytes", min_shard_bytes)
        self.max_shards = _count(self, "max_shards", max_shards)

    def _num_shards(self, size: int, nbytes: int) -> int:
        return min(self.max_shards, math.ceil(nbytes / self.min_shard_bytes))


class MaxSizePartitioner(Partitioner):
    """Makes as few shards as possible that stay below a maximum size.

    Use this if messages or servers have a limit. A single row is never divided.

    Args:
        max_shard_bytes: The largest number of bytes of a shard.
        max_shards: The largest number of shards, which counts more than their size;
            None for any number.

    Raises:
        StrategyError: If one of them is not a positive integer.

    Example:
        >>> MaxSizePartitioner(max_shard_bytes=4)((6, 1), "float32")
        [6, 1]
        >>> MaxSizePartitioner(max_shard_bytes=4, max_shards=2)((6, 1), "float32")
        [2, 1]
        >>> MaxSizePartitioner(max_shard_bytes=1024)((6, 1), "float32")
        [1, 1]
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None) -> None:
        self.max_shard_bytes = _count(self, "max_shard_bytes", max_shard_bytes)
        self.max_shards = (
            None if max_shards is None else _count(self, "max_shards", max_shards)
        )

    def _num_shards(self, size: int, nbytes: int) -> int:
        row_bytes = nbytes / size
        rows = (
            max(1, math.floor(self.max_shard_bytes / row_bytes)) if row_bytes else size
        )
        return min(self.max_shards or size, math.ceil(size / rows))


def row_ranges(num_rows: int, num_shards: int) -> list[tuple[int, int]]:
    """Returns the first row of each shard and the one after its last.

    The first shards have one row more, if it does not divide.

    Example:
        >>> row_ranges(10, 4)
        [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    base, extra = divmod(num_rows, num_shards)
    sizes = [base + (shard < extra) for shard in range(num_shards)]
    stops = np.cumsum(sizes).tolist()
    return [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def num_row_shards(partitioner: Any, shape: tuple[int, ...], dtype: DType) -> int:
    """Returns into how many shards a partitioner divides the rows of a variable.

    Raises:
        StrategyError: If the partitioner returns anything but a positive number for the
            first dim and 1 for the others.
    """
    if partitioner is None or not shape:
        return 1
    with _checks.noted("in the variable_partitioner"):
        partitions = partitioner(shape=shape, dtype=dtype)
    fits = (
        isinstance(partitions, (tuple, list))
        and len(partitions) == len(shape)
        and all(isinstance(n, (int, np.integer)) for n in partitions)
        and partitions[0] >= 1
        and all(n == 1 for n in partitions[1:])
    )
    if not fits:
        msg = (
            "variable_partitioner must return one number of shards per dim, and 1 for "
            f"all dims but the first; for the shape {shape} it returned "
            f"{_checks.shown(partitions)}."
        )
        raise StrategyError(msg)
    return max(1, min(int(partitions[0]), shape[0]))


def _count(partitioner: Partitioner, name: str, value: object) -> int:
    return _checks.count(
        name, value, where=type(partitioner).__name__, error=StrategyError
    )


def _itemsize(dtype: DType, where: str) -> int:
    try:
        return np.dtype(dtype).itemsize
    except TypeError:
        msg = f"{where}: {_checks.shown(dtype)} is not a dtype."
        raise StrategyError(msg) from None
