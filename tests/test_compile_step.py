"""A compiled step runs the step, keeps its state's layouts, and explains itself."""

import contextlib
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

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
    return MESH


@pytest.fixture
def state(mesh):
    return {
        "w": ml.relayout(np.arange(32.0).reshape(8, 4), mesh.layout("model", None)),
        "b": ml.relayout(np.ones(4, np.float32), mesh.layout("model")),
        "n": ml.relayout(np.float32(3), mesh.layout()),
    }


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

    @ml.compile_step
    def several(state, *batches, more):
        (w, nothing), count = state
        assert nothing is None
        return ((w + sum(x["x"].sum() for x in batches), None), count + 1), (more, None)

    assert (one.__name__, one.__doc__) == ("one", "Doc.")
    assert isinstance(one, ml.step.CompiledStep)
    assert one(jnp.ones(2), 1)[0].tolist() == [2, 2]
    state, batch = jnp.zeros(2), jnp.ones(3)
    state, is_training = step(state, batch, True, 3.0)
    assert bool(is_training) is True
    state, _ = step(state, batch, train=True, scale=3.0)
    state, _ = step(scale=3.0, batch=batch, train=True, state=state)
    assert state.tolist() == [54.0, 54.0]
    state, batch = ((jnp.zeros(2), None), jnp.int32(0)), {"x": np.ones(2)}
    for _ in range(2):
        state, aux = several(state, batch, batch, more=[jnp.float32(1)])
    assert jax.tree.map(lambda x: x.tolist(), (state, aux)) == (
        (([8.0, 8.0], None), 2),
        ([1.0], None),
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("is_on_mesh", [False, True])
def test_one_trace_for_many_calls_whatever_the_state_begins_with(is_on_mesh, mesh):
    traces = []

    @ml.compile_step
    def step(state, batch):
        traces.append(batch)
        n = jnp.where(batch.sum() > 0, 1, 2)  # of a weak type
        rest = {name: state[name] + 1 for name in ("x", "m")}
        rest["mean"] = state["mean"].update(batch)
        return {"n": n, **rest, "w": state["w"] * 2}, None

    w = ml.arrays.ones(8, mesh.layout("model")) if is_on_mesh else jnp.ones(8)
    state = {"n": jnp.int32(0), "x": 0, "m": np.float32(2), "w": w}
    state["mean"] = ml.metrics.Mean()
    for _ in range(4):
        state, _ = step(state, jnp.float32(1))
    assert state["n"].dtype == jnp.int32
    assert (int(state["x"]), float(state["m"])) == (4, 6)
    assert (float(state["mean"].compute()), int(state["mean"].count)) == (1, 4)
    if is_on_mesh:
        assert ml.Layout.of(state["x"]) == ml.Layout.of(state["m"]) == mesh.layout()
    assert len(traces) == 1


def changing(state, batch, train=True, scale=1):
    total = sum(leaf.astype("float32").sum() for leaf in jax.tree.leaves(batch))
    return jax.tree.map(lambda v: v + total * scale * (2 if train else 1), state), None


MESH, ONES = ml.create_mesh({"batch": 2, "model": 4}), np.ones(8, np.float32)
ROWS, COLUMNS = MESH.layout("batch", None), MESH.layout("model", None)
# What is said, of arguments that change.
CHANGES = {
    "batch changed from f32[8] to f32[4].": lambda state: (state, ONES[:4], True),
    "batch changed from f32[8] to bf16[8].": (
        lambda state: (state, ONES.astype(jnp.bfloat16), True)
    ),
    "batch/x changed from nothing to f32[8].": lambda state: (state, {"x": ONES}, True),
    "the layout of batch changed from no layout of its own to ('batch',) on (batch=2, "
    "model=4).": lambda state: (state, on(MESH, ONES), True),
    "the layout of state/w changed from ('model', None) on (batch=2, model=4) to "
    "('batch', None) on (batch=2, model=4).": (
        lambda state: ({**state, "w": ml.relayout(state["w"], ROWS)}, ONES, True)
    ),
    "train changed from True to False.": lambda state: (state, ONES, False),
    "scale changed from nothing to f32[] of a Python number, not of np.float32(...).": (
        lambda state: (state, ONES, True, 2.0)
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("said", CHANGES)
def test_the_change_that_recompiles_is_named_refused_or_ignored(said, state):
    def call(step, state, change=lambda state: (state, ONES, True)):
        return step(*change({**state, "w": ml.relayout(state["w"], COLUMNS)}))

    change, said = CHANGES[said], f"changing recompiles: {said}"
    steps = {
        kind: ml.compile_step(changing, static_argnames="train", on_recompile=kind)
        for kind in ("error", "ignore", "warn")
    }
    for step in steps.values():
        state, _ = call(step, state)
    assert message_of(call, steps["error"], state, change) == said
    assert deleted(state) == [False] * 3
    state, _ = call(steps["error"], state)
    state, _ = call(steps["ignore"], state, change)
    with pytest.warns(ml.errors.RecompileWarning) as caught:
        state, _ = call(steps["warn"], state, change)
    assert [str(one.message) for one in caught] == [said]
    state, _ = call(steps["warn"], state)  # both programs are known now
    call(steps["warn"], state, change)


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

    def work(first):
        state = {"w": jnp.zeros(2)}
        for size in range(first, first + 6):
            state, _ = step(state, jnp.ones(size))
        return float(state["w"][0])

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(work, (1, 2, 3, 4))] == [21, 27, 33, 39]


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
def test_what_is_only_lowered_is_not_remembered(state):
    step = ml.compile_step(doubled)
    abstract = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding), state
    )
    step.lower(abstract, jax.ShapeDtypeStruct((3,), "float32"))
    step.lower(state, jnp.ones(4))
    assert deleted(state) == [False] * 3
    state, _ = step(state, jnp.ones(3))
    with pytest.warns(ml.errors.RecompileWarning, match="changed from f32.3. to f32.2"):
        step(state, jnp.ones(2))


