"""Layouts: arithmetic against JAX's, text, and every way to get one wrong."""

import copy
import itertools
import math
import pickle
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
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

import meshlayout as ml
from meshlayout._default_mesh import default_mesh
from meshlayout.errors import LayoutError, MeshError, MeshLayoutError
from meshlayout.layout import MATCH, UNSHARDED, Layout, as_layout
from meshlayout.mesh_creation import create_mesh
from tests.bad_values import BAD as BAD_VALUES, refusal


MESH = create_mesh({"batch": 2, "model": 4})
CUBE = create_mesh({"data": 2, "fsdp": 2, "model": 2})
FEW = settings(max_examples=60, deadline=None)


# Against JAX itself, on random meshes, specs and shapes.


@st.composite
def meshes(draw):
    sizes = draw(
        st.lists(st.sampled_from([1, 2, 3, 4, 5, 8]), min_size=1, max_size=4).filter(
            lambda sizes: math.prod(sizes) <= 8
        )
    )
    count = math.prod(sizes)
    devices = draw(st.permutations(jax.devices()))[:count]
    names = draw(st.permutations("abcd"))[: len(sizes)]
    return create_mesh(list(zip(names, sizes, strict=True)), devices=devices)


@st.composite
def layouts(draw):
    """A layout on a random mesh, its axes dealt to the dims in any order."""
    mesh = draw(meshes())
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


def as_index(slices, shape):
    return tuple(
        range(*part.indices(size)) for part, size in zip(slices, shape, strict=True)
    )


@FEW
@given(layouts_and_shapes())
def test_shard_shape_is_that_of_the_named_sharding(case):
    layout, shape = case
    assert layout.shard_shape(shape) == layout.sharding.shard_shape(shape)
    assert layout.global_shape(layout.shard_shape(shape)) == shape
    assert layout.misfits(shape) == []


@FEW
@given(layouts_and_shapes())
def test_shard_slices_are_those_of_devices_indices_map(case):
    layout, shape = case
    for device, theirs in layout.sharding.devices_indices_map(shape).items():
        ours = layout.shard_slices(shape, device)
        assert as_index(ours, shape) == as_index(theirs, shape)


@settings(max_examples=25, deadline=None)
@given(layouts_and_shapes(), st.sampled_from(["float32", "bfloat16", "int8", "bool"]))
def test_every_shard_of_a_real_array_is_where_the_layout_says(case, dtype):
    layout, shape = case
    whole = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    x = jax.device_put(whole, layout.sharding)
    assert len(x.addressable_shards) == layout.mesh.size
    flat = list(layout.mesh.devices.flat)
    for shard in x.addressable_shards:
        part = whole[layout.shard_slices(shape, shard.device)]
        np.testing.assert_array_equal(np.asarray(shard.data), part)
        assert shard.data.nbytes == layout.bytes_per_device(shape, dtype)
        index = flat.index(shard.device)
        assert layout.shard_slices(shape, index) == layout.shard_slices(
            shape, shard.device
        )


@FEW
@given(layouts_and_shapes())
def test_offset_to_shard_counts_shard_slices_in_shards(case):
    layout, shape = case
    sizes = layout.shard_shape(shape)
    offsets = layout.offset_to_shard()
    assert len(offsets) == layout.mesh.size
    for device, offset in enumerate(offsets):
        starts = [part.start for part in layout.shard_slices(shape, device)]
        assert starts == [i * n for i, n in zip(offset, sizes, strict=True)]


@FEW
@given(layouts())
def test_num_shards_is_the_number_of_different_shards(layout):
    for dim in range(layout.rank):
        seen = {offset[dim] for offset in layout.offset_to_shard()}
        assert seen == set(range(layout.num_shards(dim)))
        assert layout.num_shards(dim) == layout.num_shards(dim - layout.rank)


@FEW
@given(layouts())
def test_is_fully_replicated_as_jax_says(layout):
    assert layout.is_fully_replicated == layout.sharding.is_fully_replicated


@FEW
@given(layouts())
def test_text_and_pickle_and_copies_give_an_equal_layout(layout):
    for twin in (
        Layout.from_string(layout.to_string()),
        pickle.loads(pickle.dumps(layout)),
        copy.copy(layout),
        copy.deepcopy(layout),
        Layout(layout.spec, layout.mesh),
        Layout(list(layout.spec), layout.mesh.jax_mesh),
        Layout.of(layout.sharding, layout.rank),
        layout.mesh.layout(*layout.specs),
    ):
        assert twin == layout
        assert hash(twin) == hash(layout)
        assert twin.to_string() == layout.to_string()
        assert twin.specs == layout.specs
        assert repr(twin) == repr(layout)


