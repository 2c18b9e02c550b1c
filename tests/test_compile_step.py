"""A compiled step runs the step, keeps its state's layouts, and explains itself."""

import contextlib
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

import meshlayout as ml
from tests.error_messages import message_of
from tests.processes import run_processes
from tests.small_states import create, mesh_of, on, squares


def doubled(state, batch):
    return jax.tree.map(lambda leaf: leaf * 2 + batch.sum(), state), {"n": batch.size}


def deleted(tree):
    return [leaf.is_deleted() for leaf in jax.tree.leaves(tree)]


@pytest.fixture
def mesh() -> ml.Mesh:
    return ml.create_mesh({"batch": 2, "model": 4})


@pytest.fixture
def state(mesh):
    return {
        "w": ml.relayout(np.arange(32.0).reshape(8, 4), mesh.layout("model", None)),
        "b": ml.relayout(np.ones(4, np.float32), mesh.layout("model")),
        "n": ml.relayout(np.float32(3), mesh.layout()),
    }


# What it computes.


def test_steps_compute_the_function_and_the_layouts_that_come_in_go_out(state, mesh):
    def function(state, batch):
        # Left alone, the compiler would shard the sum like the batch.
        return {**doubled(state, batch)[0], "w": state["w"] + batch}, batch.sum()

    plain, before = ml.to_numpy(state), jax.tree.map(ml.Layout.of, state)
    step = ml.compile_step(function)
    for seed in range(3):
        host = np.random.default_rng(seed).normal(size=(8, 4)).astype("float32")
        plain, expected = function(plain, host)
        batch, donated = on(mesh, host), state
        state, total = step(state, batch)
        np.testing.assert_allclose(total, expected, rtol=1e-5)
        assert deleted(donated) == [True] * 3
        assert not batch.is_deleted()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), state, plain)
    assert jax.tree.map(ml.Layout.of, state) == before


def test_it_is_a_decorator_of_what_is_called_by_name_or_by_place():
    @ml.compile_step
    def one(state, batch):
        """Doc."""
        return state + batch, None

    @ml.compile_step(static_argnames="train", on_recompile="error")
    def step(state, batch, train, scale=1.0):
        assert isinstance(train, bool)
        return state + batch.sum() * scale * (2 if train else 1), train

    assert (one.__name__, one.__doc__) == ("one", "Doc.")
    assert isinstance(one, ml.step.CompiledStep)
    assert one(jnp.ones(2), 1)[0].tolist() == [2, 2]
    state, batch = jnp.zeros(2), jnp.ones(3)
    state, is_training = step(state, batch, True, 3.0)
    assert bool(is_training) is True
    state, _ = step(state, batch, train=True, scale=3.0)
    state, _ = step(scale=3.0, batch=batch, train=True, state=state)
    assert state.tolist() == [54.0, 54.0]


def test_several_batches_and_any_pytrees(mesh):
    @ml.compile_step(static_argnames="sign")
    def step(state, *batches, sign=1, more):
        (w, extra), count = state
        assert extra is None
        total = sum(batch["x"].sum() for batch in batches)
        return ((w + sign * total - more[0], None), count + 1), (more, None)

    state, batch = ((ml.arrays.zeros(8, mesh.layout("model")), None), jnp.int32(0)), {}
    for _ in range(2):
        batch = {"x": np.ones(2)}
        state, aux = step(state, batch, batch, sign=-1, more=[jnp.float32(1)])
    assert state[0][0].tolist() == [-10.0] * 8
    assert int(state[1]) == 2
    assert float(aux[0][0]) == 1.0


# How often it compiles, and what it says.


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("is_on_mesh", [False, True])
def test_one_trace_for_many_calls_whatever_the_state_begins_with(is_on_mesh, mesh):
    traces = []

    @ml.compile_step
    def step(state, batch):
        traces.append(batch)
        n = jnp.where(batch.sum() > 0, 1, 2)  # of a weak type
        rest = {name: state[name] + 1 for name in ("x", "m")}
        return {"n": n, **rest, "w": state["w"] * 2}, None

    w = ml.arrays.ones(8, mesh.layout("model")) if is_on_mesh else jnp.ones(8)
    state = {"n": jnp.int32(0), "x": 0, "m": np.float32(2), "w": w}
    for _ in range(4):
        state, _ = step(state, jnp.float32(1))
    assert state["n"].dtype == jnp.int32
    assert (int(state["x"]), float(state["m"])) == (4, 6)
    if is_on_mesh:
        assert ml.Layout.of(state["x"]) == ml.Layout.of(state["m"]) == mesh.layout()
    assert len(traces) == 1


