"""Saving and restoring: every tree and dtype, on any mesh, and what is refused."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import meshlayout as ml
from meshlayout.checkpoint import Checkpointer
from tests.error_messages import message_of
from tests.same_bits import assert_same_bits


error_of = functools.partial(message_of, error=ml.errors.CheckpointError)


@pytest.fixture
def ck(tmp_path):
    with Checkpointer(tmp_path / "run") as ck:
        yield ck


def saved_and_restored(ck, state, like=None, **options):
    ck.save(1, state)
    return ck.restore(state if like is None else like, **options)


def assert_same_layouts(made, expected):
    leaves = zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True)
    assert all(a.sharding.is_equivalent_to(b.sharding, b.ndim) for a, b in leaves)


DTYPES = [
    "bool",
    *("int4", "int8", "int16", "int32"),
    *("uint8", "uint16", "uint32"),
    # XLA mixes up the bits of this one in programs of jax 0.7.
    *(("int2",) if jax.__version_info__ >= (0, 8) else ()),
    *("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"),
    *("bfloat16", "float16", "float32", "complex64"),
]


def numbers(shape, dtype):
    rng, dtype = np.random.default_rng(0), jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        some = rng.integers(int(limits.min), int(limits.max), shape, endpoint=True)
        return some.astype(dtype)
    some = 4 * rng.normal(size=shape)
    return (some * (1 + 2j) if dtype == "complex64" else some).astype(dtype)


def test_every_dtype_comes_back_to_the_bit(ck, mesh_2x4):
    sharding = mesh_2x4.layout("batch", "model").sharding
    state = {
        dtype: jax.device_put(jnp.asarray(numbers((4, 8), dtype)), sharding)
        for dtype in DTYPES
        if hasattr(jnp, dtype) or dtype == "bool"
    }
    made = saved_and_restored(ck, state)
    assert_same_bits(made, state)
    assert_same_layouts(made, state)
    assert_same_bits(ck.restore_numpy(), jax.tree.map(np.asarray, state))


NAMES = ["a.b", "params", "manifest.json", "..", ".", "", " ", "ü", "000000", "!", "%"]

TREES = {
    "zero size": {"a": jnp.zeros((0, 3)), "b": jnp.ones(2)},
    "array": jnp.arange(3.0),
    "lists": [jnp.arange(3), (jnp.zeros(()), {"x": jnp.ones(2)})],
    "keys": {"key": jax.random.split(jax.random.key(1), 3), "x": jax.random.PRNGKey(2)},
    "rbg": {"rbg": jax.random.key(5, impl="rbg")},
    "names that mean nothing": {
        **{name: jnp.full(2, float(at)) for at, name in enumerate(NAMES)},
        "a": {"b": jnp.full(2, 77.0), "c": jnp.full(2, 78.0)},
        "numbers": {3: jnp.zeros(1), 1: jnp.ones(1)},
    },
}


@pytest.mark.parametrize("name", TREES)
def test_any_tree_comes_back(ck, name):
    assert_same_bits(saved_and_restored(ck, TREES[name]), TREES[name])


def test_numbers_and_numpy_arrays_come_back_as_what_they_were(ck):
    state = {
        "int": 2**70,
        "float": 0.1,
        "nan": float("nan"),
        "bool": True,
        "complex": 1 - 2j,
        "numpy": np.arange(5, dtype=np.int64),
        "scalar": np.float64(0.3),
        "bfloat16": numbers((2, 3), "bfloat16"),
        "weak": jnp.asarray(2.0),
        "strong": jnp.float32(2),
    }
    like = jax.tree.map(lambda x: type(x)(0) if np.isscalar(x) else x * 0, state)
    made = saved_and_restored(ck, state, like)
    assert {k: type(x) for k, x in made.items()} == {k: type(state[k]) for k in made}
    assert repr(made) == repr(dict(sorted(state.items())))
    assert (made["weak"].weak_type, made["strong"].weak_type) == (True, False)
    made = {"scalar": np.array(0.3), "weak": jnp.float32(2)} | {
        name: x for name, x in made.items() if name not in ("scalar", "weak")
    }
    assert repr(ck.restore()) == repr(dict(sorted(made.items())))


def test_linen_boxes_and_host_memory_come_back(ck, mesh_2x4):
    init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
    module = nn.Dense(8, kernel_init=init)
    variables = module.init(jax.random.key(0), jnp.ones((1, 2)))
    keys = jax.random.split(jax.random.key(0), 8)
    spec = PartitionSpec("batch")
    host = NamedSharding(mesh_2x4.jax_mesh, spec, memory_kind="pinned_host")
    state = {
        "variables": variables,
        "keys": jax.device_put(keys, mesh_2x4.layout("model").sharding),
        "host": jax.device_put(jnp.arange(4.0), host),
    }
    made = saved_and_restored(ck, state)
    assert_same_bits(made, state)
    assert_same_layouts(made, state)
    assert made["variables"]["params"]["kernel"].names == (None, "model")
    assert made["host"].sharding.memory_kind == "pinned_host"


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(8, 4, rngs=rngs)


def train_state(mesh, seed):
    layouts = {"up/kernel": (None, "model"), "down/kernel": ("model", None)}
    state = ml.TrainState.create(
        lambda: Model(nnx.Rngs(seed)),
        optax.adamw(1e-3),
        ml.LayoutMap(mesh, layouts),
        rng=seed,
    )
    ema = jax.tree.map(lambda x: x * (seed + 2), state.params)
    return state.replace(extra={"ema": ema, "loss_scale": jnp.float32(seed + 8)})


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A state of a mesh, and a checkpointer that reads it."""
    mesh = ml.create_mesh({"batch": 2, "model": 4})
    state, directory = train_state(mesh, 1), tmp_path_factory.mktemp("kept")
    with Checkpointer(directory) as ck:
        ck.save(1, state)
    return SimpleNamespace(mesh=mesh, state=state, ck=Checkpointer(directory))


