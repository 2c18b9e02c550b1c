"""Strategies: scopes, functions that run once per replica, and their variables."""

import functools

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
from tests.flax_versions import set_value
from tests.replicas import made, mirrored, parts_of, scale, split, total, values_of


class Model(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        # Of zeros, with which padding cannot be seen at the first step.
        self.out = nnx.Linear(8, 3, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x)))


def batch(rows=8, seed=0):
    x = np.random.default_rng(seed).normal(size=(rows, 4)).astype("float32")
    return x, np.tanh(x[:, :3])


def losses_of(model, x, y):
    return ((model(x) - y) ** 2).mean(axis=-1)


def model_and_step(strategy):
    model, optimizer = made(strategy, lambda: Model(nnx.Rngs(0)), rate=0.1)

    def train_step(x, y):
        def loss_fn(model):
            losses = losses_of(model, x, y) + (model(x) ** 2).sum(-1)
            return ml.losses.compute_average_loss(losses)

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
    for seed, rows in enumerate((short, 8, short)):
        arrays = batch(rows, seed)
        args = [split(strategy, x, -(-rows // replicas)) for x in arrays]
        loss = total(strategy, strategy.run(train_step, args))
        expected = get_strategy().run(plain_step, arrays)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    states = (jax.tree.leaves(nnx.state(x)) for x in (model, plain))
    for actual, expected in zip(*states, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
        assert len(actual.sharding.device_set) == replicas


def test_a_step_sends_what_the_step_of_the_library_sends():
    strategy = mirrored(4)
    _, train_step = model_and_step(strategy)
    x, y = (split(strategy, array) for array in batch())
    sent = strategy.communication(train_step, args=(x, y))
    state = ml.TrainState.create(
        lambda: Model(nnx.Rngs(0)), optax.sgd(0.1), ml.LayoutMap(strategy.mesh)
    )
    step = ml.make_train_step(lambda model, batch: losses_of(model, *batch))
    plain = step.communication(state, (x.array, y.array))
    assert dict(sent) == dict(plain)
    assert "psum" not in str(sent)
    assert [x.leaves for x in sent.collectives] == [()]
    assert sum(sent.values()) == sent["all_reduce"] == 1
    # The library's step also adds up the loss, which is one number.
    assert 0 <= plain.wire_bytes - sent.wire_bytes <= 2 * 4


def test_each_replica_draws_its_own_random_numbers():
    strategy = mirrored(4)
    with strategy.scope():
        rngs = nnx.Rngs(0)
    draw = lambda: jax.random.normal(rngs.default(), (2,))
    first, second = (strategy.gather(strategy.run(draw), axis=0) for _ in range(2))
    assert len({*first.tolist(), *second.tolist()}) == 16


def test_arguments_are_moved_to_the_replicas(two):
    x = jax.device_put(jnp.arange(3.0), jax.devices()[5])
    (own, _) = two.local_results(two.run(lambda x: 2 * x, args=(x,)))
    (_, again) = two.local_results(two.run(lambda x: x + 1, args=(own,)))
    assert again.tolist() == [1, 3, 5]


def test_scopes_cannot_be_nested(two):
    with two.scope():
        assert message_of(two.scope().__enter__) == (
            "MirroredStrategy(2 replicas): its scope was opened inside that of "
            "MirroredStrategy(2 replicas), or of its run. Scopes cannot be nested: "
            "leave that first."
        )
        assert get_strategy() is two
    assert not has_strategy()


def test_code_knows_in_which_context_it_runs(two):
    assert (has_strategy(), in_cross_replica_context()) == (False, False)
    with get_strategy().scope() as default:
        assert default.num_replicas_in_sync == 1
        assert not has_strategy()
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
        inside = nnx.Variable(jnp.arange(3.0))
        state = ml.TrainState.create(lambda: Model(nnx.Rngs(0)), optax.sgd(0.1))
        assert jax.sharding.get_abstract_mesh() == two.mesh.jax_mesh.abstract_mesh
    outside = nnx.Variable(jnp.ones(3))
    copies = two.local_results(inside)
    assert [copy.devices() for copy in copies] == [{d} for d in jax.devices()[:2]]
    assert [copy.tolist() for copy in copies] == [[0, 1, 2]] * 2
    assert two.run(lambda: inside[...] + outside[...]).tolist() == [1, 2, 3]
    kernel = state.params["hidden"]["kernel"]
    assert kernel.sharding.device_set == set(jax.devices()[:2])


def test_variables_of_another_strategy_are_moved_but_those_of_each_replica(two):
    model = scale(two, 2)
    for strategy in (mirrored(4), two):
        assert float(strategy.run(lambda: model(3.0))) == 6
    with two.scope():
        own = nnx.Variable(jnp.zeros(()), aggregation="per_replica")
    assert two.local_results(own) == (0, 0)
    four, one = mirrored(4), mirrored(1)
    for count, call in (
        (4, lambda: four.run(lambda: own[...])),
        (1, lambda: one.run(lambda: own[...])),
        (4, lambda: four.local_results(own)),
    ):
        assert message_of(call, error=StrategyError) == (
            "a variable of each replica's own: the value has 2 replicas, but this "
            f"strategy {count}: it is another strategy's."
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda s: s.run(lambda batch: batch, args=(1.0, 2.0)),
            "fn is called as fn(args[0], args[1]), but takes (batch). For one "
            "argument, write args=(x,).",
        ),
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
            lambda s: s.run(jnp.sin, args=(iter(s.distribute_dataset(np.ones(4), 2)),)),
            "run: the argument x is a DataIterator. A replica's function takes arrays, "
            "numbers, values of replicas and NNX objects: call next(iterator) outside, "
            "run(fn, args=(next(iterator),)).",
        ),
        (
            lambda s: s.run(
                jnp.sin,
                args=(ml.relayout(np.ones(8), ml.create_mesh().layout("batch")),),
            ),
            "run: every replica would get all rows of an array in shards. Take "
            "strategy.distribute_dataset.",
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
    assert extended.worker_devices == extended.parameter_devices
    assert extended.worker_devices == tuple(jax.devices()[:2])
    value, device = values_of(two, 2.0, 5.0), jax.devices()[2]
    for place in (device, "CPU:2", "/device:CPU:2"):
        moved = extended.reduce_to("SUM", value, place)
        assert (float(moved), moved.devices()) == (7, {device})
    pairs = [(value, device), (value, scale(two, 0).factor)]
    assert [float(x) for x in extended.batch_reduce_to("MAX", pairs)] == [5, 5]


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


def assign_product(variable, x):
    variable[...] = variable[...] * x


def add_twice(variable, x):
    variable[...] += x
    variable[...] += x


@pytest.mark.parametrize(
    ("fn", "aggregation", "expected"),
    [
        (add_twice, "sum", 15),
        (assign_product, "sum", 7),
        (assign_product, "mean", 3.5),
        (add_twice, "MEAN", 8),
        (assign_product, "first", 2),
    ],
)
def test_an_aggregated_variable_has_tensorflows_value_or_is_refused(
    two, fn, aggregation, expected
):
    with two.scope():
        variable = nnx.Variable(jnp.ones(()), aggregation=aggregation)
    try:
        two.run(fn, (variable, values_of(two, 2.0, 5.0)))
    except StrategyError as error:
        assert (fn, aggregation) == (assign_product, "sum")
        assert "computed from the old one" in str(error)  # noqa: PT017
        expected = 1
    assert variable[...] == expected


def test_a_variable_per_replica_is_summed_read_and_reset(two):
    with two.scope():
        own = nnx.Variable(jnp.zeros(()), aggregation="per_replica")

    def count(x):
        own[...] += x
        return own[...]

    resets = lambda x: own.__setitem__(..., x), lambda x: set_value(own, x)
    for start, reset in enumerate(resets):
        reset(jnp.float32(start))
        assert two.reduce("SUM", own, axis=None) == 2 * start
        for expected in ([2 + start, 5 + start], [4 + start, 10 + start]):
            result = two.run(count, (values_of(two, 2.0, 5.0),))
            assert parts_of(two, result) == expected
        summed = two.reduce("SUM", own, axis=None)
        assert isinstance(summed, jax.Array)
        assert summed == 14 + 2 * start


def test_a_state_of_linen_comes_back_plain_and_may_not_differ(two):
    model, tx, x = nn.Dense(3), optax.adam(0.1), batch()[0]
    with two.scope():
        params = model.init(jax.random.key(0), x)
    start = params, tx.init(params)

    def step(state, x, *, summed=True):
        params, opt_state = state
        loss_fn = lambda params: (model.apply(params, x) ** 2).sum()
        grads = jax.grad(loss_fn)(params)
        if summed:
            grads = get_replica_context().all_reduce("SUM", grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = expected = start
    for _ in range(2):
        expected = step(expected, x)  # outside, on one device
        state = two.run(step, (state, split(two, x)))
    for leaf, other in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
        assert isinstance(leaf, jax.Array)
        assert leaf.sharding.is_fully_replicated
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-5)
    forgotten = functools.partial(step, summed=False)
    with pytest.raises(StrategyError, match=r"kernel(.|\n)*all_reduce"):
        two.run(forgotten, (state, split(two, x)))
    descended = lambda params, x: optax.apply_updates(
        params, jax.grad(lambda params: model.apply(params, x).sum())(params)
    )
    with pytest.raises(StrategyError, match="kernel"):
        two.run(descended, (params, split(two, x)))
    mean = ml.metrics.Mean().update(jnp.ones(4))
    with pytest.raises(StrategyError, match="Return the metric of the batch, "):
        two.run(lambda mean, x: mean.update(x), (mean, split(two, x)))
    own = two.run(lambda mean, x: mean.empty().update(x), (mean, split(two, x)))
    total = mean.merge(two.reduce("SUM", own, axis=None)).compute()
    np.testing.assert_allclose(total, np.append(x, np.ones(4)).mean(), rtol=1e-5)
    # Gradients may differ, as in TensorFlow, though they look like the parameters.
    ones = {"w": jnp.ones(4)}
    grads = two.run(jax.grad(lambda p, x: (x @ p["w"]).sum()), (ones, split(two, x)))
    summed = two.reduce("SUM", grads, axis=None)["w"]
    np.testing.assert_allclose(summed, x.sum(axis=0), rtol=1e-5)
