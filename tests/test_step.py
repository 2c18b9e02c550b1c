"""A compiled step runs the step, keeps its state's layouts, and explains itself."""

import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshlayout as ml


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


def test_three_steps_equal_the_plain_function(state, mesh):
    plain = jax.tree.map(np.asarray, state)
    step = ml.compile_step(doubled)
    for seed in range(3):
        batch = np.random.default_rng(seed).normal(size=(8, 2)).astype("float32")
        plain, _ = doubled(plain, batch)
        state, aux = step(state, ml.relayout(batch, mesh.layout("batch", None)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), state, plain)
    assert aux == {"n": 16}


def test_the_layouts_that_come_in_go_out(state, mesh):
    before = jax.tree.map(ml.Layout.of, state)
    # Left alone, the compiler would lay the product out by its operands.
    step = ml.compile_step(lambda s, b: (jax.tree.map(lambda v: v + b.sum(), s), None))
    for _ in range(3):
        state, _ = step(state, ml.arrays.ones((8, 8), mesh.layout("batch", "model")))
    assert jax.tree.map(ml.Layout.of, state) == before


def test_the_state_is_donated_and_the_batch_is_not(state):
    batch = jnp.ones(3)
    ml.compile_step(doubled)(state, batch)
    assert deleted(state) == [True] * 3
    assert not batch.is_deleted()


def test_it_is_a_decorator_with_and_without_options(state):
    @ml.compile_step
    def one(state, batch):
        """Doc."""
        return doubled(state, batch)

    @ml.compile_step(on_recompile="error")
    def two(state, batch):
        return doubled(state, batch)

    assert one.__name__ == "one"
    assert one.__doc__ == "Doc."
    assert isinstance(one, ml.step.CompiledStep)
    state, _ = one(state, jnp.ones(2))
    two(state, jnp.ones(2))


@pytest.mark.parametrize(
    "call",
    [
        lambda step, s, b: step(s, b, True, scale=3.0),
        lambda step, s, b: step(s, b, train=True, scale=3.0),
        lambda step, s, b: step(s, batch=b, train=True, scale=3.0),
        lambda step, s, b: step(state=s, batch=b, train=True, scale=3.0),
        lambda step, s, b: step(s, b, True, 3.0),
    ],
)
def test_static_and_keyword_arguments(call):
    def step(state, batch, train, scale=1.0):
        assert isinstance(train, bool)
        return state + batch.sum() * scale * (2 if train else 1), train

    compiled = ml.compile_step(step, static_argnames="train")
    state, aux = call(compiled, jnp.zeros(2), jnp.ones(3))
    assert state.tolist() == [18.0, 18.0]
    assert bool(aux) is True


def test_several_batches_and_any_pytrees(mesh):
    def step(state, first, *, second):
        (w, extra), count = state
        assert extra is None
        return ((w + first["x"].sum() - second[0], None), count + 1), (second, None)

    state = ((ml.arrays.zeros(8, mesh.layout("model")), None), jnp.int32(0))
    compiled = ml.compile_step(step)
    for _ in range(2):
        state, aux = compiled(state, {"x": np.ones(4)}, second=[jnp.float32(1)])
    assert state[0][0].tolist() == [6.0] * 8
    assert int(state[1]) == 2
    assert float(aux[0][0]) == 1.0


