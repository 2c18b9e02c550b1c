"""Which rows of which variable are on which parameter server.

Variables, or their shards, go to the servers in turn, in the order in which they are
placed, as in TensorFlow. All rows of one variable on one server are kept as one array,
also if they are several shards: a server then has, for each variable, the same tree
structure as the user's optimizer, with fewer rows.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshlayout._annotations import DType
from meshlayout.distribute.parameter_server.partitioners import (
    num_row_shards,
    row_ranges,
)


@dataclass(frozen=True)
class VariableShards:
    """Where one variable is.

    Attributes:
        shape: The shape of the variable.
        dtype: Its dtype.
        rows: By server, the ranges of rows that it has, as (start, stop); None if it
            has all of them. Several servers can have copies of a small variable.
    """

    shape: tuple[int, ...]
    dtype: DType
    rows: Mapping[int, tuple[tuple[int, int], ...] | None]

    @property
    def is_divided(self) -> bool:
        """Whether no server has all rows."""
        return None not in self.rows.values()

    def part_shape(self, server: int) -> tuple[int, ...]:
        """Returns the shape of the array on a server; it has no rows if it has none."""
        ranges = self.rows.get(server, ())
        if ranges is None or not self.shape:
            return self.shape
        return (sum(stop - start for start, stop in ranges), *self.shape[1:])

    def split(self, value: np.ndarray[Any, Any]) -> dict[int, np.ndarray[Any, Any]]:
        """Returns the array of each server."""
        return {
            server: value
            if ranges is None
            else np.concatenate([value[start:stop] for start, stop in ranges])
            for server, ranges in self.rows.items()
        }

    def join(self, parts: Mapping[int, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """Returns the whole variable from the arrays of the servers."""
        if not self.is_divided:
            server = next(s for s, ranges in self.rows.items() if ranges is None)
            return parts[server]
        value = np.empty(self.shape, self.dtype)
        for server, ranges in self.rows.items():
            taken = 0
            for start, stop in ranges or ():
                value[start:stop] = parts[server][taken : taken + stop - start]
                taken += stop - start
        return value

    def reads(self) -> tuple[int, ...]:
        """Returns the servers to ask for the whole variable: one, if it has all."""
        if self.is_divided:
            return tuple(self.rows)
        return (next(server for server, ranges in self.rows.items() if ranges is None),)


@dataclass
class VariablePlacement:
    """Where all variables are.

    Args:
        num_servers: The number of servers.
        partitioner: Returns the number of shards of a variable; None for one.

    Attributes:
        shards: Where each variable is, by name.
    """

    num_servers: int
    partitioner: Callable[..., Any] | None = None
    shards: dict[str, VariableShards] = field(default_factory=dict)
    _next: int = 0

    def add(self, name: str, shape: tuple[int, ...], dtype: DType) -> VariableShards:
        """Divides a variable over the servers.

        Example:
            >>> placement = VariablePlacement(2, lambda shape, dtype: [3, 1])
            >>> dict(placement.add("kernel", (7, 2), np.float32).rows)
            {0: ((0, 3), (5, 7)), 1: ((3, 5),)}
            >>> dict(placement.add("bias", (), np.float32).rows)
            {1: None}
        """
        num_shards = num_row_shards(self.partitioner, shape, dtype)
        rows: dict[int, list[tuple[int, int]]] = {}
        for start, stop in (
            row_ranges(shape[0], num_shards) if num_shards > 1 else [(0, 0)]
        ):
            rows.setdefault(self._next % self.num_servers, []).append((start, stop))
            self._next += 1
        if len(rows) == 1:  # all shards are on one server
            return self._record(name, VariableShards(shape, dtype, dict.fromkeys(rows)))
        ranges = {server: tuple(found) for server, found in rows.items()}
        return self._record(name, VariableShards(shape, dtype, ranges))

    def add_like(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: DType,
        like: VariableShards,
    ) -> VariableShards:
        """Places a variable on the servers that have another one, with equal rows."""
        return self._record(name, VariableShards(shape, dtype, like.rows))

    def add_copies(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: DType,
        servers: Iterable[int],
    ) -> VariableShards:
        """Places a copy of a variable on each of some servers."""
        return self._record(name, VariableShards(shape, dtype, dict.fromkeys(servers)))

    def _record(self, name: str, shards: VariableShards) -> VariableShards:
        self.shards[name] = shards
        return shards

    def names_on(self, server: int) -> list[str]:
        """Returns the variables of which a server has any part."""
        return [name for name, shards in self.shards.items() if server in shards.rows]
