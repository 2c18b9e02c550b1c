"""Pictures of layouts and arrays, against what JAX says each device holds."""

import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st

import meshlayout as ml
from meshlayout.pictures import visualize


MESH = ml.create_mesh({"batch": 2, "model": 4})
CUBE = ml.create_mesh({"data": 2, "fsdp": 2, "model": 2})


def parse_ids(text):
    ids = []
    for run in text.split(", "):
        first, _, last = run.partition("-")
        ids += range(int(first), int(last or first) + 1)
    return ids


def held_in_html(shards):
    """Reads back what each device holds: the blocks are in the order of the parts."""
    text = operator.methodcaller("_repr_html_")(shards)
    blocks = re.findall(r'<td style="background:#[^>]*>([^<]*)<', text)
    parts = sorted({part for _, part in shards.held})
    held = {}
    for part, ids in zip(parts, blocks, strict=True):
        for device_id in parse_ids(ids):
            assert device_id not in held, "a device is drawn once"
            held[device_id] = part
    return held


def held_by_jax(sharding, shape):
    return {
        device.id: tuple(
            part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
        )
        for device, index in sharding.devices_indices_map(shape).items()
    }


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_device_is_drawn_with_the_part_that_jax_gives_it(data):
    dims = [[] for _ in range(data.draw(st.integers(0, 4)))]
    for axis in data.draw(st.permutations(CUBE.axis_names)) if dims else ():
        dims[data.draw(st.integers(0, len(dims) - 1))].append(axis)
    shape = tuple(8 * data.draw(st.integers(0, 3)) for _ in dims)
    layout = ml.Layout([tuple(axes) or None for axes in dims], CUBE)
    expected = held_by_jax(layout.sharding, shape)
    array = jax.device_put(jnp.zeros(shape), layout.sharding)
    abstract = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=layout.sharding)
    for shards in (
        visualize(layout, shape=shape),
        visualize(layout.sharding, shape=list(shape)),
        visualize(array),
        visualize(abstract),
    ):
        assert dict(shards.held) == expected
        assert held_in_html(shards) == expected


def test_shardings_without_axis_names_are_drawn_too():
    array = jnp.zeros((4, 6))
    for shards in (visualize(array), visualize(array.sharding, (4, 6))):
        assert dict(shards.held) == {array.device.id: ((0, 4), (0, 6))}
        assert "One device holds the whole array" in repr(shards)


def test_parameters_are_drawn_also_where_they_are_only_described():
    layouts = ml.LayoutMap(MESH, {"kernel": ("model", None)})
    described = ml.describe(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)), layouts)
    shards = visualize(described.abstract.kernel)
    expected = ml.Layout(["model", None], MESH).sharding
    assert dict(shards.held) == held_by_jax(expected, (8, 4))


def test_an_array_is_drawn_with_its_dtype_and_bytes():
    layout = MESH.layout("batch", "model")
    text = repr(visualize(ml.arrays.zeros((64, 128), layout)))
    assert text.startswith("f32[64@batch, 128@model] on Mesh(batch=2, model=4)\n ")
    assert "\n8 shards of shape (32, 32), 4.0 KiB each. Numbers" in text


def test_three_sharded_dims_become_several_grids_and_others_are_named():
    text = repr(visualize(ml.Layout(["data", "fsdp", "model"], CUBE), (4, 4, 4)))
    assert "dim 0 at 0:2" in text
    assert "dim 0 at 2:4" in text
    assert re.findall(r"(?<=│) +(\d) +(?=│)", text) == [str(n) for n in range(8)]
    layout = ml.Layout.batch_sharded(MESH, "batch", rank=4)
    text = repr(visualize(layout, (128, 28, 28, 1)))
    assert "Whole in every shard, and not drawn: dim 2 (28), dim 3 (1)." in text
    text = repr(visualize(ml.Layout.replicated(MESH, 2), shape=(3, 5)))
    assert "│ 0-7 │" in text
    assert "8 devices hold the whole array." in text


def test_what_cannot_be_drawn_is_refused_with_the_way_out():
    for value, shape, message in (
        (MESH.layout(), None, "a layout alone has no size to draw: give the shape of"),
        (np.zeros((2, 3)), None, "an array of shape (2, 3) is on no devices; value"),
        (MESH.layout("model"), (6,), "dim 0 has size 6, which does not divide into 4"),
    ):
        with pytest.raises(ml.errors.LayoutError) as error:
            visualize(value, shape)
        assert str(error.value).startswith(message)
    with pytest.raises(ml.errors.LayoutError, match="is on no devices"):
        jax.jit(visualize)(jnp.zeros(3))