@FEW
@given(layouts(), st.data())
def test_delete_leaves_the_other_dims(layout, data):
    dims = data.draw(st.lists(st.integers(0, layout.rank - 1))) if layout.rank else []
    kept = [e for d, e in enumerate(layout.specs) if d not in dims]
    assert layout.delete(dims) == Layout(kept, layout.mesh)
    assert layout.delete([dim - layout.rank for dim in dims]) == layout.delete(dims)


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
    assert Layout.from_string(short.to_string()) == short
    shape = tuple(2 * full.num_shards(d) for d in range(full.rank))
    assert short.shard_shape(shape) == full.shard_shape(shape)
    assert short.global_shape(short.shard_shape(shape)) == shape
    assert short.bytes_per_device(shape, "f4") == full.bytes_per_device(shape, "f4")
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
        assert layout.shard_shape(shape) == layout.sharding.shard_shape(shape)
        return
    with pytest.raises(ValueError, match=r"divisible|partitioned"):
        layout.sharding.shard_shape(shape)
    for refuse in (
        layout.check,
        layout.shard_shape,
        lambda shape: layout.shard_slices(shape, 0),
        lambda shape: layout.bytes_per_device(shape, "float32"),
    ):
        with pytest.raises(LayoutError, match="does not divide into"):
            refuse(shape)


@pytest.mark.parametrize(
    "specs", list(itertools.permutations(("batch", "model", UNSHARDED)))
)
def test_shard_shape_is_the_shape_of_every_shard(specs):
    layout = Layout(specs, MESH)
    x = jax.device_put(jnp.zeros((8, 8, 8)), layout.sharding)
    shard_shapes = {shard.data.shape for shard in x.addressable_shards}
    assert shard_shapes == {layout.shard_shape(x.shape)}


def test_the_first_of_several_axes_is_the_major_one():
    x = jax.device_put(jnp.arange(8), Layout([("model", "batch")], MESH).sharding)
    ours = Layout([("model", "batch")], MESH)
    for shard in x.addressable_shards:
        (part,) = ours.shard_slices((8,), shard.device)
        assert shard.data.tolist() == [part.start]
    assert ours.offset_to_shard() == [(0,), (2,), (4,), (6,), (1,), (3,), (5,), (7,)]


# Sizes of every kind.


def test_zero_sizes_divide_and_hold_nothing():
    layout = Layout(["batch", "model"], MESH)
    assert layout.shard_shape((0, 4)) == (0, 1)
    assert layout.bytes_per_device((0, 4), "float32") == 0
    assert layout.shard_slices((0, 4), 7) == (slice(0, 0), slice(3, 4))
    x = jax.device_put(jnp.zeros((0, 4)), layout.sharding)
    assert {shard.data.shape for shard in x.addressable_shards} == {(0, 1)}


def test_an_axis_of_size_1_shards_into_one():
    mesh = create_mesh({"batch": 8, "model": 1})
    layout = Layout(["model", None], mesh)
    assert layout.num_shards(0) == 1
    assert layout.shard_shape((7, 3)) == (7, 3)
    assert layout.is_fully_replicated
    assert layout != Layout([None, None], mesh)


@pytest.mark.parametrize(
    "shape", [(4, 8), [4, 8], np.array([4, 8]), (np.int64(4), np.int32(8))]
)
def test_shapes_come_as_tuples_lists_and_numpy_integers(shape):
    layout = Layout(["batch", "model"], MESH)
    sizes = layout.shard_shape(shape)
    assert sizes == (2, 2)
    assert {type(size) for size in sizes} == {int}
    assert type(layout.bytes_per_device(shape, "float32")) is int
    assert {type(size) for size in layout.global_shape(shape)} == {int}


def test_a_numpy_integer_serves_as_dim_rank_and_device():
    layout = Layout(["batch", None], MESH)
    assert layout.num_shards(np.int64(0)) == 2
    assert layout.delete(np.int32(1)) == Layout(["batch"], MESH)
    assert Layout.replicated(MESH, np.int64(2)) == Layout([None, None], MESH)
    assert Layout([..., "model"], MESH).with_rank(np.int64(2)).rank == 2
    assert layout.shard_slices((4, 4), np.int64(7))[0] == slice(2, 4)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (jnp.float32, 4),
        ("bfloat16", 2),
        (ml_dtypes.float8_e4m3fn, 1),
        (np.dtype("int16"), 2),
        (bool, 1),
        (float, 4),
        ("float64", 4),
        (complex, 8),
    ],
)
def test_bytes_per_device_are_those_of_an_array_made_by_jax(dtype, size):
    assert Layout(["model"], MESH).bytes_per_device((8,), dtype) == 2 * size


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_bytes_per_device_of_keys_count_their_words(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 8)
    layout = Layout(["batch"], MESH)
    words = jax.random.key_data(keys)
    assert layout.bytes_per_device(keys.shape, keys.dtype) == words.nbytes // 2


def test_an_array_larger_than_any_memory_is_only_arithmetic():
    layout = Layout([("batch", "model"), None], MESH)
    assert layout.bytes_per_device((2**40, 2**40), "float32") == 2**79


# What it is made of.


