"""NNX variables as the state of a program: bound to traced values, and put back."""

import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout.distribute.variables import Variables, aggregation, is_on
from meshlayout.errors import StrategyError
from tests.error_messages import message_of
from tests.flax_versions import module_list


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.scale = jnp.full((1, 4), 0.5)
        self.rate = 0.3

    def __call__(self, x):
        return self.dense(x) * self.scale


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = Block(rngs)
        self.blocks = module_list([Block(rngs), Block(rngs)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.dropout(self.norm(x))


def parts(seed=0):
    model = Net(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return model, optimizer, nnx.metrics.Average()


def step_of(model, optimizer, average):
    def step(x):
        def loss_fn(model):
            return jnp.mean(model(x) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        average.update(values=loss)
        return loss

    return step


def named(*objects):
    return tuple(zip(("model", "optimizer", "average"), objects, strict=False))


def run(variables, step, x):
    """What a strategy does: the variables are the state of a compiled program."""
    changed = []

    def program(values, x):
        with variables.bound(values) as bound:
            result = step(x)
        changed[:] = bound.changed
        return bound.new_values, result

    values, result = jax.jit(program)(variables.get(), x)
    variables.set(values)
    return result, tuple(changed)


X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def test_bound_steps_give_the_numbers_of_nnx_jit():
    objects, expected_objects = parts(), parts()
    variables = Variables(named(*objects))

    @nnx.jit
    def expected_step(model, optimizer, average, x):
        return step_of(model, optimizer, average)(x)

    for _ in range(3):
        loss, changed = run(variables, step_of(*objects), X)
        expected = expected_step(*expected_objects, X)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for node, expected_node in zip(objects, expected_objects, strict=True):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(
                jax.random.key_data(a)
                if jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
                else a,
                jax.random.key_data(b)
                if jnp.issubdtype(b.dtype, jax.dtypes.prng_key)
                else b,
                rtol=2e-5,
                atol=1e-6,
            ),
            nnx.to_pure_dict(nnx.state(node)),
            nnx.to_pure_dict(nnx.state(expected_node)),
        )
    by_path = dict(zip(variables.paths, changed, strict=True))
    assert not by_path["model/dropout/rngs/key"]
    assert by_path["model/dropout/rngs/count"]
    assert by_path["model/first/dense/kernel"]
    assert by_path["average/total"]
    assert variables.is_current()


def test_paths_are_those_of_layout_maps_with_the_name_in_front():
    model, optimizer, average = parts()
    paths = Variables(named(model, optimizer, average)).paths
    assert len(set(paths)) == len(paths)
    assert "model/blocks/1/dense/kernel" in paths
    assert "optimizer/opt_state/0/mu/first/dense/kernel" in paths
    assert "average/count" in paths
    assert Variables((("w", nnx.Param(jnp.ones(2))),)).paths == ("w",)


def test_shared_variables_occur_once():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    model.blocks[1].dense.kernel = model.first.dense.kernel
    objects = (("model", model), ("optimizer", optimizer), ("layer", model.first))
    variables = Variables(objects)
    assert len({id(x) for x in variables.variables}) == len(variables.variables)
    starts = {
        path.partition("/")[2]
        for path in variables.paths
        if path.startswith("optimizer")
    }
    assert starts == {"step"}
    assert not any(path.startswith("layer") for path in variables.paths)


def state_of(*objects):
    attributes = [
        (path, id(node))
        for root in objects
        for path, node in nnx.iter_graph(root)
        if not str(path[-1:]).startswith("('_pytree__")
    ]
    return attributes, [id(x) for x in Variables(named(*objects)).get()]


def test_everything_is_as_before_after_a_trace_and_after_an_error():
    model, *_ = objects = parts()
    variables = Variables(named(*objects))
    before = state_of(*objects)
    step = step_of(*objects)

    def failing(x):
        step(x)
        model.hidden = nnx.Intermediate(x)
        raise RuntimeError

    jax.make_jaxpr(lambda values, x: traced(variables, values, step, x))(
        variables.get(), X
    )
    assert state_of(*objects) == before
    with pytest.raises(RuntimeError):
        jax.make_jaxpr(lambda values, x: traced(variables, values, failing, x))(
            variables.get(), X
        )
    assert state_of(*objects) == before
    model.rate = 1.0  # outside of the trace, Flax lets us change it again
    model.first.dense.kernel[...] = jnp.zeros((4, 4))


def traced(variables, values, step, *args):
    with variables.bound(values):
        return step(*args)


def trace(variables, step):
    return jax.make_jaxpr(lambda values: traced(variables, values, step))(
        variables.get()
    )


def sow(model):
    model.h = nnx.Intermediate(jnp.ones(2))  # as model.sow does, which Flax deprecates


def test_transforms_of_flax_work_while_variables_are_bound():
    class Scanned(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))
            self.layers = make(jax.random.split(rngs(), 3))

        def __call__(self, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def forward(layer, x):
                return nnx.remat(lambda layer, x: layer(x))(layer, x)

            return forward(self.layers, x)

    def make_step(model):
        def step(x):
            grads = nnx.grad(lambda model: nnx.jit(lambda m: m(x).sum())(model))(model)
            nnx.update(
                model,
                jax.tree.map(
                    lambda w, g: w - 0.1 * g, nnx.state(model, nnx.Param), grads
                ),
            )
            return model(x)

        return step

    model, expected = Scanned(nnx.Rngs(0)), Scanned(nnx.Rngs(0))
    variables = Variables((("model", model),))
    actual = [run(variables, make_step(model), X)[0] for _ in range(2)]
    np.testing.assert_allclose(
        actual, [make_step(expected)(X) for _ in range(2)], rtol=1e-5
    )


def test_what_a_program_cannot_repeat_is_refused_and_undone():
    model, *_ = objects = parts()
    variables = Variables((("model", model),))
    before = state_of(*objects)

    def refusal(change):
        message = message_of(trace, variables, change, error=StrategyError)
        assert state_of(*objects) == before
        return message

    assert refusal(lambda: sow(model)) == (
        "run: the function adds the variable model/h, and the state of a "
        "compiled program cannot grow. Create it before the call, in the strategy's "
        "scope. (What sow() keeps can be taken out with nnx.pop inside the function.)"
    )
    assert refusal(
        lambda: setattr(model.first.dense, "bias", nnx.Param(jnp.ones(4)))
    ) == (
        "run: the function replaces the variable model/first/dense/bias by "
        "another one. Give it a new value instead: variable[...] = value."
    )
    assert refusal(lambda: delattr(model.first.dense, "bias")) == (
        "run: the function removes the variable model/first/dense/bias. The "
        "function runs once per compiled program, not at every call, so this would "
        "happen only once. Remove it before the call."
    )
    assert refusal(lambda: setattr(model.first, "rate", 0.5)) == (
        "run: the function sets model/first/rate, which is not an "
        "nnx.Variable, from 0.3 to 0.5. The function runs once per compiled program, "
        "not at every call, so this would happen only once. Return the value or keep "
        "it in an nnx.Variable; switch modes, as model.eval() does, before the call."
    )
    assert "model/first/scale" in refusal(
        lambda: setattr(model.first, "scale", jnp.ones((1, 4)))
    )
    assert "model/extra" in refusal(lambda: setattr(model, "extra", 1))
    assert "deterministic" in refusal(model.eval)
    assert "model/blocks/2" in refusal(lambda: model.blocks.append(Block(nnx.Rngs(1))))
    trace(variables, lambda: model.train())  # changes nothing
    trace(variables, lambda: [sow(model), nnx.pop(model, nnx.Intermediate)])


def test_a_program_is_current_until_an_attribute_changes():
    model, *_ = objects = parts()
    variables = Variables(named(*objects))
    assert variables.is_current()
    model.eval()
    assert not variables.is_current()
    model.train()
    assert variables.is_current()
    nnx.value_and_grad(lambda model: model(X).sum())(
        model
    )  # Flax replaces its own parts
    assert variables.is_current()
    model.first.rate = float("0.3")
    assert variables.is_current()
    model.first.rate = 0.4
    assert not variables.is_current()
    model.first.rate = 0.3
    kernel = model.first.dense.kernel
    model.first.dense.kernel = nnx.Param(jnp.array(kernel[...]))
    assert not variables.is_current()
    model.first.dense.kernel = kernel
    assert variables.is_current()
    model.blocks.append(Block(nnx.Rngs(1)))
    assert not variables.is_current()


def test_values_that_are_trees_are_bound_and_other_values_are_refused():
    tree = nnx.Variable({"a": jnp.ones(2), "b": (jnp.zeros(3),)})
    variables = Variables((("tree", tree),))

    def double():
        tree.set_value(jax.tree.map(lambda x: x * 2 + 1, tree.get_value()))

    if hasattr(tree, "set_value"):
        run(variables, lambda x: double(), X)
        assert tree.get_value()["a"].tolist() == [3, 3]
        _, changed = run(variables, lambda x: tree.get_value(), X)
        assert changed == (False,)
    text = message_of(Variables, (("name", nnx.Variable("x")),), error=StrategyError)
    assert text == (
        "name is a variable that holds a str; the state of a compiled program consists "
        "of arrays. Make it a plain attribute."
    )
    reference = nnx.Variable(jnp.ones(2))
    if hasattr(jax, "new_ref"):
        object.__setattr__(
            reference,
            "_raw_value" if hasattr(nnx.Variable, "_raw_value") else "raw_value",
            jax.new_ref(jnp.ones(2)),
        )
        text = message_of(Variables, (("r", reference),), error=StrategyError)
        assert text == (
            "r keeps its value in a jax.Ref (ref=True), which cannot be the state of a "
            "compiled program. Create it without."
        )


def test_hijax_variables_are_refused():
    variable = nnx.Param(jnp.ones(2), hijax=True)
    if type(variable).__name__ == "HijaxVariable":
        assert message_of(Variables, (("h", variable),), error=StrategyError) == (
            "h is a variable with hijax=True, which cannot be the state of a compiled "
            "program. Create it without."
        )


def test_kinds_of_variables_say_how_replicas_are_aggregated():
    class Largest(nnx.metrics.Metric):
        def __init__(self):
            self.value = nnx.metrics.MetricState(jnp.zeros(()))

    class Top5(nnx.metrics.Accuracy):
        pass

    model = Net(nnx.Rngs(0))
    objects = (
        ("model", model),
        ("metrics", nnx.MultiMetric(loss=nnx.metrics.Average(), top5=Top5())),
        ("welford", nnx.metrics.Welford()),
        ("largest", Largest()),
        ("own", nnx.Variable(jnp.zeros(()), aggregation="first")),
        ("mean", nnx.metrics.MetricState(jnp.zeros(()), aggregation="mean")),
    )
    variables = Variables(objects)
    aggregations = dict(zip(variables.paths, variables.aggregations, strict=True))
    named_kinds = {
        path: kind for path, kind in aggregations.items() if kind is not None
    }
    assert named_kinds == {
        "model/norm/mean": "mean",
        "model/norm/var": "mean",
        "metrics/loss/total": "sum",
        "metrics/loss/count": "sum",
        "metrics/top5/total": "sum",
        "metrics/top5/count": "sum",
        "own": "first",
        "mean": "mean",
    }
    bad = nnx.Variable(jnp.zeros(()), aggregation="man")
    assert message_of(aggregation, bad, None, "model/x", error=StrategyError) == (
        "model/x: aggregation must be 'sum', 'mean', 'first' or 'per_replica', got "
        "'man'. Did you mean 'mean'?"
    )
    for value in (0, -1, float("nan"), True, object(), "SUM"):
        bad = nnx.Variable(jnp.zeros(()), aggregation=value)
        assert "aggregation must be" in message_of(
            aggregation, bad, error=StrategyError
        )


def test_is_on_knows_where_an_array_was_placed():
    devices = jax.devices()
    mesh, reverse = (
        jax.make_mesh((2,), ("batch",), devices=d)
        for d in (devices[:2], devices[1::-1])
    )
    place = partial(jax.device_put, jnp.arange(4.0))
    assert is_on(place(NamedSharding(mesh, PartitionSpec())), mesh) is True
    assert is_on(place(NamedSharding(mesh, PartitionSpec("batch"))), mesh) is False
    assert is_on(place(NamedSharding(reverse, PartitionSpec())), mesh) is False
    assert is_on(place(devices[0]), mesh) is False
    assert (
        is_on(place(devices[0]), jax.make_mesh((1,), ("b",), devices=devices[:1]))
        is True
    )
    assert is_on(jnp.ones(3), mesh) is None
    assert is_on(jax.random.key(0), mesh) is None
    assert is_on(np.ones(3), mesh) is None
    assert is_on(1.0, mesh) is None


def test_threads_wait_until_variables_are_bound_no_more():
    weight = nnx.Param(jnp.ones(()))
    variables = Variables((("weight", weight),))
    inside, seen = threading.Event(), []

    def read():
        inside.wait(10)
        seen.extend(variables.get())

    thread = threading.Thread(target=read)
    thread.start()

    def step():
        inside.set()
        thread.join(0.2)
        assert thread.is_alive()
        return weight[...] + 1

    trace(variables, step)
    thread.join(10)
    assert float(seen[0]) == 1.0
