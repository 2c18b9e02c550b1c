"""What global batches hold: padding, weights, dtypes, layouts, and what is refused."""

import collections
import dataclasses
import functools
import inspect
import itertools
import json
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


# The same examples from all kinds of sources


def as_examples(source):
    rows = range(len(source["y"]))
    return [{key: leaf[row] for key, leaf in source.items()} for row in rows]


def as_batches(source, sizes):
    found, start = [], 0
    for size in sizes:
        part = {key: leaf[start : start + size] for key, leaf in source.items()}
        found.append(part)
        start += size
    return found


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


def reused_buffers(source, size):
    """A generator that gives the same arrays again and again, with other rows."""

    def generate():
        buffers = {
            k: np.empty((size, *leaf.shape[1:]), leaf.dtype)
            for k, leaf in source.items()
        }
        for batch in as_batches(source, [size] * (len(source["y"]) // size)):
            for key, leaf in batch.items():
                buffers[key][...] = leaf
            yield buffers
        for buffer in buffers.values():
            buffer[...] = -1

    return generate


KINDS = {
    "arrays": lambda s: (s, {}),
    "jax arrays": lambda s: (jax.tree.map(jnp.asarray, s), {}),
    "list of examples": lambda s: (as_examples(s), {}),
    "random access": lambda s: (RandomAccess(as_examples(s)), {}),
    "iterable": lambda s: (Reiterable(as_examples(s)), {}),
    "iterator": lambda s: (iter(as_examples(s)), {}),
    "generator function": lambda s: (lambda: (e for e in as_examples(s)), {}),
    "batches of its own size": lambda s: (as_batches(s, [8, 8, 4]), {"batched": True}),
    "small batches": lambda s: (as_batches(s, [3] * 6 + [2]), {"batched": True}),
    "large batches": lambda s: (as_batches(s, [19, 1]), {"batched": True}),
    "uneven batches": lambda s: (
        Reiterable(as_batches(s, [1, 0, 13, 5, 1])),
        {"batched": True},
    ),
    "buffers used again": lambda s: (reused_buffers(s, 5), {"batched": True}),
}


@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_source_gives_every_example_once(kind, prefetch):
    source = columns(20)
    given, options = KINDS[kind](source)
    found = batches(given, prefetch=prefetch, **options)
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
    found = batches(given, ONE, size, batched=True)
    assert_same(found, padded(source, size))


# Short batches


def test_a_batch_larger_than_the_data_is_padded():
    (batch,) = batches(columns(3), size=16)
    assert batch["y"].tolist() == [0, 1, *[2] * 14]
    assert batch["weight"].tolist() == [1, 1, 1, *[0] * 13]


def test_one_example_is_a_batch():
    (batch,) = batches(columns(1))
    assert batch["x"].tolist() == [[0, 1, 2]] * 8
    assert batch["weight"].tolist() == [1, *[0] * 7]


def test_padding_is_as_finite_as_the_last_row():
    source = {"x": np.full((9, 2), 1e30, np.float32)}
    assert all(np.isfinite(batch["x"]).all() for batch in batches(source))


def test_batches_that_are_full_have_weights_too():
    found = batches(columns(16))
    assert [set(batch) for batch in found] == [{"x", "y", "weight"}] * 2
    assert all(batch["weight"].tolist() == [1] * 8 for batch in found)
    assert found[0]["weight"].dtype == np.float32


def test_drop_says_how_many_it_drops():
    data = distributed(columns(20), remainder="drop")
    assert [batch["y"].tolist() for batch in data] == [
        list(range(8)),
        list(range(8, 16)),
    ]
    assert data.report().notes == (
        "remainder='drop' drops 4 of 20 rows in every epoch.",
    )
    assert set(data.element_spec) == {"x", "y"}


def test_drop_says_how_many_it_dropped_of_a_stream():
    data = distributed(lambda: iter(as_examples(columns(20))), remainder="drop")
    assert len(list(data)) == 2
    assert data.report().notes == ("Dropped the last 4 rows of an epoch.",)


def test_dropping_all_rows_is_an_error():
    expected = (
        "the source has 3 rows in epoch 1, fewer than a batch: remainder='drop' drops "
        "all of them. Take a smaller global_batch_size, or another remainder=."
    )
    assert message(lambda: distributed(columns(3), remainder="drop")) == expected
    stream = iter(as_examples(columns(3)))
    assert refused(stream, remainder="drop") == expected


@pytest.mark.parametrize("kind", ["arrays", "generator function", "large batches"])
def test_epochs_that_repeat_run_into_each_other(kind):
    given, options = KINDS[kind](columns(20))
    data = distributed(given, remainder="repeat", **options)
    rows = []
    for _ in range(4):
        found = [np.asarray(batch["y"]) for batch in data]
        assert len(found) in (2, 3)
        rows += np.concatenate(found).tolist()
    assert rows == (list(range(20)) * 5)[: len(rows)]


def test_repeat_gives_an_iteration_enough_batches_for_its_epochs():
    for epochs, steps in ((1, 3), (2, 5), (3, 8)):
        data = distributed(columns(20), remainder="repeat", epochs=epochs)
        assert len(data) == len(list(data)) == len(list(data)) == steps


@pytest.mark.parametrize("kind", ["arrays", "generator function"])
def test_a_batch_larger_than_the_data_repeats_it(kind):
    given, _ = KINDS[kind](columns(3))
    (batch,) = batches(given, remainder="repeat")
    assert batch["y"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_repeated_epochs_are_shuffled_each_in_its_own_way():
    data = distributed(columns(12), remainder="repeat", shuffle=0, epochs=2)
    rows = np.concatenate([np.asarray(batch["y"]) for batch in data])
    first, second = rows[:12].tolist(), rows[12:24].tolist()
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


# Where weights ride


def test_weights_of_the_source_stay_and_are_0_for_padding():
    source = {**columns(9), "weight": np.arange(1, 10, dtype=np.float32) / 2}
    found = batches(source)
    assert found[0]["weight"].tolist() == [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]
    assert found[1]["weight"].tolist() == [4.5, *[0] * 7]


def test_weights_of_each_token_are_0_for_padding():
    source = {**columns(9), "weight": np.ones((9, 2), np.float32)}
    assert batches(source)[1]["weight"].tolist() == [[1, 1], *[[0, 0]] * 7]


def test_weights_may_have_another_name():
    found = batches(columns(9), weights="mask")
    assert [batch["mask"].sum() for batch in found] == [8, 1]


def test_weights_are_appended_to_a_tuple():
    source = (np.arange(18).reshape(9, 2), np.arange(9))
    found = batches(source, weights=2)
    assert [len(batch) for batch in found] == [3, 3]
    assert found[1][2].tolist() == [1, *[0] * 7]


def test_weights_of_a_tuple_are_kept():
    source = (np.arange(9), np.full(9, 0.5, np.float32))
    assert batches(source, weights=1)[1][1].tolist() == [0.5, *[0] * 7]


class Named(typing.NamedTuple):
    x: Any
    weight: Any


def test_a_named_tuples_weights_are_kept():
    found = batches(Named(np.arange(9), np.ones(9, np.float32)))
    assert type(found[1]) is Named
    assert found[1].weight.tolist() == [1, *[0] * 7]


MAPPINGS = {
    "an OrderedDict": collections.OrderedDict,
    "a FrozenDict": FrozenDict,
    "a defaultdict": lambda **leaves: collections.defaultdict(list, leaves),
}


@pytest.mark.parametrize("name", MAPPINGS)
@pytest.mark.parametrize("order", ["xy", "yx"])
@pytest.mark.parametrize("streamed", [False, True])
def test_mappings_keep_their_type_and_get_weights(name, order, streamed):
    leaves = {"x": np.arange(10) * 10, "y": np.arange(10)}
    source: Any = MAPPINGS[name](**{key: leaves[key] for key in order})
    if streamed:
        rows = [jax.tree.map(lambda leaf: leaf[row], source) for row in range(10)]  # noqa: B023
        found = batches(lambda: iter(rows))
    else:
        found = batches(source)
    assert {type(batch) for batch in found} == {type(source)}
    if name == "an OrderedDict":
        assert list(found[0]) == [*order, "weight"]
    assert found[0]["x"].tolist() == [0, 10, 20, 30, 40, 50, 60, 70]
    assert found[0]["y"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert found[1]["x"].tolist() == [80, *[90] * 7]
    assert found[1]["y"].tolist() == [8, *[9] * 7]
    assert found[1]["weight"].tolist() == [1, 1, *[0] * 6]


@pytest.mark.parametrize("name", MAPPINGS)
@pytest.mark.parametrize("order", ["weight label", "label weight"])
def test_own_weights_of_a_mapping_are_0_for_padding_and_nothing_else_is(name, order):
    leaves = {"weight": np.full(9, 0.5, np.float32), "label": np.arange(9)}
    source = MAPPINGS[name](**{key: leaves[key] for key in order.split()})
    _, last = batches(source)
    assert last["label"].tolist() == [8] * 8
    assert last["weight"].tolist() == [0.5, *[0] * 7]


def test_weights_that_are_one_array_with_another_leaf_are_found():
    ones = np.ones(9, np.float32)
    _, last = batches(Named(ones, ones))
    assert last.x.tolist() == [1] * 8
    assert last.weight.tolist() == [1, *[0] * 7]


def test_keys_that_are_numbers_get_weights_under_a_number():
    source = {0: np.arange(8), 1: np.arange(8)}
    (batch,) = batches(source)
    assert set(batch) == {0, 1}
    source = {0: np.arange(9), 1: np.arange(9)}
    assert batches(source, weights=2)[1][2].tolist() == [1, *[0] * 7]
    assert message(lambda: distributed(source)) == (
        "the last batch of an epoch has 1 row, and batches have 8. Padding is marked "
        "by weights: a dict carries them under a key. Or choose another remainder=."
    )


@pytest.mark.parametrize("source", [np.arange(16), (np.arange(16), np.arange(16))])
def test_what_has_no_place_for_weights_goes_without_where_rows_divide(source):
    found = batches(source)
    assert len(found) == 2
    assert jax.tree.structure(found[0]) == jax.tree.structure(source)


def test_what_has_no_place_for_weights_is_not_padded():
    assert message(lambda: distributed((np.arange(9), np.arange(9)))) == (
        "the last batch of an epoch has 1 row, and batches have 8. Padding is marked "
        "by weights: weights=2 appends them. Or choose another remainder=."
    )
    assert message(lambda: distributed(np.arange(9))) == (
        "the last batch of an epoch has 1 row, and batches have 8. Padding is marked "
        "by weights: a dict carries them under a key. Or choose another remainder=."
    )
    assert refused(iter(range(9))) == (
        "the last batch of an epoch has 1 row, and batches have 8. Padding is marked "
        "by weights: a dict carries them under a key. Or choose another remainder=."
    )


def test_weights_can_be_left_out():
    assert set(batches(columns(8), weights=None)[0]) == {"x", "y"}
    assert message(lambda: distributed(columns(9), weights=None)).startswith(
        "the last batch of an epoch has 1 row, and batches have 8."
    )


def test_what_is_called_weights_has_to_be_numbers():
    source = {"x": np.arange(8), "weight": {"a": np.ones(8)}}
    assert message(lambda: distributed(source)) == (
        "the source's 'weight' is taken for the weights, one number per example, and "
        "is a dict. Give weights= another name."
    )
    source = {"x": np.arange(8), "weight": np.ones(8, np.complex64)}
    assert message(lambda: distributed(source)) == (
        "the source's 'weight' is taken for the weights, one number per example, and "
        "is complex64. Give weights= another name."
    )


# Trees


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


def test_keys_that_have_no_order_are_an_error():
    source = {"x": np.arange(8), 1: np.arange(8)}
    with pytest.raises(ValueError, match="Comparator raised exception while sorting"):
        distributed(source)


class Frame:
    """A table with columns by name, as a data frame is one."""

    def keys(self):
        return ["x"]

    def __len__(self):
        return 8

    def __iter__(self):
        return iter(["x"])

    def __getitem__(self, name):
        return {"x": np.arange(8, dtype=np.int32)}[name]


def test_an_unknown_table_is_given_as_a_dict():
    assert "got a Frame." in refused(Frame())
    assert_same(batches(dict(Frame()), remainder="drop"), [{"x": np.arange(8)}])


def test_an_npz_file_is_a_dict_of_columns(tmp_path):
    np.savez(tmp_path / "data.npz", x=np.arange(8, dtype=np.int32))
    with np.load(tmp_path / "data.npz") as file:
        assert_same(batches(file, remainder="drop"), [{"x": np.arange(8)}])


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
TABLES = {
    "a frame": (DataFrame(a=A, b=B), {"a": A, "b": B}),
    "a frame and a series": (
        (DataFrame(a=A, b=B), Series(A)),
        (np.stack([A, B], 1), A),
    ),
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


def test_a_pandas_frame_and_its_columns():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"a": A, "b": B})
    for source, expected in (
        (frame, {"a": A, "b": B}),
        (dict(frame), {"a": A, "b": B}),
        (frame["a"], A),
        ((frame, frame["b"]), (np.stack([A, B], 1), B)),
    ):
        assert_same(batches(source, remainder="drop", weights=None), [expected])


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ({"x": A, "y": {1, 2}}, "leaf 'y' is a set, which is not an array, number or"),
        ((A, object()), "leaf '1' is an object, which is not an array, number or"),
        (
            {"x": A, "y": [[1.0], [1.0, 2.0]] * 4},
            "leaf 'y': a list cannot be converted",
        ),
        (
            {"x": A, "y": Series(list("abcdefgh"))},
            "leaf 'y' holds strings, which devices",
        ),
        (
            {"x": A, "y": 3.0},
            "leaf 'x' float32[8] and leaf 'y' float64[]: the first dim",
        ),
        (
            {"x": A, "y": [1, 2]},
            "leaf 'x' float32[8] and leaf 'y' int64[2]: the first dim",
        ),
    ],
)
def test_an_entry_that_is_no_column_is_named_with_its_type(source, sentence):
    assert refused(source).startswith(sentence)


def test_a_scalar_per_example_becomes_a_vector_over_the_batch_axis():
    layout = PAIR.layout("batch", "model")
    data = distributed(
        ({"x": np.ones(4, np.float32), "y": i} for i in range(8)), layout
    )
    (batch,) = data
    assert batch["y"].shape == (8,)
    assert ml.fetch_layout(batch["y"]) == PAIR.layout("batch")
    assert ml.fetch_layout(batch["x"]) == layout


# Layouts


LAYOUTS = {
    "a batch axis of size 1": (
        ml.create_mesh({"batch": 1, "model": 8}),
        ["batch", None],
        (16, 8),
    ),
    "two batch axes": (PAIR, [("batch", "model"), None], (2, 8)),
    "the sequence dim too": (PAIR, ["batch", "model"], (8, 2)),
    "replicated": (PAIR, [None, None], (16, 8)),
    "only the sequence dim": (PAIR, [None, ("batch", "model")], (16, 1)),
    "fewer entries than dims": (PAIR, ["model"], (4, 8)),
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
    first = None if specs[0] is None else specs[0]
    assert ml.fetch_layout(batch["weight"]) == mesh.layout(first)


@pytest.mark.parametrize("source", ["rows", "stream"])
def test_the_element_spec_is_what_batches_are(source):
    given: Any = columns(9)
    if source == "stream":
        given = iter(as_examples(given))
    data = distributed(given, PAIR)
    spec = data.element_spec
    assert {key: (leaf.shape, str(leaf.dtype)) for key, leaf in spec.items()} == {
        "x": ((8, 3), "float32"),
        "y": ((8,), "int32"),
        "weight": ((8,), "float32"),
    }
    for batch in data:
        assert jax.tree.structure(batch) == jax.tree.structure(spec)
        for leaf, one in zip(
            jax.tree.leaves(batch), jax.tree.leaves(spec), strict=True
        ):
            assert (leaf.shape, leaf.dtype) == (one.shape, one.dtype)
            assert leaf.sharding == one.sharding


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_batches_go_on_meshes_with_axes_of_all_types(kind):
    mesh = ml.create_mesh({"batch": 8}, axis_types=kind)
    (batch,) = distributed(columns(8), mesh)
    assert ml.fetch_layout(batch["x"]) == mesh.layout("batch", None)
    np.testing.assert_array_equal(np.asarray(batch["x"]), columns(8)["x"])


def test_batches_are_in_the_memory_that_was_asked_for():
    layout = ml.Layout(["batch", ...], MESH, memory_kind="pinned_host")
    (batch,) = distributed(columns(8), layout)
    assert {leaf.sharding.memory_kind for leaf in batch.values()} == {"pinned_host"}
    np.testing.assert_array_equal(np.asarray(batch["x"]), columns(8)["x"])


def test_replication_that_was_asked_for_is_not_noted():
    mesh = ml.create_mesh({"rows": 8})
    for layout in (mesh.layout(...), mesh.layout("rows", ...), MESH, ONE):
        assert distributed(columns(8), layout).report().notes == ()


def test_a_global_batch_that_does_not_divide_is_refused_before_training():
    assert message(lambda: distributed(columns(8), size=12)) == (
        "a global batch of 12 rows does not divide into 8 replicas (Layout([batch, "
        "...], Mesh(batch=8))). Nearest sizes that divide: 8 and 16."
    )


def test_a_dim_that_does_not_divide_is_refused_before_training():
    layout = PAIR.layout("batch", "model")
    assert message(lambda: distributed(columns(8), layout)) == (
        "x f32[8, 3]: dim 1 has size 3, which does not divide into 4 shards over mesh "
        "axis 'model' (Layout([batch, model], Mesh(batch=2, model=4))). Nearest size "
        "that fits: 4. To keep the size, leave dim 1 UNSHARDED."
    )


def test_a_layout_of_too_many_dims_is_refused_before_training():
    layout = PAIR.layout("batch", None, None, "model")
    assert message(lambda: distributed(columns(8), layout)) == (
        "x f32[8, 3]: Layout([batch, unsharded, unsharded, model], Mesh(batch=2, "
        "model=4)) is for arrays of rank 4, but this one has rank 2. Name fewer dims: "
        "those left out are unsharded."
    )


def test_an_array_without_elements_is_placed():
    source = {"x": np.zeros((9, 0, 3), np.float32), "y": np.arange(9)}
    found = batches(source)
    assert [batch["x"].shape for batch in found] == [(8, 0, 3)] * 2


# Dtypes


DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "uint32",
    "float16",
    "float32",
    "complex64",
    "bfloat16",
    "float8_e4m3fn",
]


@pytest.mark.parametrize("source", ["rows", "stream"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_stay_as_they_are(dtype, source):
    x = np.arange(9).astype(jnp.dtype(dtype))
    given: Any = {"x": x}
    if source == "stream":
        given = iter([{"x": one} for one in x])
    data = distributed(given)
    found = np.concatenate([np.asarray(batch["x"]) for batch in data])[:9]
    assert found.dtype == x.dtype
    assert found.tobytes() == x.tobytes()
    assert data.report().notes == ()


WIDE = {
    "float64": "float32",
    "int64": "int32",
    "uint64": "uint32",
    "complex128": "complex64",
}


@pytest.mark.parametrize("source", ["rows", "stream"])
@pytest.mark.parametrize("dtype", WIDE)
def test_wide_dtypes_become_what_jax_makes_of_them_and_are_reported(dtype, source):
    x = np.array([1, 2, 70000, 4, 5, 6, 7, 8], dtype)
    given: Any = {"x": x}
    if source == "stream":
        given = iter([{"x": one} for one in x])
    data = distributed(given)
    (batch,) = data
    expected = jnp.asarray(x)
    assert batch["x"].dtype == expected.dtype == WIDE[dtype]
    np.testing.assert_array_equal(batch["x"], expected)
    # Integers are checked to fit, so that only floats lose something.
    note = f"x: {dtype} becomes {WIDE[dtype]}, as JAX does without jax_enable_x64."
    assert data.report().notes == (
        (note,) if dtype in ("float64", "complex128") else ()
    )


@pytest.mark.parametrize("prefetch", [0, 2])
def test_wide_dtypes_stay_with_jax_enable_x64(prefetch):
    source = {"x": np.full(8, 2**40), "y": np.full(8, 0.1)}
    jax.config.update("jax_enable_x64", True)
    try:
        data = distributed(source, prefetch=prefetch)
        (batch,) = data
    finally:
        jax.config.update("jax_enable_x64", False)
    assert (batch["x"].dtype, batch["y"].dtype) == ("int64", "float64")
    np.testing.assert_array_equal(np.asarray(batch["x"]), source["x"])
    np.testing.assert_array_equal(np.asarray(batch["y"]), source["y"])
    assert data.report().notes == ()


@pytest.mark.parametrize("source", ["rows", "stream"])
@pytest.mark.parametrize(
    ("dtype", "value", "to"),
    [
        ("int64", 2**31, "int32"),
        ("int64", -(2**31) - 1, "int32"),
        ("uint64", 2**32, "uint32"),
    ],
)
def test_integers_that_do_not_fit_are_an_error(dtype, value, to, source):
    x = np.array([1, 2, 3, 4, 5, 6, 7, value], dtype)
    given: Any = {"x": x}
    if source == "stream":
        given = iter([{"x": one} for one in x])
    assert refused(given) == (
        f"leaf 'x' has the value {value}, which does not fit into {to}, JAX's {dtype} "
        "without jax_enable_x64."
    )


def test_floats_too_large_become_infinite_as_in_jax():
    (batch,) = batches({"x": np.full(8, 1e300)})
    assert np.isinf(batch["x"]).all()


def test_other_byte_orders_are_read_right():
    (batch,) = batches({"x": np.arange(8, dtype=">i4")})
    assert batch["x"].tolist() == list(range(8))
    assert batch["x"].dtype == np.int32


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (np.array(["2020-01-01"] * 8, "datetime64[D]"), "datetime64[D]"),
        (np.zeros(8, np.longdouble), str(np.dtype(np.longdouble))),
        (np.zeros(8, [("a", "i4")]), "[('a', '<i4')]"),
    ],
)
def test_dtypes_that_jax_does_not_have_are_refused(values, name):
    assert message(lambda: distributed({"x": values})) == (
        f"leaf 'x' has dtype {name}, which JAX does not have. Pad ragged rows to one "
        "shape, and convert numbers, as with array.astype('float32')."
    )


# Strings and objects


STRINGS = {
    "text": np.array(["a", "bc", "def", "g", "h", "i", "j", "k", "l"]),
    "bytes": np.array([b"a", b"bc", b"def", b"g", b"h", b"i", b"j", b"k", b"l"]),
    "objects": np.array([b"a", b"b\0", b"c", "d", "e", "f", "g", "h", "i"], object),
}


@pytest.mark.parametrize("name", STRINGS)
def test_strings_are_refused_unless_the_user_keeps_them_on_the_host(name):
    source = {"id": STRINGS[name], "x": np.arange(9)}
    assert message(lambda: distributed(source)) == (
        "leaf 'id' holds strings, which devices do not take. Leave it out, or keep it "
        "on the host with strings='host'."
    )
    data = distributed(source, strings="host")
    found = list(data)
    assert type(found[0]["id"]) is np.ndarray
    assert found[0]["id"].tolist() == STRINGS[name].tolist()[:8]
    assert found[1]["id"].tolist() == [STRINGS[name].tolist()[8]] * 8
    spec = data.element_spec["id"]
    assert (spec.shape, spec.dtype, spec.sharding) == ((8,), STRINGS[name].dtype, None)


def test_objects_are_refused():
    values = np.array([1, "two", None, 4, 5, 6, 7, 8], object)
    assert message(lambda: distributed({"a": {"x": values}})) == (
        "leaf 'a/x' has dtype object, which JAX does not have. Pad ragged rows to one "
        "shape, and convert numbers, as with array.astype('float32')."
    )


def test_what_is_not_an_array_is_refused():
    examples = [{"x": np.ones(2), "when": object()} for _ in range(8)]
    assert refused(iter(examples)) == (
        "leaf 'when' is an object, which is not an array, number or string. Leave it "
        "out of the examples, or make it an array."
    )


def test_masked_arrays_are_refused():
    values = np.ma.masked_array(np.arange(8), np.arange(8) > 5)
    assert message(lambda: distributed({"x": values})) == (
        "leaf 'x' is a masked array, and JAX would lose its mask. Fill it with "
        "x.filled(value), and pass the mask as a separate array if it matters."
    )


# Ragged, empty, and what does not fit together


def test_ragged_examples_are_refused():
    examples = [{"x": np.zeros(2 + (i == 3)), "y": i} for i in range(8)]
    for source in (examples, iter(examples)):
        assert refused(source) == (
            "leaf 'x' is f64[3], and must be f64[2]: all examples have the shape and "
            "dtype of the first one."
        )


def test_examples_that_change_their_dtype_are_refused():
    examples = [{"x": 1, "y": np.zeros(2)}, {"x": 1.5, "y": np.zeros(2)}]
    assert refused(iter(examples)) == (
        "leaf 'x' is f64[], and must be i64[]: all examples have the shape and dtype "
        "of the first one."
    )
    examples = [{"x": np.float32(1)}, {"x": 2.0}, {"x": np.float32(3)}]
    assert message(lambda: batches(examples)) == (
        "leaf 'x' is f64[], and must be f32[]: all examples have the shape and dtype "
        "of the first one."
    )


def test_examples_that_change_their_structure_are_refused():
    examples = [{"x": 1, "y": np.zeros(2)}, {"x": 1}]
    with pytest.raises(ValueError, match="expected keys") as error:
        batches(iter(examples))
    assert error.value.__notes__ == [
        "All examples need the structure of the first one, in which a list of numbers "
        "counts as well: make it an array with np.asarray."
    ]


def test_arrays_of_different_length_are_refused():
    source = {"x": np.zeros((8, 2)), "y": np.zeros(7)}
    assert message(lambda: distributed(source)) == (
        "leaf 'x' float64[8, 2] and leaf 'y' float64[7]: the first dim of every array "
        "counts the examples, and must be the same."
    )


def test_an_array_of_length_0_among_others_is_refused():
    source = {"x": np.zeros((8, 2)), "y": np.zeros(0)}
    assert message(lambda: distributed(source)) == (
        "leaf 'x' float64[8, 2] and leaf 'y' float64[0]: the first dim of every array "
        "counts the examples, and must be the same."
    )


def test_a_single_number_among_arrays_is_refused():
    source = {"x": np.zeros((8, 2)), "rate": np.float32(0.1)}
    assert message(lambda: distributed(source)) == (
        "leaf 'rate' float32[] and leaf 'x' float64[8, 2]: the first dim of every array "
        "counts the examples, and must be the same."
    )


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


def test_an_example_without_arrays_is_refused():
    assert message(lambda: distributed(iter([{"x": None}]))) == (
        "an example has no leaves: there is no array in it."
    )


@pytest.mark.parametrize("source", [7, "a text", {}, None, {"x": None}])
def test_what_is_not_a_source_is_refused(source):
    assert message(lambda: distributed(source)) == (
        "the source must be arrays, a list of examples, an iterable, a function that "
        "makes a generator, or a dataset of Grain, TFDS, tf.data, PyTorch or Hugging "
        f"Face, got {source!r}."
    )


class Numbers:
    """A class whose objects are iterated; `__iter__` is not the class's own."""

    def __iter__(self):
        return ({"y": number} for number in range(9))


class Counter:
    """A class whose objects are iterators."""

    def __init__(self):
        self.number = -1

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        if self.number >= 9:
            raise StopIteration
        return {"y": self.number}


@pytest.mark.parametrize("kind", [Numbers, Counter])
def test_a_class_makes_a_new_iterator_for_every_epoch(kind):
    data = distributed(kind)
    for _ in range(2):
        first, last = [np.asarray(batch["y"]).tolist() for batch in data]
        assert (first, last) == ([0, 1, 2, 3, 4, 5, 6, 7], [8] * 8)


# Examples or batches


@pytest.mark.parametrize("batched", ["yes", 1, 0.0])
def test_batched_is_a_flag(batched):
    assert message(lambda: distributed([{"y": 1}], batched=batched)) == (
        f"batched must be True, False or None, got {batched!r}."
    )


def test_elements_that_may_be_both_need_a_word():
    elements = [{"x": np.zeros((4, 2)), "y": np.zeros(4)}] * 4
    sentence = (
        "the elements of the source may be examples or batches: all their arrays have "
        "the same first dim. Say batched=False for examples, or batched=True for "
        "batches."
    )
    assert message(lambda: distributed(elements)) == sentence
    assert message(lambda: distributed(iter(elements))) == sentence
    assert len(batches(elements, batched=True)) == 2
    assert batches(elements, batched=False, size=8)[0]["x"].shape == (8, 4, 2)


def test_a_list_of_batches_knows_how_many_there_are():
    sizes = [3, 8, 6]
    source = [{"x": np.zeros((n, 2), np.float32), "y": np.arange(n)} for n in sizes]
    data = distributed(source, batched=True)
    assert len(data) == len(list(data)) == 3
    data = distributed(source, batched=True, remainder="drop", epochs=2)
    assert len(data) == len(list(data)) == 4


def test_a_list_of_arrays_needs_a_word():
    arrays = [np.zeros((8, 2), np.float32), np.ones((8, 2), np.float32)]
    assert message(lambda: distributed(arrays)) == (
        "the elements of the source may be examples or batches: all their arrays have "
        "the same first dim. Say batched=False for examples, or batched=True for "
        "batches. Columns of one dataset go into a tuple or a dict."
    )
    assert len(batches(tuple(arrays))) == 1
    assert len(batches(arrays, batched=True)) == 2
    found = batches(arrays, batched=False, size=8, remainder="repeat")
    assert found[0].shape == (8, 8, 2)


def test_batched_means_nothing_for_columns():
    assert message(lambda: distributed(columns(8), batched=True)) == (
        "a dict yields single examples: leave out batched=True."
    )


def test_batches_without_a_common_first_dim_are_refused():
    for y in (np.int32(3), np.zeros(3)):
        elements = [{"x": np.zeros((4, 2)), "y": y}]
        assert message(lambda: distributed(iter(elements), batched=True)) == (  # noqa: B023
            f"the arrays of a batch have no batch dim in common: (4, 2), {y.shape}. If "
            "the source yields single examples, say batched=False."
        )


# Batches that are on the devices already


# The user's memory


def aligned(array):
    """A copy of an array, where JAX takes its memory on a CPU device as it is."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def test_batches_do_not_change_with_the_users_arrays():
    source = {"x": aligned(np.zeros((8, 1024), np.float32))}
    (batch,) = distributed(source, ONE)
    source["x"][:] = 1
    assert float(batch["x"].sum()) == 0


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


@pytest.mark.parametrize("kind", ["one array", "a view", "part of an example"])
def test_examples_may_come_in_one_buffer(kind):
    def generate():
        buffer = np.zeros((2, 3), np.float32)
        for row in range(20):
            buffer[...] = row
            given = buffer[:] if kind == "a view" else buffer
            yield {"x": given, "y": row} if kind != "one array" else given

    options = {"batched": False} if kind == "one array" else {}
    found = batches(generate, size=8, epochs=2, remainder="repeat", **options)
    rows = np.concatenate(
        [batch if kind == "one array" else batch["x"] for batch in found]
    )
    expected = np.tile(np.arange(20), 2)
    np.testing.assert_array_equal(rows[:, 0, 0], expected)
    np.testing.assert_array_equal(rows[:, 1, 2], expected)


def read_buffer():
    """Rows as views of a buffer that is filled again, as by `file.readinto`."""
    buffer = np.zeros((10, 3), np.int32)
    for start in range(0, 100, 10):
        buffer[...] = np.arange(start, start + 10)[:, None]
        for row in buffer:
            yield {"x": row}
    buffer[...] = -1


def two_buffers():
    buffers = [np.zeros(3, np.int32), np.zeros(3, np.int32)]
    for row in range(100):
        buffers[row % 2][...] = row
        yield {"x": buffers[row % 2]}
    for buffer in buffers:
        buffer[...] = -1


def one_dict():
    example = {"x": np.zeros(3, np.int32)}
    for row in range(100):
        example["x"] = np.full(3, row, np.int32)
        yield example
        example["x"][...] = -1


@pytest.mark.parametrize("size", [8, 16, 48])
@pytest.mark.parametrize("generate", [read_buffer, two_buffers, one_dict])
def test_examples_whose_memory_is_used_again_come_out_right(generate, size):
    found = batches(generate, size=size, batched=False, remainder="drop")
    rows = np.concatenate([batch["x"] for batch in found])
    expected = np.repeat(np.arange(100)[: len(rows), None], 3, axis=1)
    np.testing.assert_array_equal(rows, expected)


def test_integers_beyond_64_bits_are_an_error():
    source = [{"y": 1}, {"y": 2**70}]
    assert refused(lambda: iter(source), size=8).startswith(
        "leaf 'y' is object[], and must be i64[]: all examples have"
    )


# Sources of one's own


class Table:
    """A source with random access that augments by epoch."""

    def __len__(self):
        return 20

    def read_rows(self, indices, epoch):
        return {"y": indices.astype(np.int32), "epoch": np.full(len(indices), epoch)}


class Socket:
    """A source that is read one way, in batches or one by one, from any row on."""

    num_rows = 20

    def __init__(self, batched):
        self.batched = batched

    def open(self, epoch):
        return SocketPass(self.batched)


class SocketPass:
    def __init__(self, batched):
        self.batched, self.row = batched, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.row >= 20:
            raise StopIteration
        start, self.row = self.row, self.row + (5 if self.batched else 1)
        rows = np.arange(start, self.row, dtype=np.int32)
        return {"y": rows if self.batched else rows[0]}

    def get_state(self):
        return self.row

    def set_state(self, state):
        self.row = state

    def close(self):
        pass


def test_a_users_own_source_with_random_access_is_taken():
    assert isinstance(Table(), md.RandomAccessSource)
    data = distributed(Table(), shuffle=0)
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


def test_a_users_own_source_says_itself_what_it_gives():
    assert message(lambda: distributed(Table(), batched=True)) == (
        "a Table yields single examples: leave out batched=True."
    )


class ReadsRows:
    """A source of 20 rows, read by a function that may be wrong."""

    def __init__(self, read):
        self.read_rows = read

    def __len__(self):
        return 20


WRONG_ROWS = {
    "too few": (
        lambda indices, epoch: {"y": np.zeros(max(1, len(indices) - 1), "int32")},
        "leaf 'y' is i32[7], and must be i32[8]: all examples have the shape and dtype "
        "of the first one.",
    ),
    "one leaf of another size": (
        lambda indices, epoch: {"x": indices, "y": np.append(indices, 0)},
        "the arrays of a batch have no batch dim in common: (1,), (2,). If the source "
        "yields single examples, say batched=False.",
    ),
    "a number": (
        lambda indices, epoch: {"y": 1.0},
        "the arrays of a batch have no batch dim in common: (). If the source yields "
        "single examples, say batched=False.",
    ),
    "lists": (
        lambda indices, epoch: {"y": indices.tolist()},
        "the arrays of a batch have no batch dim in common: (). If the source yields "
        "single examples, say batched=False.",
    ),
    "nothing": (
        lambda indices, epoch: None,
        "the arrays of a batch have no batch dim in common: none. If the source yields "
        "single examples, say batched=False.",
    ),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_rows_that_were_not_asked_for_are_refused(name):
    read, expected = WRONG_ROWS[name]
    assert message(lambda: list(distributed(ReadsRows(read)))) == expected


def test_rows_may_be_read_as_arrays_of_jax():
    data = distributed(
        ReadsRows(lambda indices, epoch: {"y": jax.numpy.array(indices)})
    )
    assert [int(batch["y"].sum()) for batch in data] == [28, 92, 70 + 4 * 19]


class Opens:
    """A stream source whose passes a function opens."""

    num_rows = None

    def __init__(self, start, batched=False):
        self.open, self.batched = start, batched


def test_a_stream_without_the_methods_of_one_is_refused():
    examples = [{"y": np.float32(row)} for row in range(20)]
    for start, text in (
        (lambda epoch: iter(examples), "a list_iterator"),
        (lambda epoch: examples, "a list"),
        (lambda epoch: None, "None"),
    ):
        assert message(lambda: distributed(Opens(start))) == (  # noqa: B023
            f"open of the Opens returned {text}, which is no ml.data.Stream."
        )


def test_a_stream_says_whether_it_is_batched():
    start = Socket(batched=False).open
    assert message(lambda: distributed(Opens(start, batched="yes"))) == (
        "batched of the Opens must be True, False or None, got 'yes'."
    )


def test_a_stream_says_how_many_rows_it_has_or_nothing():
    stream = Socket(batched=False)
    for wrong in ("x", -1, 2.5, float("nan")):
        stream.num_rows = wrong
        assert message(lambda: distributed(stream)) == (
            f"num_rows of the Socket must be a non-negative integer, got {wrong!r}."
        )


# Types


# What loses or narrows data is logged


def test_what_loses_or_narrows_data_is_logged_once(caplog):
    source = {"y": np.arange(20)}
    with caplog.at_level("WARNING", logger="meshlayout"):
        data = distributed(source, remainder="drop")
        for _ in range(2):
            list(data)
    assert [record.getMessage() for record in caplog.records] == [
        "remainder='drop' drops 4 of 20 rows in every epoch.",
    ]
    caplog.clear()
    with caplog.at_level("WARNING", logger="meshlayout"):
        data = distributed(lambda: iter(as_examples(columns(20))), remainder="drop")
        for _ in range(2):
            list(data)
    assert [record.getMessage() for record in caplog.records] == [
        "Dropped the last 4 rows of an epoch."
    ]


# Arguments


@pytest.mark.parametrize(
    ("source", "weights", "way_out"),
    [
        (columns(8), 2, "a dict carries them under a key"),
        ((np.zeros(8), np.ones(8)), "mask", "weights=2 appends them"),
        ((np.zeros(8), np.ones(8)), 5, "weights=2 appends them"),
        (np.zeros(8), "mask", "a dict carries them under a key"),
    ],
)
@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_weights_that_batches_have_no_place_for_are_refused(
    source, weights, way_out, remainder
):
    assert message(
        lambda: distributed(source, weights=weights, remainder=remainder)
    ) == (
        f"the source's examples have no place for weights={weights!r}. Padding is "
        f"marked by weights: {way_out}. Or choose another remainder=."
    )


ODD = [None, float("nan"), -1, 0, "x", object()]
PARAMETERS = [*inspect.signature(ml.data.distribute_dataset).parameters]


def test_numbers_and_flags_may_be_numpys():
    data = distributed(
        (np.arange(8), np.arange(8)),
        weights=2,
        shuffle=np.uint8(1),
        epochs=np.int32(1),
        prefetch=np.int8(0),
        per_process=np.False_,
    )
    state = iter(data).get_state()
    assert json.loads(json.dumps(state)) == state
    ((_, _, weights),) = data
    assert weights.tolist() == [1] * 8


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
    ({"size": 8.0}, "global_batch_size must be a positive integer, got 8.0."),
    ({"epochs": 0}, "epochs must be a positive integer, got 0."),
    ({"epochs": -1}, "epochs must be a positive integer, got -1."),
    ({"prefetch": -1}, "prefetch must be a non-negative integer, got -1."),
    (
        {"weights": 1.5},
        "weights must be a key of the batch, an index into a tuple, or None, got 1.5.",
    ),
    (
        {"shuffle": -1},
        "shuffle must be a non-negative integer, got -1.",
    ),
    (
        {"shuffle": True},
        "shuffle=True is no seed: give a seed, shuffle=0, which with the epoch "
        "determines the order of the rows; or shuffle=None, which keeps their order.",
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
    (batch,) = data
    assert batch["x"].tolist() == np.repeat(np.arange(8), 2).tolist()


def test_a_function_may_return_rows_and_say_the_batch_size():
    data = md.distribute_datasets_from_function(
        lambda context: columns(16), MESH, global_batch_size=8
    )
    assert [batch["y"].tolist() for batch in data] == [
        list(range(8)),
        list(range(8, 16)),
    ]
    assert message(
        lambda: md.distribute_datasets_from_function(lambda context: columns(8), MESH)
    ) == (
        "the function returned a source of single rows, which does not say the size of "
        "a batch. Give global_batch_size=, or return batches of the per-replica size."
    )


def test_what_a_function_raises_says_for_which_part_of_the_input():
    def fn(context):
        raise FileNotFoundError("part-00000 is gone")

    with pytest.raises(FileNotFoundError, match="part-00000 is gone") as error:
        md.distribute_datasets_from_function(fn, MESH)
    assert error.value.__notes__ == [
        "This was raised by the function, called with InputContext(num_input_pipelines=1, "
        "input_pipeline_id=0, num_replicas_in_sync=8)."
    ]


@pytest.mark.parametrize("value", [None, float("nan"), -1, 0, "x", object()])
@pytest.mark.parametrize("name", ["dataset", "layout_or_mesh", "batched", "options"])
def test_odd_values_for_a_function_of_sources_work_or_are_refused(name, value):
    dataset = value if name == "dataset" else columns(16)
    options = {
        "fn": lambda context: dataset,
        "layout_or_mesh": MESH,
        "global_batch_size": 8,
    }
    if name != "dataset":
        options[name] = value
    try:
        data = md.distribute_datasets_from_function(**options)
        num_batches = len(list(itertools.islice(data, 3)))
    except ml.errors.MeshLayoutError as error:
        num_batches, text = 1, str(error)
    else:
        text = "It works."
    assert num_batches
    assert text.endswith((".", "?"))