def test_numpy_and_number_leaves_of_a_state_are_placed_with_the_others(mesh):
    state = {"w": ml.arrays.ones(8, mesh.layout("model")), "n": 1, "m": np.float32(2)}
    step = ml.compile_step(lambda s, b: (jax.tree.map(lambda v: v + b, s), None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            state, _ = step(state, 1)
    assert int(state["n"]) == 4
    assert ml.Layout.of(state["n"]) == mesh.layout()


# How often it compiles, and what it says.


class Traces:
    """Counts how often a step's Python runs: once for each program."""

    def __init__(self, step=doubled):
        self.step, self.count = step, 0

    def __call__(self, state, *args, **kwargs):
        self.count += 1
        return self.step(state, *args, **kwargs)


def test_one_program_for_many_calls(state, mesh):
    traces = Traces()
    step = ml.compile_step(traces)
    batch = ml.arrays.ones(8, mesh.layout("batch"))
    for _ in range(5):
        state, _ = step(state, batch)
    assert traces.count == 1


def test_a_weakly_typed_update_does_not_compile_twice():
    traces = Traces(lambda s, b: ({"n": jnp.where(b > 0, 1, 2), "x": s["x"] + 1}, None))
    step = ml.compile_step(traces)
    state = {"n": jnp.int32(0), "x": 0}
    for _ in range(3):
        state, _ = step(state, jnp.float32(1))
    assert traces.count == 1
    assert state["n"].dtype == jnp.int32


CHANGES = {
    "shape": (
        lambda m: ((jnp.ones(4),), {}),
        "changing recompiles: batch changed from f32[8] to f32[4].",
    ),
    "dtype": (
        lambda m: ((jnp.ones(8, jnp.bfloat16),), {}),
        "changing recompiles: batch changed from f32[8] to bf16[8].",
    ),
    "structure": (
        lambda m: (({"x": jnp.ones(8)},), {}),
        "changing recompiles: batch/x changed from nothing to f32[8].",
    ),
    "layout": (
        lambda m: ((ml.arrays.ones(8, m.layout("batch")),), {}),
        "changing recompiles: the layout of batch changed from no layout of its own to "
        "('batch',) on (batch=2, model=4).",
    ),
    "static": (
        lambda m: ((jnp.ones(8),), {"train": False}),
        "changing recompiles: train changed from True to False.",
    ),
    "keyword": (
        lambda m: ((jnp.ones(8),), {"scale": jnp.float32(2)}),
        "changing recompiles: scale changed from nothing to f32[].",
    ),
}


def changing(state, batch, train=True, scale=1):
    total = sum(leaf.astype("float32").sum() for leaf in jax.tree.leaves(batch))
    return jax.tree.map(lambda v: v + total * scale * (2 if train else 1), state), None


@pytest.mark.parametrize("name", CHANGES)
def test_the_change_that_recompiles_is_named(name, state, mesh):
    change, message = CHANGES[name]
    args, kwargs = change(mesh)
    step = ml.compile_step(changing, static_argnames=("train",))
    state, _ = step(state, jnp.ones(8), train=True)
    with pytest.warns(ml.errors.RecompileWarning) as caught:
        state, _ = step(state, *args, **{"train": True, **kwargs})
    assert [str(one.message) for one in caught] == [message]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # both programs are known now
        state, _ = step(state, jnp.ones(8), train=True)
        step(state, *args, **{"train": True, **kwargs})


@pytest.mark.parametrize("name", CHANGES)
def test_with_error_a_recompilation_is_refused_and_nothing_is_lost(name, state, mesh):
    change, message = CHANGES[name]
    args, kwargs = change(mesh)
    step = ml.compile_step(changing, static_argnames=("train",), on_recompile="error")
    state, _ = step(state, jnp.ones(8), train=True)
    with pytest.raises(ml.errors.StepError) as caught:
        step(state, *args, **{"train": True, **kwargs})
    assert str(caught.value) == message
    assert deleted(state) == [False] * 3
    step(state, jnp.ones(8), train=True)


def test_a_state_in_another_layout_is_named_too(state, mesh):
    step = ml.compile_step(doubled, on_recompile="error")
    step(state, jnp.ones(2))
    other = {
        "w": ml.arrays.ones((8, 4), mesh.layout("batch", None)),
        "b": ml.arrays.ones(4, mesh.layout("model")),
        "n": ml.arrays.ones((), mesh.layout()),
    }
    with pytest.raises(ml.errors.StepError) as caught:
        step(other, jnp.ones(2))
    assert str(caught.value) == (
        "doubled recompiles: the layout of state/w changed from ('model', None) on "
        "(batch=2, model=4) to ('batch', None) on (batch=2, model=4)."
    )
    assert deleted(other) == [False] * 3


def test_by_name_or_by_place_is_one_program(state):
    step = ml.compile_step(changing, static_argnames="train", on_recompile="error")
    state, _ = step(state, jnp.ones(8), True)
    state, _ = step(state, batch=jnp.ones(8), train=True)
    state, _ = step(batch=jnp.ones(8), train=True, state=state)
    plain_step = ml.compile_step(doubled, on_recompile="error")
    state, _ = plain_step(state, jnp.ones(8))
    plain_step(batch=jnp.ones(8), state=state)


def test_threads_may_share_a_step_that_retraces():
    traces = []

    def slow(state, batch):
        traces.append(batch.shape)
        time.sleep(0.02)
        return {"w": state["w"] + batch.sum()}, None

    step = ml.compile_step(slow, on_recompile="ignore")
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
    strict = ml.compile_step(slow, on_recompile="error")
    strict({"w": jnp.zeros(2)}, jnp.ones(3))
    with pytest.raises(ml.errors.StepError, match="recompiles"):
        strict({"w": jnp.zeros(2)}, jnp.ones(4))


@pytest.mark.parametrize("transform", [jax.grad, jax.vmap])
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
    expected = transform(lambda w: (w + 1.0).sum())(w)
    np.testing.assert_allclose(inside(w), expected)


def test_any_number_of_batches_and_a_static_argument_after_them():
    @ml.compile_step(static_argnames="sign")
    def step(state, *batches, sign=1):
        return state + sign * sum(batch.sum() for batch in batches), None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ml.errors.RecompileWarning)
        assert step(jnp.zeros(()), jnp.ones(2), jnp.ones(3))[0] == 5
        assert step(jnp.zeros(()), jnp.ones(2), jnp.ones(3), sign=-1)[0] == -5


def test_ignore_says_nothing(state):
    step = ml.compile_step(doubled, on_recompile="ignore")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = step(state, jnp.ones(2))
        step(state, jnp.ones(3))


def test_another_active_map_makes_another_program_and_says_so(mesh):
    traces = Traces(lambda s, b: (s + ml.constrain(b, "hidden").sum(), None))
    step = ml.compile_step(traces)
    state, _ = step(ml.arrays.zeros(8, mesh.layout("model")), jnp.ones((2, 4)))
    with (
        ml.scope(ml.LayoutMap(mesh, {"hidden": ("batch", "model")})),
        pytest.warns(ml.errors.RecompileWarning, match="the active layout map"),
    ):
        step(state, jnp.ones((2, 4)))
    assert traces.count == 2


def test_the_given_map_is_in_force_inside(mesh):
    layouts = ml.LayoutMap(mesh, {"hidden": ("batch", "model")})
    step = ml.compile_step(
        lambda s, b: (s, ml.constrain(b * 2, "hidden")), layouts=layouts
    )
    _, hidden = step(ml.arrays.zeros(8, mesh.layout("model")), jnp.ones((2, 4)))
    assert ml.Layout.of(hidden) == mesh.layout("batch", "model")


def test_it_is_traced_with_its_own_mesh_as_the_ambient_one(mesh):
    axes = []

    @ml.compile_step
    def step(state, batch):
        axes.extend(jax.sharding.get_abstract_mesh().axis_names)
        return state, jax.lax.with_sharding_constraint(batch * 2, P("batch"))

    _, result = step(ml.arrays.zeros(8, mesh.layout("model")), jnp.ones((2, 4)))
    assert axes == ["batch", "model"]
    assert ml.Layout.of(result) == mesh.layout("batch", None)


# Inside and outside.


def test_lower_takes_abstract_arguments_and_runs_nothing(state, mesh):
    step = ml.compile_step(doubled)
    abstract = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding), state
    )
    lowered = step.lower(abstract, jax.ShapeDtypeStruct((3,), "float32"))
    held = sum(
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state)
    )
    assert lowered.compile().memory_analysis().alias_size_in_bytes == held
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(state, jnp.ones(3))


