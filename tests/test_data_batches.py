"""What global batches hold: padding, weights, dtypes, layouts, and what is refused."""

import collections
import dataclasses
import functools
import inspect
import itertools
import typing
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict

import meshlayout as ml
from meshlayout import data as md
from tests.error_messages import message_of
from tests.seekable import SeekableIterator


MESH = ml.create_mesh({"batch": 8})
PAIR = ml.create_mesh({"batch": 2, "model": 4})
ONE = ml.create_mesh({"batch": 1}, devices=jax.devices()[:1])

few = hypothesis.settings(max_examples=25, deadline=None, derandomize=True)


def distributed(source: Any, mesh: Any = MESH, size: int = 8, **options: Any):
    return ml.data.distribute_dataset(source, mesh, global_batch_size=size, **options)


def batches(source: Any, mesh: Any = MESH, size: int = 8, **options: Any) -> list[Any]:
    """The batches of one iteration, as NumPy arrays."""
    data = distributed(source, mesh, size, **options)
    return [jax.tree.map(np.asarray, batch) for batch in data]


message = functools.partial(message_of, error=ml.errors.DataError)


def refused(source: Any, mesh: Any = MESH, size: int = 8, **options: Any) -> str:
    """What is said about a source, at the latest when all of it is read."""
    return message(lambda: batches(source, mesh, size, **options))


def columns(num_rows: int) -> dict[str, Any]:
    x = np.arange(num_rows * 3, dtype=np.float32).reshape(num_rows, 3)
    return {"x": x, "y": np.arange(num_rows, dtype=np.int32)}


def padded(source: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """What batches should be, a row at a time."""
    num_rows = len(source["y"])
    found = []
    for start in range(0, num_rows, size):
        rows = [min(start + i, num_rows - 1) for i in range(size)]
        real = [float(start + i < num_rows) for i in range(size)]
        batch = {key: np.stack([leaf[r] for r in rows]) for key, leaf in source.items()}
        found.append({**batch, "weight": np.array(real, np.float32)})
    return found


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        jax.tree.map(np.testing.assert_array_equal, one, other)


def as_examples(source):
    rows = range(len(source["y"]))
    return [{key: leaf[row] for key, leaf in source.items()} for row in rows]


def as_batches(source, sizes):
    cuts = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    return [{key: leaf[a:b] for key, leaf in source.items()} for a, b in cuts]


class Reiterable:
    def __init__(self, elements):
        self.elements = elements

    def __iter__(self):
        return iter(self.elements)


class RandomAccess:
    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, row):
        return self.examples[row]


KINDS = {
    "arrays": lambda s: s,
    "jax arrays": lambda s: jax.tree.map(jnp.asarray, s),
    "list of examples": lambda s: as_examples(s),
    "random access": lambda s: RandomAccess(as_examples(s)),
    "iterable": lambda s: Reiterable(as_examples(s)),
    "iterator": lambda s: iter(as_examples(s)),
    "generator function": lambda s: lambda: (e for e in as_examples(s)),
}


