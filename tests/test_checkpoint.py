"""Saving and restoring: every tree and dtype, on any mesh, and what is refused."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import meshlayout as ml
from meshlayout.checkpoint import Checkpointer
from meshlayout.checkpoint.checkpointer import best_of, steps_to_delete
from tests.error_messages import message_of
from tests.same_bits import assert_same_bits


DTYPES = [
    "bool",
    *("int4", "int8", "int16", "int32"),
    *("uint8", "uint16", "uint32"),
    # XLA mixes up the bits of this one in programs of jax 0.7.
    *(("int2",) if jax.__version_info__ >= (0, 8) else ()),
    *("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"),
    *("bfloat16", "float16", "float32", "complex64"),
]


@pytest.fixture
def ck(tmp_path):
    with Checkpointer(tmp_path / "run") as checkpointer:
        yield checkpointer


def numbers(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    if dtype == "complex64":
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        some = rng.integers(int(limits.min), int(limits.max), shape, endpoint=True)
        return some.astype(jnp.dtype(dtype))
    return np.asarray(4 * rng.normal(size=shape)).astype(jnp.dtype(dtype))


def saved_and_restored(ck, state, like=None, **options):
    ck.save(1, state)
    return ck.restore(state if like is None else like, **options)


def assert_same_layouts(made, expected):
    for one, other in zip(
        jax.tree.leaves(made), jax.tree.leaves(expected), strict=True
    ):
        assert isinstance(one, jax.Array)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


# Every dtype and tree.


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
    host = ck.restore_numpy()
    assert_same_bits(host, jax.tree.map(np.asarray, state))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(self.norm(self.up(x))))


def layout_map(mesh, last="model"):
    return ml.LayoutMap(mesh, {"up/kernel": (None, last), "down/kernel": (last, None)})


def train_state(mesh, seed=0, **options):
    build = lambda: Model(nnx.Rngs(seed))  # noqa: E731
    state = ml.TrainState.create(
        build, optax.adamw(1e-3), layout_map(mesh, **options), rng=seed
    )
    ema = jax.tree.map(lambda x: x * (seed + 2), state.params)
    return state.replace(extra={"ema": ema, "loss_scale": jnp.float32(seed + 8)})


def test_a_train_state_comes_back_whole_with_the_optimizer_of_like(ck, mesh_2x4):
    state = train_state(mesh_2x4, 1)
    like = train_state(mesh_2x4, 2)
    made = saved_and_restored(ck, state, like)
    assert type(made) is ml.TrainState
    assert made.tx is like.tx
    fields = ("params", "opt_state", "model_state", "step", "rng", "extra")
    for name in fields:
        assert_same_bits(getattr(made, name), getattr(state, name))
    assert_same_layouts(made.params, like.params)


def test_linen_boxes_come_back(ck, mesh_2x4):
    init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
    module = nn.Dense(8, kernel_init=init)
    variables = module.init(jax.random.key(0), jnp.ones((1, 2)))
    made = saved_and_restored(ck, variables)
    assert_same_bits(made, variables)
    assert made["params"]["kernel"].names == (None, "model")


@pytest.mark.parametrize(
    "state",
    [
        {"a": jnp.zeros((0, 3)), "b": jnp.ones(2)},
        jnp.arange(3.0),
        [jnp.arange(3), (jnp.zeros(()), {"x": jnp.ones(2)})],
        {"key": jax.random.split(jax.random.key(1), 3), "old": jax.random.PRNGKey(2)},
        {"rbg": jax.random.key(5, impl="rbg")},
    ],
    ids=["zero size", "array", "lists", "keys", "rbg"],
)
def test_any_tree_comes_back(ck, state):
    assert_same_bits(saved_and_restored(ck, state), state)


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
    }
    like = jax.tree.map(lambda x: type(x)(0) if np.ndim(x) == 0 else x * 0, state)
    made = saved_and_restored(ck, state, like)
    assert {name: type(one) for name, one in made.items()} == {
        name: type(one) for name, one in state.items()
    }
    assert repr(made) == repr(dict(sorted(state.items())))
    assert repr(ck.restore()) == repr(made | {"scalar": np.array(0.3)})


def test_weak_types_come_back(ck):
    state = {"x": jnp.asarray(2.0), "y": jnp.float32(2)}
    made = saved_and_restored(ck, state)
    assert made["x"].weak_type
    assert not made["y"].weak_type


def test_no_name_of_a_key_means_anything(ck):
    names = ["a.b", "params", "manifest.json", "..", ".", "", " ", "ü", "000000", "!"]
    state = {name: jnp.full(2, float(at)) for at, name in enumerate(names)}
    state["a"] = {"b": jnp.full(2, 77.0), "c": jnp.full(2, 78.0)}
    state["numbers"] = {3: jnp.zeros(1), 1: jnp.ones(1)}
    made = saved_and_restored(ck, state)
    assert_same_bits(made, state)
    state["numbers"] = {"3": jnp.zeros(1), "1": jnp.ones(1)}
    assert_same_bits(ck.restore_numpy(), jax.tree.map(np.asarray, state))


# Anywhere.


WHOLE = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)

LAYOUTS = {
    "one": ({"x": 1}, (None, None)),
    "8": ({"fsdp": 8}, ("fsdp", None)),
    "8, other dim": ({"fsdp": 8}, (None, "fsdp")),
    "2x4": ({"batch": 2, "model": 4}, ("batch", "model")),
    "4x2": ({"batch": 4, "model": 2}, ("model", "batch")),
    "both on one dim": ({"batch": 2, "model": 4}, (("batch", "model"), None)),
    "replicated": ({"batch": 2, "model": 4}, (None, None)),
}


def on_mesh(name):
    axes, specs = LAYOUTS[name]
    count = int(np.prod(list(axes.values())))
    mesh = ml.create_mesh(axes, devices=jax.devices()[:count])
    return mesh.layout(*specs)


@pytest.mark.parametrize("saved", LAYOUTS)
def test_what_was_saved_on_one_mesh_is_restored_on_any(tmp_path, saved):
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"x": jax.device_put(WHOLE, on_mesh(saved).sharding)})
        for wanted in LAYOUTS:
            sharding = on_mesh(wanted).sharding
            like = {
                "x": jax.ShapeDtypeStruct(WHOLE.shape, "float32", sharding=sharding)
            }
            made = ck.restore(like)["x"]
            np.testing.assert_array_equal(made, WHOLE)
            assert made.sharding == sharding


def test_a_sharded_state_is_restored_on_one_device_without_a_mesh(ck, mesh_2x4):
    state = train_state(mesh_2x4)
    ck.save(1, state)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    made = ck.restore(shapes)
    assert_same_bits(made.params, state.params)
    assert {len(x.devices()) for x in jax.tree.leaves(made)} == {1}
    assert_same_bits(ck.restore()["params"], state.params)


def test_a_chosen_device_is_kept(ck):
    ck.save(1, {"x": jnp.arange(4.0)})
    place = SingleDeviceSharding(jax.devices()[3])
    like = {"x": jax.ShapeDtypeStruct((4,), "float32", sharding=place)}
    assert ck.restore(like)["x"].devices() == {jax.devices()[3]}


def test_sharded_keys_and_host_memory_come_back(ck, mesh_2x4):
    keys = jax.device_put(
        jax.random.split(jax.random.key(0), 8), mesh_2x4.layout("model").sharding
    )
    spec = NamedSharding(
        mesh_2x4.jax_mesh, PartitionSpec("batch"), memory_kind="pinned_host"
    )
    state = {"keys": keys, "host": jax.device_put(jnp.arange(4.0), spec)}
    made = saved_and_restored(ck, state)
    assert_same_bits(made, state)
    assert made["keys"].sharding.is_equivalent_to(keys.sharding, 1)
    assert made["host"].sharding.memory_kind == "pinned_host"


# Another dtype, other names, a part.


def test_a_new_head_stays_as_it_was_made(ck):
    ck.save(1, {"body": jnp.ones(3), "old_head": jnp.ones(2)})
    like = {"body": jnp.zeros(3), "head": jnp.full(4, 7.0)}
    made = ck.restore(like, partial=True)
    assert_same_bits(made, {"body": jnp.ones(3), "head": jnp.full(4, 7.0)})
    made = ck.restore(like, partial=["head"])
    assert_same_bits(made, {"body": jnp.ones(3), "head": jnp.full(4, 7.0)})
    with pytest.raises(ml.errors.CheckpointError, match="1 missing, 1 extra"):
        ck.restore(like)


# Steps.


def test_layouts_alone_go_by_the_paths_that_inspect_shows(ck, mesh_2x4):
    ck.save(1, train_state(mesh_2x4))
    mesh = ml.create_mesh({"fsdp": 8})
    assert "params/up/kernel" in ck.inspect().arrays
    made = ck.restore(ml.LayoutMap(mesh, {"^params/up/kernel$": (None, "fsdp")}))
    assert str(ml.fetch_layout(made["params"]["up"]["kernel"])) == "[unsharded, fsdp]"
    mu = made["opt_state"]["0"]["mu"]["up"]["kernel"]  # follows its parameter
    assert str(ml.fetch_layout(mu)) == "[unsharded, fsdp]"
    down = made["params"]["down"]["kernel"]
    assert str(ml.fetch_layout(down)) == "[unsharded, unsharded]"


def linen_variables(seed=0):
    module = nn.Dense(3)
    return module, module.init(jax.random.key(seed), jnp.ones((2, 8)))


def test_a_root_key_called_params_is_a_key_like_any_other(ck, mesh_2x4):
    module, variables = linen_variables()
    layouts = ml.LayoutMap(mesh_2x4, {"^params/kernel$": ("batch", None)})
    ck.save(1, variables)
    x = jnp.ones((2, 8))
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
    assert_same_layouts(made, {"a": like["a"]})
    made = ck.restore({"n": like["n"]}, dtype="int32", partial="a")
    assert_same_bits(made, {"n": like["n"] + np.arange(8)})


def test_what_is_set_for_other_programs_does_not_matter(ck, mesh_2x4):
    types = (jax.sharding.AxisType.Explicit,) * 2
    other = jax.make_mesh((4, 2), ("x", "y"), axis_types=types)
    x = ml.copy_to_mesh(np.arange(8, dtype="float32"), mesh_2x4.layout("batch"))
    half = x.astype("bfloat16")
    with jax.set_mesh(other), jax.transfer_guard("disallow"):
        made = saved_and_restored(ck, {"x": x})
        as_half = ck.restore({"x": half}, dtype="bfloat16")
    assert_same_bits(made, {"x": x})
    assert_same_bits(as_half, {"x": half})


def test_a_layout_that_does_not_divide_is_not_damage(ck, mesh_2x4):
    ck.save(1, {"w": jnp.arange(6.0)})
    sharding = mesh_2x4.layout("model").sharding
    like = {"w": jax.ShapeDtypeStruct((6,), jnp.float32, sharding=sharding)}
    with pytest.raises(ml.errors.CheckpointError) as caught:
        ck.restore(like)
    assert type(caught.value) is ml.errors.CheckpointError
    message = str(caught.value)
    assert message.startswith(
        "w f32[6] does not fit its layout: Sharding NamedSharding"
    )
    assert "axis 0 is partitioned 4 times, but the dimension size is 6" in message


def test_the_last_steps_stay_and_the_best(tmp_path):
    options = {"keep": 2, "best": ("accuracy", "max")}
    accuracies = {4: 0.5, 7: 0.9, 10: 0.2, 11: 0.3, 12: float("nan"), 13: 0.4}
    with Checkpointer(tmp_path, **options) as ck:
        for step, accuracy in accuracies.items():
            ck.save(step, {"x": np.full(1, step)}, metrics={"accuracy": accuracy})
        ck.wait()
        assert ck.all_steps() == [7, 12, 13]
        assert (ck.latest_step(), ck.best_step()) == (13, 7)
        assert ck.restore_numpy(step="best")["x"] == 7
        assert ck.restore_numpy(step="latest")["x"] == 13
        assert ck.restore_numpy(step=12)["x"] == 12


def test_a_save_is_due_by_steps(tmp_path):
    state = {"x": np.zeros(1)}
    with Checkpointer(tmp_path, every=10, keep=None) as ck:
        due = [
            step for step in (0, 3, 6, 9, 12, 15, 18, 30, 39) if ck.save(step, state)
        ]
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


def test_a_step_that_exists_is_replaced(ck):
    for value in (1.0, 2.0, 3.0):
        ck.save(5, {"x": jnp.full(2, value)}, metadata={"value": value})
        assert ck.restore_numpy()["x"].tolist() == [value, value]
        assert ck.inspect(5).metadata == {"value": value}
    assert sorted(one.name for one in ck.directory.iterdir()) == [".lock", "5"]


def test_going_back_keeps_what_is_saved_then(tmp_path):
    with Checkpointer(tmp_path, keep=2) as ck:
        for step in (10, 20, 30):
            ck.save(step, {"x": np.full(1, step)})
        ck.restore_numpy(step=20)
        ck.save(21, {"x": np.full(1, 21)})
        ck.wait()
        assert 21 in ck.all_steps()
        ck.save(5, {"x": np.full(1, 5)})
        ck.wait()
        assert 5 in ck.all_steps()


def test_the_state_may_be_donated_when_save_returns(tmp_path, mesh_2x4):
    update = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(
        jnp.zeros((256, 512)), mesh_2x4.layout("batch", "model").sharding
    )
    with Checkpointer(tmp_path, keep=None) as ck:
        for step in range(6):
            ck.save(step, {"x": x})
            x = update(x)
        for step in ck.all_steps():
            assert (ck.restore_numpy(step=step)["x"] == step).all()
    assert len(list(tmp_path.iterdir())) == 7


def test_numpy_arrays_may_be_written_to_when_save_returns(ck):
    x = np.zeros((64, 64))
    ck.save(1, {"x": x})
    x += 1
    assert (ck.restore_numpy()["x"] == 0).all()


class Counter:
    """An input iterator; its state is whatever it is given."""

    def __init__(self, state=0):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


@pytest.mark.parametrize(
    "state",
    [
        3,
        {"at": [1, [2]], "seed": 4},
        {"next": {"0": None, "1": 2.5}},
    ],
)
def test_the_input_iterator_continues_where_it_was(ck, state):
    data = Counter(state)
    ck.save(1, {"x": jnp.ones(1)}, data=data)
    data.state = "later"
    other = Counter()
    ck.restore({"x": jnp.ones(1)}, data=other)
    assert other.state == state


def test_inspect_is_a_table_of_what_was_saved(ck, mesh_2x4):
    kernel = jax.device_put(
        jnp.ones((8, 4)), mesh_2x4.layout("batch", "model").sharding
    )
    state = {"kernel": kernel, "steps": 3, "key": jax.random.key(0)}
    ck.save(7, state, metadata={"note": "x"}, metrics={"loss": 0.25}, data=Counter())
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


def test_sizes_and_seconds_are_logged(ck, caplog):
    caplog.set_level(logging.INFO, "meshlayout.checkpoint")
    ck.save(1, {"x": jnp.ones(4)})
    ck.restore_numpy()
    lines = [one.getMessage() for one in caplog.records if one.name.startswith("mesh")]
    assert re.fullmatch(r"saved step 1: 16 B in \d+\.\d\d s", lines[0])
    assert lines[1] == f"restored step 1 of {ck.directory}"


@given(
    steps=st.sets(st.integers(0, 40), min_size=1, max_size=12),
    keep=st.integers(1, 5),
    losses=st.dictionaries(st.integers(0, 40), st.floats(allow_infinity=False)),
)
def test_retention_deletes_only_what_nothing_keeps(steps, keep, losses):
    newest = min(steps)
    measured = {step: {"loss": losses[step]} for step in steps & losses.keys()}
    best = best_of(("loss", "min"), measured)
    gone = steps_to_delete(list(steps), keep, {best, newest})
    left = steps - set(gone)
    measured = {s: losses[s] for s in steps & losses.keys() if losses[s] == losses[s]}
    best = {s for s, loss in measured.items() if loss == min(measured.values())}
    kept = {*sorted(steps)[-keep:], newest, *([max(best)] if best else [])}
    assert left == kept
    assert gone == sorted(gone)


# What is refused.


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"f": print},
            "f: a builtin_function_or_method is neither an array nor a number: keep "
            "anything else in metadata=, or outside the tree.",
        ),
        (
            {"x": jax.ShapeDtypeStruct((2,), "float32")},
            "x: a shape without values cannot be saved. Save the state itself.",
        ),
        (
            {"a/b": 1, "a": {"b": 2}},
            "the state cannot be saved: two leaves have the path 'a/b': a key that contains '/' reads like two keys, and 1 like '1'. Rename one of them.",
        ),
    ],
    ids=["function", "shape", "paths"],
)
def test_a_state_that_cannot_be_saved_is_refused(ck, state, message):
    with pytest.raises(ml.errors.CheckpointError) as caught:
        ck.save(1, state)
    assert str(caught.value) == message
    assert ck.all_steps() == []
    ck.save(1, {"x": 1})
    ck.wait()
    assert ck.all_steps() == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"keep": 0},
            "keep must be a positive integer, got 0.",
        ),
        (
            {"keep": np.arange(2)},
            "keep must be a positive integer, got an array of shape (2,).",
        ),
        (
            {"best": "loss"},
            "best must be ('val_accuracy', 'max') or such, got 'loss'.",
        ),
    ],
)
def test_a_wrong_option_is_refused(tmp_path, options, message):
    with pytest.raises(ml.errors.CheckpointError) as caught:
        Checkpointer(tmp_path, **options)
    assert str(caught.value) == message


def test_steps_that_do_not_exist_are_refused(ck):
    message = functools.partial(message_of, error=ml.errors.CheckpointError)
    assert message(ck.restore_numpy) == (
        f"{ck.directory} has no step 'latest': there is no such directory."
    )
    ck.directory.mkdir()
    assert message(ck.restore_numpy) == (
        f"{ck.directory} has no step 'latest': there is no step at all."
    )
    ck.save(3, {"x": 1})
    ck.wait()
    assert message(lambda: ck.restore_numpy(step=4)) == (
        f"{ck.directory} has no step 4: there is 3."
    )
    assert message(lambda: ck.restore_numpy(step="newest")) == (
        "step must be a non-negative integer, got 'newest'."
    )
    assert message(lambda: ck.restore_numpy(step="best")) == (
        "no step is best without Checkpointer(best=('val_accuracy', 'max'))."
    )
    assert message(lambda: ck.save(-1, {})) == (
        "step must be a non-negative integer, got -1."
    )
    assert message(lambda: ck.save(True, {})) == (
        "step must be a non-negative integer, got True."
    )
    assert message(lambda: ck.restore(step=-1)) == (
        "step must be a non-negative integer, got -1."
    )


def test_what_save_is_given_is_checked(tmp_path):
    def message(**options):
        return message_of(
            ck.save, 1, {"x": 1}, error=ml.errors.CheckpointError, **options
        )

    with Checkpointer(tmp_path, best=("accuracy", "max")) as ck:
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
        ck.save(1, {"x": 1})
        with pytest.raises(ml.errors.CheckpointError) as caught:
            ck.restore({"x": 1}, data=Counter())
        assert str(caught.value) == (
            "the step was saved without data=: restore it without."
        )


def test_a_save_compiles_no_program(tmp_path, mesh_2x4):
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
    with Checkpointer(tmp_path) as ck:
        ck.save(1, state)
        ck.wait()
        assert compiled == []
        assert_same_bits(ck.restore(state), state)


JUNK = {
    "None": None,
    "nan": float("nan"),
    "-1": -1,
    "0": 0,
    "x": "x",
    "object": object(),
}


@pytest.mark.parametrize("state", [None, {}, [], {"a": {}, "b": ()}])
def test_a_forgotten_return_is_not_saved(ck, state):
    with pytest.raises(ml.errors.CheckpointError) as caught:
        ck.save(1, state)
    assert str(caught.value) == (
        f"save: state holds no arrays, got {state!r}. A function that ends without "
        "`return` gives None."
    )
    assert ck.all_steps() == []


def test_arrays_without_values_are_refused(ck):
    donated = jnp.ones(3)
    donated.delete()
    with pytest.raises(ml.errors.CheckpointError, match="x: the array was donated"):
        ck.save(1, {"x": donated})
    with pytest.raises(jax.errors.ConcretizationTypeError, match="traced array"):
        jax.jit(lambda x: ck.save(1, {"x": x}))(jnp.ones(2))
    assert ck.all_steps() == []
