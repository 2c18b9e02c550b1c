"""States born sharded: the same bits as without a mesh, and never whole on a device."""

import contextlib
import gc
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax import experimental  # noqa: TID251
from jax.sharding import AxisType

import meshlayout as ml
from meshlayout.state import operations
from models.mlp import MLP
from tests.error_messages import message_of
from tests.flax_versions import module_list
from tests.same_bits import assert_same_bits, plain
from tests.small_states import linear, mesh_of


# jax 0.7.2 has it there.
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else experimental.enable_x64

MESHES = {
    "8": mesh_of(model=8),
    "2x4": mesh_of(batch=2, model=4),
    "2x2x2": mesh_of(batch=2, fsdp=2, model=2),
    "3": mesh_of(model=3),
    "last 4": mesh_of(range(4, 8), batch=2, model=2),
    "explicit": ml.create_mesh({"batch": 2, "model": 4}, axis_types="explicit"),
    "auto and explicit": ml.create_mesh(
        {"batch": 2, "model": 4}, axis_types=(AxisType.Auto, AxisType.Explicit)
    ),
}
ONE = mesh_of(model=1)


def map_of(mesh, *spec):
    """A layout map of everything, to which `all` means all axes; scalars stay whole."""
    spec = [mesh.axis_names if entry == "all" else entry for entry in spec]

    def rule(path, shape, dtype):
        return spec if shape else None

    return ml.LayoutMap(mesh, {".*": rule} if spec else {}, on_uneven="replicate")


FIRST, LAST = ("model", ...), (..., "model")


class Block(nnx.Module):
    def __init__(self, features, *, rngs):
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.dense = nnx.Linear(features, features, rngs=rngs)

    def __call__(self, x):
        return x + self.dense(self.norm(x))


@nnx.split_rngs(splits=8)
@nnx.vmap(in_axes=(0,), out_axes=0)
def stacked(rngs):
    return Block(16, rngs=rngs)


class Everything(nnx.Module):
    """Most layers that NNX has, a list of blocks, tied parameters, other attributes."""

    def __init__(self, *, rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=32, decode=False, rngs=rngs
        )
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.lora = nnx.LoRA(32, 4, 32, rngs=rngs)
        self.blocks = module_list([Block(32, rngs=rngs) for _ in range(3)])
        self.tied = self.blocks[0].dense.kernel
        self.lstm = nnx.LSTMCell(32, 16, rngs=rngs)
        self.stacked = stacked(rngs)
        self.name = "everything"
        self.sizes = (1, 2, 3)


class LinenEverything(nn.Module):
    """Linen layers with other collections, automatic names and a scanned block."""

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.Dense(16)(nn.LayerNorm()(x)), None

        x = nn.Dense(16)(x)
        x = nn.BatchNorm(use_running_average=False)(x)
        x, _ = nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4
        )()(x, None)
        self.variable("cache", "seen", lambda: jnp.zeros((8,), jnp.int32))
        return nn.Dense(8, kernel_init=nn.initializers.orthogonal())(x)


def pytree():
    key = jax.random.key(3)
    return {
        "key": key,
        "keys": jax.random.split(key, 8),
        "legacy": jax.random.PRNGKey(3),
        "rbg": jax.random.key(1, impl="rbg"),
        "half": jax.random.normal(key, (16, 8)).astype(jnp.bfloat16) * 3,
        "numpy": np.arange(48.0).reshape(8, 6),
        "tiny": np.arange(8).astype(ml_dtypes.bfloat16),
        "scalar": np.float32(3.5),
        "int": 3,
        "float": 2.5,
        "bool": True,
        "text": "hello",
        "none": None,
        "nested": [jnp.arange(8), (jnp.ones((0, 8)), jnp.zeros(())), []],
        "complex": jnp.ones((8,)) * 1j,
        "small": jnp.arange(16, dtype=jnp.uint8),
    }


def sums():
    """Arrays whose last bits depend on the order in which elements are added."""
    x = jax.random.normal(jax.random.key(5), (64, 48))
    return {"mean": x.mean(0), "norm": x / jnp.linalg.norm(x), "product": x.T @ x}


