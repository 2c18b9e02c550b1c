"""Arrays are placed, moved, taken apart and created, with JAX as the oracle."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import meshlayout as ml
from meshlayout import arrays as ma
from tests.error_messages import message_of


P = PartitionSpec


def mesh_of(text, count=8, first=0, **kwargs):
    return ml.create_mesh(text, devices=jax.devices()[first : first + count], **kwargs)


BATCH_8 = mesh_of("batch=8")
MESH_2X4 = mesh_of("batch=2,model=4")
MESH_4X2 = mesh_of("batch=4,model=2")
SUBSET = ml.create_mesh("part=4", devices=jax.devices()[6:2:-1])
ONE = mesh_of("batch=1", count=1, first=5)
EXPLICIT = mesh_of("batch=2,model=4", axis_types="explicit")

LAYOUTS = [
    BATCH_8.layout("batch", None),
    BATCH_8.layout(...),
    MESH_2X4.layout("batch", "model"),
    MESH_2X4.layout(None, ("model", "batch")),
    MESH_4X2.layout("model", "batch"),
    SUBSET.layout(None, "part"),
    ONE.layout("batch", None),
    EXPLICIT.layout("model", None),
]
EIGHT = [layout for layout in LAYOUTS if layout.mesh.size == 8]
# jax 0.7 cannot move arrays from Explicit axes to a mesh with other names.
MOVES = [
    (source, target)
    for source, target in itertools.product(LAYOUTS, LAYOUTS)
    if hasattr(jax, "reshard") or source.mesh != EXPLICIT or target.mesh == EXPLICIT
]
ON_HOST = BATCH_8.layout(None, "batch", memory_kind="pinned_host")
MOVES += [(ON_HOST, LAYOUTS[2]), (LAYOUTS[0], ON_HOST)]
CREATED = [*LAYOUTS, ON_HOST]


@pytest.fixture
def value():
    return np.arange(128, dtype=np.float32).reshape(16, 8) / 7


def assert_lies(x, layout):
    """The oracle is JAX: the same pieces, on the same devices, in the same memory."""
    sharding = layout.with_rank(x.ndim).sharding
    assert x.sharding.is_equivalent_to(sharding, x.ndim), (x.sharding, sharding)


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_relayout_goes_from_any_layout_to_any_other(value, source, target):
    x = jax.device_put(value, source.with_rank(2).sharding)
    for donate in (False, True):
        moved = ma.relayout(x, target, donate=donate)
        assert_lies(moved, target)
        assert same_bits(moved, value)
        assert x.is_deleted() is donate


@pytest.mark.parametrize(("source", "target"), [*zip(EIGHT, EIGHT[::-1], strict=True)])
def test_relayout_inside_jit_is_relayout(value, source, target):
    x = jax.device_put(value, source.with_rank(2).sharding)
    # JAX may not be able to name a result on a mesh of another shape by itself.
    named = source.mesh == target.mesh
    out = {} if named else {"out_shardings": target.with_rank(2).sharding}
    moved = jax.jit(lambda x: ma.relayout(x, target), **out)(x)
    assert_lies(moved, target)
    assert same_bits(moved, value)


@pytest.mark.parametrize("target", LAYOUTS[:-1:2])  # JAX wants one mesh under Explicit
@pytest.mark.parametrize("source", [LAYOUTS[0], LAYOUTS[5]])
def test_a_gradient_does_not_see_relayout(value, source, target):
    x = jax.device_put(value, source.with_rank(2).sharding)
    grad = jax.grad(lambda x: (ma.relayout(x, target) ** 3).sum())(x)
    np.testing.assert_array_equal(np.asarray(grad), np.asarray(3 * jnp.square(value)))
    assert_lies(grad, source)


def test_relayout_works_under_vmap_and_keeps_the_dims_apart(value):
    layout = BATCH_8.layout("batch")
    moved = jax.vmap(lambda row: ma.relayout(row, layout) * 2)(value)
    assert same_bits(moved, value * 2)
    assert moved.sharding.is_equivalent_to(BATCH_8.layout(None, "batch").sharding, 2)


def test_relayout_to_where_it_is_copies_nothing(value):
    x = ma.relayout(value, LAYOUTS[2])
    again = ma.relayout(x, LAYOUTS[2])
    pointers = [
        [shard.data.unsafe_buffer_pointer() for shard in one.addressable_shards]
        for one in (x, again)
    ]
    assert pointers[0] == pointers[1]


def test_a_numpy_array_changed_later_does_not_change_the_placed_one():
    # Memory at multiples of 64 bytes is what a CPU device would use as it is.
    memory = np.zeros(4 * 1024 * 256 + 64, np.uint8)
    source = memory[-memory.ctypes.data % 64 :][: 4 * 1024 * 256]
    source = source.view(np.float32).reshape(1024, 256)
    for layout in (BATCH_8.layout("batch", None), ONE.layout(...)):
        source[:] = 0
        placed = ma.relayout(source, layout)
        copied = ma.copy_to_mesh(source, layout)
        packed = ma.pack([source] * layout.mesh.size, layout)
        source[:] = 1
        for x in (placed, copied, packed):
            assert not np.asarray(x).any()


@pytest.mark.parametrize("mesh", [MESH_2X4, EXPLICIT])
def test_match_keeps_how_a_dim_is_sharded(value, mesh):
    x = ma.relayout(value, mesh.layout("batch", None))
    move = lambda x: ma.relayout(x, mesh.layout(ml.MATCH, "model"))
    for moved in (move(x), jax.jit(move)(x)):
        assert_lies(moved, mesh.layout("batch", "model"))
        assert same_bits(moved, value)


def test_a_tree_takes_one_layout_or_a_prefix_of_layouts(value):
    tree = {"w": value, "inner": [value, (value + 1, None)], "none": None}
    both = BATCH_8.layout("batch", ...)
    moved = ma.relayout(tree, both)
    assert jax.tree.structure(moved) == jax.tree.structure(tree)
    for leaf in jax.tree.leaves(moved):
        assert_lies(leaf, both)
    layouts = {"w": both, "inner": MESH_2X4.layout(None, "model"), "none": None}
    moved = ma.relayout(tree, layouts)
    assert_lies(moved["w"], both)
    assert_lies(moved["inner"][1][0], layouts["inner"])
    assert moved["none"] is None


def test_a_tree_with_one_array_twice_can_be_donated(value):
    x = ma.relayout(value, BATCH_8.layout("batch", None))
    moved = ma.relayout({"a": x, "b": x}, LAYOUTS[2], donate=True)
    assert x.is_deleted()
    assert same_bits(moved["a"], value)
    assert same_bits(moved["b"], value)
    x = ma.relayout(value, LAYOUTS[2])
    # Nothing is deleted if a leaf does not fit.
    with pytest.raises(ml.errors.LayoutError):
        ma.relayout({"a": x, "b": np.ones((3, 8))}, LAYOUTS[0], donate=True)
    moved = ma.relayout([x, x], [LAYOUTS[2], LAYOUTS[0]], donate=True)
    assert same_bits(moved[0], value)
    assert same_bits(moved[1], value)


def test_relayout_like_takes_the_layouts_of_other_arrays(value):
    other = {"a": ma.relayout(value, LAYOUTS[2]), "b": ma.relayout(value, LAYOUTS[5])}
    moved = ma.relayout_like({"a": value * 2, "b": [value, value]}, other)
    assert_lies(moved["a"], LAYOUTS[2])
    assert_lies(moved["b"][1], LAYOUTS[5])
    assert_lies(ma.relayout_like(value, other["b"]), LAYOUTS[5])


@pytest.mark.parametrize("dtype", ["bfloat16", "int4", "bool", "complex64", "key"])
def test_every_dtype_can_be_placed_moved_packed_and_read(dtype):
    source = np.arange(16).reshape(8, 2) % 3
    if dtype == "key":
        source = jax.random.split(jax.random.key(0), (8, 2))
    else:
        source = source.astype(jnp.dtype(dtype))
    x = ma.relayout(source, BATCH_8.layout("batch", None))
    x = ma.relayout(x, MESH_4X2.layout(None, "model"), donate=True)
    assert ma.fetch_layout(x) == MESH_4X2.layout(None, "model")
    assert x.dtype == source.dtype
    again = ma.pack(ma.unpack(x), ma.fetch_layout(x), verify=True)
    assert again.dtype == source.dtype
    assert (ma.to_numpy(again) == ma.to_numpy(source)).all()


def test_scalars_and_empty_arrays_can_be_placed():
    assert_lies(ma.relayout(3, BATCH_8.layout()), BATCH_8.layout())
    empty = ma.relayout(np.ones((0, 8), np.float32), MESH_2X4.layout("batch", "model"))
    assert empty.shape == (0, 8)
    assert ma.zeros((0,), BATCH_8.layout("batch")).shape == (0,)
    assert ma.pack(ma.unpack(empty), ma.fetch_layout(empty)).shape == (0, 8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unpack_gives_what_each_device_holds_and_pack_is_its_inverse(value, layout):
    parts = ma.unpack(ma.relayout(value, layout))
    devices = list(layout.mesh.devices.flat)
    assert [part.sharding for part in parts] == [
        SingleDeviceSharding(device) for device in devices
    ]
    for part, device in zip(parts, devices, strict=True):
        assert same_bits(part, value[layout.with_rank(2).shard_slices((16, 8), device)])
    for make in (np.asarray, jnp.asarray, lambda x: np.asarray(x).tolist()):
        packed = ma.pack(list(map(make, parts)), layout, verify=True)
        assert_lies(packed, layout)
        assert same_bits(packed, value)


def test_pack_takes_one_tree_per_device():
    layouts = {"x": BATCH_8.layout("batch", None), "n": BATCH_8.layout()}
    parts = [{"x": np.full((2, 3), index), "n": 1} for index in range(8)]
    packed = ma.pack(parts, layouts, verify=True)
    assert (packed["x"].shape, int(packed["n"])) == ((16, 3), 1)
    assert same_bits(ma.unpack(packed)[5]["x"], np.full((2, 3), 5, np.int32))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_are_copied_to_a_mesh_and_read_from_it(value, layout):
    for source in (value, value.tolist(), jnp.asarray(value)):
        copy = ma.copy_to_mesh(source, layout)
        assert_lies(copy, layout)
        assert same_bits(copy, value)
    tree = {"x": copy, "y": [copy, None]}
    whole = layout.with_rank(2)
    assert ma.fetch_layout(tree) == {"x": whole, "y": [whole, None]}
    assert repr(ma.fetch_layout(nnx.Param(copy))) == repr(whole)
    host = ma.to_numpy({**tree, "name": "net", "n": 3})
    assert isinstance(host["x"], np.ndarray)
    assert same_bits(host["y"][0], value)
    assert (host["name"], host["n"]) == ("net", 3)


def test_check_layout_compares_by_meaning(value):
    mesh = ml.create_mesh({"batch": 8, "one": 1})
    x = ma.relayout(value, mesh.layout("batch", "one"))
    for same in (mesh.layout("batch", None), mesh.layout(("batch", "one"), ...)):
        ma.check_layout(x, same)
    ma.check_layout(x, BATCH_8.layout("batch", None))
    ma.check_layout(x, BATCH_8.layout(ml.MATCH, None))
    ma.check_layout(x, NamedSharding(BATCH_8.jax_mesh, P("batch")))
    ma.check_layout({"a": [x]}, {"a": BATCH_8.layout("batch", ...)})
    # MATCH allows anything for its dim, whatever the axes are called.
    x = ma.relayout(value, MESH_2X4.layout("batch", "model"))
    other = ml.create_mesh("x=2,model=4")
    ma.check_layout(x, other.layout("x", ml.MATCH))
    with pytest.raises(ml.errors.LayoutError, match="was expected"):
        ma.check_layout(x, other.layout(ml.MATCH, None))


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*zip(CREATED, itertools.cycle([None, "bfloat16", "int32", bool]), strict=False)],
)
def test_zeros_ones_and_full_are_those_of_jax(layout, dtype):
    for made, plain in (
        (ma.zeros((16, 8), layout, dtype), jnp.zeros((16, 8), dtype)),
        (ma.ones((16, 8), layout, dtype), jnp.ones((16, 8), dtype)),
        (ma.full((16, 8), 1, layout, dtype), jnp.full((16, 8), 1, dtype)),
    ):
        assert_lies(made, layout)
        assert same_bits(made, plain)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *[(CREATED[0], "float32"), (CREATED[2], "bfloat16"), (ON_HOST, "float32")],
        *(
            pytest.param(layout, dtype, marks=pytest.mark.slow)
            for layout in CREATED
            for dtype in ("float32", "bfloat16")
        ),
    ],
)
def test_random_values_are_the_unsharded_ones_bit_for_bit(layout, dtype):
    key = jax.random.key(7)
    normal = ma.normal(key, (16, 24), layout, dtype)
    assert_lies(normal, layout)
    assert same_bits(normal, jax.random.normal(key, (16, 24), dtype))
    uniform = ma.uniform(key, (16, 24), layout, dtype, minval=-2, maxval=3)
    assert same_bits(uniform, jax.random.uniform(key, (16, 24), dtype, -2, 3))


@pytest.mark.parametrize(
    "arguments", [(16,), (0, 32, 2), (10, -6, -1), (0.5, 16.5), (8, 8)]
)
def test_arange_is_that_of_jax(arguments):
    made = ma.arange(*arguments, layout=BATCH_8.layout("batch"))
    assert same_bits(made, jnp.arange(*arguments))
    assert_lies(made, BATCH_8.layout("batch"))


def test_creators_work_inside_jit_and_on_explicit_axes():
    layout = EXPLICIT.layout("batch", "model")
    with jax.set_mesh(EXPLICIT.jax_mesh):
        made = jax.jit(lambda: ma.zeros((8, 8), layout) + ma.ones((8, 8), layout))()
    assert_lies(made, layout)
    layout = BATCH_8.layout("batch", None)
    made = jax.jit(lambda key: ma.normal(key, (8, 8), layout))(jax.random.key(0))
    assert same_bits(made, jax.random.normal(jax.random.key(0), (8, 8)))


def test_no_device_ever_holds_a_whole_created_array(monkeypatch):
    size = 1 << 20
    layout, shard = BATCH_8.layout("batch"), 4 * size // 8
    key = ma.relayout(jax.random.key(0), BATCH_8.layout())
    zeros = lambda: ma.zeros((size,), layout)
    normal = lambda: ma.normal(key, (size,), layout)
    arange = lambda: ma.arange(0.5, size + 0.5, 1.0, layout=layout)
    put, moved = jax.device_put, []
    monkeypatch.setattr(
        jax, "device_put", lambda x, *to: moved.append(x) or put(x, *to)
    )
    assert_lies(zeros(), layout)  # of which JAX makes one shard, and copies it
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        assert_lies(normal(), layout)
        assert_lies(arange(), layout)
    assert size not in {x.addressable_shards[0].data.size for x in moved}
    for create in (zeros, normal, arange):
        memory = jax.jit(create).lower().compile().memory_analysis()
        assert memory.output_size_in_bytes <= 1.1 * shard
        # Threefry keeps counters and words, shard by shard: three shards, not eight.
        assert memory.temp_size_in_bytes <= 3.1 * shard


def test_call_with_layout_takes_trees():
    def build(key, shape, *, scale):
        return {"w": scale * jax.random.normal(key, shape), "b": jnp.zeros(shape[1:])}

    layouts = {"w": BATCH_8.layout(None, "batch"), "b": BATCH_8.layout(...)}
    made = ma.call_with_layout(build, layouts, jax.random.key(0), (4, 16), scale=2.0)
    assert_lies(made["w"], layouts["w"])
    assert_lies(made["b"], layouts["b"])
    expected = 2 * jax.random.normal(jax.random.key(0), (4, 16))
    np.testing.assert_allclose(made["w"], expected, rtol=1e-6)


B = BATCH_8.layout("batch", None)
BAD = {
    "ma.relayout({'x': np.array([-(2**40), 1])}, ONE.layout(None))": "x i64[2]: the array "
    "holds -1099511627776, and JAX would turn int64 into int32. Set jax_enable_x64, or "
    "give it another dtype.",
    "ma.pack([np.ones((2, 3), np.float32)] * 7, B)": "got 7 parts for the 8 "
    "devices of Mesh(batch=8) on this process. Give one part per device, in mesh order, "
    "including devices that hold replicas.",
    "ma.pack([[1.0]] * 3 + [[2.0]], SUBSET.layout(None))": "replicas of shard (0,) must "
    "be alike: part 0 has the digest 06e0f1055650bd76, and part 3 has the digest "
    "0fae9ad5b1659a20 (Layout([unsharded], Mesh(part=4))). To split a whole array, write "
    "relayout(x, layout).",
    "ma.zeros((8,), ['batch'])": "f32[8]: expected a Layout or a NamedSharding, got "
    "['batch']. A spec needs a mesh: Layout(spec, mesh).",
    "ma.relayout(np.ones(8, 'f'), ('batch',))": "f32[8]: expected a Layout or a "
    "NamedSharding, got ('batch',). A spec needs a mesh: Layout(spec, mesh).",
    "ma.relayout({'a': 1, 'b': 2}, {'a': B})": "expected one Layout for all arrays, or a "
    "tree of layouts like theirs; there is none for 'b'.",
    "ma.pack(np.ones((8, 3)), B)": "pack: parts must be a list, with one part per "
    "device. To split a whole array, write relayout(x, layout).",
    "ma.copy_to_mesh(np.ones(8, 'f'), BATCH_8)": "f32[8]: expected a Layout or a "
    "NamedSharding, got a Mesh. Name the axes of each dim: mesh.layout('batch', ...).",
    "ma.relayout(np.ones(8, 'f'), ml.LayoutMap(BATCH_8))": "f32[8]: expected a Layout or "
    "a NamedSharding, got a LayoutMap. Instead of a map, give "
    "layouts.resolve(tree).layouts.",
    "ma.zeros((12, 8), B, 'float32')": "f32[12, 8]: dim 0 has size 12, which does not "
    "divide into 8 shards over mesh axis 'batch' (Layout([batch, unsharded], "
    "Mesh(batch=8))). Nearest sizes that fit: 8 and 16. To keep the size, leave dim 0 "
    "UNSHARDED.",
}


@pytest.mark.parametrize("code", BAD)
def test_what_is_refused_says_where_what_and_the_way_out(code):
    assert message_of(eval, code, globals(), error=ml.errors.LayoutError) == BAD[code]


def test_a_shard_inside_shard_map_cannot_be_moved():
    move = lambda x: ma.relayout({"x": x}, BATCH_8.layout(ml.MATCH, None))
    options = {"mesh": BATCH_8.jax_mesh, "in_specs": P("batch"), "out_specs": P()}
    assert message_of(
        jax.shard_map(move, **options), jnp.ones((16, 8)), error=ml.errors.LayoutError
    ) == (
        "x f32[2, 8]: inside shard_map every device works on its own shard, which "
        "relayout cannot move. Call it outside shard_map."
    )


def test_a_layout_on_other_axes_than_those_that_are_set_is_refused_inside_jit():
    move = jax.jit(lambda x: ma.relayout(x, MESH_2X4.layout("batch", None)))
    with (
        jax.set_mesh(EXPLICIT.jax_mesh),
        pytest.raises(ml.errors.LayoutError, match="JAX cannot move it to"),
    ):
        move(np.ones((8, 8), "float32"))


def doors(mesh):
    """Every function that takes arrays of the host; each returns the whole value."""
    layout = mesh.layout("batch", None)
    return {
        "relayout": lambda x: ml.relayout(x, layout),
        "relayout, donate": lambda x: ml.relayout(x, layout, donate=True),
        "relayout in jit": lambda x: jax.jit(lambda: ml.relayout(x, layout))(),
        "copy_to_mesh": lambda x: ml.copy_to_mesh(x, layout),
        "copy_to_mesh of a tree": lambda x: ml.copy_to_mesh({"x": [x]}, layout)["x"][0],
        "pack": lambda x: ml.pack([x] * 8, mesh.layout(None, None)),
        "to_numpy": lambda x: ml.to_numpy(x),
    }


@pytest.mark.parametrize("door", list(doors(BATCH_8)))
def test_other_byte_orders_keep_their_values_and_masks_are_refused(door):
    place = doors(BATCH_8)[door]
    for dtype in (">f4", ">i8"):
        placed = place(np.arange(16, dtype=dtype).reshape(8, 2))
        assert np.array_equal(ml.to_numpy(placed), np.arange(16).reshape(8, 2))
        assert np.asarray(placed).dtype.isnative
    x = np.ma.masked_array(np.ones((8, 2), "float32"), mask=[[0, 1]] * 8)
    with pytest.raises(ml.MeshLayoutError, match="is a masked array, and JAX would"):
        place(x)
