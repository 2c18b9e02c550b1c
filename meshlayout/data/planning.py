"""What a data set does, decided once: checked from the first element."""

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from meshlayout import _jax
from meshlayout._render.tables import array_text
from meshlayout.data.agreement import (
    FACTS,
    PLAN,
    Agreement,
    agreement_of,
    check_made,
    check_same,
    telling,
)
from meshlayout.data.clock import Clock
from meshlayout.data.host_batches import Cut, Reader
from meshlayout.data.looking import Looked, look
from meshlayout.data.options import Options
from meshlayout.data.placed_batches import PlacedReader
from meshlayout.data.placing import plan_placement
from meshlayout.data.position import Identity
from meshlayout.data.producing import Pipeline
from meshlayout.data.row_batches import RowReader
from meshlayout.data.row_plan import batches_in_epoch
from meshlayout.data.rows import (
    per_replica_batch_size,
    process_rows,
    row_groups,
)
from meshlayout.data.source import Source
from meshlayout.data.stream_batches import StreamReader, first_row
from meshlayout.data.weighting import find_weighting, way_out
from meshlayout.errors import DataError
from meshlayout.layout import Layout


@dataclass(frozen=True)
class Plan:
    """What all iterations over a data set share.

    Attributes:
        pipeline: What is done with every batch.
        element_spec: What a batch is.
        identity: What has to be the same for a state to fit.
        num_steps: Batches of one iteration, or None where that is not known.
        new_reader: Begins to read the source.
        close: Lets go of what was opened for the look at the first element.
        agreement: With the other processes; None if there are none.
    """

    pipeline: Pipeline
    element_spec: Any
    identity: Identity
    num_steps: int | None
    new_reader: Callable[[], Reader]
    close: Callable[[], None]
    agreement: Agreement | None


def make_plan(
    open_source: Callable[[], Source],
    layout: Layout,
    options: Options,
    clock: Clock,
    agreement: Agreement | None = None,
) -> Plan:
    """Returns what a data set does.

    Args:
        open_source: Gives the source.
        layout: How batches lie on the mesh.
        options: What was asked for.
        clock: Where time and notes go.
        agreement: With the other processes, where it was made before; None makes it.

    Raises:
        DataError: If the source cannot be made into such batches, here or on another
            process.
    """
    agreement = agreement or agreement_of(layout)
    with telling(agreement, FACTS):
        kept = _kept_rows(layout, options)
        looked = look(open_source(), layout, options, clock)
        facts = _facts(looked, options)
    num_batches = None
    if agreement is not None:
        check_same(agreement, facts)
        if options.per_process and looked.is_random_access:
            num_batches = _agreed_batches(agreement, looked, len(kept), options)
    with telling(agreement, PLAN):
        pipeline = _pipeline(looked, layout, options, clock, kept, agreement)
        _check_length(looked, pipeline, num_batches)
    if agreement is not None:
        check_made(agreement)
    cut, placement = pipeline.cut, pipeline.placement
    return Plan(
        pipeline,
        _placed_spec(looked.first) if placement is None else placement.element_spec,
        _identity(looked, options),
        _num_steps(looked, cut, options, num_batches),
        functools.partial(_reader, looked, cut, options, num_batches, clock),
        getattr(looked.source, "close", _nothing),
        agreement,
    )


def _pipeline(
    looked: Looked,
    layout: Layout,
    options: Options,
    clock: Clock,
    kept: np.ndarray[Any, Any],
    agreement: Agreement | None,
) -> Pipeline:
    size = len(kept) if options.per_process else options.global_batch_size
    is_all = options.per_process or len(kept) == size
    weighting, placement, filler = None, None, None
    no_place = (
        "Batches that are on the mesh already are not padded: give as many on every "
        "process, or choose remainder='drop'."
    )
    if looked.element is not None:
        add = options.remainder == "pad"
        weighting = find_weighting(
            looked.first, looked.element, options.weights, add=add
        )
        no_place = way_out(looked.first)
        placement = plan_placement(
            weighting.treedef,
            weighting.leaves,
            layout,
            options.global_batch_size,
            kept,
        )
        may_run_short = options.per_process and not looked.is_random_access
        if may_run_short and weighting.at is not None:
            filler = first_row(looked.element, looked.first)
    return Pipeline(
        options,
        Cut(size, None if is_all else kept),
        weighting,
        placement,
        no_place,
        filler,
        agreement if options.per_process else None,
        _jax.canonical_dtype(np.int64) == np.int64,
        clock,
    )


