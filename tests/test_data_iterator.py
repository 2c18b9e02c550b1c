"""Iterating: threads, leaving early, exceptions, resuming, lengths and the report."""

import functools
import gc
import itertools
import json
import threading
import time
import traceback
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import meshlayout as ml
from tests.error_messages import message_of
from tests.seekable import Seekable


MESH = ml.create_mesh({"batch": 8})
ONE = ml.create_mesh({"batch": 1}, devices=jax.devices()[:1])

few = hypothesis.settings(max_examples=40, deadline=None, derandomize=True)


def distributed(source: Any, mesh: Any = ONE, size: int = 4, **options: Any):
    return ml.data.distribute_dataset(source, mesh, global_batch_size=size, **options)


def rows_of(batches: Any) -> list[list[int]]:
    return [np.asarray(batch["y"]).tolist() for batch in batches]


message = functools.partial(message_of, error=ml.errors.DataError)


def columns(num_rows: int) -> dict[str, Any]:
    return {"y": np.arange(num_rows)}


def examples(num_rows: int):
    return lambda: ({"y": row} for row in range(num_rows))


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "meshlayout-data"]


def wait_for(condition, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def no_threads() -> bool:
    if threads():
        gc.collect()
    return not threads()


@pytest.fixture(autouse=True)
def no_threads_stay():
    assert wait_for(no_threads)
    yield
    assert wait_for(no_threads)


EPOCH = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 9, 9]]
SOURCES = [columns(10), examples(10), lambda: iter(in_batches(10, [3, 4]))]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_islice_of_one_iterator_goes_on_where_it_ended(source, prefetch):
    options = {"batched": True} if source is SOURCES[2] else {}
    data = distributed(source, epochs=None, prefetch=prefetch, **options)
    first, second, third = EPOCH
    it = iter(data)
    assert rows_of(itertools.islice(it, 2)) == [first, second]
    state = it.get_state()
    assert rows_of(itertools.islice(it, 2)) == [third, first]
    assert rows_of(itertools.islice(it, 2)) == [second, third]
    again = iter(distributed(source, epochs=None, prefetch=prefetch, **options))
    again.set_state(state, skip=True)
    assert rows_of(itertools.islice(again, 2)) == [third, first]


@pytest.mark.parametrize("source", [columns(10), examples(10)])
def test_an_iterator_from_an_epoch_does_not_count_as_an_iteration(source):
    data = distributed(source, epochs=1)
    first = rows_of(data.iterator(epoch=0))
    assert rows_of(data.iterator(epoch=0)) == first
    shuffled = distributed(columns(10), shuffle=3)
    epochs = [rows_of(shuffled) for _ in range(2)]
    assert rows_of(shuffled.iterator(epoch=1)) == epochs[1]
    assert rows_of(shuffled) not in epochs


@pytest.mark.parametrize("source", [columns(10), examples(10)])
@pytest.mark.parametrize("remainder", ["pad", "repeat"])
def test_epochs_may_have_no_end(source, remainder):
    data = distributed(source, epochs=None, remainder=remainder)
    with pytest.raises(TypeError, match="does not know how many batches it has"):
        len(data)
    found = rows_of(itertools.islice(data, 7))
    if remainder == "pad":
        assert found == [*EPOCH, *EPOCH, EPOCH[0]]
    else:
        assert np.concatenate(found).tolist() == (list(range(10)) * 3)[:28]


def test_an_iterator_is_read_once():
    data = distributed(examples(8)())
    assert len(list(data)) == 2
    assert message(lambda: list(data)) == (
        "the source is an iterator (generator), which can be read once, and epoch 2 "
        "starts. Give a function that makes one, as lambda: make_iterator()."
    )


def test_a_generator_that_is_exhausted_at_the_second_epoch_is_an_error():
    once = examples(8)()
    data = distributed(lambda: once)
    assert len(list(data)) == 2
    assert message(lambda: list(data)) == (
        "the source yielded no examples in epoch 2, though it did before. A function "
        "that makes a generator must make a new one at every call."
    )


