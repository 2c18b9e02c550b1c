"""Layouts: arithmetic against JAX's, text, and every way to get one wrong."""

import copy
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec as P,
    SingleDeviceSharding,
)

from meshlayout.errors import LayoutError
from meshlayout.layout import MATCH, UNSHARDED, Layout
from meshlayout.mesh import create_mesh
from tests.error_messages import message_of
from tests.test_mesh import meshes


MESH = create_mesh({"batch": 2, "model": 4})
CUBE = create_mesh({"data": 2, "fsdp": 2, "model": 2})
FEW = settings(max_examples=60, deadline=None)


@st.composite
def layouts(draw):
    """A layout on a random mesh, its axes dealt to the dims in any order."""
    mesh = draw(meshes(st.sampled_from("abcd"), st.just(AxisType.Auto)))
    rank = draw(st.integers(0, 4))
    dims = [[] for _ in range(rank)]
    for axis in draw(st.permutations(mesh.axis_names)):
        dim = draw(st.integers(0, rank))
        if dim < rank:
            dims[dim].append(axis)
    return Layout([tuple(axes) for axes in dims], mesh)


@st.composite
def layouts_and_shapes(draw):
    layout = draw(layouts())
    multiples = [draw(st.integers(0, 3)) for _ in range(layout.rank)]
    shape = tuple(m * layout.num_shards(d) for d, m in enumerate(multiples))
    return layout, shape


@FEW
@given(layouts_and_shapes())
def test_shards_are_those_of_the_named_sharding(case):
    layout, shape = case
    sizes, offsets = layout.shard_shape(shape), layout.offset_to_shard()
    assert sizes == layout.sharding.shard_shape(shape)
    assert layout.global_shape(sizes) == shape
    for dim in range(layout.rank):
        assert {x[dim] for x in offsets} == set(range(layout.num_shards(dim)))
    for device, offset in enumerate(offsets):
        starts = [part.start for part in layout.shard_slices(shape, device)]
        assert starts == [i * n for i, n in zip(offset, sizes, strict=True)]
    assert layout.is_fully_replicated == layout.sharding.is_fully_replicated
    abstract = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=layout.sharding)
    assert Layout.of(abstract) == layout


@settings(max_examples=25, deadline=None)
@given(layouts_and_shapes(), st.sampled_from(["float32", "bfloat16", "int8", "bool"]))
def test_every_shard_of_a_real_array_is_where_the_layout_says(case, dtype):
    layout, shape = case
    whole = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    x = jax.device_put(whole, layout.sharding)
    assert len(x.addressable_shards) == layout.mesh.size
    for shard in x.addressable_shards:
        part = whole[layout.shard_slices(shape, shard.device)]
        np.testing.assert_array_equal(np.asarray(shard.data), part)
        assert shard.data.nbytes == layout.bytes_per_device(shape, dtype)


@FEW
@given(layouts())
def test_text_and_pickle_and_copies_give_an_equal_layout(layout):
    for twin in (
        pickle.loads(pickle.dumps(layout)),
        copy.copy(layout),
        copy.deepcopy(layout),
        Layout(layout.spec, layout.mesh.jax_mesh),
        Layout.of(layout.sharding, layout.rank),
        layout.mesh.layout(*layout.specs),
        layout.mesh.layout(layout.spec),
    ):
        assert twin == layout
        assert hash(twin) == hash(layout)
        assert twin.specs == layout.specs
        assert repr(twin) == repr(layout)


@FEW
@given(layouts(), st.data())
def test_an_ellipsis_anywhere_is_any_number_of_unsharded_dims(layout, data):
    at = data.draw(st.integers(0, layout.rank))
    more = data.draw(st.integers(0, 3))
    before, after = layout.specs[:at], layout.specs[at:]
    short = Layout([*before, ..., *after], layout.mesh)
    full = Layout([*before, *[None] * more, *after], layout.mesh)
    assert short.has_ellipsis
    assert short.with_rank(full.rank) == full
    assert short != layout
    shape = tuple(2 * full.num_shards(d) for d in range(full.rank))
    assert short.shard_shape(shape) == full.shard_shape(shape)
    assert short.shard_slices(shape, 0) == full.shard_slices(shape, 0)
    if at == layout.rank:
        assert short.sharding.is_equivalent_to(full.sharding, full.rank)