def test_a_layout_shows_what_it_is_made_of():
    layout = Layout(["batch", UNSHARDED, ("model",)], MESH)
    assert layout.mesh is MESH
    assert layout.specs == ("batch", None, "model")
    assert layout.spec == P("batch", None, "model")
    assert layout.sharding == NamedSharding(MESH.jax_mesh, P("batch", None, "model"))
    assert layout.rank == 3
    assert layout.memory_kind is None
    assert not layout.has_ellipsis
    assert repr(layout) == ("Layout([batch, unsharded, model], Mesh(batch=2, model=4))")
    assert str(layout) == "[batch, unsharded, model]"
    assert str(Layout([..., ("batch", "model"), MATCH], MESH)) == (
        "[..., (batch, model), MATCH]"
    )


def test_dtensor_spellings_are_aliases():
    layout = Layout(["batch", UNSHARDED], MESH)
    assert layout.sharding_specs == ["batch", None]
    assert layout.local_shape_from_global_shape((4, 3)) == (2, 3)
    assert layout.global_shape_from_local_shape((2, 3)) == (4, 3)


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        (["batch"], True),
        (["batch", None, None], True),
        ([("batch", "model"), None], True),
        (["batch", ...], True),
        (["batch", "model"], False),
        ([None, "batch"], False),
        ([None], False),
        ([..., "batch"], False),
        ([], False),
    ],
)
def test_is_batch_parallel_when_the_first_dim_alone_is_sharded(specs, expected):
    assert Layout(specs, MESH).is_batch_parallel is expected


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
    assert MESH.layout("batch", None) == Layout(["batch", None], MESH)
    assert MESH.layout() == Layout([], MESH)
    with default_mesh(MESH):
        assert Layout.replicated(rank=2) == Layout([None, None], MESH)


def test_the_mesh_is_the_default_one_if_left_out():
    with default_mesh(MESH):
        assert Layout(["batch"]).mesh == MESH
        assert Layout(["data"], CUBE).mesh == CUBE
    with jax.set_mesh(CUBE.jax_mesh):
        assert Layout(["data"]).mesh == CUBE
        with default_mesh(MESH):
            assert Layout(["batch"]).mesh == MESH


def test_the_default_mesh_of_one_thread_is_not_that_of_another():
    seen = []

    def work():
        try:
            Layout(["batch"])
        except LayoutError as error:
            seen.append(error)

    with default_mesh(MESH):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(seen) == 1


def test_a_layout_does_not_change():
    layout = Layout(["batch"], MESH)
    with pytest.raises(AttributeError) as error:
        layout.specs = ()
    assert str(error.value) == (
        "a Layout is immutable; make another one instead of setting 'specs'."
    )
    with pytest.raises(AttributeError):
        layout.other = 1
    with pytest.raises(AttributeError):
        del layout._specs
    assert layout.specs == ("batch",)


# Equality and hash by meaning.


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([None], [UNSHARDED]),
        ([None], [()]),
        (["batch"], [("batch",)]),
        (["batch"], [["batch"]]),
        (["batch"], ("batch",)),
        ([("batch", "model")], [["batch", "model"]]),
        (["batch", None], P("batch", None)),
        ([..., "batch"], (..., "batch")),
        ([MATCH], [MATCH]),
    ],
)
def test_two_spellings_of_one_layout_are_equal(one, other):
    assert Layout(one, MESH) == Layout(other, MESH)
    assert hash(Layout(one, MESH)) == hash(Layout(other, MESH))
    assert Layout(one, MESH) == Layout(one, MESH.jax_mesh)
    assert len({Layout(one, MESH), Layout(other, MESH.jax_mesh)}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([], [UNSHARDED]),
        ([None], [None, None]),
        ([None], [...]),
        ([], [...]),
        ([None], [MATCH]),
        ([MATCH], [...]),
        (["batch"], ["model"]),
        ([("batch", "model")], [("model", "batch")]),
        (["batch", None], [None, "batch"]),
    ],
)
def test_layouts_of_other_meaning_differ(one, other):
    assert Layout(one, MESH) != Layout(other, MESH)


def test_layouts_on_other_meshes_or_memories_differ():
    layout = Layout(["batch"], MESH)
    turned = create_mesh({"batch": 2, "model": 4}, devices=jax.devices()[::-1])
    explicit = create_mesh({"batch": 2, "model": 4}, axis_types="explicit")
    assert layout != Layout(["batch"], turned)
    assert layout != Layout(["batch"], explicit)
    assert layout != Layout(["batch"], MESH, memory_kind="pinned_host")
    assert layout != layout.sharding
    assert layout != "Layout([batch], Mesh(batch=2, model=4))"


# Layout.of.


@FEW
@given(layouts_and_shapes())
def test_of_an_abstract_array_is_the_layout_it_was_given(case):
    layout, shape = case
    value = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=layout.sharding)
    assert Layout.of(value) == layout