def test_a_train_state_comes_back_whole_with_the_optimizer_of_like(kept):
    like = train_state(kept.mesh, 2)
    made = kept.ck.restore(like)
    assert type(made) is ml.TrainState
    assert made.tx is like.tx
    for name in ("params", "opt_state", "model_state", "step", "rng", "extra"):
        assert_same_bits(getattr(made, name), getattr(kept.state, name))
    assert_same_layouts(made.params, like.params)


def test_a_sharded_state_is_restored_on_one_device_without_a_mesh(kept):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), kept.state)
    made = kept.ck.restore(shapes)
    assert_same_bits(made.params, kept.state.params)
    assert {len(x.devices()) for x in jax.tree.leaves(made)} == {1}
    assert_same_bits(kept.ck.restore()["params"], kept.state.params)


def test_a_bare_module_is_restored_from_a_train_state(kept):
    like = Model(nnx.Rngs(2))
    arrays = lambda model: nnx.to_pure_dict(nnx.state(model))
    assert_same_bits(arrays(kept.ck.restore(like)), arrays(kept.state.model))
    assert_same_bits(arrays(like), arrays(Model(nnx.Rngs(2))))  # as it was


def test_layouts_alone_go_by_the_paths_that_inspect_shows(kept):
    mesh = ml.create_mesh({"fsdp": 8})
    assert "params/up/kernel" in kept.ck.inspect().arrays
    made = kept.ck.restore(ml.LayoutMap(mesh, {"^params/up/kernel$": (None, "fsdp")}))
    mu = made["opt_state"]["0"]["mu"]["up"]["kernel"]  # follows its parameter
    for x in (made["params"]["up"]["kernel"], mu):
        assert str(ml.fetch_layout(x)) == "[unsharded, fsdp]"


WHOLE = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)

MESHES = {
    "one": ({"x": 1}, (None, None)),
    "8": ({"fsdp": 8}, ("fsdp", None)),
    "8, other dim": ({"fsdp": 8}, (None, "fsdp")),
    "2x4": ({"batch": 2, "model": 4}, ("batch", "model")),
    "4x2": ({"batch": 4, "model": 2}, ("model", "batch")),
    "both on one dim": ({"batch": 2, "model": 4}, (("batch", "model"), None)),
    "replicated": ({"batch": 2, "model": 4}, (None, None)),
}