BUILDERS = {
    "sums": sums,
    "everything": lambda: Everything(rngs=nnx.Rngs(0)),
    "linen everything": lambda: LinenEverything().init(
        jax.random.key(4), jnp.ones((2, 4))
    ),
    "pytree": pytree,
    "one array": lambda: jnp.linspace(0.0, 1.0, 64),
    "pair": lambda: (
        nnx.Linear(8, 16, rngs=nnx.Rngs(1)),
        {"step": jnp.zeros(()), "n": 3},
    ),
}


# Every builder, every mesh and every map, and not all of their combinations: each costs
# many compilations.
@pytest.mark.parametrize(
    ("mesh_name", "spec", "name"),
    [
        ("8", FIRST, "everything"),
        ("8", FIRST, "linen everything"),
        ("8", (..., "all"), "pytree"),
        ("8", FIRST, "sums"),
        ("2x4", (), "pair"),
        ("2x2x2", ("all", ...), "one array"),
        ("last 4", LAST, "pair"),
        ("explicit", LAST, "pair"),
        ("auto and explicit", LAST, "pair"),
    ],
)
def test_every_array_has_the_maps_layout_and_the_bits_of_building_without_a_mesh(
    mesh_name, spec, name
):
    expected = BUILDERS[name]()
    layouts = map_of(MESHES[mesh_name], *spec)
    made = ml.create(BUILDERS[name], layouts)
    assert_same_bits(made, expected)
    sharded = assert_lies(made, layouts.resolve(expected).layouts)
    assert (sharded > 0) == bool(spec)
    if "everything" in name:  # what Flax makes is the same in a scope
        with ml.scope(layouts):
            scoped = BUILDERS[name]()
        assert_same_bits(scoped, expected)
        assert_lies(scoped, layouts.resolve(expected).layouts)


def initializers():
    """Flax's initializers, which are JAX's, by name; some have two names."""
    functions, made = {}, nnx.initializers
    for name in dir(made):
        function = getattr(made, name)
        if inspect.isfunction(function) and function not in functions.values():
            functions[name] = function
    arguments = {"constant": (0.3,), "variance_scaling": (2.0, "fan_avg", "uniform")}
    plain = ("zeros", "ones")
    return {
        name: function if name in plain else function(*arguments.get(name, ()))
        for name, function in functions.items()
        if not name.endswith("_init")  # as `zeros_init`, which returns `zeros`
    }