def changing(state, batch, train=True, scale=1):
    total = sum(leaf.astype("float32").sum() for leaf in jax.tree.leaves(batch))
    return jax.tree.map(lambda v: v + total * scale * (2 if train else 1), state), None


# What changes, and what is said of it.
CHANGES = {
    "shape": ({"batch": (4,)}, "batch changed from f32[8] to f32[4]."),
    "dtype": ({"dtype": "bfloat16"}, "batch changed from f32[8] to bf16[8]."),
    "structure": ({"key": "x"}, "batch/x changed from nothing to f32[8]."),
    "layout": (
        {"spec": ("batch",)},
        "the layout of batch changed from no layout of its own to ('batch',) on "
        "(batch=2, model=4).",
    ),
    "state": (
        {"state_spec": ("batch", None)},
        "the layout of state/w changed from ('model', None) on (batch=2, model=4) to "
        "('batch', None) on (batch=2, model=4).",
    ),
    "static": ({"train": False}, "train changed from True to False."),
    "keyword": ({"scale": 2.0}, "scale changed from nothing to f32[]."),
}


def call(
    step,
    state,
    mesh,
    key=None,
    spec=None,
    batch=(8,),
    dtype="float32",
    state_spec=("model", None),
    **more,
):
    state = {**state, "w": ml.relayout(state["w"], mesh.layout(*state_spec))}
    ones = np.ones(batch, jnp.dtype(dtype))
    ones = ones if spec is None else ml.relayout(ones, mesh.layout(*spec))
    return step(state, ones if key is None else {key: ones}, **{"train": True, **more})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CHANGES)
def test_the_change_that_recompiles_is_named_refused_or_ignored(name, state, mesh):
    change, said = CHANGES[name]
    said = f"changing recompiles: {said}"
    steps = {
        kind: ml.compile_step(changing, static_argnames="train", on_recompile=kind)
        for kind in ("error", "ignore", "warn")
    }
    for step in steps.values():
        state, _ = call(step, state, mesh)
    with pytest.raises(ml.errors.StepError) as error:
        call(steps["error"], state, mesh, **change)
    assert str(error.value) == said
    assert deleted(state) == [False] * 3
    state, _ = call(steps["error"], state, mesh)
    state, _ = call(steps["ignore"], state, mesh, **change)
    with pytest.warns(ml.errors.RecompileWarning) as caught:
        state, _ = call(steps["warn"], state, mesh, **change)
    assert [str(one.message) for one in caught] == [said]
    for options in ({}, change):  # both programs are known now
        state, _ = call(steps["warn"], state, mesh, **options)


def test_what_starts_on_no_mesh_and_comes_back_on_one_is_a_recompilation(mesh):
    @ml.compile_step(on_recompile="error")
    def step(state, batch, total):
        return state, total + batch.sum()

    batch = on(mesh, np.ones(4, "float32"))
    state = ml.arrays.ones(8, mesh.layout("model"))
    state, total = step(state, batch, jnp.float32(0))
    assert message_of(lambda: step(state, batch, total)) == (
        "step recompiles: the layout of total changed from no layout of its own to () "
        "on (batch=2, model=4)."
    )


@pytest.mark.parametrize("devices", [1, 2])
def test_a_step_runs_where_its_state_was_moved_and_says_so(devices):
    @ml.compile_step
    def step(state, batch):
        return state + batch.sum(), batch.sum()

    here = mesh_of(batch=devices).layout(...)
    there = mesh_of(range(4, 4 + devices), batch=devices).layout(...)
    state, batch = ml.relayout((jnp.zeros(2), jnp.ones(4)), here)
    for _ in range(2):
        state, _ = step(state, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ml.errors.RecompileWarning)
        with pytest.raises(ValueError, match="incompatible devices"):
            step(state, ml.relayout(batch, there))
    state, batch = ml.relayout((state, batch), there)
    with pytest.warns(ml.errors.RecompileWarning, match="its devices"):
        state, total = step(state, batch)
    assert state.devices() == total.devices() == set(there.mesh.devices.flat)
    assert state.tolist() == [12.0, 12.0]


