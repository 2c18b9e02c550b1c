"""States born sharded: the same bits as without a mesh, and never whole on a device."""

import gc
import re
import time
from typing import Any

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
from models.convnet import ConvNet, LinenConvNet
from models.mlp import MLP, LinenMLP
from tests.flax_versions import module_list
from tests.same_bits import assert_same_bits, plain


# jax 0.7.2 has it there.
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else experimental.enable_x64

MESHES = {
    "8": lambda: ml.create_mesh({"model": 8}),
    "2x4": lambda: ml.create_mesh({"batch": 2, "model": 4}),
    "2x2x2": lambda: ml.create_mesh({"batch": 2, "fsdp": 2, "model": 2}),
    "1": lambda: ml.create_mesh({"model": 1}, devices=jax.devices()[3:4]),
    "last 4": lambda: ml.create_mesh(
        {"batch": 2, "model": 2}, devices=jax.devices()[4:]
    ),
}


def first_dim(path, shape, dtype):
    return ("model", *[None] * (len(shape) - 1)) if shape else None


def last_dim(path, shape, dtype):
    return (..., "model") if shape else None


def every_axis_on_the_last_dim(mesh):
    return lambda path, shape, dtype: (..., mesh.axis_names) if shape else None


def every_axis_on_the_first_dim(mesh):
    return lambda path, shape, dtype: (mesh.axis_names, ...) if shape else None


def maps(mesh):
    """Layout maps of all kinds; what does not divide stays whole."""
    rules = {
        "replicated": {},
        "first": {".*": first_dim},
        "last": {".*": last_dim},
        "all on the last": {".*": every_axis_on_the_last_dim(mesh)},
        "all on the first": {".*": every_axis_on_the_first_dim(mesh)},
    }
    return {
        name: ml.LayoutMap(mesh, rule, on_uneven="replicate")
        for name, rule in rules.items()
    }


# Which maps are tried on which mesh: each pair of them costs many compilations.
TRIED = {
    "8": ("all on the last", "first"),
    "2x4": ("first", "last", "replicated"),
    "2x2x2": ("all on the first", "all on the last"),
    "1": ("last",),
    "last 4": ("all on the last",),
}


class Block(nnx.Module):
    def __init__(self, features, *, rngs):
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.dense = nnx.Linear(features, features, rngs=rngs)

    def __call__(self, x):
        return x + self.dense(self.norm(x))


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
        self.name = "everything"
        self.sizes = (1, 2, 3)


class Expressions(nnx.Module):
    """Parameters that a compiler would like to fuse."""

    def __init__(self, *, rngs):
        a = jax.random.normal(rngs.params(), (64, 48))
        b = jax.random.uniform(rngs.params(), (64, 48), minval=-3.0)
        self.fused = nnx.Param(a * b + 0.1)
        self.chained = nnx.Param((a * 1.7 + b) * 0.3 - a / 3.0)
        self.sin = nnx.Param(jnp.sin(a) * jnp.exp(b) / jnp.sqrt(48.0))
        self.shuffled = nnx.Param(jax.random.permutation(rngs.params(), a))
        self.sum = nnx.Param(a.sum(axis=0))
        self.product = nnx.Param(a @ b.T)
        self.mean = nnx.Param((a - a.mean(0, keepdims=True)) / a.std())
        self.orthogonal = nnx.Param(
            jax.nn.initializers.orthogonal()(rngs.params(), (64, 32))
        )
        self.truncated = nnx.Param(
            jax.nn.initializers.truncated_normal(0.02)(rngs.params(), (32, 64))
        )
        self.he = nnx.Param(jax.nn.initializers.he_normal()(rngs.params(), (128, 64)))
        self.categorical = nnx.Variable(
            jax.random.categorical(rngs.params(), a, axis=-1)
        )
        self.bernoulli = nnx.Variable(jax.random.bernoulli(rngs.params(), 0.3, (64,)))
        self.cumulative = nnx.Variable(jnp.cumsum(a, axis=0))
        self.sorted = nnx.Variable(jnp.sort(a, axis=0))
        self.angles = nnx.Variable(
            jnp.outer(jnp.arange(64), 1.0 / 10000 ** (jnp.arange(0, 32, 2) / 32))
        )
        self.mask = nnx.Variable(jnp.tril(jnp.ones((64, 64), bool)))
        self.table = nnx.Variable(jnp.linspace(-1, 1, 64)[jnp.arange(64) % 7])


