"""Strategies: scopes, and functions that run once per replica."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout.distribute import (
    MirroredStrategy,
    OneDeviceStrategy,
    PerReplica,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from tests.error_messages import message_of
from tests.flax_versions import value_of


def mirrored(replicas):
    return MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def split(strategy, x, size=None):
    """The rows of an array, `size` for each replica as long as there are any."""
    size = size or len(x) // strategy.num_replicas_in_sync

    def rows(context):
        start = context.replica_id_in_sync_group * size
        return x[start : start + size]

    return strategy.distribute_values_from_function(rows)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x)))


def batch(rows=8, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 4)).astype("float32")
    return x, np.tanh(x[:, :3])


def losses_of(model, x, y):
    return ((model(x) - y) ** 2).mean(axis=-1)


def on_one_device(steps=3):
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = []
    for seed in range(steps):
        x, y = batch(seed=seed)
        mean_loss = lambda model, x, y: losses_of(model, x, y).mean()  # noqa: E731
        loss, grads = nnx.value_and_grad(mean_loss)(model, x, y)
        optimizer.update(model, grads)
        losses.append(float(loss))
    return losses, model


@pytest.mark.parametrize(
    "replicas",
    [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 8],
)
def test_a_custom_training_loop_computes_what_one_device_does(replicas):
    strategy = mirrored(replicas)
    with strategy.scope():
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def train_step(x, y):
        def loss_fn(model):
            return ml.losses.compute_average_loss(losses_of(model, x, y))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    losses = []
    for seed in range(3):
        args = tuple(split(strategy, array) for array in batch(seed=seed))
        loss = strategy.run(train_step, args=args)
        losses.append(float(strategy.reduce("SUM", loss, axis=None)))
    expected, reference = on_one_device()
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    np.testing.assert_allclose(
        model.hidden.kernel[...], reference.hidden.kernel[...], rtol=1e-5, atol=1e-6
    )
    assert len(model.hidden.kernel[...].sharding.device_set) == replicas


def test_gradients_that_the_function_has_combined_are_not_added_up_again():
    strategy = mirrored(2)
    with strategy.scope():
        model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    before = np.asarray(model.kernel[...])
    x, y = batch()

    def step(x, y):
        grads = nnx.grad(lambda model: losses_of(model, x, y).mean())(model)
        optimizer.update(model, get_replica_context().all_reduce("MEAN", grads))

    strategy.run(step, args=(split(strategy, x), split(strategy, y)))
    plain = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    grads = nnx.grad(lambda model: losses_of(model, x, y).mean())(plain)
    expected = before - np.asarray(grads["kernel"][...])
    np.testing.assert_allclose(model.kernel[...], expected, rtol=1e-5, atol=1e-6)


def test_a_variable_that_would_differ_between_replicas_is_named():
    strategy = mirrored(2)
    with strategy.scope():
        model = Model(nnx.Rngs(0))

    def step(x):
        model.out.bias[...] = x.mean(axis=0)[:3]

    x, _ = batch()
    assert message_of(strategy.run, step, (split(strategy, x),)) == (
        "step would leave different values of model/out/bias on the replicas: the new "
        "values are computed from what differs between them. Combine that first, as "
        "get_replica_context().all_reduce('MEAN', x) does, or say how the variable's "
        "values become one: nnx.Variable(x, aggregation='mean'), or 'sum', 'first', "
        "'per_replica'."
    )
    # Nothing happened.
    np.testing.assert_array_equal(model.out.bias[...], 0)


def test_variables_say_how_the_values_of_replicas_become_one():
    strategy = mirrored(4)
    kinds = ("sum", "mean", "first", "per_replica")
    with strategy.scope():
        variables = {
            kind: nnx.Variable(jnp.float32(10), aggregation=kind) for kind in kinds
        }
    model = variables

    def step():
        index = get_replica_context().replica_id_in_sync_group
        for kind in kinds:
            model[kind][...] += 1.0 + index

    for _ in range(2):
        strategy.run(step)
    assert float(value_of(model["sum"])) == 10 + 2 * (1 + 2 + 3 + 4)
    assert float(value_of(model["mean"])) == 10 + 2 * 2.5
    assert float(value_of(model["first"])) == 10 + 2 * 1
    values = value_of(model["per_replica"])
    assert isinstance(values, PerReplica)
    assert [float(v) for v in strategy.local_results(values)] == [12, 14, 16, 18]


def test_each_replica_draws_its_own_random_numbers():
    strategy = mirrored(4)
    with strategy.scope():
        rngs = nnx.Rngs(0)

    def draw():
        return jax.random.normal(rngs.default(), (2,))

    first, second = (strategy.gather(strategy.run(draw), axis=0) for _ in range(2))
    assert len({*first.tolist(), *second.tolist()}) == 16


def test_a_model_in_evaluation_mode_is_compiled_anew_and_only_once():
    strategy = mirrored(2)
    with strategy.scope():
        model = nnx.Sequential(
            nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        )
    x = split(strategy, batch()[0])

    def forward(x):
        return model(x)

    def run():
        return strategy.gather(strategy.run(forward, args=(x,)), axis=0)

    model.eval()
    plain = run()
    model.train()
    dropped = run()
    model.eval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nnx.Sequential, "__call__", None)  # a trace would fail
        again = run()
    np.testing.assert_array_equal(plain, again)
    assert (np.asarray(dropped) == 0).any()
    assert not (np.asarray(plain) == 0).any()


def test_scopes_cannot_be_nested():
    strategy = mirrored(2)
    with strategy.scope():
        for inner in (strategy, OneDeviceStrategy("CPU:0")):
            assert message_of(inner.scope().__enter__) == (
                f"{inner!r}: its scope was opened inside that of MirroredStrategy(2 "
                "replicas), or of its run. Scopes cannot be nested: leave the outer one "
                "first."
            )
        assert get_strategy() is strategy
    assert not has_strategy()


def test_variables_of_another_strategy_are_moved():
    one, other = mirrored(2), mirrored(4)
    with one.scope():
        model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    expected = np.asarray(model.kernel[...]).sum(axis=0)
    for strategy in (other, one):
        result = strategy.run(lambda: model(jnp.ones((1, 4))))
        np.testing.assert_allclose(result[0], expected, rtol=1e-5)


def test_code_knows_in_which_context_it_runs():
    strategy = mirrored(2)
    assert (has_strategy(), in_cross_replica_context()) == (False, False)
    assert get_strategy().num_replicas_in_sync == 1
    assert get_replica_context().num_replicas_in_sync == 1
    with strategy.scope():
        assert (has_strategy(), in_cross_replica_context()) == (True, True)
        assert get_replica_context() is None

    def replica():
        context = get_replica_context()
        assert context.strategy is strategy
        assert get_strategy() is strategy
        assert not in_cross_replica_context()
        return context.replica_id_in_sync_group

    result = strategy.run(replica)
    assert [int(x) for x in strategy.local_results(result)] == [0, 1]


def test_one_device_gives_plain_arrays():
    strategy = OneDeviceStrategy("CPU:3")
    result = strategy.run(lambda x: {"twice": 2 * x}, args=(jnp.arange(3.0),))
    assert isinstance(result["twice"], jax.Array)
    assert float(strategy.reduce("SUM", result["twice"], axis=0)) == 6
    np.testing.assert_array_equal(strategy.gather(result["twice"], axis=0), [0, 2, 4])


def trained(strategy, steps=1):
    """A model, and a function that trains it on a batch of values of replicas."""
    with strategy.scope():
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)

    def train_step(x, y):
        def loss_fn(model):
            return ml.losses.compute_average_loss(losses_of(model, x, y))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    return model, train_step


@pytest.mark.parametrize(
    ("replicas", "rows"),
    [
        pytest.param(2, 6, marks=pytest.mark.slow),
        pytest.param(4, 5, marks=pytest.mark.slow),
        (8, 3),
    ],
)
def test_a_short_batch_gives_the_numbers_of_one_device(replicas, rows):
    strategy = mirrored(replicas)
    model, train_step = trained(strategy)
    x, y = batch(rows)
    size = -(-rows // replicas) if rows > replicas else 1
    values = [split(strategy, array, size) for array in (x, y)]
    loss = strategy.run(train_step, args=tuple(values))
    plain = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(plain, optax.sgd(0.5), wrt=nnx.Param)
    expected, grads = nnx.value_and_grad(lambda m: losses_of(m, x, y).mean())(plain)
    optimizer.update(plain, grads)
    np.testing.assert_allclose(
        strategy.reduce("SUM", loss, axis=None), expected, rtol=1e-6
    )
    np.testing.assert_allclose(
        model.out.kernel[...], plain.out.kernel[...], rtol=1e-5, atol=1e-6
    )
    # Values of rows keep their padding apart, and reductions over rows leave it out.
    losses = strategy.run(lambda x, y: losses_of(model, x, y), args=tuple(values))
    rows_of_replicas = [len(part) for part in strategy.local_results(losses)]
    assert sum(rows_of_replicas) == rows
    np.testing.assert_allclose(
        strategy.reduce("MEAN", losses, axis=0),
        losses_of(plain, x, y).mean(),
        rtol=1e-5,
    )


def test_a_function_that_ignores_padding_is_refused():
    strategy = mirrored(2)
    x, _ = batch(6)
    values = split(strategy, x, 4)
    assert message_of(strategy.run, lambda x: x.mean(), (values,)) == (
        "<lambda> got a short batch, which is padded to the shape of the others, and "
        "did not ask which rows are real: padding would count. Use "
        "losses.compute_average_loss, which asks; or multiply by "
        "get_replica_context().example_mask and divide by its num_examples; or return "
        "one value per row and combine these with reduce(..., axis=0); or leave such "
        "batches out with distribute_dataset(..., remainder='drop')."
    )

    def by_hand(x):
        context = get_replica_context()
        total = (x.mean(axis=1) * context.example_mask).sum()
        return context.all_reduce("SUM", total) / context.num_examples

    mean = strategy.local_results(strategy.run(by_hand, args=(values,)))
    np.testing.assert_allclose(mean, [x.mean()] * 2, rtol=1e-5)


def test_a_step_sends_what_the_step_of_the_library_sends():
    strategy = mirrored(8)
    _, train_step = trained(strategy)
    x, y = (split(strategy, array) for array in batch())
    sent = strategy.communication(train_step, args=(x, y))
    state = ml.TrainState.create(
        lambda: Model(nnx.Rngs(0)), optax.sgd(0.5), ml.LayoutMap(strategy.mesh)
    )
    step = ml.make_train_step(lambda model, batch: losses_of(model, *batch))
    plain = step.communication(state, (x.array, y.array))
    assert dict(sent) == dict(plain)
    assert sum(sent.values()) == sent["all_reduce"] == 1
    # The library's step also adds up the loss, which is one number.
    assert 0 <= plain.wire_bytes - sent.wire_bytes <= 2 * 4


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
def test_bad_calls_are_refused(call, message):
    assert message_of(call, mirrored(2)) == message


def test_a_state_made_in_a_scope_is_on_the_mesh_of_the_strategy():
    strategy = mirrored(2)
    with strategy.scope():
        state = ml.TrainState.create(lambda: Model(nnx.Rngs(0)), optax.sgd(0.1))
        assert ml.get_default_mesh() == strategy.mesh
    kernel = state.params["hidden"]["kernel"]
    assert kernel.sharding.device_set == set(strategy.extended.worker_devices)


def test_a_variable_may_hold_the_parameters_of_linen():
    strategy = mirrored(2)
    with strategy.scope():
        params = nnx.Variable({"w": jnp.ones((4, 3))})

    def step(x):
        tree = value_of(params)
        grads = jax.grad(lambda tree: (x @ tree["w"]).sum())(tree)
        grads = get_replica_context().all_reduce("SUM", grads)
        params.set_value(jax.tree.map(lambda a, b: a - b, tree, grads))

    strategy.run(step, args=(split(strategy, batch()[0]),))
    expected = 1 - batch()[0].sum(axis=0)[:, None] * np.ones((1, 3))
    np.testing.assert_allclose(value_of(params)["w"], expected, rtol=1e-5)


def test_values_are_reduced_to_where_they_are_wanted():
    strategy = mirrored(2)
    values = strategy.run(lambda: get_replica_context().replica_id_in_sync_group)
    with strategy.scope():
        variable = nnx.Variable(jnp.float32(0))
    extended = strategy.extended
    device = jax.devices()[5]
    assert extended.reduce_to("SUM", values, device).devices() == {device}
    pairs = [(values, variable), (values, device)]
    assert [int(x) for x in extended.batch_reduce_to("MAX", pairs)] == [1, 1]


def test_a_mirrored_variable_has_a_copy_on_each_replica():
    strategy = mirrored(2)
    with strategy.scope():
        variable = nnx.Variable(jnp.arange(3.0))
    copies = strategy.local_results(variable)
    assert [copy.devices() for copy in copies] == [{d} for d in jax.devices()[:2]]
    for copy in copies:
        np.testing.assert_array_equal(copy, [0, 1, 2])