def test_threads_may_share_a_step_that_retraces():
    @ml.compile_step(on_recompile="ignore")
    def step(state, batch):
        time.sleep(0.02)
        return {"w": state["w"] + batch.sum()}, None

    errors = []

    def work(first):
        try:
            state = {"w": jnp.zeros(2)}
            for size in range(first, first + 6):
                state, _ = step(state, jnp.ones(size))
            assert state["w"][0] == sum(range(first, first + 6))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_a_step_inside_another_transformation_is_traced_and_says_nothing(
    transform, mesh
):
    step = ml.compile_step(
        lambda state, x: ({"w": state["w"] + x.mean()}, x.sum()), on_recompile="error"
    )
    batch = ml.arrays.ones((4, 8), mesh.layout("batch", None))
    step({"w": jnp.ones((2, 2))}, batch)
    inside = transform(lambda w: step({"w": w}, batch)[0]["w"].sum())
    w = jnp.ones((8, 4))
    np.testing.assert_allclose(inside(w), transform(lambda w: (w + 1.0).sum())(w))


def test_another_active_map_makes_another_program_and_says_so(mesh):
    def hidden(state, batch):
        return state, ml.constrain(batch * 2, "hidden")

    state, batch = ml.arrays.zeros(8, mesh.layout("model")), jnp.ones((2, 4))
    layouts = ml.LayoutMap(mesh, {"hidden": ("batch", "model")})
    step = ml.compile_step(hidden)
    state, found = step(state, batch)
    assert ml.Layout.of(found) != mesh.layout("batch", "model")
    said = pytest.warns(ml.errors.RecompileWarning, match="the active layout map")
    with ml.scope(layouts), said:
        state, found = step(state, batch)
    assert ml.Layout.of(found) == mesh.layout("batch", "model")
    _, found = ml.compile_step(hidden, layouts=layouts)(state, batch)
    assert ml.Layout.of(found) == mesh.layout("batch", "model")


def test_it_is_traced_with_its_own_mesh_as_the_ambient_one(mesh):
    axes = []

    @ml.compile_step
    def step(state, batch):
        axes.extend(jax.sharding.get_abstract_mesh().axis_names)
        return state, jax.lax.with_sharding_constraint(batch * 2, P("batch"))

    _, result = step(ml.arrays.zeros(8, mesh.layout("model")), jnp.ones((2, 4)))
    assert axes == ["batch", "model"]
    assert ml.Layout.of(result) == mesh.layout("batch", None)


@pytest.mark.filterwarnings("error")
def test_lower_takes_abstract_arguments_and_runs_nothing(state):
    step = ml.compile_step(doubled)
    abstract = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding), state
    )
    lowered = step.lower(abstract, jax.ShapeDtypeStruct((3,), "float32"))
    shards = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(state)]
    donated = lowered.compile().memory_analysis().alias_size_in_bytes
    assert donated == sum(shard.nbytes for shard in shards)
    step.lower(state, jnp.ones(4))
    state, _ = step(state, jnp.ones(3))
    with pytest.warns(ml.errors.RecompileWarning, match="changed from f32.3. to f32.2"):
        step(state, jnp.ones(2))


# What it refuses.


def used_up():
    step, state = ml.compile_step(doubled), {"w": jnp.ones(3)}
    step(state, jnp.ones(2))
    return step(state, jnp.ones(2))


def sharded():
    return ml.arrays.ones(8, mesh_of(batch=8).layout("batch"))


def called_with_one_array_as_both(array):
    return ml.compile_step(doubled)({"a": array}, array)