def shardings():
    found = {"device 3": SingleDeviceSharding(jax.devices()[3])}
    for name, (axes, specs) in MESHES.items():
        devices = jax.devices()[: int(np.prod([*axes.values()]))]
        found[name] = ml.create_mesh(axes, devices=devices).layout(*specs).sharding
    return found


def test_what_was_saved_on_one_mesh_is_restored_on_any(ck):
    places = shardings()
    ck.save(1, {name: jax.device_put(WHOLE, place) for name, place in places.items()})
    for wanted in places.values():
        like = jax.ShapeDtypeStruct(WHOLE.shape, "float32", sharding=wanted)
        for made in ck.restore(dict.fromkeys(places, like)).values():
            np.testing.assert_array_equal(made, WHOLE)
            assert made.sharding == wanted


def test_what_is_set_for_other_programs_does_not_matter(ck, mesh_2x4):
    types = (jax.sharding.AxisType.Explicit,) * 2
    other = jax.make_mesh((4, 2), ("x", "y"), axis_types=types)
    x = ml.copy_to_mesh(np.arange(8, dtype="float32"), mesh_2x4.layout("batch"))
    with jax.set_mesh(other), jax.transfer_guard("disallow"):
        made = saved_and_restored(ck, {"x": x})
    assert_same_bits(made, {"x": x})


def test_arrays_are_renamed_cast_and_left_out(ck):
    ck.save(1, {"body": {"w": jnp.arange(3.0)}, "old_head": jnp.ones(2)})
    like = {"trunk": {"w": jnp.zeros(3, "bfloat16")}, "head": jnp.full(4, 7.0)}
    options = {"rename": {"^body/": "trunk/"}, "dtype": "bfloat16"}
    for partial in (True, ["head"]):
        made = ck.restore(like, partial=partial, **options)
        expected = jnp.arange(3, dtype="bfloat16")
        assert_same_bits(made, {"trunk": {"w": expected}, "head": jnp.full(4, 7.0)})
    with pytest.raises(ml.errors.RestoreDiffError, match="1 missing, 1 extra"):
        ck.restore(like, **options)


def test_a_root_key_called_params_is_a_key_like_any_other(ck, mesh_2x4):
    module, x = nn.Dense(3), jnp.ones((2, 8))
    variables = module.init(jax.random.key(0), x)
    layouts = ml.LayoutMap(mesh_2x4, {"^params/kernel$": ("batch", None)})
    ck.save(1, variables)
    for found in (ck.restore_numpy(), ck.restore(), ck.restore(layouts)):
        assert_same_bits(found, variables)
        module.apply(found, x)
    ck.save(2, {**variables, "opt_state": {"mu": variables["params"]}, "step": 7})
    assert set(ck.restore_numpy()) == {"opt_state", "params", "step"}


def test_64_bits_are_cast_on_the_host_where_devices_have_32(ck, mesh_2x4):
    layout = mesh_2x4.layout("batch")
    ck.save(1, {"a": np.arange(8.0) / 3, "n": np.arange(8)})
    like = {
        name: ml.copy_to_mesh(np.zeros(8, dtype), layout)
        for name, dtype in {"a": "float32", "n": "int32"}.items()
    }
    made = ck.restore({"a": like["a"]}, dtype="float32", partial="n")
    assert_same_bits(made, {"a": (np.arange(8.0) / 3).astype("float32")})
    made = ck.restore({"n": like["n"]}, dtype="int32", partial="a")
    assert_same_bits(made, {"n": like["n"] + np.arange(8)})
    assert error_of(ck.restore, ml.LayoutMap(mesh_2x4)) == (
        "a f64[8]: JAX would turn float64 into float32. Ask for that with "
        "dtype='float32', or set jax_enable_x64."
    )


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_last_steps_stay_and_the_best(tmp_path, mode):
    sign = 1 if mode == "max" else -1
    accuracies = {4: 0.5, 7: 0.9, 10: 0.2, 11: 0.9, 12: float("nan"), 13: 0.4, 14: 0.1}
    with Checkpointer(tmp_path, keep=2, best=("accuracy", mode)) as ck:
        assert ck.best_step() is None
        for step, accuracy in accuracies.items():
            metrics = {"accuracy": sign * accuracy}
            ck.save(step, {"x": np.full(1, step)}, metrics=metrics)
        ck.wait()
        assert ck.all_steps() == [11, 13, 14]  # the latest of two that are equal
        assert (ck.latest_step(), ck.best_step()) == (14, 11)
        found = [ck.restore_numpy(step=x)["x"] for x in ("best", "latest", 13)]
        assert found == [11, 14, 13]