class Stacked(nnx.Module):
    def __init__(self, *, rngs):
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Block(16, rngs=rngs)

        self.layers = make(rngs)

        @nnx.split_rngs(splits=8)
        @nnx.scan(in_axes=(0,), out_axes=0)
        def more(rngs):
            return Block(16, rngs=rngs)

        self.scanned = more(rngs)


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
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=4,
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


def optimizer_state():
    params = {"a": jax.random.normal(jax.random.key(0), (16, 24)), "b": jnp.ones(8)}
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1, 9))
    )
    return {"params": params, "opt": optimizer.init(params)}


BUILDERS = {
    "mlp": lambda: MLP(rngs=nnx.Rngs(1)),
    "convnet": lambda: ConvNet(rngs=nnx.Rngs(2)),
    "conv": lambda: nnx.Conv(3, 16, (3, 3), rngs=nnx.Rngs(2)),
    "everything": lambda: Everything(rngs=nnx.Rngs(0)),
    "expressions": lambda: Expressions(rngs=nnx.Rngs(params=5, dropout=7)),
    "stacked": lambda: Stacked(rngs=nnx.Rngs(0)),
    "linen mlp": lambda: LinenMLP().init(jax.random.key(0), jnp.ones((1, 28, 28, 1))),
    "linen convnet": lambda: LinenConvNet().init(
        jax.random.key(0), jnp.ones((1, 28, 28, 1))
    ),
    "linen everything": lambda: LinenEverything().init(
        jax.random.key(4), jnp.ones((2, 4))
    ),
    "pytree": pytree,
    "optimizer": optimizer_state,
    "one array": lambda: jnp.linspace(0.0, 1.0, 64),
    "pair": lambda: (
        nnx.Linear(8, 16, rngs=nnx.Rngs(1)),
        {"step": jnp.zeros(()), "n": 3},
    ),
}


# What `make test` tries: every builder, every mesh and every map, and not all of their
# combinations.
SOON = {
    ("8", "all on the last"): ("conv", "pytree", "optimizer"),
    ("8", "first"): ("everything", "linen everything"),
    ("2x4", "first"): ("pair",),
    ("2x4", "last"): ("pair",),
    ("2x4", "replicated"): ("pair",),
    ("2x2x2", "all on the first"): ("one array",),
    ("2x2x2", "all on the last"): ("pair",),
    ("1", "last"): ("one array",),
    ("last 4", "all on the last"): ("one array",),
}
# Linen's and NNX's make the same arrays; the expressions compile for long, and so do the
# stacked layers, of which test_scope has some.
SLOW_ALONE = (
    *("mlp", "linen mlp", "convnet", "linen convnet"),
    *("expressions", "stacked"),
)


@pytest.mark.parametrize(
    ("mesh_name", "kind", "name"),
    [
        pytest.param(
            *(mesh_name, kind, name),
            marks=[pytest.mark.slow] * (name not in SOON[mesh_name, kind]),
            id=f"{name}-{mesh_name}-{kind}",
        )
        for name in BUILDERS
        for mesh_name, kinds in TRIED.items()
        for kind in kinds
    ],
)
def test_every_array_has_the_maps_layout_and_the_bits_of_building_without_a_mesh(
    mesh_name, kind, name
):
    expected = BUILDERS[name]()
    layouts = maps(MESHES[mesh_name]())[kind]
    made = ml.create(BUILDERS[name], layouts)
    assert_same_bits(made, expected)
    sharded = assert_lies(made, layouts.resolve(expected).layouts)
    is_split = kind != "replicated" and mesh_name != "1"
    assert (sharded > 0) == is_split
    assert sharded > 3 or not is_split or name not in LARGE


