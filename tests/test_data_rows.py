"""Which rows each process loads, replicas, and the order of an epoch."""

import itertools
import math
from dataclasses import dataclass

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshlayout as ml
from meshlayout import data as md
from tests.error_messages import message_of


many = hypothesis.settings(max_examples=100, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Chip:
    """A device of another process: what a mesh needs of it."""

    id: int
    process_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v9"


@st.composite
def layouts(draw):
    """A layout of rank 2 on chips of several processes, in any order, and a shape."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    axes = [f"a{i}" for i in range(len(sizes))]
    num_chips = math.prod(sizes)
    num_processes = draw(st.integers(1, min(num_chips, 4)))
    owner = draw(st.permutations([i % num_processes for i in range(num_chips)]))
    chips = np.empty(num_chips, object)
    chips[:] = [Chip(i, p) for i, p in enumerate(owner)]
    mesh = ml.Mesh(jax.sharding.Mesh(chips.reshape(sizes), axes))
    left = draw(st.permutations(axes))
    cut = draw(st.integers(0, len(left)))
    used = draw(st.integers(cut, len(left)))
    layout = ml.Layout([tuple(left[:cut]), tuple(left[cut:used])], mesh)
    per_shard = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    return layout, layout.global_shape(per_shard), num_processes


@many
@hypothesis.given(layouts())
def test_rows_of_a_process_are_those_that_jax_puts_on_its_devices(given):
    layout, shape, num_processes = given
    where = layout.sharding.devices_indices_map(shape)
    for process in range(num_processes):
        rows = md.process_rows(layout, shape, process)
        held = {
            row
            for device, index in where.items()
            if device.process_index == process
            for row in range(*index[0].indices(shape[0]))
        }
        assert rows.dtype == np.int64
        assert rows.tolist() == sorted(held)


def test_rows_may_be_asked_for_with_a_mesh_a_sharding_or_a_number(mesh_2x4):
    expected = list(range(8))
    sharding = NamedSharding(mesh_2x4.jax_mesh, PartitionSpec("batch"))
    for layout in (mesh_2x4, mesh_2x4.jax_mesh, sharding, ml.Layout.of(sharding)):
        assert md.process_rows(layout, (8, 3)).tolist() == expected
        assert md.process_rows(layout, 8).tolist() == expected


@pytest.mark.parametrize(
    ("axes", "specs", "expected"),
    [
        ({"batch": 8}, None, 64),
        ({"batch": 2, "model": 4}, None, 256),
        ({"data": 4, "fsdp": 2}, None, 64),
        ({"model": 8}, None, 512),
        ({"a": 2, "b": 4}, [("a", "b"), None], 64),
        ({"a": 2, "b": 4}, [None, "a"], 512),
    ],
)
def test_each_replica_gets_its_share_of_a_global_batch(axes, specs, expected):
    mesh = ml.create_mesh(axes)
    layout = mesh if specs is None else ml.Layout(specs, mesh)
    assert md.per_replica_batch_size(512, layout) == expected


def test_a_global_batch_that_does_not_divide_names_both_numbers(mesh_2x4):
    assert message_of(lambda: md.per_replica_batch_size(9, mesh_2x4)) == (
        "a global batch of 9 rows does not divide into 2 replicas (Layout([batch, ...],"
        " Mesh(batch=2, model=4))). Nearest sizes that divide: 8 and 10."
    )


def visited(num_rows, seed, epochs, batch=8, mesh=None):
    """The rows of some epochs, in the order in which batches give them."""
    mesh = mesh or ml.create_mesh({"batch": 1}, devices=jax.devices()[:1])
    data = ml.data.distribute_dataset(
        {"row": np.arange(num_rows)}, mesh, global_batch_size=batch, shuffle=seed
    )
    found = []
    for _ in range(epochs):
        rows = []
        for each in data:
            real = np.asarray(each["weight"]) == 1
            rows += np.asarray(each["row"])[real].tolist()
        found.append(rows)
    return found


class Counted:
    """A source of more rows than fit in memory, which are their own numbers."""

    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows

    def __getitem__(self, row):
        return {"low": np.uint32(row % 2**32), "high": np.uint32(row // 2**32)}


@pytest.mark.parametrize("num_rows", [2**22 + 1, 5_000_000, 3 * 2**40])
def test_a_source_of_billions_of_rows_is_shuffled_without_a_table(num_rows):
    mesh = ml.create_mesh({"batch": 8})
    orders = []
    for _ in range(2):
        data = ml.data.distribute_dataset(
            Counted(num_rows), mesh, global_batch_size=1024, shuffle=0
        )
        rows = [
            np.asarray(b["low"]).astype(np.int64)
            + np.asarray(b["high"]).astype(np.int64) * 2**32
            for b in itertools.islice(data, 2)
        ]
        orders.append(np.concatenate(rows))
    np.testing.assert_array_equal(*orders)
    rows = orders[0]
    assert len(set(rows.tolist())) == 2048
    assert rows.min() >= 0
    assert rows.max() < num_rows
    # As of a uniform draw: 6 standard errors about the mean.
    assert abs(rows.mean() / num_rows - 0.5) < 6 / math.sqrt(12 * 2048)
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 6 / math.sqrt(2048)


def test_an_order_without_a_table_visits_every_row_once(monkeypatch):
    monkeypatch.setattr("meshlayout.data.by_row._LARGEST_TABLE", 1)
    for num_rows in (2, 3, 64, 65, 100):
        epochs = visited(num_rows, seed=3, epochs=2, batch=8)
        assert [sorted(rows) for rows in epochs] == [list(range(num_rows))] * 2
    assert epochs[0] != epochs[1]


def test_the_order_never_changes():
    # Resuming after an upgrade depends on it. Computed with Python's own integers.
    assert visited(12, seed=0, epochs=2) == [feistel_order(12, 0, e) for e in range(2)]


def feistel_order(num_rows, seed, epoch):
    keys = np.random.SeedSequence([seed, epoch]).generate_state(6, np.uint64).tolist()
    bits = ((num_rows - 1).bit_length() + 1) // 2

    def mixed(value):
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return value ^ (value >> 31)

    def visit(row):
        left, right = row >> bits, row % 2**bits
        for key in keys:
            left, right = right, left ^ (mixed(right ^ key) % 2**bits)
        row = (left << bits) | right
        return row if row < num_rows else visit(row)

    return [visit(row) for row in range(num_rows)]