def test_a_save_is_due_by_steps(tmp_path):
    state = {"x": np.zeros(1)}
    with Checkpointer(tmp_path, every=10, keep=None) as ck:
        due = [x for x in (0, 3, 6, 9, 12, 15, 18, 30, 39) if ck.save(x, state)]
        assert due == [12, 30]
        assert ck.save(39, state, force=True)
        assert not ck.save(39, state)
    with Checkpointer(tmp_path, every=10, keep=None) as ck:
        assert ck.restore_numpy(step=39) == state
        assert [step for step in (38, 39, 40, 41) if ck.save(step, state)] == [40]
        ck.wait()
        assert ck.all_steps() == [12, 30, 39, 40]
        ck.restore_numpy(step=12)
        assert [step for step in (13, 19, 21) if ck.save(step, state)] == [21]


def test_going_back_keeps_what_is_saved_then(tmp_path):
    with Checkpointer(tmp_path, keep=2) as ck:
        for step in (10, 20, 30):
            ck.save(step, {"x": np.full(1, step)})
        for step in (21, 5):
            ck.save(step, {"x": np.full(1, step)})
            ck.wait()
            assert step in ck.all_steps()


def test_the_state_may_be_donated_when_save_returns(tmp_path, mesh_2x4):
    update = jax.jit(lambda x: x + 1, donate_argnums=0)
    layout = mesh_2x4.layout("batch", "model")
    x, host = jax.device_put(jnp.zeros((256, 512)), layout.sharding), np.zeros((64, 64))
    with Checkpointer(tmp_path, keep=None) as ck:
        for step in range(6):
            ck.save(step, {"x": x, "host": host})
            x = update(x)
            host += 1
        for step in ck.all_steps():
            found = ck.restore_numpy(step=step)
            assert all((found[name] == step).all() for name in ("x", "host"))


class Position:
    """An input iterator; its state is whatever it is given."""

    def __init__(self, state=0):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def test_the_input_iterator_continues_where_it_was(ck):
    state = {"at": [1, [2]], "seed": np.int32(4), "next": {"0": None, "1": 2.5}}
    data, other = Position(state), Position()
    ck.save(1, {"x": 1}, data=data)
    data.state = "later"
    ck.restore({"x": 1}, data=other)
    assert other.state == state


def test_inspect_is_a_table_of_what_was_saved(ck, mesh_2x4):
    sharding = mesh_2x4.layout("batch", "model").sharding
    kernel = jax.device_put(jnp.ones((8, 4)), sharding)
    state = {"kernel": kernel, "steps": 3, "key": jax.random.key(0)}
    ck.save(7, state, metadata={"note": "x"}, metrics={"loss": 0.25}, data=Position())
    ck.wait()
    found = ck.inspect(7)
    title, *table = str(found).splitlines()
    assert re.fullmatch(
        r"step 7, saved \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC, 136 B, {'loss': 0.25}, "
        "{'note': 'x'}",
        title,
    )
    assert [line.split(maxsplit=1) for line in table[2:]] == [
        ["kernel", "f32[8, 4] [batch, model] Mesh(batch=2, model=4)"],
        ["key", "key<fry>[]"],
        ["steps", "int[]"],
    ]
    assert (found.step, found.nbytes, found.metrics) == (7, 136, {"loss": 0.25})
    assert "kernel" in found._repr_html_()