@pytest.mark.parametrize("specs", [["batch", "model"], [None, "batch"], [None, None]])
@pytest.mark.parametrize("memory_kind", [None, "device", "pinned_host"])
def test_of_an_array_is_the_layout_it_was_placed_by(specs, memory_kind):
    layout = Layout(specs, MESH, memory_kind=memory_kind)
    x = jax.device_put(jnp.zeros((4, 8)), layout.sharding)
    assert Layout.of(x) == layout
    assert Layout.of(x, 2) == layout
    assert Layout.of(layout) is layout


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
    assert layout.shard_shape((4, 8)) == (4, 8)
    assert Layout.of(SingleDeviceSharding(device), 2) == layout
    assert Layout.of(jnp.float32(1)).rank == 0


def test_of_a_result_of_jit_is_what_jax_chose():
    layout = Layout(["batch", None], MESH)
    x = jax.device_put(jnp.ones((4, 8)), layout.sharding)
    assert Layout.of(jax.jit(lambda x: 2 * x)(x)) == layout


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


def test_as_layout_takes_layouts_and_named_shardings():
    layout = Layout(["batch", ...], MESH)
    assert as_layout(layout) is layout
    assert as_layout(layout, 3) == Layout(["batch", None, None], MESH)
    sharding = NamedSharding(MESH.jax_mesh, P("batch"))
    assert as_layout(sharding, 2) == Layout(["batch", None], MESH)


# Memories.


def test_the_default_memory_is_the_same_as_none():
    kind = jax.devices()[0].default_memory().kind
    layout = Layout(["batch"], MESH, memory_kind=kind)
    assert layout == Layout(["batch"], MESH)
    assert layout.memory_kind is None
    assert hash(layout) == hash(Layout(["batch"], MESH))


def test_another_memory_is_part_of_the_layout():
    layout = Layout(["batch", None], MESH, memory_kind="pinned_host")
    assert layout.sharding.memory_kind == "pinned_host"
    assert repr(layout) == (
        "Layout([batch, unsharded], Mesh(batch=2, model=4), memory_kind='pinned_host')"
    )
    assert str(layout) == "[batch, unsharded] in pinned_host"
    for twin in (
        Layout.from_string(layout.to_string()),
        pickle.loads(pickle.dumps(layout)),
        Layout.of(layout.sharding),
        MESH.layout("batch", None, memory_kind="pinned_host"),
    ):
        assert twin == layout
    assert layout.delete(1).memory_kind == "pinned_host"
    assert layout.with_memory_kind(None) == Layout(["batch", None], MESH)


# Text and pickle.


@pytest.mark.parametrize("specs", [[], [...], [MATCH, ..., ("batch", "model"), None]])
def test_open_layouts_survive_text_and_pickle(specs):
    layout = Layout(specs, MESH)
    assert Layout.from_string(layout.to_string()) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert copy.deepcopy(layout).specs == layout.specs


def test_axis_names_in_any_script_survive_text_and_pickle():
    mesh = create_mesh({"größe": 2, "...": 2, 'a"b\\': 2})
    layout = Layout(["größe", "...", 'a"b\\', ...], mesh)
    assert Layout.from_string(layout.to_string()) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout


PICKLED_ELSEWHERE = """
import sys, jax
jax.config.update("jax_num_cpu_devices", 8)
import pickle
layouts = pickle.load(sys.stdin.buffer)
for layout in layouts:
    sys.stdout.write(f"{layout!r} {layout.to_string()}\\n")
"""