def test_every_builder_is_tried_soon():
    assert {*BUILDERS} == {*SLOW_ALONE}.union(*SOON.values())
    assert {*SOON} == {(mesh, kind) for mesh in TRIED for kind in TRIED[mesh]}


LARGE = ("convnet", "linen everything", "stacked", "pytree")


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


# No leaf is ever whole on a device.

LAYERS, WIDTH = 32, 256


class Tower(nnx.Module):
    def __init__(self, *, rngs):
        self.layers = module_list(
            [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)]
        )


def test_making_a_model_takes_little_more_than_its_shards():
    mesh = ml.create_mesh({"model": 8})
    layouts = ml.LayoutMap(mesh, {".*": (..., "model")})
    plan = ml.describe(lambda: Tower(rngs=nnx.Rngs(0)), layouts)
    memory = plan.memory()
    whole = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
    assert memory.state_bytes == whole // 8
    assert memory.peak_bytes <= 1.1 * memory.state_bytes


@pytest.mark.parametrize(
    "spec",
    [pytest.param(("model", None), marks=pytest.mark.slow), (None, "model")],
)
def test_a_train_state_takes_little_more_than_its_shards(spec):
    mesh = ml.create_mesh({"model": 8})
    layouts = ml.LayoutMap(mesh, {"kernel": spec, "bias": ("model",)})
    plan = ml.TrainState.describe(
        lambda: Tower(rngs=nnx.Rngs(0)), optax.adam(1e-3), layouts
    )
    memory = plan.memory()
    assert memory.state_bytes <= 3 * LAYERS * (WIDTH * WIDTH + WIDTH) * 4 // 8 + 64
    assert memory.peak_bytes <= 1.1 * memory.state_bytes


@pytest.mark.parametrize(
    "build",
    [
        lambda: nnx.Embed(2048, 512, rngs=nnx.Rngs(0)),
        lambda: nnx.Conv(64, 256, (3, 3), rngs=nnx.Rngs(0)),
        lambda: jax.random.truncated_normal(jax.random.key(0), -2, 2, (512, 1024)),
    ],
)
def test_one_large_leaf_takes_no_more_than_its_shards_either(build):
    layouts = ml.LayoutMap(ml.create_mesh({"model": 8}), {".*": (..., "model")})
    memory = ml.describe(build, layouts).memory()
    assert memory.peak_bytes <= 1.1 * memory.state_bytes


def test_a_leaf_that_is_moved_into_its_layout_takes_two_of_its_shards():
    layouts = ml.LayoutMap(ml.create_mesh({"model": 8}), {".*": (..., "model")})
    memory = ml.describe(
        lambda: nnx.LinearGeneral(512, (4, 256), rngs=nnx.Rngs(0)), layouts
    ).memory()
    assert memory.peak_bytes <= 2.1 * memory.state_bytes


def lecun(seed, shape=(512, 512)):
    return nnx.initializers.lecun_normal()(jax.random.key(seed), shape)