class Counted:
    """Rows by number, and which of them were asked for."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows, self.asked = num_rows, []

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, int]:
        self.asked.append(row)
        return {"y": row}


@pytest.mark.parametrize(("num_rows", "size"), [(10, 4), (1, 4), (8, 4)])
def test_padding_reads_no_row_again(num_rows, size):
    source = Counted(num_rows)
    data = distributed(source, size=size, shuffle=3)
    source.asked.clear()
    found = list(data)
    assert sorted(source.asked) == list(range(num_rows))
    last = np.asarray(found[-1]["y"])
    real = int(np.asarray(found[-1]["weight"]).sum())
    assert (last[real:] == last[real - 1]).all()
    assert data.report().rows == num_rows


class SourceError(Exception):
    pass


def failing(at: int, num_rows: int = 12):
    def generate():
        for row in range(num_rows):
            if row == at:
                raise SourceError(f"row {row} cannot be read")
            yield {"y": row}

    return generate


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("at", "before"), [(1, 0), (3, 0), (5, 1), (11, 2)])
def test_an_exception_of_the_source_comes_after_the_batches_before_it(
    at, before, prefetch
):
    it = iter(distributed(failing(at), prefetch=prefetch))
    for batch in range(before):
        assert rows_of([next(it)]) == [list(range(4 * batch, 4 * batch + 4))]
    with pytest.raises(SourceError, match=f"^row {at} cannot be read") as info:
        next(it)
    frames = [frame.name for frame in traceback.extract_tb(info.value.__traceback__)]
    assert "generate" in frames
    assert next(it, "the end") == "the end"


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_source_of_rows_that_raises_stop_iteration_does_not_end_the_epoch(prefetch):
    class Ending(Counted):
        def __getitem__(self, row):
            if row == 6:
                raise StopIteration
            return {"y": row}

    it = iter(distributed(Ending(8), prefetch=prefetch))
    assert rows_of([next(it)]) == [[0, 1, 2, 3]]
    assert message(lambda: next(it), error=RuntimeError) == (
        "generator raised StopIteration"
    )


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_leaving_the_loop_stops_the_thread(prefetch):
    closed = threading.Event()

    def source():
        try:
            for row in itertools.count():
                yield {"y": row}
        finally:
            closed.set()

    data = distributed(source, prefetch=prefetch)
    for _ in data:
        break
    gc.collect()
    assert closed.wait(5)
    assert wait_for(lambda: not threads())


def test_closing_and_leaving_a_with_block_stop_the_thread_at_once():
    data = distributed(columns(10_000))
    it = iter(data)
    next(it)
    assert len(threads()) == 1
    it.close()
    assert not threads()
    with data.iterator() as it:
        next(it)
        assert len(threads()) == 1
    assert not threads()


def test_closing_does_not_wait_for_a_source_that_blocks():
    go_on, is_blocked = threading.Event(), threading.Event()

    def source():
        yield from examples(4)()
        is_blocked.set()
        go_on.wait(20)
        yield {"y": 4}

    it = iter(distributed(source))
    next(it)
    assert is_blocked.wait(5)
    start = time.monotonic()
    it.close()
    assert time.monotonic() - start < 2
    go_on.set()
    assert wait_for(lambda: not threads())


def test_at_most_as_many_batches_as_asked_for_are_made_ready():
    source = Counted(400)
    made = source.asked
    for prefetch in (0, 1, 3):
        it = iter(distributed(source, prefetch=prefetch))
        made.clear()
        next(it)
        wait_for(lambda: len(made) >= 4 * (1 + prefetch))  # noqa: B023
        time.sleep(0.05)
        assert len(made) == 4 * (1 + prefetch)
        it.close()


def test_a_hundred_epochs_leave_nothing_behind():
    data = distributed(columns(6), MESH, 8)
    for _ in data:
        pass
    gc.collect()
    before = len(jax.live_arrays()), threading.active_count()
    for epoch in range(100):
        for _ in data:
            if epoch % 3 == 0:
                break
    gc.collect()
    assert wait_for(lambda: not threads())
    gc.collect()
    assert (len(jax.live_arrays()), threading.active_count()) == before


def test_an_older_iterator_does_not_move_the_next_iteration():
    data = distributed(columns(12), shuffle=0)
    other = distributed(columns(12), shuffle=0, epochs=3)
    first, second = iter(data), iter(data)
    expected = rows_of(other)
    assert rows_of(second) == expected[3:6]
    assert rows_of(first) == expected[:3]
    assert rows_of(data) == expected[6:]


def in_batches(num_rows: int, sizes: list[int]) -> list[dict[str, Any]]:
    found, start = [], 0
    for size in sizes:
        stop = min(start + size, num_rows)
        found.append({"y": np.arange(start, stop)})
        start = stop
    found.append({"y": np.arange(start, num_rows)})
    return found


def sources(num_rows: int, sizes: list[int]) -> dict[str, Any]:
    """By name: a source, its options, and how a state is set."""
    listed = [{"y": row} for row in range(num_rows)]
    cut = in_batches(num_rows, sizes)
    return {
        "arrays": (columns(num_rows), {}, {}),
        "arrays, shuffled": (columns(num_rows), {"shuffle": 5}, {}),
        "examples": (listed, {"shuffle": 5}, {}),
        "list of batches": (cut, {"batched": True}, {}),
        "seekable examples": (Seekable(listed), {}, {}),
        "seekable batches": (Seekable(cut), {"batched": True}, {}),
        "generator": (examples(num_rows), {}, {"skip": True}),
        "generator of batches": (lambda: iter(cut), {"batched": True}, {"skip": True}),
    }


NAMES = list(sources(1, []))


@few
@hypothesis.given(st.data())
def test_what_is_left_after_any_stop_comes_after_resuming(data):
    num_rows = data.draw(st.integers(4, 25))
    sizes = data.draw(st.lists(st.integers(0, 9), max_size=5))
    name = data.draw(st.sampled_from(NAMES))
    source, options, how = sources(num_rows, sizes)[name]
    options = {
        **options,
        "epochs": data.draw(st.integers(1, 3)),
        "remainder": data.draw(st.sampled_from(["pad", "drop", "repeat"])),
        "prefetch": data.draw(st.sampled_from([0, 1, 3])),
    }
    before = data.draw(st.integers(0, 2))

    def make():
        made = distributed(source, **options)
        for _ in range(before):
            list(made)
        return made

    whole = rows_of(make())
    stop = data.draw(st.integers(0, len(whole)))
    first = make()
    it = iter(first)
    assert rows_of(itertools.islice(it, stop)) == whole[:stop]
    state = json.loads(json.dumps(it.get_state()))
    it.close()

    fresh = distributed(source, **options)
    resumed = iter(fresh)
    if data.draw(st.booleans()):
        next(resumed)
    resumed.set_state(state, **how)
    assert resumed.get_state() == state
    assert rows_of(resumed) == whole[stop:]
    continued = make()
    list(continued)
    assert rows_of(fresh) == rows_of(continued)


def test_closing_from_another_thread_ends_the_loop():
    it = iter(distributed(columns(10**6)))
    looping = threading.Thread(target=lambda: list(it))
    looping.start()
    time.sleep(0.05)
    it.close()
    looping.join(5)
    assert not looping.is_alive()
    assert next(it, "closed") == "closed"


def test_a_source_that_cannot_seek_says_so_and_offers_to_skip():
    it = iter(distributed(examples(12)))
    next(it)
    state = it.get_state()
    it.close()
    other = iter(distributed(examples(12)))
    assert message(lambda: other.set_state(state)) == (
        "this source cannot seek to row 4 of epoch 1: it has no position of its own. "
        "iterator.set_state(state, skip=True) reads the rows before it, and drops them."
    )
    assert rows_of([next(other)]) == [[0, 1, 2, 3]]
    other.set_state(state, skip=True)
    assert rows_of(other) == [[4, 5, 6, 7], [8, 9, 10, 11]]


SHORTER = {
    "the source ended before the position: it is shorter than it was.": examples,
    "the source refuses the position of the state (IndexError: the position is after "
    "item 8, and there are 5). The state is of another source or of another version of "
    "its library, or it is damaged.": lambda rows: [{"y": np.arange(1)}] * rows,
}


@pytest.mark.parametrize("text", SHORTER)
def test_a_place_that_a_shorter_source_does_not_have_is_an_error(text):
    options = {} if SHORTER[text] is examples else {"batched": True}
    it = iter(distributed(SHORTER[text](12), **options))
    for _ in range(2):
        next(it)
    other = iter(distributed(SHORTER[text](5), **options))
    set_state = lambda: other.set_state(it.get_state(), skip=True)
    assert message(lambda: (set_state(), next(other))) == text


def in_fives(size: int = 5, **options: Any):
    """A source whose own position counts batches."""
    return distributed(
        Seekable(in_batches(40, [size] * (40 // size))), batched=True, **options
    )


WRONG_STATES = {
    "source": (lambda: distributed(examples(12)), "source='rows'", "source='stream'"),
    "batch size": (
        lambda: distributed(columns(12), size=6),
        "global_batch_size=4",
        "global_batch_size=6",
    ),
    "seed": (lambda: distributed(columns(12), shuffle=1), "shuffle=None", "shuffle=1"),
    "stream that is cut otherwise": (lambda: in_fives(8), "block=5", "block=8"),
}


@pytest.mark.parametrize("what", WRONG_STATES)
def test_a_state_of_another_data_set_is_refused(what):
    make, there, here = WRONG_STATES[what]
    data = in_fives() if "stream" in what else distributed(columns(12))
    state = json.loads(json.dumps(iter(data).get_state()))
    assert message(lambda: iter(make()).set_state(state)) == (
        f"the state is of a dataset with {there}, and this one has {here}: its batches "
        "would be different ones. Make the dataset as it was, or restore without it, "
        "to start the data anew."
    )


def test_what_is_not_a_state_is_refused():
    it = iter(distributed(columns(12)))
    cut = dict(it.get_state())
    del cut["row"]
    for wrong in ({}, 7, None, cut):
        assert message(lambda: it.set_state(wrong)).startswith(  # noqa: B023
            "the state must be that of a data iterator's get_state(), got "
        )


def test_the_report_counts_rows_and_seconds():
    class Slow(Counted):
        def __getitem__(self, row):
            time.sleep(0.005)
            return super().__getitem__(row)

    data = distributed(Slow(8))
    list(data)
    report = data.report()
    assert (report.rows, report.batches, report.notes) == (8, 2, ())
    assert report.read_s >= 0.04
    assert report.waited_s >= 0.02
    assert report.place_s > 0
    assert str(report).startswith("8 rows in 2 batches: 0.")