def test_calls_recompile_after_a_program_that_was_looked_at_and_called(state):
    step = ml.compile_step(doubled)
    for size in (3, 4):
        step.lower(state, jnp.ones(size))
    state, _ = step(state, jnp.ones(3))
    with pytest.warns(ml.errors.RecompileWarning, match="changed from f32.3. to f32.2"):
        step(state, jnp.ones(2))


def test_it_can_be_called_inside_jit(state):
    step = ml.compile_step(doubled)
    expected, _ = doubled(state, jnp.ones(3))
    result, _ = jax.jit(lambda s, b: step(s, b))(state, jnp.ones(3))
    jax.tree.map(np.testing.assert_array_equal, result, expected)


# What it refuses.


def used_up():
    step = ml.compile_step(doubled)
    state = {"w": jnp.ones(3)}
    step(state, jnp.ones(2))
    return step(state, jnp.ones(2))


def twice(mesh):
    w = ml.arrays.ones(8, mesh.layout("batch"))
    return ml.compile_step(doubled)({"a": w, "b": w}, jnp.ones(2))


def state_as_batch():
    mesh = ml.create_mesh({"batch": 8})
    state = {"a": ml.arrays.ones(8, mesh.layout("batch"))}
    return ml.compile_step(doubled)(state, state["a"])


def shared_module():
    return ml.compile_step(doubled)(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones(2))


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
        "<lambda> returned a dict; a step returns a pair, (state, aux), with aux=None if "
        "there is nothing else.",
    ),
    "another structure": (
        lambda: ml.compile_step(lambda s: ({"b": s["a"]}, None))({"a": jnp.ones(2)}),
        "<lambda> returned another state than came in: s/b changed from nothing to f32[2]. "
        "Return it in the structure, shapes and dtypes that it had: cast or reshape it back.",
    ),
    "another dtype": (
        lambda: ml.compile_step(lambda s: ({"a": s["a"].astype("bfloat16")}, 0))(
            {"a": jnp.ones(2)}
        ),
        "<lambda> returned another state than came in: s/a changed from f32[2] to bf16[2]. "
        "Return it in the structure, shapes and dtypes that it had: cast or reshape it "
        "back.",
    ),
    "a state used up": (
        used_up,
        "doubled: 'state/w' was used up by an earlier call of a step. "
        "Continue with the state that the step returned.",
    ),
    "an array twice": (
        lambda: twice(ml.create_mesh({"batch": 8})),
        "doubled: 'state/a' and 'state/b' are the same array, whose memory the step reuses. "
        "Copy one with jax.numpy.copy.",
    ),
    "the state as the batch": (
        state_as_batch,
        "doubled: 'batch' and 'state/a' are the same array, whose memory the step reuses. "
        "Copy one with jax.numpy.copy.",
    ),
    "a module": (
        shared_module,
        "doubled: the state holds an NNX module, no pytree of arrays. Pass what "
        "nnx.split(module) gives, or a TrainState.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_and_how_else(name):
    call, message = REFUSED[name]
    with pytest.raises(ml.errors.StepError) as caught:
        call()
    assert str(caught.value) == message


def test_an_error_of_the_step_itself_comes_through_and_loses_nothing(state):
    def failing(state, batch):
        msg = "mine"
        raise KeyError(msg)

    with pytest.raises(KeyError, match="mine"):
        ml.compile_step(failing)(state, jnp.ones(2))
    assert deleted(state) == [False] * 3