@pytest.mark.parametrize(
    ("build", "spec"),
    [
        (lambda: jnp.stack([lecun(n) for n in range(4)]), (None, None, "model")),
        (lambda: jnp.concatenate([lecun(0), lecun(1)]), ("model", None)),
        pytest.param(
            lambda: jnp.concatenate([lecun(0), lecun(1)], 1),
            (None, "model"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: lecun(0, (512, 1024)).T, ("model", None), marks=pytest.mark.slow
        ),
        (lambda: lecun(0).reshape(8, 64, 512), (None, None, "model")),
    ],
)
def test_parts_that_are_joined_are_cut_as_the_whole_will_be(build, spec):
    layouts = ml.LayoutMap(ml.create_mesh({"model": 8}), default=spec)
    memory = ml.describe(build, layouts).memory()
    assert memory.peak_bytes <= 2.1 * memory.state_bytes


def test_no_compiled_operation_holds_a_whole_leaf(monkeypatch):
    """Reads the compiled programs themselves, apart from the library's accounting."""
    programs = []

    compile_operation = operations._compile

    def recorded(key):
        programs.append(compile_operation(key))
        return programs[-1]

    monkeypatch.setattr(operations, "_compile", recorded)
    mesh = ml.create_mesh({"model": 8})
    layouts = ml.LayoutMap(mesh, {".*": (..., "model")})

    def build():
        rngs = nnx.Rngs(0)
        return {
            "dense": nnx.Linear(256, 768, rngs=rngs),
            "embed": nnx.Embed(1536, 512, rngs=rngs),
            "ones": nnx.Param(jnp.ones((384, 640))),
            "uniform": nnx.Param(jax.random.uniform(rngs(), (640, 896))),
        }

    ml.create(build, layouts)
    assert len(programs) > 10
    leaves = [(256, 768), (1536, 512), (384, 640), (640, 896)]
    shards = {rows * columns * 4 // 8 for rows, columns in leaves}
    seen = set()
    for program in programs:
        for shape in re.findall(r"\w+\[([\d,]+)\]", program.as_text()):
            dims = tuple(map(int, shape.split(",")))
            assert dims not in leaves
        analysis = program.memory_analysis()
        made = analysis.output_size_in_bytes
        assert analysis.temp_size_in_bytes <= 4096
        assert analysis.argument_size_in_bytes <= made + 4096
        seen.update(shards.intersection({made}))
    assert seen == shards


def test_a_description_makes_nothing_and_knows_everything(mesh_2x4):
    layouts = ml.LayoutMap(mesh_2x4, {"kernel": (None, "model")}, on_uneven="replicate")
    gc.collect()
    before = len(jax.live_arrays())
    plan = ml.describe(lambda: MLP(rngs=nnx.Rngs(0)), layouts)
    assert len(jax.live_arrays()) == before
    kernel = nnx.to_pure_dict(nnx.state(plan.abstract))["hidden"]["kernel"]
    assert kernel.shape == (784, 128)
    assert ml.Layout.of(kernel) == mesh_2x4.layout(None, "model")
    assert [one.path for one in plan.resolutions] == [
        "hidden/bias",
        "hidden/kernel",
        "output/bias",
        "output/kernel",
    ]
    plan = ml.describe(lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)), layouts)
    assert_same_bits(plan.create(), nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    assert_same_bits(plan.create(), plan.create())


def test_an_abstract_state_has_the_dtypes_of_the_state(mesh_2x4):
    layouts = ml.LayoutMap(mesh_2x4)
    abstract = ml.describe(pytree, layouts).abstract
    made = ml.create(pytree, layouts)
    for one, other in zip(
        jax.tree.leaves(abstract), jax.tree.leaves(made), strict=True
    ):
        if isinstance(other, jax.Array):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert one.sharding == other.sharding
        else:
            assert one == other


def test_memory_counts_arrays_that_exist_already(mesh_2x4):
    layouts = ml.LayoutMap(mesh_2x4, {"a": ("model",)})
    plan = ml.describe(lambda: {"a": np.ones(8), "b": jnp.ones(4), "n": 3}, layouts)
    assert plan.memory().state_bytes == 2 * 4 + 4 * 4
    empty = ml.describe(lambda: None, ml.LayoutMap(mesh_2x4))
    assert empty.memory().state_bytes == 0


# What a state shares with nothing else, and what it keeps.


def pointers(tree):
    return [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]


def test_every_leaf_has_memory_of_its_own():
    given = jnp.arange(8.0)
    one_device = ONE
    for mesh in (one_device, ml.create_mesh({"model": 8})):

        def build():
            x = jnp.ones((8,))
            return {"x": x, "same": x, "given": given, "given twice": given}

        made = ml.create(build, ml.LayoutMap(mesh, {".*": ("model",)}))
        found = pointers([made, given])
        assert len(set(found)) == len(found)
        jax.jit(lambda tree: tree, donate_argnums=0)(made)
        assert given.sum() == 28


def test_numpy_arrays_may_change_after_they_were_given():
    host = np.ones(8, np.float32)
    mesh = ONE
    made = ml.create(lambda: {"w": host}, ml.LayoutMap(mesh))
    host[:] = 2
    assert made["w"].sum() == 8


def test_tied_parameters_stay_one_parameter(mesh_2x4):
    def build() -> Any:
        rngs = nnx.Rngs(0)
        one, other = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        other.kernel = one.kernel
        return nnx.Sequential(one, other)

    made = ml.create(build, ml.LayoutMap(mesh_2x4, {"kernel": (None, "model")}))
    assert made.layers[0].kernel is made.layers[1].kernel


def test_linen_metadata_boxes_stay_as_init_gives_them(mesh_2x4):
    dense = nn.Dense(
        8, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "model"))
    )
    layouts = ml.LayoutMap(mesh_2x4)
    made = ml.create(lambda: dense.init(jax.random.key(0), jnp.ones((1, 8))), layouts)
    kernel = made["params"]["kernel"]
    assert isinstance(kernel, nn.Partitioned)
    assert ml.Layout.of(kernel.value) == mesh_2x4.layout(None, "model")


