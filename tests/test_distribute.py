"""Strategies: scopes, functions that run once per replica, and their variables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import meshlayout as ml
from meshlayout.distribute import (
    OneDeviceStrategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from meshlayout.errors import StrategyError
from tests.error_messages import message_of
from tests.flax_versions import set_value, value_of
from tests.replicas import mirrored, scale, split, total, values_of


@pytest.fixture
def two():
    return mirrored(2)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x)))


def batch(rows=8, seed=0):
    x = np.random.default_rng(seed).normal(size=(rows, 4)).astype("float32")
    return x, np.tanh(x[:, :3])


def losses_of(model, x, y):
    return ((model(x) - y) ** 2).mean(axis=-1)


def model_and_step(strategy):
    with strategy.scope():
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def train_step(x, y):
        def loss_fn(model):
            return ml.losses.compute_average_loss(losses_of(model, x, y))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    return model, train_step


@pytest.mark.parametrize(
    ("replicas", "short"),
    [
        *(pytest.param(n, 6, marks=pytest.mark.slow) for n in (1, 2)),
        pytest.param(8, 3, marks=pytest.mark.slow),
        (4, 5),
    ],
)
def test_a_loop_whose_last_batch_is_short_computes_what_one_device_does(
    replicas, short
):
    strategy = mirrored(replicas)
    model, train_step = model_and_step(strategy)
    plain, plain_step = model_and_step(OneDeviceStrategy("CPU:0"))
    for seed, rows in enumerate((8, 8, short)):
        arrays = batch(rows, seed)
        args = [split(strategy, x, -(-rows // replicas)) for x in arrays]
        loss = total(strategy, strategy.run(train_step, args))
        mean = lambda model: losses_of(model, *arrays).mean()  # noqa: E731, B023
        np.testing.assert_allclose(loss, mean(plain), rtol=1e-5)
        get_strategy().run(plain_step, arrays)
    for actual, expected in zip(
        jax.tree.leaves(nnx.state(model)),
        jax.tree.leaves(nnx.state(plain)),
        strict=True,
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
        assert len(actual.sharding.device_set) == replicas
    # Values of rows keep their padding apart, and reductions over rows leave it out.
    losses = strategy.run(lambda x, y: losses_of(model, x, y), args)
    assert sum(len(part) for part in strategy.local_results(losses)) == short
    expected = losses_of(plain, *arrays).mean()
    mean = strategy.reduce("MEAN", losses, axis=0)
    np.testing.assert_allclose(mean, expected, rtol=1e-4)


def test_a_step_sends_what_the_step_of_the_library_sends():
    strategy = mirrored(4)
    _, train_step = model_and_step(strategy)
    x, y = (split(strategy, array) for array in batch())
    sent = strategy.communication(train_step, args=(x, y))
    state = ml.TrainState.create(
        lambda: Model(nnx.Rngs(0)), optax.adam(1e-2), ml.LayoutMap(strategy.mesh)
    )
    step = ml.make_train_step(lambda model, batch: losses_of(model, *batch))
    plain = step.communication(state, (x.array, y.array))
    assert dict(sent) == dict(plain)
    assert sum(sent.values()) == sent["all_reduce"] == 1
    # The library's step also adds up the loss, which is one number.
    assert 0 <= plain.wire_bytes - sent.wire_bytes <= 2 * 4


def test_each_replica_draws_its_own_random_numbers():
    strategy = mirrored(4)
    with strategy.scope():
        rngs = nnx.Rngs(0)
    draw = lambda: jax.random.normal(rngs.default(), (2,))  # noqa: E731
    first, second = (strategy.gather(strategy.run(draw), axis=0) for _ in range(2))
    assert len({*first.tolist(), *second.tolist()}) == 16


def test_arguments_are_moved_to_the_replicas(two):
    x = jax.device_put(jnp.arange(3.0), jax.devices()[5])
    (own, _) = two.local_results(two.run(lambda x: 2 * x, args=(x,)))
    (_, again) = two.local_results(two.run(lambda x: x + 1, args=(own,)))
    assert again.tolist() == [1, 3, 5]


def test_one_device_gives_plain_arrays():
    strategy = OneDeviceStrategy("CPU:3")
    result = strategy.run(lambda x: {"twice": 2 * x}, args=(jnp.arange(3.0),))
    assert isinstance(result["twice"], jax.Array)
    assert total(strategy, result["twice"], 0) == 6


def test_what_is_the_same_on_all_replicas_stands_for_a_value_of_each(two):
    result = two.run(lambda x: x * 2.0, (3.0,))
    assert [float(x) for x in two.local_results(result)] == [6, 6]
    # TensorFlow's sum of a value per replica counts it once for each.
    assert total(two, result) == 12
    assert float(two.reduce("MEAN", result, axis=None)) == 6


# Scopes and contexts.


def test_scopes_cannot_be_nested(two):
    with two.scope():
        for inner in (two, OneDeviceStrategy("CPU:0")):
            assert message_of(inner.scope().__enter__) == (
                f"{inner!r}: its scope was opened inside that of MirroredStrategy(2 "
                "replicas), or of its run. Scopes cannot be nested: leave the outer one "
                "first."
            )
        assert get_strategy() is two
    assert not has_strategy()


def test_code_knows_in_which_context_it_runs(two):
    assert (has_strategy(), in_cross_replica_context()) == (False, False)
    assert get_strategy().num_replicas_in_sync == 1
    assert get_replica_context().num_replicas_in_sync == 1
    with two.scope():
        assert (has_strategy(), in_cross_replica_context()) == (True, True)
        assert get_replica_context() is None

    def replica():
        context = get_replica_context()
        assert context.strategy is two
        assert get_strategy() is two
        assert not in_cross_replica_context()
        return context.replica_id_in_sync_group

    assert [int(x) for x in two.local_results(two.run(replica))] == [0, 1]


def test_what_is_made_in_a_scope_is_mirrored_and_what_is_made_outside_works(two):
    with two.scope():
        mirrored_variable = nnx.Variable(jnp.arange(3.0))
        state = ml.TrainState.create(lambda: Model(nnx.Rngs(0)), optax.sgd(0.1))
        assert jax.sharding.get_abstract_mesh() == two.mesh.jax_mesh.abstract_mesh
    regular = nnx.Variable(jnp.ones(3))
    copies = two.local_results(mirrored_variable)
    assert [copy.devices() for copy in copies] == [{d} for d in jax.devices()[:2]]
    assert [copy.tolist() for copy in copies] == [[0, 1, 2]] * 2
    result = two.run(lambda: mirrored_variable[...] + regular[...])
    assert two.reduce("SUM", result, axis=None).tolist() == [2, 4, 6]
    kernel = state.params["hidden"]["kernel"]
    assert kernel.sharding.device_set == set(two.extended.worker_devices)


def test_variables_of_another_strategy_are_moved(two):
    model = scale(two, 2)
    for strategy in (mirrored(4), two):
        assert float(strategy.run(lambda: model(3.0))) == 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda s: s.run(jnp.sin, args=1.0),
            "run: args must be a tuple of fn's arguments, got 1.0. For one argument, "
            "write args=(x,).",
        ),
        (
            lambda s: s.run(jnp.sin, args=("a",)),
            "run: the argument x is 'a'. A replica's function takes arrays, numbers, "
            "values of replicas and NNX objects; fix anything else with "
            "functools.partial or a closure.",
        ),
        (
            lambda s: s.run(lambda: "a"),
            "<lambda> returned 'a', which is not an array.",
        ),
        (
            lambda s: s.run(lambda: s.run(lambda: 1)),
            "run was called in a function that runs on each replica: call the inner "
            "function directly.",
        ),
        (
            lambda s: s.run(lambda: s.reduce("SUM", 1.0, axis=None)),
            "reduce was called in a function that runs on each replica: use "
            "get_replica_context().all_reduce.",
        ),
    ],
)
def test_bad_calls_are_refused(two, call, message):
    assert message_of(call, two) == message


def test_what_is_gone_is_gone_and_what_stays_works(two):
    extended = two.extended
    for name in ("update", "variable_created_in_scope"):
        assert not hasattr(extended, name)
    assert not hasattr(get_replica_context(), "merge_call")
    assert len(extended.worker_devices) == 2
    assert extended.parameter_devices
    value = values_of(two, 2, 5)
    device = jax.devices()[2]
    moved = extended.reduce_to("SUM", value, device)
    assert (float(moved), moved.devices()) == (7, {device})
    with two.scope():
        variable = nnx.Variable(jnp.float32(0))
    pairs = [(value, device), (value, variable)]
    assert [float(x) for x in extended.batch_reduce_to("MAX", pairs)] == [5, 5]


# Variables whose replicas would differ. TensorFlow's number, or a refusal.


def test_a_variable_that_would_differ_between_replicas_is_named(two):
    with two.scope():
        model = Model(nnx.Rngs(0))

    def step(x):
        model.out.bias[...] = x.mean(axis=0)[:3]

    assert message_of(two.run, step, (split(two, batch()[0]),)) == (
        "step would leave different values of model/out/bias on the replicas: the new "
        "values are computed from what differs between them. Combine that first, as "
        "get_replica_context().all_reduce('MEAN', x) does, or say how the variable's "
        "values become one: nnx.Variable(x, aggregation='mean'), or 'sum', 'first', "
        "'per_replica'."
    )
    np.testing.assert_array_equal(model.out.bias[...], 0)  # nothing happened


def assign(variable, x):
    variable[...] = x


def add(variable, x):
    variable[...] += x


def assign_product(variable, x):
    variable[...] = variable[...] * x


def add_and_read(variable, x):
    variable[...] += x
    return variable[...]


def add_twice(variable, x):
    variable[...] += x
    variable[...] += x


@pytest.mark.parametrize(
    ("fn", "aggregation", "expected"),
    [
        (add, "sum", 8.0),
        (assign, "sum", 7.0),
        (assign_product, "sum", 7.0),
        (add_and_read, "sum", 8.0),
        (add_twice, "sum", 15.0),
        (assign, "mean", 3.5),
        (add, "mean", 4.5),
        (add_and_read, "mean", 4.5),
        (assign, "first", 2.0),
        (add, "first", 3.0),
    ],
)
def test_an_aggregated_variable_has_tensorflows_value_or_is_refused(
    two, fn, aggregation, expected
):
    with two.scope():
        variable = nnx.Variable(jnp.ones(()), aggregation=aggregation)
    try:
        result = two.run(fn, (variable, values_of(two, 2, 5)))
    except StrategyError as error:
        assert str(error).endswith(".")  # noqa: PT017
        assert fn not in (add, assign) or (fn, aggregation) == (assign, "sum")
        assert variable[...] == 1
        return
    assert variable[...] == expected
    if fn is add_and_read:
        assert [float(x) for x in two.local_results(result)] == [expected] * 2


def test_a_variable_per_replica_is_summed_read_and_reset(two):
    with two.scope():
        own = nnx.Variable(jnp.zeros(()), aggregation="per_replica")
    count = lambda x: add_and_read(own, x)  # noqa: E731
    resets = lambda x: own.__setitem__(..., x), lambda x: set_value(own, x)
    for start, reset in enumerate(resets):
        reset(jnp.float32(start))
        assert two.reduce("SUM", own, axis=None) == 2 * start
        for expected in ([2 + start, 5 + start], [4 + start, 10 + start]):
            result = two.run(count, (values_of(two, 2, 5),))
            assert [float(x) for x in two.local_results(result)] == expected
        summed = two.reduce("SUM", own, axis=None)
        assert isinstance(summed, jax.Array)
        assert summed == 14 + 2 * start


def test_variables_that_are_set_to_one_array_stay_two(two):
    with two.scope():
        sums = nnx.Variable(jnp.zeros(())), nnx.Variable(jnp.ones(()))

    def add(x):
        for variable in sums:
            variable[...] += get_replica_context().all_reduce("SUM", x)

    two.run(add, (values_of(two, 2, 5),))
    shared = jnp.zeros(())
    for variable in sums:
        variable[...] = shared
    two.run(add, (values_of(two, 2, 5),))
    assert [float(variable[...]) for variable in sums] == [7, 7]


# Linen.


def test_a_variable_may_hold_the_parameters_of_linen(two):
    with two.scope():
        params = nnx.Variable({"w": jnp.ones((4, 3))})

    def step(x):
        tree = value_of(params)
        grads = jax.grad(lambda tree: (x @ tree["w"]).sum())(tree)
        grads = get_replica_context().all_reduce("SUM", grads)
        set_value(params, jax.tree.map(lambda a, b: a - b, tree, grads))

    two.run(step, args=(split(two, batch()[0]),))
    expected = 1 - batch()[0].sum(axis=0)[:, None] * np.ones((1, 3))
    np.testing.assert_allclose(value_of(params)["w"], expected, rtol=1e-5)


def test_a_state_of_linen_comes_back_plain_and_may_not_differ(two):
    model, tx, x = nn.Dense(3), optax.adam(0.1), batch()[0]
    with two.scope():
        params = model.init(jax.random.key(0), x)
    state = params, tx.init(params)

    def step(state, x, *, summed=True):
        def loss_fn(params):
            losses = (model.apply(params, x) ** 2).sum(-1)
            return ml.losses.compute_average_loss(losses)

        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params)
        if summed:
            loss, grads = get_replica_context().all_reduce("SUM", (loss, grads))
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    expected = state
    for _ in range(3):
        expected, expected_loss = step(expected, x)  # outside, on one device
        state, loss = two.run(step, (state, split(two, x)))
        assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    for leaf in jax.tree.leaves((state, loss)):
        assert isinstance(leaf, jax.Array)
        assert leaf.sharding.is_fully_replicated
    np.testing.assert_allclose(
        model.apply(state[0], x), model.apply(expected[0], x), rtol=1e-4, atol=1e-5
    )
    forgotten = lambda *args: step(*args, summed=False)  # noqa: E731
    message = message_of(
        two.run, forgotten, (state, split(two, x)), error=StrategyError
    )
    assert "kernel" in message
    assert "all_reduce" in message


def test_a_forgotten_sum_of_plain_parameters_is_noticed(two):
    params = {"w": jnp.ones(3)}

    def step(params, x):
        grads = jax.grad(lambda p: (x @ p["w"]).sum())(params)
        return jax.tree.map(lambda p, g: p - g, params, grads)

    x = split(two, np.arange(12, dtype="f").reshape(4, 3))
    with pytest.raises(StrategyError, match=r"different values of w .*all_reduce"):
        two.run(step, (two.run(step, (params, x)), x))