@pytest.mark.parametrize("prefetch", [0, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_source_gives_every_example_once(kind, prefetch):
    source = columns(20)
    found = batches(KINDS[kind](source), prefetch=prefetch)
    assert_same(found, padded(source, 8))


@few
@hypothesis.given(st.data())
def test_batches_do_not_depend_on_how_rows_come(data):
    num_rows = data.draw(st.integers(1, 40))
    size = data.draw(st.integers(1, 20))
    source = columns(num_rows)
    cuts = data.draw(st.lists(st.integers(0, 15), max_size=8))
    sizes = [*cuts, max(num_rows - sum(cuts), 0)]
    given = as_batches(source, sizes)
    if data.draw(st.booleans()):
        given = Reiterable(given)
    prefetch = data.draw(st.sampled_from([0, 5]))
    found = batches(given, ONE, size, batched=True, prefetch=prefetch)
    assert_same(found, padded(source, size))


class Named(typing.NamedTuple):
    x: Any
    weight: Any


NINE, HALVES = np.arange(9), np.full(9, 0.5, np.float32)
FIRST = [1, *[0] * 7]
WEIGHTED = {
    "own": ({"x": NINE, "weight": HALVES}, "weight", [0.5, *[0] * 7]),
    "own, of tokens": (
        {"x": NINE, "weight": np.ones((9, 2), np.float32)},
        "weight",
        [[1, 1], *[[0, 0]] * 7],
    ),
    "another name": ({"x": NINE}, "mask", FIRST),
    "appended": ((NINE, NINE), 2, FIRST),
    "own, of a tuple": ((NINE, HALVES), 1, [0.5, *[0] * 7]),
    "own, of a named tuple": (Named(HALVES, HALVES), "weight", [0.5, *[0] * 7]),
    "of an OrderedDict": (collections.OrderedDict(y=HALVES, x=NINE), "weight", FIRST),
    "of a FrozenDict": (FrozenDict(x=NINE), "weight", FIRST),
    "of a defaultdict": (collections.defaultdict(list, x=NINE), "weight", FIRST),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_are_0_for_padding(name, caplog):
    source, key, expected = WEIGHTED[name]
    caplog.set_level("INFO")
    _, last = batches(source, weights=key)
    # A column that is taken for weights because of its name is told once.
    says = "Losses and metrics are weighted by 'weight'; loss_fn need not use it."
    assert caplog.messages.count(says) == (name[:3] == "own" and key == "weight")
    is_named = type(source) is Named
    assert type(last) is type(source)
    if name == "of an OrderedDict":
        assert list(last) == ["y", "x", "weight"]
    assert (last.weight if is_named else last[key]).tolist() == expected
    first = last.x if is_named else jax.tree.leaves(last)[0]
    assert is_named is False or first.tolist() == [0.5] * 8


@pytest.mark.parametrize("source", [(NINE, NINE), NINE, iter(range(9))])
def test_what_has_no_place_for_weights_is_not_padded(source):
    place = "weights=2 appends them"
    place = place if isinstance(source, tuple) else "a dict carries them under a key"
    assert refused(source) == (
        "the last batch of an epoch has 1 row, and batches have 8. Padding is marked "
        f"by weights: {place}. Or choose another remainder=."
    )
    assert refused(columns(9), weights=None).startswith("the last batch of an epoch")
    (batch,) = batches((NINE[:8], NINE[:8]))
    assert len(batch) == 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    first: Any
    second: Any


TREES = {
    "an array": lambda a, b: a,
    "a tuple": lambda a, b: (a, b),
    "nested": lambda a, b: {"in": {"a": a, "more": [b, (a,)]}, "out": b},
    "with None": lambda a, b: {"a": a, "nothing": None, "b": b},
    "a named tuple": lambda a, b: Named(a, b),
    "a dataclass": lambda a, b: Pair(a, b),
}


@pytest.mark.parametrize("name", TREES)
def test_trees_keep_their_structure(name):
    a, b = np.arange(16, dtype=np.int32).reshape(8, 2), np.arange(8, dtype=np.float32)
    source = TREES[name](a, b)
    (batch,) = batches(source, remainder="drop")
    assert_same([batch], [source])
    examples = [jax.tree.map(lambda leaf: leaf[row], source) for row in range(8)]  # noqa: B023
    options = {"batched": False} if name == "an array" else {}
    (batch,) = batches(examples, remainder="drop", **options)
    assert_same([batch], [source])


class Series:
    """An array-like that is no array, as a column of a data frame."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return self.values.astype(dtype or self.values.dtype)

    def __len__(self):
        return len(self.values)


class DataFrame(Series):
    """Named columns that are an array together, as those of pandas."""

    def __init__(self, **columns):
        self.columns = list(columns)
        self.by_name = {name: Series(values) for name, values in columns.items()}
        super().__init__(np.stack([*columns.values()], 1))

    def __getitem__(self, name):
        return self.by_name[name]


A, B = np.arange(8, dtype=np.float32), np.arange(8, 16, dtype=np.float32)
FRAME = DataFrame(a=A, b=B)
TABLES = {
    "a frame": (FRAME, {"a": A, "b": B}),
    "a frame and a series": ((FRAME, Series(A)), (np.stack([A, B], 1), A)),
    "a dict of series": ({"a": Series(A), "b": Series(B)}, {"a": A, "b": B}),
    "a series": (Series(A), A),
    "lists": (
        {"a": A.tolist(), "b": [[x] for x in B.tolist()]},
        {"a": A, "b": B[:, None]},
    ),
    "a pair of lists": ((A.tolist(), B.tolist()), (A, B)),
    "a list of rows": ([[x, 1.0] for x in A.tolist()], np.stack([A, A * 0 + 1], 1)),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_and_lists_are_arrays(name):
    source, expected = TABLES[name]
    assert_same(batches(source, remainder="drop", weights=None), [expected])


WRONG_COLUMNS = {
    "leaf 'y' is a set, which is not an array, number or": {"x": A, "y": {1, 2}},
    "leaf 'y': a list cannot be converted": {"x": A, "y": [[1.0], [1.0, 2.0]] * 4},
    "leaf 'y' holds strings, which": {"x": A, "y": Series(list("abcdefgh"))},
    "leaf 'x' float32[8] and leaf 'y' int64[2]: the first": {"x": A, "y": [1, 2]},
}


@pytest.mark.parametrize("sentence", WRONG_COLUMNS)
def test_an_entry_that_is_no_column_is_named_with_its_type(sentence):
    assert refused(WRONG_COLUMNS[sentence]).startswith(sentence)


LONG = ml.create_mesh({"batch": 1, "model": 8})
LAYOUTS = {
    "a batch axis of size 1": (LONG, ["batch", None], (16, 8)),
    "two batch axes": (PAIR, [("batch", "model"), None], (2, 8)),
    "the sequence dim too": (PAIR, ["batch", "model"], (8, 2)),
    "replicated": (PAIR, [None, None], (16, 8)),
    "the rank left open": (PAIR, ["model", ...], (4, 8)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_batches_have_the_layouts_that_were_asked_for(name):
    mesh, specs, shard_shape = LAYOUTS[name]
    layout = ml.Layout(specs, mesh)
    x = np.arange(128, dtype=np.float32).reshape(16, 8)
    data = distributed({"x": x}, layout, 16)
    (batch,) = data
    np.testing.assert_array_equal(np.asarray(batch["x"]), x)
    shards = batch["x"].addressable_shards
    assert {shard.data.shape for shard in shards} == {shard_shape}
    for shard in shards:
        np.testing.assert_array_equal(np.asarray(shard.data), x[shard.index])
    assert ml.fetch_layout(batch["weight"]) == mesh.layout(specs[0])


DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "uint32", "float16", "float32"),
    *("complex64", "bfloat16", "float8_e4m3fn"),
    *("float64", "int64", "uint64", "complex128"),  # which JAX narrows
]


@pytest.mark.parametrize("source", ["rows", "stream"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_are_what_jax_makes_of_them(dtype, source):
    x = np.arange(9).astype(jnp.dtype(dtype))
    stream = iter([{"x": one} for one in x])
    data = distributed({"x": x} if source == "rows" else stream)
    found = np.concatenate([np.asarray(batch["x"]) for batch in data])[:9]
    expected = np.asarray(jnp.asarray(x))
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()
    assert data.report().notes == ()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_wide_dtypes_stay_with_jax_enable_x64(prefetch):
    source = {"x": np.full(8, 2**40), "y": np.full(8, 0.1)}
    jax.config.update("jax_enable_x64", True)
    try:
        (batch,) = batches(source, prefetch=prefetch, weights=None)
    finally:
        jax.config.update("jax_enable_x64", False)
    assert_same([batch], [source])
    assert (batch["x"].dtype, batch["y"].dtype) == ("int64", "float64")


@pytest.mark.parametrize("source", ["rows", "stream"])
@pytest.mark.parametrize(("dtype", "value"), [("int", 2**31), ("uint", 2**32)])
def test_integers_that_do_not_fit_are_an_error(dtype, value, source):
    x = np.array([1, 2, 3, 4, 5, 6, 7, value], f"{dtype}64")
    stream = iter([{"x": one} for one in x])
    assert refused({"x": x} if source == "rows" else stream) == (
        f"leaf 'x' has the value {value}, which does not fit into {dtype}32, JAX's "
        f"{dtype}64 without jax_enable_x64."
    )


def test_dtypes_that_jax_does_not_have_are_refused():
    values = np.array(["2020-01-01"] * 8, "datetime64[D]")
    assert message(lambda: distributed({"x": values})) == (
        "leaf 'x' has dtype datetime64[D], which JAX lacks. Drop missing values, pad rows, "
        "write (x - x.min()).dt.days of dates, pd.factorize(x) of text, or x.astype(...)."
    )
    values = np.array([[True, 0.5]] * 8, object)  # as of a frame of several dtypes
    assert message(lambda: distributed({"x": values})) == (
        "leaf 'x' has dtype object, though of numbers: write x.astype('float32')."
    )


STRINGS = {
    "text": np.array(["a", "bc", "def", "g", "h", "i", "j", "k", "l"]),
    "bytes": np.array([b"a", b"bc", b"def", b"g", b"h", b"i", b"j", b"k", b"l"]),
    "objects": np.array([b"a", b"b\0", b"c", "d", "e", "f", "g", "h", "i"], object),
}


@pytest.mark.parametrize("name", STRINGS)
def test_strings_are_refused_unless_the_user_keeps_them_on_the_host(name):
    source = {"id": STRINGS[name], "x": np.arange(9)}
    assert message(lambda: distributed(source)) == (
        "leaf 'id' holds strings, which devices do not take. Of labels, after dropna, "
        "write codes, names = pd.factorize(labels), of features pd.get_dummies(frame); "
        "or leave it out, or give distribute_dataset strings='host'."
    )
    data = distributed(source, strings="host")
    found = list(data)
    assert type(found[0]["id"]) is np.ndarray
    assert found[0]["id"].tolist() == STRINGS[name].tolist()[:8]
    assert found[1]["id"].tolist() == [STRINGS[name].tolist()[8]] * 8
    spec = data.element_spec["id"]
    assert (spec.shape, spec.dtype, spec.sharding) == ((8,), STRINGS[name].dtype, None)


ALL = "all examples have the shape and dtype of the first one."
UNLIKE = {
    "ragged": ([{"x": np.zeros(n), "y": 1} for n in (2, 3)], "f64[3]", "f64[2]"),
    "another dtype": ([{"x": 1}, {"x": 1.5}], "f64[]", "i64[]"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_examples_unlike_the_first_one_are_refused(name):
    examples, now, first = UNLIKE[name]
    for source in (examples, lambda: iter(examples)):
        assert refused(source) == f"leaf 'x' is {now}, and must be {first}: {ALL}"


def test_rows_that_were_not_asked_for_are_refused():
    def too_few(indices, epoch):
        return {"y": np.zeros(max(1, len(indices) - 1), "int32")}

    said = f"leaf 'y' is i32[7], and must be i32[8]: {ALL}"
    assert refused(ReadsRows(too_few)) == said
    several = ReadsRows(lambda indices, epoch: {"y": np.append(indices, 0)})
    assert refused(several).startswith("leaf 'y' is i64[9], and must be i64[8]")
    without = ReadsRows(lambda indices, epoch: {"y": 1.0})
    assert refused(without).startswith("the arrays of a batch have no batch dim")


EMPTY = {
    "arrays": {"x": np.zeros((0, 3))},
    "a list": [],
    "an iterator": iter([]),
    "a generator function": lambda: iter([]),
    "only empty batches": Reiterable([{"x": np.zeros((0, 3))}]),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_source_is_an_error_before_training(name):
    options = {"batched": True} if name == "only empty batches" else {}
    assert message(lambda: distributed(EMPTY[name], **options)) == (
        "the source is empty: it yielded no examples."
    )


@pytest.mark.parametrize("source", [7, "a text", {}, None, {"x": None}])
def test_what_is_not_a_source_is_refused(source):
    assert message(lambda: distributed(source)) == (
        "the source must be arrays, a list of examples, an iterable, a function that "
        "makes a generator, or a dataset of Grain, TFDS, tf.data, PyTorch or Hugging "
        f"Face, got {source!r}."
    )


def test_a_list_of_batches_knows_how_many_there_are():
    sizes = [3, 8, 6]
    source = [{"x": np.zeros((n, 2), np.float32), "y": np.arange(n)} for n in sizes]
    data = distributed(source, batched=True)
    assert len(data) == len(list(data)) == 3
    data = distributed(source, batched=True, remainder="drop", epochs=2)
    assert len(data) == len(list(data)) == 4


def test_elements_that_may_be_both_need_a_word():
    sentence = (
        "the elements of the source may be examples or batches: all their arrays have "
        "the same first dim. Say batched=False for examples, or batched=True for "
        "batches."
    )
    elements = [{"x": np.zeros((8, 2)), "y": np.zeros(8)}] * 2
    for source in (elements, iter(elements)):
        assert refused(source) == sentence
    arrays = [element["x"] for element in elements]
    hint = " Columns of one dataset go into a tuple or a dict."
    assert refused(arrays) == sentence + hint
    assert len(batches(tuple(arrays))) == 1
    assert len(batches(arrays, batched=True)) == 2
    assert batches(RandomAccess(elements * 4))[0]["x"].shape == (8, 8, 2)
    found = batches(arrays, batched=False, size=8, remainder="repeat")
    assert found[0].shape == (8, 8, 2)


def aligned(array):
    """A copy of an array, where JAX takes its memory on a CPU device as it is."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_do_not_change_with_the_users_buffers(prefetch):
    def generate():
        buffer = aligned(np.zeros((8, 1024), np.float32))
        for step in range(4):
            buffer[...] = step
            yield {"x": buffer}

    found = list(distributed(generate, ONE, batched=True, prefetch=prefetch))
    means = [float(batch["x"].mean()) for batch in found]
    assert means == [0, 1, 2, 3]


def two_buffers():
    buffers = [np.zeros(3, np.int32), np.zeros(3, np.int32)]
    for row in range(100):
        buffers[row % 2][...] = row
        yield {"x": buffers[row % 2]}
    for buffer in buffers:
        buffer[...] = -1


@pytest.mark.parametrize("size", [8, 48])
def test_examples_whose_memory_is_used_again_come_out_right(size):
    found = batches(two_buffers, size=size, batched=False, remainder="drop")
    rows = np.concatenate([batch["x"] for batch in found])
    expected = np.repeat(np.arange(100)[: len(rows), None], 3, axis=1)
    np.testing.assert_array_equal(rows, expected)


class Socket:
    """A source that is read one way, in batches or one by one, from any row on."""

    num_rows = 20

    def __init__(self, batched):
        self.batched = batched

    def open(self, epoch):
        rows = np.arange(20, dtype=np.int32)
        elements = rows.reshape(4, 5) if self.batched else rows
        return SeekableIterator([{"y": each} for each in elements])


def test_a_users_own_source_with_random_access_is_taken():
    source = ReadsRows(lambda rows, epoch: {"y": rows, "epoch": 0 * rows + epoch})
    assert isinstance(source, md.RandomAccessSource)
    data = distributed(source, shuffle=0)
    assert len(data) == 3
    for epoch in range(2):
        found = [jax.tree.map(np.asarray, batch) for batch in data]
        real = np.concatenate([batch["weight"] for batch in found]) > 0
        rows = np.concatenate([batch["y"] for batch in found])[real]
        assert sorted(rows) == list(range(20))
        assert {int(e) for batch in found for e in batch["epoch"]} == {epoch}


@pytest.mark.parametrize("batched", [True, False])
def test_a_users_own_stream_is_taken_and_resumes(batched):
    assert isinstance(Socket(batched), md.StreamSource)
    it = iter(distributed(Socket(batched)))
    first = np.asarray(next(it)["y"])
    assert first.tolist() == list(range(8))
    again = iter(distributed(Socket(batched)))
    again.set_state(it.get_state())
    rest = np.concatenate(
        [np.asarray(b["y"])[np.asarray(b["weight"]) > 0] for b in again]
    )
    assert rest.tolist() == list(range(8, 20))


class ReadsRows:
    """A source of 20 rows, read by a function that may be wrong."""

    def __init__(self, read):
        self.read_rows = read

    def __len__(self):
        return 20


def test_what_loses_or_narrows_data_is_logged_once(caplog):
    rows = columns(20)
    for source, said in (
        (rows, "remainder='drop' drops 4 of 20 rows in every epoch."),
        (lambda: iter(as_examples(rows)), "Dropped the last 4 rows of an epoch."),
    ):
        caplog.clear()
        data = distributed(source, remainder="drop")
        for _ in range(2):
            list(data)
        assert caplog.messages == [said]


ODD = [None, float("nan"), -1, 0, "x", object()]
PARAMETERS = [*inspect.signature(ml.data.distribute_dataset).parameters]


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("name", PARAMETERS)
def test_odd_values_work_or_are_refused_in_a_sentence(name, value):
    options = {
        "source": columns(8),
        "layout_or_mesh": MESH,
        "global_batch_size": 8,
        name: value,
    }
    found, text = [], "."
    try:
        found = list(itertools.islice(ml.data.distribute_dataset(**options), 3))
    except ml.MeshLayoutError as error:
        text = str(error)
    assert text[-1] in ".?"
    assert all(batch["y"].shape == (8,) for batch in found)


WRONG = [
    ({"size": 0}, "global_batch_size must be a positive integer, got 0."),
    (
        {"mesh": {"x": MESH.layout("batch", ...)}},
        "batches need a Layout, a mesh or a NamedSharding, got a dict. One is for all "
        "entries, of which those with fewer dims take its first ones: "
        "distribute_dataset(data, mesh, global_batch_size=8).",
    ),
    ({"epochs": 0}, "epochs must be a positive integer, got 0."),
    (
        {"weights": 1.5},
        "weights must be a key of the batch, an index into a tuple, or None, got 1.5.",
    ),
    (
        {"shuffle": True},
        "shuffle=True is not a seed. Write shuffle=0: the seed and the epoch determine "
        "the order of the rows; or shuffle=None to keep their order.",
    ),
    (
        {"remainder": "padd"},
        "remainder must be 'pad', 'drop' or 'repeat', got 'padd'. Did you mean 'pad'?",
    ),
    ({"strings": "keep"}, "strings must be 'error' or 'host', got 'keep'."),
    ({"per_process": 1}, "per_process must be True or False, got 1."),
    (
        {"per_process": True, "remainder": "repeat"},
        "remainder='repeat' with per_process=True needs epochs=None: the processes may "
        "have different numbers of rows, and must take as many steps, as "
        "itertools.islice(iterator, steps) does.",
    ),
]


@pytest.mark.parametrize(("options", "expected"), WRONG)
def test_wrong_arguments_are_named(options, expected):
    assert message(lambda: distributed(columns(8), **options)) == expected


def test_a_stream_is_not_shuffled():
    assert message(lambda: distributed(iter(as_examples(columns(8))), shuffle=0)) == (
        "shuffle= and strings='host' are for sources with random access, and this one "
        "is read in order: shuffle it, and make numbers of strings, where it is made."
    )


def test_a_function_gets_its_context_and_makes_the_source():
    seen = []

    def fn(context):
        seen.append(context)
        size = context.get_per_replica_batch_size(16)
        return ({"x": np.full(size, i)} for i in range(8))

    data = md.distribute_datasets_from_function(fn, MESH)
    assert seen == [md.InputContext(1, 0, 8)]
    for _ in range(2):  # a generator can be read once, so each epoch has its own
        (batch,) = data
        assert batch["x"].tolist() == np.repeat(np.arange(8), 2).tolist()
    assert len(seen) == 2


def test_a_function_may_return_rows_and_say_the_batch_size():
    def made(**options):
        return md.distribute_datasets_from_function(
            lambda context: columns(16), MESH, **options
        )

    found = [batch["y"].tolist() for batch in made(global_batch_size=8)]
    assert found == [[*range(8)], [*range(8, 16)]]
    assert message(made) == (
        "the function returned a source of single rows, which does not say the size of "
        "a batch. Give global_batch_size=, or return batches of the per-replica size."
    )


def test_a_source_with_other_rows_than_it_says_is_told(caplog):
    class Liar(Socket):
        num_rows = 24

    list(distributed(Liar(batched=False)))
    assert caplog.messages == [
        "The source says that an epoch has 24 rows, and epoch 1 has 20."
    ]


def test_a_mask_is_sharded_as_its_image_without_channels():
    mesh = ml.create_mesh({"batch": 2, "height": 4})
    data = {"image": np.zeros((8, 4, 4, 3), "f4"), "mask": np.zeros((8, 4, 4), "i4")}
    layout = mesh.layout("batch", "height", None, None)
    batch = next(iter(ml.distribute_dataset(data, layout, global_batch_size=4)))
    assert ml.fetch_layout(batch["mask"]) == mesh.layout("batch", "height", None)