def used_up():
    step, state = ml.compile_step(doubled), {"w": jnp.ones(3)}
    step(state, jnp.ones(2))
    return step(state, jnp.ones(2))


def sharded():
    return ml.arrays.ones(8, mesh_of(batch=8).layout("batch"))


def called_with_one_array_as_both(array):
    return ml.compile_step(doubled)({"a": array}, array)


RETURNED = "<lambda> returned another state than came in: s/"
BACK = (
    "Return it in the structure, shapes and dtypes that it had: cast or reshape it "
    "back."
)
SAME = "are the same array, whose memory the step reuses. Copy one with jax.numpy.copy."
REFUSED = {
    "on_recompile must be 'warn', 'error' or 'ignore', got 'wrn'. Did you mean 'warn'?": (
        lambda: ml.compile_step(doubled, on_recompile="wrn")
    ),
    "layouts must be a LayoutMap, got {'w': None}.": (
        lambda: ml.compile_step(doubled, layouts={"w": None})
    ),
    "<lambda> returned a dict; a step returns a pair, (state, aux), with aux=None if "
    "there is nothing else.": (
        lambda: ml.compile_step(lambda s: {"a": s})(jnp.ones(2))
    ),
    f"{RETURNED}b changed from nothing to f32[2]. {BACK}": (
        lambda: ml.compile_step(lambda s: ({"b": s["a"]}, None))({"a": jnp.ones(2)})
    ),
    f"{RETURNED}a changed from f32[2] to bf16[2]. {BACK}": (
        lambda: ml.compile_step(lambda s: ({"a": s["a"].astype("bfloat16")}, 0))(
            {"a": jnp.ones(2)}
        )
    ),
    f"{RETURNED[:-1]} changed from nothing to f32[]. Write `return state, aux`: the "
    "state comes first.": (
        lambda: ml.compile_step(lambda s: (s["a"].sum(), s))({"a": jnp.ones(2)})
    ),
    "doubled: 'state/w' was used up by an earlier call of a step. Continue with the "
    "state that the step returned.": used_up,
    f"doubled: 'state/a' and 'state/b' {SAME}": (
        lambda: ml.compile_step(doubled)(dict.fromkeys("ab", sharded()), jnp.ones(2))
    ),
    f"doubled: 'batch' and 'state/a' {SAME}": (
        lambda: called_with_one_array_as_both(sharded())
    ),
    "doubled: the state holds an NNX module, no pytree of arrays. Pass what "
    "nnx.split(module) gives, or a TrainState; or keep @nnx.jit.": (
        lambda: ml.compile_step(doubled)(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), 1)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_say_what_and_how_else(message):
    assert message_of(REFUSED[message], error=ml.errors.StepError) == message


def test_an_error_of_the_step_itself_comes_through_and_loses_nothing(state):
    @ml.compile_step
    def failing(state, batch):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        failing(state, jnp.ones(2))
    assert deleted(state) == [False] * 3


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