class Rows(nnx.Module):
    """As many layers as asked for, each of which draws from one stream."""

    def __init__(self, num_layers):
        rngs = nnx.Rngs(0)
        layers = [nnx.Linear(2, 2, rngs=rngs) for _ in range(num_layers)]
        self.layers = module_list(layers)


def test_describing_takes_time_in_proportion_to_the_layers(mesh_2x4):
    layouts = ml.LayoutMap(mesh_2x4, {"kernel": (None, None)})

    def cpu_seconds(num_layers):
        start = time.process_time()
        ml.describe(lambda: Rows(num_layers), layouts)
        return time.process_time() - start

    cpu_seconds(2)
    small = min(cpu_seconds(20) for _ in range(3))
    # 4 times the layers: 4 times the time, and 16 if it were quadratic.
    assert min(cpu_seconds(80) for _ in range(2)) < 8 * small


def test_a_traced_value_has_the_attributes_that_jax_gives_it():
    before = vars(jax.core.Tracer).get("sharding")
    inside = []

    def build():
        x = jnp.ones(3)
        inside.append((hasattr(x, "sharding"), getattr(x, "sharding", "none")))
        with pytest.raises(AttributeError):
            _ = x.sharding
        return x

    ml.create(build, ml.LayoutMap(ONE))
    assert inside == [(False, "none")]
    assert vars(jax.core.Tracer).get("sharding") is before


def test_the_builder_runs_once(mesh_2x4):
    runs = []

    def build():
        runs.append(1)
        return jnp.ones(8)

    ml.create(build, ml.LayoutMap(mesh_2x4))
    assert len(runs) == 1


@pytest.mark.parametrize(
    "context",
    [
        lambda mesh: jax.set_mesh(mesh.jax_mesh),
        lambda mesh: jax.set_mesh(jax.make_mesh((8,), ("other",), (AxisType.Auto,))),
        lambda mesh: jax.default_device(jax.devices()[5]),
        lambda mesh: jax.debug_nans(True),
        lambda mesh: jax.default_matmul_precision("float32"),
    ],
)
def test_values_do_not_depend_on_the_context(mesh_2x4, context):
    expected = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    layouts = ml.LayoutMap(mesh_2x4, {"kernel": ("batch", "model")})
    with context(mesh_2x4):
        made = ml.create(lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)), layouts)
    assert_same_bits(made, expected)
    assert ml.Layout.of(made.kernel[...]) == mesh_2x4.layout("batch", "model")


@pytest.mark.slow
def test_values_without_jit_are_those_of_building_without_jit(mesh_2x4):
    layouts = ml.LayoutMap(mesh_2x4, {"kernel": ("batch", "model")})
    with jax.disable_jit():
        made = ml.create(lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)), layouts)
        assert_same_bits(made, nnx.Linear(16, 16, rngs=nnx.Rngs(0)))