def test_a_save_compiles_no_program(ck, mesh_2x4):
    """Not even the first one of a shape, on a mesh on which arrays are replicated."""
    sharding = mesh_2x4.layout(None, "model").sharding
    state = {
        f"w{size}": jax.device_put(np.ones((size, 8), np.float32), sharding)
        for size in (2, 6, 10)
    }
    compiled = []

    def listen(event, seconds, **facts):
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    ck.save(1, state)
    ck.wait()
    assert compiled == []
    assert_same_bits(ck.restore(state), state)


def deleted():
    x = jnp.ones(3)
    x.delete()
    return x


NO_ARRAYS = (
    "save: state holds no arrays, got {!r}. A function without a `return` returns None."
)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        *((x, NO_ARRAYS.format(x)) for x in (None, {}, [], {"a": {}, "b": ()})),
        (
            {"f": print},
            "f: a builtin_function_or_method is neither an array nor a number: keep "
            "anything else in metadata=, or outside the tree.",
        ),
        (
            {"model": nnx.Linear(1, 1, rngs=nnx.Rngs(0)), "name": "a"},
            "name: 'a' is neither an array nor a number: keep anything else in "
            "metadata=, or outside the tree.",
        ),
        (
            {"x": jax.ShapeDtypeStruct((2,), "float32")},
            "x: a shape without values cannot be saved. Save the state itself.",
        ),
        (
            {"a/b": 1, "a": {"b": 2}},
            "the state cannot be saved: two leaves have the path 'a/b': a key that "
            "contains '/' reads like two keys, and 1 like '1'. Rename one of them.",
        ),
        (
            {"x": np.ma.masked_array([1.0, 2.0], [True, False])},
            "x: the mask of a masked array would be lost. Save it as an array.",
        ),
        (
            {"x": deleted()},
            "x: the array was donated, and is deleted. Save what the step returned.",
        ),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused(ck, state, message):
    assert error_of(ck.save, 1, state) == message
    assert ck.all_steps() == []
    ck.save(1, {"x": 1})
    ck.wait()
    assert ck.all_steps() == [1]


def test_steps_that_do_not_exist_are_refused(ck):
    begin = f"{ck.directory} has no step"
    assert error_of(ck.restore) == f"{begin} 'latest': there is no such directory."
    ck.directory.mkdir()
    assert error_of(ck.restore).endswith("there is none (see load_orbax).")
    ck.save(3, {"x": 1})
    ck.wait()
    # A step's number, its directory, and what builds the state.
    for like in (3, str(ck.directory / "3"), lambda: {"x": 1}):
        assert error_of(ck.restore, like).endswith("The number of a step is step=.")
    assert error_of(ck.restore, step=4) == f"{begin} 4: there is 3."
    assert error_of(ck.restore, step="best") == (
        "the best step needs Checkpointer(directory, best=(name, 'max')), or 'min'; the "
        "last one's names are none."
    )
    for step in ("newest", -1, True):
        message = f"step must be a non-negative integer, got {step!r}."
        assert error_of(ck.restore, step=step) == message
        assert error_of(ck.save, step, {}) == message


def test_what_a_checkpointer_is_given_is_checked(tmp_path):
    assert error_of(Checkpointer, tmp_path, best="loss") == (
        "best must be a pair such as ('val_accuracy', 'max'), got 'loss'."
    )
    with Checkpointer(tmp_path, best=("accuracy", "max")) as ck:
        message = functools.partial(error_of, ck.save, 1, {"x": 1})
        assert message(metrics={"acuracy": 1}) == (
            "best=('accuracy', 'max') needs the metric 'accuracy', and metrics= holds "
            "'acuracy'. Did you mean 'acuracy'?"
        )
        assert message(metadata={"f": {1, 2}}) == (
            "metadata['f'] is {1, 2}, which cannot be written as JSON."
        )
        assert message(data=[1]) == (
            "data= must be an iterator, such as iter(dataset), got [1]."
        )
        with pytest.raises(jax.errors.ConcretizationTypeError, match="traced array"):
            jax.jit(lambda x: ck.save(1, {"x": x}))(jnp.ones(2))
        assert ck.all_steps() == []
        ck.save(1, {"x": 1})
        assert error_of(ck.restore, {"x": 1}, data=Position()) == (
            "the step was saved without data=: restore it without."
        )