@FEW
@given(layouts(), st.data())
def test_a_dim_that_does_not_divide_is_refused_where_jax_refuses_it(layout, data):
    shape = tuple(data.draw(st.integers(0, 12)) for _ in range(layout.rank))
    bad = [d for d, size in enumerate(shape) if size % layout.num_shards(d)]
    assert [misfit.dim for misfit in layout.misfits(shape)] == bad
    if not bad:
        return
    with pytest.raises(ValueError, match=r"divisible|partitioned"):
        layout.sharding.shard_shape(shape)
    for refuse in (layout.check, layout.shard_shape):
        with pytest.raises(LayoutError, match="does not divide into"):
            refuse(shape)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_bytes_per_device_of_keys_count_their_words(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 8)
    layout = Layout(["batch"], MESH)
    words = jax.random.key_data(keys)
    assert layout.bytes_per_device(keys.shape, keys.dtype) == words.nbytes // 2
    assert layout.bytes_per_device((8,), "float64") == 4 * 4  # as JAX would make it


def test_a_layout_shows_what_it_is_made_of():
    layout = Layout(["batch", UNSHARDED, ("model",)], MESH)
    assert layout.specs == ("batch", None, "model")
    assert layout.spec == P("batch", None, "model")
    assert layout.sharding == NamedSharding(MESH.jax_mesh, P("batch", None, "model"))
    assert layout.rank == 3
    assert repr(layout) == ("Layout([batch, unsharded, model], Mesh(batch=2, model=4))")
    assert str(layout) == "[batch, unsharded, model]"
    assert str(Layout([..., ("batch", "model"), MATCH], MESH)) == (
        "[..., (batch, model), MATCH]"
    )


def test_the_short_constructors_make_the_same_layouts():
    assert Layout.replicated(MESH, 2) == Layout([None, None], MESH)
    assert Layout.replicated(MESH) == Layout([], MESH)
    batch = Layout.batch_sharded(MESH, "batch", 3)
    assert batch == Layout(["batch", None, None], MESH)
    assert Layout.batch_sharded(MESH, "model", 3, dim=1).specs == (None, "model", None)
    assert Layout.batch_sharded(MESH, "model", 3, dim=-1) == Layout.inner_sharded(
        MESH, "model", 3
    )
    assert Layout.batch_sharded(MESH, ("batch", "model"), 1).num_shards(0) == 8
    assert batch.local_shape_from_global_shape((4, 3, 1)) == (2, 3, 1)
    assert batch.global_shape_from_local_shape((2, 3, 1)) == (4, 3, 1)
    for specs, expected in (
        *((["batch", ...], True), ([("batch", "model"), None], True)),
        *((["batch", "model"], False), ([None, "batch"], False), ([], False)),
    ):
        assert Layout(specs, MESH).is_batch_parallel is expected
    assert MESH.layout() == Layout([], MESH)
    with jax.set_mesh(MESH.jax_mesh):
        assert Layout.replicated(rank=2) == Layout([None, None], MESH)


def test_the_mesh_is_that_of_jax_if_left_out():
    with jax.set_mesh(CUBE.jax_mesh):
        assert Layout(["data"]).mesh == CUBE
        assert Layout(["batch"], MESH).mesh == MESH
        assert jax.jit(lambda: Layout(["data"]).num_shards(0))() == 2


def test_two_spellings_of_one_layout_are_equal():
    for *spellings, other in (
        ([None], [()], [UNSHARDED]),
        (["batch"], [("batch",)], [["batch"]], ("batch",)),
        ([("batch", "model")], [["batch", "model"]]),
        (["batch", None], P("batch", None)),
        ([MATCH, ..., "batch"], (MATCH, ..., "batch")),
    ):
        for specs in spellings:
            assert Layout(specs, MESH) == Layout(other, MESH.jax_mesh)
            assert hash(Layout(specs, MESH)) == hash(Layout(other, MESH))


def test_layouts_on_other_meshes_or_memories_differ():
    layout = Layout(["batch"], MESH)
    for options in ({"devices": jax.devices()[::-1]}, {"axis_types": "explicit"}):
        mesh = create_mesh({"batch": 2, "model": 4}, **options)
        assert layout != mesh.layout("batch")
    assert layout != Layout(["batch"], MESH, memory_kind="pinned_host")
    assert layout != layout.sharding


def test_of_an_array_has_the_rank_of_the_array():
    x = jax.device_put(jnp.zeros((4, 8, 2)), NamedSharding(MESH.jax_mesh, P("batch")))
    assert Layout.of(x) == Layout(["batch", None, None], MESH)
    assert Layout.of(x.sharding) == Layout(["batch"], MESH)
    assert Layout.of(x.sharding, 3) == Layout.of(x)


def test_of_an_array_on_one_device_is_a_mesh_of_one():
    device = jax.devices()[3]
    x = jax.device_put(jnp.zeros((4, 8)), device)
    layout = Layout.of(x)
    assert repr(layout) == "Layout([unsharded, unsharded], Mesh(device=1))"
    assert list(layout.mesh.devices.flat) == [device]
    assert Layout.of(SingleDeviceSharding(device), 2) == layout
    assert Layout.of(jnp.float32(1)).rank == 0