BROADCASTS = {
    "unit columns": lambda x: x / jnp.linalg.norm(x, axis=0, keepdims=True),
    "by the first": lambda x: x / jnp.abs(x[:1]),
    "softmax": lambda x: jax.nn.softmax(x, 0),
    "standardised": lambda x: (x - x.mean(0, keepdims=True)) / x.std(0, keepdims=True),
}


# Two of them with one shape soon, and all of them with all in test-all.
BROADCAST_SHAPES = [(8, 16), (8, 256), (8, 16, 64), (8, 32768)]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=[pytest.mark.slow] * (number != 2 * kind))
        for number, name in enumerate(BROADCASTS)
        for kind, shape in enumerate(BROADCAST_SHAPES)
    ],
)
def test_dividing_by_a_broadcast_array_keeps_its_bits(name, shape):
    def build():
        return BROADCASTS[name](jax.random.normal(jax.random.key(0), shape))

    expected = build()
    mesh = ml.create_mesh({"batch": 2, "model": 4})
    for spec in ((("batch", "model"), ...), ("model", ...), (..., "model")):
        layouts = ml.LayoutMap(mesh, default=spec)
        assert_same_bits(ml.create(build, layouts), expected)


def wavy(x):
    return jnp.sin(x) * 3.1 + x


def own_jvp(x):
    return jnp.exp(x) * 0.3 - x


own_jvp = jax.custom_jvp(own_jvp)
own_jvp.defjvp(lambda primals, tangents: (own_jvp(*primals), tangents[0]))
own_vjp = jax.custom_vjp(lambda x: jnp.cos(x) / 3.0 + x)
own_vjp.defvjp(lambda x: (own_vjp(x), None), lambda _, g: (g,))


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(jax.checkpoint(wavy), marks=pytest.mark.slow),
        pytest.param(own_jvp, marks=pytest.mark.slow),
        pytest.param(own_vjp, marks=pytest.mark.slow),
        # All three of them.
        lambda x: jax.checkpoint(lambda y: own_jvp(own_vjp(y)) + wavy(y))(x),
        jax.checkpoint(lambda x: x),
        lambda x: jax.checkpoint(lambda _: 2.5)(x) * x,
    ],
)
def test_bodies_that_jax_runs_one_by_one_keep_their_bits(mesh_2x4, function):
    def build():
        return function(jax.random.normal(jax.random.key(0), (8, 24)))

    for layouts in (
        ml.LayoutMap(mesh_2x4),
        ml.LayoutMap(mesh_2x4, default=("model", None)),
    ):
        assert_same_bits(ml.create(build, layouts), build())


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1024, 1024), marks=pytest.mark.slow),
        (64, 4096),
        pytest.param((16, 128, 128), marks=pytest.mark.slow),
    ],
)
def test_large_random_leaves_have_the_bits_of_the_whole(shape):
    def build():
        keys = [jax.random.key(n) for n in range(3)]
        return {
            "normal": jax.random.normal(keys[0], shape),
            "uniform": jax.random.uniform(keys[1], shape),
            "truncated": jax.random.truncated_normal(keys[2], -2, 2, shape),
        }

    expected = build()
    mesh = ml.create_mesh({"model": 8})
    for spec in (("model", ...), (..., "model")):
        layouts = ml.LayoutMap(mesh, default=spec)
        assert_same_bits(ml.create(build, layouts), expected)


def test_what_was_made_is_what_flax_makes(mesh_2x4):
    plain_model = Block(16, rngs=nnx.Rngs(0))
    made = ml.create(lambda: Block(16, rngs=nnx.Rngs(0)), ml.LayoutMap(mesh_2x4))
    assert nnx.graphdef(made) == nnx.graphdef(plain_model)
    both = jax.tree.map(
        lambda one, other: one.shape == other.shape,
        nnx.state(made),
        nnx.state(plain_model),
    )
    assert all(jax.tree.leaves(both))


