"""A look at a source's first element, before anything is trained on it."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshlayout.data.adapters.arrays import is_placed
from meshlayout.data.clock import Clock
from meshlayout.data.elements import Element, describe
from meshlayout.data.options import Options
from meshlayout.data.peeked import PeekedSource
from meshlayout.data.placing import is_on_mesh
from meshlayout.data.source import RowSource, Source
from meshlayout.data.stream_batches import no_rows
from meshlayout.errors import DataError
from meshlayout.layout import Layout


@dataclass(frozen=True)
class Looked:
    """A source, and what was seen of it.

    Attributes:
        source: The source; a streamed one with its first block read.
        first: Its first rows.
        element: What its examples are; None for batches that are placed already.
        num_rows: How many it has; None where that is not known.
    """

    source: Any
    first: Any
    element: Element | None
    num_rows: int | None

    @property
    def is_random_access(self) -> bool:
        """Whether it gives any row by number."""
        return isinstance(self.source, RowSource)


def look(source: Source, layout: Layout, options: Options, clock: Clock) -> Looked:
    """Returns a source with its first element, checked.

    Args:
        source: The source.
        layout: How batches lie on the mesh.
        options: What was asked for.
        clock: Where notes go.

    Raises:
        DataError: If the source is empty, or its examples cannot be placed.
    """
    if isinstance(source, RowSource):
        num_rows = len(source)
        if not num_rows:
            raise DataError(no_rows(0))
        first = source.rows(np.zeros(1, np.int64))
        element = describe(first, options.strings, clock.note)
        return Looked(source, first, element, num_rows)
    _check_stream(source, options)
    peeked = PeekedSource(source)
    first = peeked.first.rows
    if is_placed(first):
        _check_placed(first, peeked.first.count, layout, options)
        return Looked(peeked, first, None, None)
    element = describe(first, options.strings, clock.note).with_objects()
    num_rows = None if options.per_process else peeked.num_rows
    return Looked(peeked, first, element, num_rows)


def _check_stream(source: Any, options: Options) -> None:
    if options.seed is not None:
        msg = (
            "shuffle= reorders the rows of a source with random access, and this one "
            "is read one way. Shuffle it where it is made, and leave out shuffle=."
        )
        raise DataError(msg)
    if options.epochs > 1 and getattr(source, "is_one_way", False):
        msg = (
            f"the source is an iterator, which can be read once, and epochs="
            f"{options.epochs}. Give a function that makes one, as lambda: "
            "make_iterator()."
        )
        raise DataError(msg)


def _check_placed(batch: Any, count: int, layout: Layout, options: Options) -> None:
    if not is_on_mesh(batch, layout):
        msg = (
            "the source gives arrays that are on other devices than those of "
            f"{layout.mesh!r}. Place them on this mesh, or give them as NumPy arrays."
        )
        raise DataError(msg)
    if count != options.global_batch_size:
        msg = (
            f"the source gives batches of {count} rows that are on the mesh already, "
            f"and global_batch_size={options.global_batch_size}. They pass through as "
            "they are: give their size."
        )
        raise DataError(msg)