def test_of_a_traced_value_is_known_on_explicit_axes():
    mesh = create_mesh({"batch": 2, "model": 4}, axis_types="explicit")
    layout = Layout(["batch", None], mesh)
    seen = []

    @jax.jit
    def f(x):
        seen.append(Layout.of(x))
        return x

    with jax.set_mesh(mesh.jax_mesh):
        f(jax.device_put(jnp.ones((4, 8)), layout.sharding))
    assert seen == [layout]


def test_another_memory_is_part_of_the_layout():
    layout = Layout(["batch", None], MESH, memory_kind="pinned_host")
    assert layout.sharding.memory_kind == "pinned_host"
    assert repr(layout) == (
        "Layout([batch, unsharded], Mesh(batch=2, model=4), memory_kind='pinned_host')"
    )
    assert str(layout) == "[batch, unsharded] in pinned_host"
    for twin in (
        pickle.loads(pickle.dumps(layout)),
        Layout.of(layout.sharding),
        MESH.layout("batch", None, memory_kind="pinned_host"),
    ):
        assert twin == layout
    default = layout.with_memory_kind(jax.devices()[0].default_memory().kind)
    assert default == layout.with_memory_kind(None) == Layout(["batch", None], MESH)
    assert default.memory_kind is None


KINDS = "a mesh axis name, a tuple of names, UNSHARDED (None), MATCH or `...`"
OPEN = "Layout([batch, ..., model], Mesh(batch=2, model=4))"
MATCHING = "Layout([MATCH], Mesh(batch=2, model=4))"
BAD = {
    "Layout('batch', MESH)": "specs must be a list, a tuple or a PartitionSpec with one "
    "entry per dim, got 'batch'.",
    "MESH.layout((1,))": f"entry 0 must be {KINDS}, got (1,).",
    "MESH.layout({'a': 1})": f"entry 0 must be {KINDS}, got {{'a': 1}}.",
    "MESH.layout(..., 'batch', ...)": "[..., batch, ...] has `...` twice; one stands for "
    "all other dims.",
    "MESH.layout('unsharded')": "mesh axis 'unsharded' of [unsharded] is not in "
    "Mesh(batch=2, model=4). Write UNSHARDED, or None.",
    "MESH.layout('modle')": "mesh axis 'modle' of [modle] is not in Mesh(batch=2, "
    "model=4). Did you mean 'model'?",
    "MESH.layout('batch', ('model', 'batch'))": "mesh axis 'batch' is used twice in "
    "[batch, (model, batch)]; an axis can shard only one dim, and only once.",
    "Layout(['batch'])": "Layout([batch]) has no mesh. Give one as the second argument, "
    "or set one: `with jax.set_mesh(mesh.jax_mesh):`.",
    "MESH.layout('batch').shard_shape((3,))": "dim 0 has size 3, which does not divide "
    "into 2 shards over mesh axis 'batch' (Layout([batch], Mesh(batch=2, model=4))). "
    "Nearest sizes that fit: 2 and 4. To keep the size, leave dim 0 UNSHARDED.",
    "MESH.layout('batch', ..., 'model').with_rank(1)": f"{OPEN} is for arrays of rank 2 "
    "or more, but this one has rank 1.",
    "MESH.layout('batch', ..., 'model').spec": f"{OPEN} has `...` before its end, which a "
    "PartitionSpec cannot express; use layout.with_rank(n) first.",
    "MESH.layout(MATCH).num_shards(0)": f"{MATCHING} holds MATCH, which stands for the "
    "layout of an array. Only relayout(x, layout) can fill it in.",
    "MESH.layout('batch', memory_kind='pined_host')": "memory_kind must be 'device', "
    "'pinned_host' or 'unpinned_host', got 'pined_host'. Did you mean 'pinned_host'?",
    "Layout.of(np.ones(3))": "ndarray has no layout: it has no NamedSharding. Place the "
    "array with relayout(x, layout); inside jit, layouts are only known on a mesh with "
    "Explicit axes.",
}


@pytest.mark.parametrize("code", BAD)
def test_what_is_said_about_a_bad_layout(code):
    assert message_of(eval, code, globals(), error=LayoutError) == BAD[code]


def test_a_layout_needs_a_mesh_of_devices():
    abstract = AbstractMesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    with pytest.raises(LayoutError, match="has no devices: set its mesh with"):
        Layout.of(NamedSharding(abstract, P("batch")))