def test_64_bit_values_stay_so(mesh_2x4):
    layouts = ml.LayoutMap(mesh_2x4, {".*": ("model", ...)})

    def build():
        return {"w": jax.random.normal(jax.random.key(0), (8, 8)), "n": np.arange(8.0)}

    with enable_x64(True):
        made, expected = ml.create(build, layouts), build()
        assert made["w"].dtype == made["n"].dtype == np.float64
        assert_same_bits(made, expected)


@pytest.mark.parametrize(
    "name", ["pair", pytest.param("expressions", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "types", [AxisType.Explicit, (AxisType.Auto, AxisType.Explicit)]
)
def test_explicit_axes_change_no_bits(types, name):
    mesh = ml.create_mesh({"batch": 2, "model": 4}, axis_types=types)
    layouts = ml.LayoutMap(mesh, {".*": last_dim}, on_uneven="replicate")
    assert_same_bits(ml.create(BUILDERS[name], layouts), BUILDERS[name]())


# What is refused, and how.


def outer_rngs():
    rngs = nnx.Rngs(0)
    return lambda: nnx.Linear(8, 8, rngs=rngs)


READS = (
    "the builder reads the value of an array it computed, as float(x), np.asarray(x) "
    "or 'if x > 0' do, and there is no value while it is traced. Compute such values "
    "with NumPy, or outside of the builder."
)
NO_TRANSFORMS = (
    "create makes arrays on devices, and was called inside a function that JAX "
    "transforms (jit, eval_shape, vmap, or another create's builder). Call it outside; "
    "describe(build, layouts).abstract has the shapes alone."
)
BAD_BUILDERS = [
    (
        lambda: 3,
        "create: build must be a function, got 3. Write create(lambda: Model(...), "
        "layouts).",
    ),
    (
        lambda: {"w": np.float32(1)},
        f"create: build must be a function, got {{'w': {np.float32(1)!r}}}. Write "
        "create(lambda: Model(...), layouts).",
    ),
    (
        lambda: LinenMLP(),
        "create takes a function that builds the state, got a LinenMLP that is built "
        "already. Write create(lambda: Model(...), layouts).",
    ),
    (
        lambda: nnx.Sequential(*[nnx.Linear(8, 8, rngs=nnx.Rngs(0))] * 40),
        "create takes a function that builds the state, got a Sequential that is built "
        "already. Write create(lambda: Model(...), layouts).",
    ),
    (
        lambda: lambda rngs: nnx.Linear(8, 8, rngs=rngs),
        "create: build is called as build(), but takes (rngs). Write create(lambda: "
        "Model(...), layouts).",
    ),
    (
        lambda: Block,
        "create: build is called as build(), but takes (features, rngs). Write "
        "create(lambda: Model(...), layouts).",
    ),
    (
        lambda: lambda: None,
        "create: what the builder returned holds no arrays, got None. A function that "
        "ends without `return` gives None.",
    ),
    (
        lambda: dict,
        "create: what the builder returned holds no arrays, got {}. A function that "
        "ends without `return` gives None.",
    ),
    (
        lambda: lambda: {"a": [None, ()], "b": 3, "c": "x"},
        "create: what the builder returned holds no arrays, got {'a': [None, ()], 'b': "
        "3, 'c': 'x'}. A function that ends without `return` gives None.",
    ),
    (lambda: lambda: float(jnp.ones(())), READS),
    (lambda: lambda: np.asarray(jnp.ones(3)), READS),
    (lambda: lambda: 1 if jnp.ones(()) > 0 else 2, READS),
    (lambda: lambda: range(jnp.arange(3)[0]), READS),
    (
        lambda: lambda: {"a": jax.eval_shape(lambda: jnp.ones((8, 8)))},
        "a f32[8, 8]: the builder returned a shape without values, as jax.eval_shape "
        "does. Return the array itself.",
    ),
    (
        lambda: lambda: jax.eval_shape(lambda: jnp.ones((8, 8))),
        "the result f32[8, 8]: the builder returned a shape without values, as "
        "jax.eval_shape does. Return the array itself.",
    ),
    (
        lambda: lambda: nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
        "bias f32[3]: the builder returned a shape without values, as jax.eval_shape "
        "does. Return the array itself.",
    ),
    (
        lambda: lambda: ml.create(lambda: jnp.ones(8), ml.LayoutMap(ONE)),
        NO_TRANSFORMS,
    ),
]
ONE = ml.create_mesh({"model": 1}, devices=jax.devices()[:1])


@pytest.mark.parametrize(("make", "message"), BAD_BUILDERS)
def test_what_is_not_a_builder_is_refused(make, message):
    build = make()
    with pytest.raises(ml.errors.StateError) as error:
        ml.create(build, ml.LayoutMap(ONE))
    assert str(error.value) == message


@pytest.mark.parametrize(
    "build",
    [
        lambda: optax.sgd(0.1).init({"w": jnp.ones(3)}),
        lambda: nnx.Dropout(0.5),
        lambda: {"pool": nnx.Sequential(nnx.relu)},
    ],
)
def test_modules_and_states_without_arrays_are_allowed(build):
    made = ml.create(build, ml.LayoutMap(ONE))
    assert jax.tree.structure(made) == jax.tree.structure(build())


def test_big_endian_arrays_keep_their_values(mesh_2x4):
    tree = {k: np.arange(8).astype(k) for k in (">f4", ">i4", ">u2", ">f8", ">c8")}
    layouts = ml.LayoutMap(mesh_2x4, {".*": ("model",)})
    made = ml.create(lambda: {"new": jnp.ones(8), **tree}, layouts)
    for name, array in tree.items():
        np.testing.assert_array_equal(np.asarray(made[name]), array)
        assert np.asarray(made[name]).dtype.isnative


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_create_is_refused_inside_a_transformation(transform):
    def inside(x):
        made = ml.create(lambda: jnp.ones(()), ml.LayoutMap(ONE))
        return x * made

    with pytest.raises(ml.errors.StateError) as error:
        transform(inside)(np.ones((2,)) if transform is jax.vmap else 1.0)
    assert str(error.value) == NO_TRANSFORMS


def test_random_numbers_from_outside_are_refused():
    with pytest.raises(ml.errors.StateError) as error:
        ml.create(outer_rngs(), ml.LayoutMap(ONE))
    assert str(error.value).startswith(
        "the builder changes an NNX object that was made outside of it, such as "
        "nnx.Rngs. Make it inside: create(lambda: Model(rngs=nnx.Rngs(0)), layouts); "
        "or build inside layouts.scope(). ("
    )


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


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        (
            {"a": ("model",)},
            "create takes a LayoutMap, got {'a': ('model',)}. To replicate everything, "
            "give LayoutMap(mesh).",
        ),
        (
            ONE,
            "create takes a LayoutMap, got a Mesh. To replicate everything, give "
            "LayoutMap(mesh).",
        ),
    ],
)
def test_what_is_not_a_layout_map_is_refused(layouts, message):
    with pytest.raises(ml.errors.StateError) as error:
        ml.create(lambda: jnp.ones(3), layouts)
    assert str(error.value) == message


def test_layouts_that_do_not_fit_are_refused_before_anything_is_made(mesh_2x4):
    layouts = ml.LayoutMap(mesh_2x4, {"output/kernel": (None, "model")})
    gc.collect()
    before = len(jax.live_arrays())
    with pytest.raises(ml.errors.LayoutMapError) as error:
        ml.create(lambda: MLP(rngs=nnx.Rngs(0)), layouts)
    assert len(jax.live_arrays()) == before
    assert str(error.value) == (
        "output/kernel f32[128, 10]: dim 1 has size 10, which does not divide into 4 "
        "shards over mesh axis 'model' (rule 'output/kernel', Layout([unsharded, "
        "model], Mesh(batch=2, model=4))). Nearest sizes that fit: 8 and 12. To keep "
        "the size, leave dim 1 UNSHARDED, or give the rule on_uneven='replicate'."
    )


def test_an_error_in_the_builder_is_the_users_own():
    with pytest.raises(ZeroDivisionError):
        ml.create(lambda: 1 // 0, ml.LayoutMap(ONE))