RETURNED = "<lambda> returned another state than came in: s/{}"
BACK = (
    "Return it in the structure, shapes and dtypes that it had: cast or reshape it "
    "back."
)
SAME = "are the same array, whose memory the step reuses. Copy one with jax.numpy.copy."
REFUSED = {
    "bad option": (
        lambda: ml.compile_step(doubled, on_recompile="wrn"),
        "on_recompile must be 'warn', 'error' or 'ignore', got 'wrn'. Did you mean "
        "'warn'?",
    ),
    "bad map": (
        lambda: ml.compile_step(doubled, layouts={"w": None}),
        "layouts must be a LayoutMap, got {'w': None}.",
    ),
    "no pair": (
        lambda: ml.compile_step(lambda s: {"a": s})(jnp.ones(2)),
        "<lambda> returned a dict; a step returns a pair, (state, aux), with aux=None "
        "if there is nothing else.",
    ),
    "another structure": (
        lambda: ml.compile_step(lambda s: ({"b": s["a"]}, None))({"a": jnp.ones(2)}),
        RETURNED.format(f"b changed from nothing to f32[2]. {BACK}"),
    ),
    "another dtype": (
        lambda: ml.compile_step(lambda s: ({"a": s["a"].astype("bfloat16")}, 0))(
            {"a": jnp.ones(2)}
        ),
        RETURNED.format(f"a changed from f32[2] to bf16[2]. {BACK}"),
    ),
    "a state used up": (
        used_up,
        "doubled: 'state/w' was used up by an earlier call of a step. Continue with "
        "the state that the step returned.",
    ),
    "an array twice": (
        lambda: ml.compile_step(doubled)(dict.fromkeys("ab", sharded()), jnp.ones(2)),
        f"doubled: 'state/a' and 'state/b' {SAME}",
    ),
    "the state as the batch": (
        lambda: called_with_one_array_as_both(sharded()),
        f"doubled: 'batch' and 'state/a' {SAME}",
    ),
    "a module": (
        lambda: ml.compile_step(doubled)(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 1),
        "doubled: the state holds an NNX module, no pytree of arrays. Pass what "
        "nnx.split(module) gives, or a TrainState; or keep @nnx.jit.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_and_how_else(name):
    call, message = REFUSED[name]
    assert message_of(call, error=ml.errors.StepError) == message


def test_an_error_of_the_step_itself_comes_through_and_loses_nothing(state):
    @ml.compile_step
    def failing(state, batch):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        failing(state, jnp.ones(2))
    assert deleted(state) == [False] * 3


# In processes of their own.


def unread_steps():
    mesh = ml.create_mesh({"batch": 8})

    @ml.compile_step
    def step(state, batch):
        grads = jax.grad(lambda w: (batch @ w).mean())(state)
        return state - 1e-6 * grads, None

    batch = ml.arrays.ones((256, 256), mesh.layout("batch", None))
    state = ml.arrays.ones((256, 128), mesh.layout(None, None))
    for _ in range(2000):
        state, _ = step(state, batch)
    jax.block_until_ready(state)


@pytest.mark.multiprocess
def test_thousands_of_steps_that_read_nothing_neither_dead_lock_nor_abort():
    """Too many in flight, and XLA ends the process after 40 seconds."""
    run_processes(1, unread_steps, devices_per_process=8)


def steps_under(ambient_axes, ambient_types, state_types):
    """Numbers of steps of every kind while `jax.set_mesh` has set a mesh, or none."""
    axes, enter, ambient = {"batch": 2, "model": 4}, contextlib.nullcontext, None
    if ambient_axes:
        other = ml.create_mesh(ambient_axes, axis_types=AxisType[ambient_types])
        enter, ambient = jax.set_mesh, other.jax_mesh
    mesh = ml.create_mesh(axes, axis_types=AxisType[state_types])
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    batch = on(mesh, {"x": x, "y": x[::-1].copy(), "weight": np.ones(8, "float32")})
    state = create(mesh, tx=optax.adam(0.1))
    options = {"accumulate": 2, "ema": 0.9, "on_nonfinite": "skip"}
    train_step = ml.make_train_step(squares, on_recompile="error", **options)
    eval_step = ml.make_eval_step(squares, metrics={"mse": ml.metrics.Mean()})
    predict_step = ml.make_predict_step(lambda model, batch: model(batch["x"]))
    own_step = ml.compile_step(lambda s, b: (s * 2, b["x"].sum()))
    own, found = ml.arrays.ones((4, 4), mesh.layout(None, "model")), []
    for _ in range(2):
        with enter(ambient):
            state, metrics = train_step(state, batch)
            evaluated, made = eval_step(state, batch), predict_step(state, batch)
            own, total = own_step(own, batch)
            train_step.lower(state, batch)
        values = metrics["loss"], evaluated["mse"], made.sum(), own.sum(), total
        found += [round(float(value), 4) for value in values]
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "case",
    [
        # One of them shows whether anything is wrong; the rest show where.
        ({"x": 8}, "Explicit", "Explicit"),
        *(
            pytest.param(({"batch": 2, "model": 4}, *types), marks=pytest.mark.slow)
            for types in (("Auto", "Explicit"), ("Explicit", "Auto"))
        ),
    ],
    ids=str,
)
def test_steps_compute_the_same_under_any_mesh(case):
    """In a process that has compiled nothing: JAX's caches would hide the fault."""
    (found,) = run_processes(1, steps_under, *case, devices_per_process=8)
    assert found == steps_under(None, None, "Auto")