# Alike, so that what they have in common compiles once.
ODD = [
    ("2x4", (3, 24, 7), (None, ("batch", "model"), None), "float32"),
    pytest.param(
        *("3", (5, 11, 33), (None, None, "model"), "bfloat16"), marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("name", initializers())
@pytest.mark.parametrize(("mesh_name", "shape", "spec", "dtype"), ODD)
def test_every_initializer_has_its_bits_in_odd_shapes(
    name, mesh_name, shape, spec, dtype
):
    if "orthogonal" in name:  # QR is of float32
        shape, dtype = (3, 8, 24) if mesh_name == "2x4" else (3, 5, 33), "float32"

    def build():
        return initializers()[name](jax.random.key(1), shape, jnp.dtype(dtype))

    layouts = ml.LayoutMap(MESHES[mesh_name], default=spec)
    assert_same_bits(ml.create(build, layouts), build())


def assert_lies(made, layouts):
    """Asserts that arrays have the layouts; returns how many of them are sharded."""
    layouts = jax.tree.leaves_with_path(plain(layouts))
    sharded = 0
    for path, leaf in jax.tree.leaves_with_path(plain(made)):
        if not isinstance(leaf, jax.Array):
            continue
        (layout,) = (v for p, v in layouts if p == path)
        assert ml.Layout.of(leaf) == layout
        shapes = {shard.data.shape for shard in leaf.addressable_shards}
        assert shapes == {layout.shard_shape(leaf.shape)}
        sharded += not layout.is_fully_replicated
    return sharded


def lecun(seed, shape=(512, 512)):
    return nnx.initializers.lecun_normal()(jax.random.key(seed), shape)


@pytest.mark.parametrize(
    ("build", "spec"),
    [
        (lambda: nnx.Embed(2048, 512, rngs=nnx.Rngs(0)), (..., "model")),
        (lambda: nnx.Conv(64, 256, (3, 3), rngs=nnx.Rngs(0)), (..., "model")),
        # Moved into its layout at the end.
        (lambda: nnx.LinearGeneral(512, (4, 256), rngs=nnx.Rngs(0)), (..., "model")),
        # Parts that are joined are cut as the whole will be.
        (lambda: jnp.stack([lecun(n) for n in range(4)]), (None, None, "model")),
        (lambda: jnp.concatenate([lecun(0), lecun(1)]), ("model", None)),
        (lambda: lecun(0).reshape(8, 64, 512), (None, None, "model")),
    ],
)
def test_no_compiled_operation_holds_a_whole_leaf(monkeypatch, build, spec):
    """Reads the compiled programs themselves."""
    programs, jitted = [], operations._program

    def recorded(*key, **options):
        def run(*operands):
            program = jitted(*key, **options)
            programs.append(program.lower(*operands).compile())
            return program(*operands)

        return run

    monkeypatch.setattr(operations, "_program", recorded)
    mesh = MESHES["8"]
    layouts = ml.LayoutMap(mesh, default=spec, on_uneven="replicate")
    made = ml.create(build, layouts)
    leaves = [leaf for leaf in jax.tree.leaves(plain(made)) if leaf.size > 4096]
    largest = max(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert programs
    for program in programs:
        analysis = program.memory_analysis()
        # On CPUs, JAX draws random numbers in a loop that holds three arrays.
        assert analysis.output_size_in_bytes <= largest
        assert analysis.temp_size_in_bytes <= 4 * largest
        assert analysis.argument_size_in_bytes <= 2 * largest + 4096


def test_a_description_makes_nothing_and_knows_everything(mesh_2x4):
    layouts = ml.LayoutMap(mesh_2x4, {"kernel": (None, "model")})
    gc.collect()
    before = len(jax.live_arrays())
    plan = ml.describe(lambda: MLP(12, rngs=nnx.Rngs(0)), layouts)
    # And what does not fit is refused before anything is made.
    said = message_of(ml.create, lambda: MLP(rngs=nnx.Rngs(0)), layouts)
    assert said.startswith("output/kernel f32[128, 10]: dim 1 has size 10")
    assert len(jax.live_arrays()) == before
    kernel = nnx.to_pure_dict(nnx.state(plan.abstract))["hidden"]["kernel"]
    assert kernel.shape == (784, 128)
    assert ml.Layout.of(kernel) == mesh_2x4.layout(None, "model")
    paths = [one.path for one in plan.resolutions]
    names = "hidden/bias", "hidden/kernel", "output/bias", "output/kernel"
    assert paths == [*names]
    plan = ml.describe(linear, layouts)
    assert_same_bits(plan.create(), linear())


def pointers(tree):
    return [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]


def test_shards_of_one_element_have_the_bits_of_the_array():
    def build():
        return jax.random.normal(jax.random.key(6), (8,)) / 0.3

    layouts = ml.LayoutMap(ml.create_mesh({"batch": 8}), default=("batch",))
    assert_same_bits(ml.create(build, layouts), build())


def test_every_leaf_has_memory_of_its_own():
    given, host = jnp.arange(8.0), np.ones(8, np.float32)
    for mesh in (ONE, MESHES["8"]):

        def build():
            x = jnp.ones((8,))
            return {"x": x, "same": x, "given": given, "twice": given, "host": host}

        made = ml.create(build, ml.LayoutMap(mesh, {".*": ("model",)}))
        host[:] = 2
        assert made["host"].sum() == 8
        host[:] = 1
        found = pointers([made, given])
        assert len(set(found)) == len(found)
        jax.jit(lambda tree: tree, donate_argnums=0)(made)
        assert given.sum() == 28


def test_linen_metadata_boxes_stay_as_init_gives_them(mesh_2x4):
    boxed = nn.with_partitioning(nn.initializers.ones, (None, "model"))
    build = lambda: nn.Dense(8, kernel_init=boxed).init(
        jax.random.key(0), jnp.ones((1, 8))
    )
    kernel = ml.create(build, ml.LayoutMap(mesh_2x4))["params"]["kernel"]
    assert isinstance(kernel, nn.Partitioned)
    assert ml.Layout.of(kernel.value) == mesh_2x4.layout(None, "model")


def under_both_settings():
    """Operations keep the settings they were traced under."""
    drawn = []
    for is_partitionable in (False, True):
        with jax.threefry_partitionable(is_partitionable):
            drawn.append(jax.random.normal(jax.random.key(0), (8, 8)))
    return drawn


def large():
    key, shape = jax.random.key(0), (64, 4096)
    truncated = jax.random.truncated_normal(key, -2, 2, shape)
    return truncated, jax.random.normal(key, shape), jax.random.uniform(key, shape)


def of_64_bits():
    return {"w": jax.random.normal(jax.random.key(0), (8, 8)), "n": np.arange(8.0)}


@pytest.mark.parametrize(
    ("build", "context"),
    [
        (linear, lambda: jax.default_device(jax.devices()[5])),
        (linear, lambda: jax.debug_nans(True)),
        (linear, jax.disable_jit),
        (under_both_settings, contextlib.nullcontext),
        (large, contextlib.nullcontext),
        (of_64_bits, lambda: enable_x64(True)),
    ],
)
def test_values_do_not_depend_on_the_context(mesh_2x4, build, context):
    with context() if build is of_64_bits else contextlib.nullcontext():
        expected = build()
    with context():
        made = ml.create(build, map_of(mesh_2x4, *LAST))
        assert_same_bits(made, expected)
        if build is of_64_bits:
            assert made["w"].dtype == made["n"].dtype == np.float64
    if build is linear:  # of one structure: tree maps take both
        jax.tree.map(np.testing.assert_array_equal, *map(nnx.state, (made, expected)))
        assert ml.Layout.of(made.kernel[...]) == mesh_2x4.layout(None, "model")


RNGS = nnx.Rngs(0)
GIVE = "Give a function that builds the state, such as lambda: Model(...)."
BAD_BUILDERS = {
    lambda: nnx.Linear(8, 8, rngs=RNGS): "the builder changes an NNX object that was "
    "made outside of it, such as nnx.Rngs. Make it inside: create(lambda: "
    "Model(rngs=nnx.Rngs(0)), layouts); or, inside ml.scope(layouts), give it as an "
    "argument. Of a model that exists, return nnx.clone(model). (",
    3: f"create: build must be a function, got 3. {GIVE}",
    Block: "create: build is called as build(), but takes (features, rngs). " + GIVE,
    lambda: None: "create: the builder returned None. Does it end without `return`?",
    lambda: ml.create(lambda: jnp.ones(8), ml.LayoutMap(ONE)): "create was called "
    "inside a function that JAX transforms, or in a builder of create. Call it outside; "
    "describe(build, layouts).abstract has the shapes alone.",
    lambda: jax.eval_shape(lambda: jnp.ones(8)): "the builder returned shapes without "
    "values, as jax.eval_shape does.",
    lambda: np.array([2**40]): "an array that the builder returns holds 1099511627776, "
    "and JAX would turn int64 into int32. Set jax_enable_x64, or give it another dtype.",
}


@pytest.mark.parametrize("build", BAD_BUILDERS)
def test_what_is_not_a_builder_is_refused(build):
    said, message = message_of(ml.create, build, ml.LayoutMap(ONE)), BAD_BUILDERS[build]
    assert said == message or (message[-1] == "(" and said.startswith(message))


def test_without_a_map_every_device_holds_everything():
    value = ml.create(lambda: {"a": jnp.arange(8.0)})["a"]
    assert len(value.addressable_shards) == len(jax.devices())
    assert all(shard.data.shape == (8,) for shard in value.addressable_shards)
    state = ml.TrainState.create(
        lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)), optax.sgd(0.1)
    )
    assert state.layouts.params["kernel"].mesh.shape == {"batch": len(jax.devices())}
    with jax.set_mesh(ONE.jax_mesh):
        assert ml.describe(lambda: jnp.ones(3)).layouts.mesh == ONE