def test_a_pickle_opens_in_a_fresh_process():
    sent = [
        Layout(["batch", None, ...], MESH),
        Layout([("model", "batch"), MATCH], MESH, memory_kind="pinned_host"),
        Layout(["x"], create_mesh({"x": 2}, devices=["CPU:5", "CPU:2"])),
        Layout(["a"], create_mesh({"a": 8}, axis_types="explicit")),
    ]
    run = subprocess.run(
        [sys.executable, "-c", PICKLED_ELSEWHERE],
        input=pickle.dumps(sent),
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr.decode()
    expected = [f"{layout!r} {layout.to_string()}" for layout in sent]
    assert run.stdout.decode().splitlines() == expected


# Bad inputs, with what is said about them.

TWO = "Layout([batch, model], Mesh(batch=2, model=4))"
KINDS = ", ".join(repr(m.kind) for m in jax.devices()[0].addressable_memories())
AXES = ("batch", "model")
YES = True


def sharded(*specs, **options):
    return Layout(specs, MESH, **options)


BAD = {
    "unknown axis with a near name": (
        lambda: sharded("modle", None),
        "mesh axis 'modle' of [modle, unsharded] is not in Mesh(batch=2, model=4). "
        "Did you mean 'model'?",
    ),
    "unknown axis with none near": (
        lambda: sharded(None, ("batch", "zzz")),
        "mesh axis 'zzz' of [unsharded, (batch, zzz)] is not in Mesh(batch=2, "
        "model=4).",
    ),
    "axis name of another case": (
        lambda: sharded("Batch"),
        "mesh axis 'Batch' of [Batch] is not in Mesh(batch=2, model=4). "
        "Did you mean 'batch'?",
    ),
    "empty axis name": (
        lambda: sharded(""),
        "mesh axis '' of [] is not in Mesh(batch=2, model=4).",
    ),
    "axis on two dims": (
        lambda: sharded("batch", None, ("model", "batch")),
        "mesh axis 'batch' is used twice in [batch, unsharded, (model, batch)], on "
        "entries 0 and 2; an axis can shard only one dim, and only once.",
    ),
    "axis twice on one dim": (
        lambda: sharded(None, ("model", "model")),
        "mesh axis 'model' is used twice in [unsharded, (model, model)], on entry 1; "
        "an axis can shard only one dim, and only once.",
    ),
    "string for the list": (
        lambda: Layout("batch", MESH),
        "specs must be a list of entries, one per dim, got the string 'batch'. Write ['batch'] "
        "for an array of one dim, or ['batch', ...] for any.",
    ),
    "NamedSharding for the list": (
        lambda: Layout(NamedSharding(MESH.jax_mesh, P("batch")), MESH),
        "specs must be a list of entries, one per dim, got a NamedSharding. Use "
        "Layout.of(sharding).",
    ),
    "Layout for the list": (
        lambda: Layout(Layout(["batch"], MESH), MESH),
        "specs must be a list of entries, one per dim, got a Layout. Use "
        "Layout.of(sharding).",
    ),
    "None for the list": (
        lambda: Layout(None, MESH),
        "specs must be a list, a tuple or a PartitionSpec with one entry per dim, "
        "got None.",
    ),
    "dict for the list": (
        lambda: Layout({0: "batch"}, MESH),
        "specs must be a list, a tuple or a PartitionSpec with one entry per dim, "
        "got {0: 'batch'}.",
    ),
    "UNCONSTRAINED": (
        lambda: Layout(P(None, P.UNCONSTRAINED), MESH),
        "entry 1 is PartitionSpec.UNCONSTRAINED, which leaves the dim to the compiler; "
        "a layout says how every dim is sharded. Write an axis name or UNSHARDED.",
    ),
    "two ellipses": (
        lambda: sharded(..., "batch", ...),
        "[..., batch, ...] has `...` twice; one stands for all other dims.",
    ),
    "number as entry": (
        lambda: sharded("batch", 4),
        "entry 1 is 4; an entry must be a mesh axis name, a tuple of names, "
        "UNSHARDED (None), MATCH or `...`.",
    ),
    "bool as entry": (
        lambda: sharded(YES),
        "entry 0 is True; an entry must be a mesh axis name, a tuple of "
        "names, UNSHARDED (None), MATCH or `...`.",
    ),
    "None inside a tuple": (
        lambda: sharded(("batch", None)),
        "entry 0 is ('batch', None); a tuple must hold mesh axis names.",
    ),
    "tuple inside a tuple": (
        lambda: sharded((("batch",), "model")),
        "entry 0 is (('batch',), 'model'); a tuple must hold mesh axis names.",
    ),
    "no mesh": (
        lambda: Layout(["batch", None]),
        "Layout([batch, unsharded]) has no mesh. Give one as the second argument, or "
        "set one with default_mesh(mesh).",
    ),
    "unknown memory": (
        lambda: sharded("batch", memory_kind="pined_host"),
        f"memory_kind 'pined_host' is not one of these devices' memories: {KINDS}. "
        "Did you mean 'pinned_host'?",
    ),
    "memory of another type": (
        lambda: sharded("batch", memory_kind=5),
        f"memory_kind 5 is not one of these devices' memories: {KINDS}.",
    ),
    "rank of an open layout": (
        lambda: sharded("batch", ...).rank,
        "Layout([batch, ...], Mesh(batch=2, model=4)) has `...` and so no rank yet; "
        "use layout.with_rank(n).",
    ),
    "offset_to_shard of an open layout": (
        lambda: sharded("batch", ...).offset_to_shard(),
        "Layout([batch, ...], Mesh(batch=2, model=4)) has `...` and so no rank yet; "
        "use layout.with_rank(n).",
    ),
    "spec of a leading ellipsis": (
        lambda: sharded(..., "batch").spec,
        "Layout([..., batch], Mesh(batch=2, model=4)) has `...` before its end, which a PartitionSpec cannot express; use layout.with_rank(n) first.",
    ),
    "rank too small": (
        lambda: sharded(*AXES).with_rank(1),
        f"{TWO} is for arrays of rank 2, but this one has rank 1. Use `...` for any "
        "number of unsharded dims.",
    ),
    "rank too small for an open layout": (
        lambda: sharded("batch", ..., "model").with_rank(1),
        "Layout([batch, ..., model], Mesh(batch=2, model=4)) is for arrays of rank 2 or more, but this one has rank 1.",
    ),
    "shape of another rank": (
        lambda: sharded(*AXES).shard_shape((4, 8, 2)),
        f"{TWO} is for arrays of rank 2, but this one has rank 3. Use `...` for any "
        "number of unsharded dims.",
    ),
    "negative rank": (
        lambda: Layout.replicated(MESH, -1),
        "rank must be a non-negative integer, got -1. It is the number of dims of an "
        "array.",
    ),
    "bool as rank": (
        lambda: sharded(...).with_rank(YES),
        "rank must be a non-negative integer, got True. It is the number of dims of an "
        "array.",
    ),
    "dim out of range": (
        lambda: sharded(*AXES).num_shards(2),
        "dim 2 is out of range for a layout of rank 2, which has dims 0 to 1.",
    ),
    "negative dim out of range": (
        lambda: sharded(*AXES).delete([0, -3]),
        "dim -3 is out of range for a layout of rank 2, which has dims 0 to 1.",
    ),
    "dim of a scalar": (
        lambda: sharded().num_shards(0),
        "dim 0 is out of range for a layout of rank 0, which has no dims.",
    ),
    "bool as dim": (
        lambda: sharded(*AXES).num_shards(YES),
        "dim must be an integer, got True.",
    ),
    "float as dim": (
        lambda: sharded(*AXES).delete(1.0),
        "dim must be an integer, got 1.0.",
    ),
    "axis as dim": (
        lambda: sharded(*AXES).delete("batch"),
        "dim must be an integer, got 'batch'.",
    ),
    "batch_sharded of a scalar": (
        lambda: Layout.batch_sharded(MESH, "batch", 0),
        "dim 0 is out of range for a layout of rank 0, which has no dims.",
    ),
    "batch_sharded by no axis": (
        lambda: Layout.batch_sharded(MESH, None, 2),
        "axis must be a mesh axis name or a tuple of names, got None.",
    ),
    "inner_sharded by an unknown axis": (
        lambda: Layout.inner_sharded(MESH, "modle", 2),
        "mesh axis 'modle' of [unsharded, modle] is not in Mesh(batch=2, model=4). "
        "Did you mean 'model'?",
    ),
    "shard_shape that does not divide": (
        lambda: sharded(None, "model").shard_shape((512, 10)),
        "an array of shape (512, 10): dim 1 has size 10, which does not divide into 4 "
        "shards over mesh axis 'model' (Layout([unsharded, model], Mesh(batch=2, "
        "model=4))). Nearest sizes that fit: 8 and 12. To keep the size, leave dim 1 "
        "UNSHARDED.",
    ),
    "shard_slices that do not divide": (
        lambda: sharded(("batch", "model")).shard_slices((12,), 0),
        "an array of shape (12,): dim 0 has size 12, which does not divide into 8 "
        "shards over mesh axes 'batch', 'model' (Layout([(batch, model)], "
        "Mesh(batch=2, model=4))). Nearest sizes that fit: 8 and 16. To keep the size, "
        "leave dim 0 UNSHARDED.",
    ),
    "bytes_per_device of fewer elements than shards": (
        lambda: sharded(..., "model").bytes_per_device((2, 3), "float32"),
        "an array of shape (2, 3): dim 1 has size 3, which does not divide into 4 "
        "shards over mesh axis 'model' (Layout([..., model], Mesh(batch=2, model=4))). "
        "Nearest size that fits: 4. To keep the size, leave dim 1 UNSHARDED.",
    ),
    "check of a named array": (
        lambda: sharded(*AXES).check((3, 4), where="dense/kernel f32[3, 4]"),
        "dense/kernel f32[3, 4]: dim 0 has size 3, which does not divide into 2 shards "
        f"over mesh axis 'batch' ({TWO}). Nearest sizes that fit: 2 and 4. To keep the "
        "size, leave dim 0 UNSHARDED.",
    ),
    "check of a named array's rank": (
        lambda: sharded(*AXES).check((4,), where="dense/bias f32[4]"),
        f"dense/bias f32[4]: {TWO} is for arrays of rank 2, but this one has rank 1. "
        "Use `...` for any number of unsharded dims.",
    ),
    "negative size": (
        lambda: sharded(*AXES).shard_shape((-2, 4)),
        "dim 0 of the shape has size -2; a size must be a non-negative integer.",
    ),
    "float size": (
        lambda: sharded(*AXES).global_shape((2, 4.0)),
        "dim 1 of the shape has size 4.0; a size must be a non-negative integer.",
    ),
    "open size": (
        lambda: sharded(*AXES).check((None, 4)),
        "dim 0 of the shape has size None; a size must be a non-negative integer.",
    ),
    "bool size": (
        lambda: sharded("batch").bytes_per_device((True,), "float32"),
        "dim 0 of the shape has size True; a size must be a non-negative integer.",
    ),
    "number for a shape": (
        lambda: sharded("batch").shard_shape(8),
        "a shape must be a tuple of sizes, one per dim, got 8.",
    ),
    "string for a shape": (
        lambda: sharded("batch").shard_shape("8"),
        "a shape must be a tuple of sizes, one per dim, got '8'.",
    ),
    "no dtype": (
        lambda: sharded("batch").bytes_per_device((8,), None),
        "None is not a dtype, such as 'float32' or jnp.bfloat16.",
    ),
    "unknown dtype": (
        lambda: sharded("batch").bytes_per_device((8,), "float23"),
        "'float23' is not a dtype, such as 'float32' or jnp.bfloat16.",
    ),
    "MATCH in arithmetic": (
        lambda: sharded(MATCH, "model").shard_shape((4, 8)),
        "Layout([MATCH, model], Mesh(batch=2, model=4)) holds MATCH, which stands for the layout of an array; only relayout(x, layout) can fill it "
        "in.",
    ),
    "text that is not JSON": (
        lambda: Layout.from_string("[batch]"),
        "'[batch]' is not a layout; such text comes from layout.to_string().",
    ),
    "JSON that is not a layout": (
        lambda: Layout.from_string('{"specs": ["batch"]}'),
        '\'{"specs": ["batch"]}\' is not a layout; such text comes from '
        "layout.to_string().",
    ),
    "None for text": (
        lambda: Layout.from_string(None),
        "None is not a layout; such text comes from layout.to_string().",
    ),
    "list given as a layout": (
        lambda: as_layout(["batch", None]),
        "expected a Layout or a NamedSharding, got ['batch', None]. A "
        "spec needs a mesh: Layout(spec, mesh).",
    ),
    "string given as a layout": (
        lambda: as_layout("batch"),
        "expected a Layout or a NamedSharding, got 'batch'.",
    ),
    "sharding with too many entries": (
        lambda: as_layout(NamedSharding(MESH.jax_mesh, P("batch", None)), 1),
        "the spec ('batch', None) of the sharding has 2 entries, too many for an array of rank 1.",
    ),
    "layout of a NumPy array": (
        lambda: Layout.of(np.zeros(4)),
        "ndarray has no layout: it has no NamedSharding. Place the array with relayout(x, layout); inside jit, layouts are only known on a mesh with Explicit axes.",
    ),
    "layout of an array of another rank": (
        lambda: Layout.of(jnp.zeros((4, 8)), 3),
        "the array has rank 2, but rank=3 was given.",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_said_about_a_bad_layout(case):
    act, message = BAD[case]
    with pytest.raises(LayoutError) as error:
        act()
    assert str(error.value) == message
    assert isinstance(error.value, MeshLayoutError)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    "ask",
    [
        lambda layout: layout.num_shards(0),
        lambda layout: layout.global_shape((4, 8)),
        lambda layout: layout.misfits((4, 8)),
        lambda layout: layout.check((4, 8)),
        lambda layout: layout.shard_slices((4, 8), 0),
        lambda layout: layout.bytes_per_device((4, 8), "float32"),
        lambda layout: layout.offset_to_shard(),
        lambda layout: layout.is_fully_replicated,
        lambda layout: layout.is_batch_parallel,
        lambda layout: layout.spec,
        lambda layout: layout.sharding,
    ],
)
def test_a_layout_with_match_answers_no_question_of_where(ask):
    with pytest.raises(LayoutError, match="holds MATCH"):
        ask(Layout([MATCH, "model"], MESH))


def test_a_layout_needs_a_mesh_of_devices():
    with pytest.raises(MeshError) as error:
        Layout(["batch"], {"batch": 8})
    assert str(error.value) == (
        "expected a Mesh or a jax.sharding.Mesh, got {'batch': 8}. "
        "Make one with create_mesh({'batch': 8})."
    )
    abstract = AbstractMesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    with pytest.raises(LayoutError, match="on an abstract mesh, which has no devices"):
        Layout.of(NamedSharding(abstract, P("batch")))


@pytest.mark.parametrize("device", [8, -1, True, "cpu:0", None, [0]])
def test_a_device_that_is_not_of_the_mesh_holds_no_shard(device):
    with pytest.raises(MeshError):
        Layout(["batch"], MESH).shard_slices((8,), device)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1],
        lambda text: text.replace('"specs"', '"spec"'),
        lambda text: text.replace('["batch", null]', "7"),
        lambda text: text.replace("null", '{"special": "all"}', 1),
        lambda text: text.replace("null", '{"special": []}', 1),
        lambda text: text.replace("null", "1.5", 1),
        lambda text: text.replace('["batch", null]', '["btach", null]'),
        lambda text: text.replace("cpu:", "abacus:"),
        lambda text: text.replace("cpu:0-7", "cpu:90-97"),
        lambda text: text.replace("cpu:0-7", "cpu:0-6,0"),
        lambda text: text.replace("cpu:0-7", "cpu:[0]-7"),
        lambda text: text.replace("cpu:0-7", "cpu:1-7"),
        lambda text: text.replace("|auto,", "|otto,"),
        lambda text: text.replace("|auto,", "|"),
        lambda text: text.replace("batch=2", "batch"),
        lambda text: text.replace("batch=2", "batch=-1"),
        lambda text: text.replace("batch=2", "batch=2.5"),
        lambda text: text.replace('"mesh": "', '"mesh": 3, "x": "'),
        lambda text: "[" * 100_000,
        lambda text: text.replace('["batch", null]', "[" * 100_000),
        lambda text: text.replace('"memory_kind": null', '"memory_kind": "disk"'),
        lambda text: "",
        lambda text: "null",
        lambda text: "[]",
    ],
)
def test_a_changed_text_is_refused(change):
    text = Layout(["batch", None], MESH).to_string()
    assert change(text) != text
    with pytest.raises(MeshLayoutError):
        Layout.from_string(change(text))