def _check_length(looked: Looked, pipeline: Pipeline, num_batches: int | None) -> None:
    """Raises DataError if it is known already that an epoch cannot be cut."""
    num_rows, size = looked.num_rows, pipeline.cut.size
    remainder, weighting = pipeline.options.remainder, pipeline.weighting
    if num_rows is None or remainder == "repeat":
        return
    if num_batches is None:
        num_batches = batches_in_epoch(num_rows, size, remainder)
    left = num_rows % size
    what = f"a source of {num_rows} rows, in batches of {size}, leaves {left}"
    if remainder == "drop":
        if num_rows < size:
            msg = (
                f"the source has {num_rows} rows, fewer than a batch of {size}: "
                "remainder='drop' drops all of them. Take a smaller "
                "global_batch_size, or another remainder=."
            )
            raise DataError(msg)
        dropped = num_rows - num_batches * size
        if dropped:
            pipeline.clock.note(
                f"remainder='drop' drops {dropped} of {num_rows} rows in every epoch."
            )
    if remainder == "error" and left:
        msg = f"{what}. Choose another remainder=, or another global_batch_size."
        raise DataError(msg)
    if remainder != "pad" or weighting is None or weighting.at is not None:
        return
    if left:
        raise DataError(f"{what}, to be padded. {pipeline.no_place}")
    if num_rows < num_batches * size:
        msg = (
            f"the source has {num_rows} rows, and those of other processes fill "
            f"{num_batches} batches of {size}, up to which this one is padded. "
            f"{pipeline.no_place}"
        )
        raise DataError(msg)


def _kept_rows(layout: Layout, options: Options) -> np.ndarray[Any, Any]:
    """Returns which rows of a global batch are this process's own."""
    size = options.global_batch_size
    per_replica_batch_size(size, layout)
    kept = process_rows(layout, size)
    if options.per_process:
        row_groups(layout, size)
        if not len(kept):
            msg = (
                f"process {jax.process_index()} has no devices in {layout.mesh!r}, so "
                "that no rows are its own: with per_process=True it makes no data set."
            )
            raise DataError(msg)
    return kept


def _facts(looked: Looked, options: Options) -> dict[str, Any]:
    """Returns what has to be the same on all processes."""
    facts = asdict(options)
    facts["shuffle"] = facts.pop("seed")
    if not options.per_process:
        facts["number of rows"] = looked.num_rows
    if looked.element is not None:
        facts["leaves"] = [
            f"{spec.path} {array_text(spec.dtype, spec.shape)}"
            for spec in looked.element.leaves
        ]
    return facts


def _agreed_batches(
    agreement: Agreement, looked: Looked, size: int, options: Options
) -> int | None:
    """Returns how many batches an epoch has where processes have rows of their own."""
    if options.remainder == "repeat" or looked.num_rows is None:
        return None
    here = batches_in_epoch(looked.num_rows, size, options.remainder)
    said = agreement.exchange("batches", here)
    if options.remainder == "error" and len(set(said.values())) > 1:
        listed = ", ".join(f"{n} on process {p}" for p, n in said.items())
        msg = (
            f"the processes have different numbers of batches: {listed}. "
            "remainder='pad' pads the shorter ones."
        )
        raise DataError(msg)
    return min(said.values()) if options.remainder == "drop" else max(said.values())


def _identity(looked: Looked, options: Options) -> Identity:
    process = None
    if options.per_process:
        process = [jax.process_index(), jax.process_count()]
    return Identity(
        "rows" if looked.is_random_access else "stream",
        looked.num_rows if looked.is_random_access else None,
        options.global_batch_size,
        options.remainder,
        options.seed,
        process,
    )


def _num_steps(
    looked: Looked, cut: Cut, options: Options, num_batches: int | None
) -> int | None:
    """Returns how many batches an iteration has, or None."""
    if looked.num_rows is None:
        return options.steps
    if options.remainder == "repeat":
        if options.steps is not None:
            return options.steps
        return math.ceil(options.epochs * looked.num_rows / cut.size)
    if num_batches is None:
        num_batches = batches_in_epoch(looked.num_rows, cut.size, options.remainder)
    available = options.epochs * num_batches
    if options.steps is not None and options.steps > available:
        epochs = (
            "1 epoch has" if options.epochs == 1 else f"{options.epochs} epochs have"
        )
        msg = (
            f"steps={options.steps}, and {epochs} {available} batches. Take more "
            "epochs=, fewer steps=, or remainder='repeat'."
        )
        raise DataError(msg)
    return available if options.steps is None else options.steps


def _reader(
    looked: Looked,
    cut: Cut,
    options: Options,
    num_batches: int | None,
    clock: Clock,
) -> Reader:
    if looked.element is None:
        return PlacedReader(looked.source, clock)
    if looked.is_random_access:
        return RowReader(
            looked.source,
            looked.element,
            cut,
            remainder=options.remainder,
            seed=options.seed,
            num_batches=num_batches,
            clock=clock,
        )
    return StreamReader(
        looked.source, looked.element, cut, remainder=options.remainder, clock=clock
    )


def _placed_spec(batch: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding
        ),
        batch,
    )


def _nothing() -> None:
    """Does nothing."""