# What nobody can mean: every parameter works with it or says so in a sentence.

LAYOUT = Layout(["batch", None], MESH)
CALLS = {
    "create_mesh": lambda bad: create_mesh(bad),
    "create_mesh, a size": lambda bad: create_mesh({"batch": bad}),
    "create_mesh, a name": lambda bad: create_mesh([(bad, 8)]),
    "create_mesh, devices": lambda bad: create_mesh({"batch": 8}, devices=bad),
    "create_mesh, axis_types": lambda bad: create_mesh({"batch": 8}, axis_types=bad),
    "Mesh": lambda bad: ml.Mesh(bad),
    "default_mesh": lambda bad: ml.default_mesh(bad),
    "axis_size": lambda bad: MESH.axis_size(bad),
    "dim_size": lambda bad: MESH.dim_size(bad),
    "coords": lambda bad: MESH.coords(bad),
    "a sub-mesh": lambda bad: MESH[bad],
    "rename": lambda bad: MESH.rename(bad),
    "rename, a name": lambda bad: MESH.rename({"batch": bad}),
    "merge, axes": lambda bad: MESH.merge(bad, "all"),
    "merge, name": lambda bad: MESH.merge(("batch", "model"), bad),
    "Mesh.from_string": lambda bad: ml.Mesh.from_string(bad),
    "mesh.layout": lambda bad: MESH.layout(bad),
    "mesh.layout, memory_kind": lambda bad: MESH.layout("batch", memory_kind=bad),
    "Layout": lambda bad: Layout(bad, MESH),
    "Layout, mesh": lambda bad: Layout(["batch"], bad),
    "Layout.of": lambda bad: Layout.of(bad),
    "Layout.of, rank": lambda bad: Layout.of(LAYOUT, bad),
    "replicated, mesh": lambda bad: Layout.replicated(bad, 1),
    "replicated, rank": lambda bad: Layout.replicated(MESH, bad),
    "batch_sharded, axis": lambda bad: Layout.batch_sharded(MESH, bad, 2),
    "batch_sharded, rank": lambda bad: Layout.batch_sharded(MESH, "batch", bad),
    "batch_sharded, dim": lambda bad: Layout.batch_sharded(MESH, "batch", 2, bad),
    "inner_sharded": lambda bad: Layout.inner_sharded(MESH, bad, 2),
    "with_rank": lambda bad: LAYOUT.with_rank(bad),
    "delete": lambda bad: LAYOUT.delete(bad),
    "with_memory_kind": lambda bad: LAYOUT.with_memory_kind(bad),
    "num_shards": lambda bad: LAYOUT.num_shards(bad),
    "misfits": lambda bad: LAYOUT.misfits(bad),
    "check": lambda bad: LAYOUT.check(bad),
    "shard_shape": lambda bad: LAYOUT.shard_shape(bad),
    "shard_shape, a size": lambda bad: LAYOUT.shard_shape((bad, 2)),
    "global_shape": lambda bad: LAYOUT.global_shape(bad),
    "shard_slices, device": lambda bad: LAYOUT.shard_slices((4, 4), bad),
    "bytes_per_device, shape": lambda bad: LAYOUT.bytes_per_device(bad, "float32"),
    "bytes_per_device, dtype": lambda bad: LAYOUT.bytes_per_device((4, 4), bad),
    "Layout.from_string": lambda bad: Layout.from_string(bad),
    "visualize": lambda bad: ml.visualize(bad),
    "visualize, shape": lambda bad: ml.visualize(LAYOUT, shape=bad),
    "zero_rule, mesh": lambda bad: ml.zero_rule(bad),
    "zero_rule, axes": lambda bad: ml.zero_rule(MESH, bad),
    "constrain, name": lambda bad: ml.constrain(np.ones(8), bad),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_arguments_work_or_are_refused_in_a_sentence(name):
    for bad in BAD_VALUES:
        message = refusal(MeshLayoutError, CALLS[name], bad)
        assert message is None or "0x" not in message
