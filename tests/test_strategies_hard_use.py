"""Strategies as people use them who know tf.distribute, and not this library.

Models are reached in ways that no reader of code could follow, batches are short in
inconvenient ways, and TensorFlow's documented examples print TensorFlow's numbers.
"""

import collections
import types
import warnings

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import meshlayout as ml
from meshlayout.distribute import (
    CentralStorageStrategy,
    MirroredStrategy,
    get_replica_context,
)
from meshlayout.errors import StrategyError
from tests.error_messages import message_of


@pytest.fixture
def two():
    return MirroredStrategy(["CPU:0", "CPU:1"])


def linear(strategy, seed=0, **options):
    with strategy.scope():
        return nnx.Linear(4, 3, rngs=nnx.Rngs(seed), **options)


def ones(strategy, rows=4, size=None):
    (batch,) = strategy.distribute_dataset(np.ones((rows, 4), "f"), size or rows)
    return batch


def per_replica(strategy, *values):
    return strategy.distribute_values_from_function(
        lambda context: np.array(values[context.replica_id_in_sync_group], "f")
    )


def total(strategy, value, axis=None):
    return float(strategy.reduce("SUM", value, axis=axis))


def zero(model):
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model)))


# Models that code reaches in its own ways.


class Holder:
    """An object of the user's, with attributes of computed names."""


def held_by_computed_names(models):
    holder = Holder()
    for number, model in enumerate(models):
        setattr(holder, f"model_{number}", model)
    return lambda: [getattr(holder, f"model_{i}") for i in range(len(models))]


def held_by_vars(models):
    holder = Holder()
    holder.first, holder.second = models
    return lambda: list(vars(holder).values())


def held_by_a_frozen_dict(models):
    frozen = flax.core.FrozenDict({"first": models[0], "second": models[1]})
    return lambda: [frozen["first"], frozen["second"]]


def held_by_a_dicts_values(models):
    values = {"first": models[0], "second": models[1]}.values()
    return lambda: list(values)


def held_by_a_long_list(models):
    everything = [0.0] * 5000 + models
    return lambda: everything[-2:]


def held_by_subclasses(models):
    base = type("Base", (), {})
    kinds = [type(f"Sub{i}", (base,), {"model": m}) for i, m in enumerate(models)]
    return lambda kinds=kinds: [kind.model for kind in base.__subclasses__()]


HELD = {
    "computed names": held_by_computed_names,
    "vars": held_by_vars,
    "FrozenDict": held_by_a_frozen_dict,
    "dict.values()": held_by_a_dicts_values,
    "a long list": held_by_a_long_list,
    "subclasses": held_by_subclasses,
    "globals()": lambda models: (
        globals().update(hidden_models=models) or (lambda: globals()["hidden_models"])
    ),
    "UserDict": lambda models: (
        lambda held=collections.UserDict({0: models[0], 1: models[1]}): [
            held[0],
            held[1],
        ]
    ),
    "ChainMap": lambda models: (
        lambda held=collections.ChainMap({0: models[0]}, {1: models[1]}): [
            held[0],
            held[1],
        ]
    ),
    "MappingProxyType": lambda models: (
        lambda held=types.MappingProxyType({0: models[0], 1: models[1]}): [
            held[0],
            held[1],
        ]
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_a_model_is_evaluated_with_its_present_weights_however_it_is_reached(two, name):
    models = [linear(two, 0), linear(two, 1)]
    held = HELD[name](models)
    evaluate = lambda x: sum(model(x).sum() for model in held())  # noqa: E731
    batch = ones(two)
    before = total(two, two.run(evaluate, (batch,)))
    expected = sum(float(model(np.ones((4, 4), "f")).sum()) for model in models)
    assert before == pytest.approx(expected, rel=1e-5)
    for model in models:
        zero(model)
    assert total(two, two.run(evaluate, (batch,))) == 0


@pytest.mark.parametrize("name", ["computed names", "vars", "MappingProxyType"])
def test_a_model_is_trained_however_it_is_reached(two, name):
    models = [linear(two, 0), linear(two, 1)]
    with two.scope():
        optimizers = [nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param) for m in models]
        calls = nnx.Variable(jnp.zeros((), "int32"))
    held, held_optimizers = HELD[name](models), HELD[name](optimizers)
    held_calls = HELD[name]([calls, calls])

    def step(x):
        (first, second), counter = held(), held_calls()[0]
        loss_fn = lambda m: ml.losses.compute_average_loss((m(x) ** 2).sum(-1))  # noqa: E731
        for model, optimizer in zip((first, second), held_optimizers(), strict=True):
            optimizer.update(model, nnx.grad(loss_fn)(model))
        counter[...] += 1

    expected = [np.asarray(model.kernel[...]) for model in models]
    two.run(step, (ones(two),))
    # The gradient of the mean of (1 W)^2 is 2 1 W in every row.
    expected = [w - 0.2 * w.sum(0, keepdims=True) for w in expected]
    for model, kernel in zip(models, expected, strict=True):
        np.testing.assert_allclose(model.kernel[...], kernel, rtol=1e-4, atol=1e-5)
        assert model.bias[...].any()
    assert calls[...] == 1


def test_a_name_that_is_bound_to_another_model_means_that_one(two):
    model = linear(two, 0)
    run = lambda: total(two, two.run(lambda x: model(x).sum(), (ones(two),)))  # noqa: E731
    first = run()
    model = linear(two, 1)
    assert run() == pytest.approx(float(model(np.ones((4, 4), "f")).sum()), rel=1e-5)
    assert run() != first

    class Trainer:
        def evaluate(self, x):
            return self.model(x).sum()

    trainer = Trainer()
    for seed in (0, 1):
        trainer.model = linear(two, seed)
        expected = float(trainer.model(np.ones((4, 4), "f")).sum())
        actual = total(two, two.run(trainer.evaluate, (ones(two),)))
        assert actual == pytest.approx(expected, rel=1e-5)


def test_modes_and_static_attributes_are_those_of_the_call(two):
    with two.scope():
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    run = lambda: two.gather(two.run(lambda x: dropout(x), (ones(two),)), 0)  # noqa: E731
    assert not run().all()
    dropout.eval()
    assert run().tolist() == np.ones((4, 4)).tolist()
    dropout.train()
    dropout.rate = 0.0
    assert run().tolist() == np.ones((4, 4)).tolist()
    dropout.rate = 0.5
    assert not run().all()


def test_a_new_function_sees_new_numbers_and_an_old_one_is_frozen_as_under_jit(two):
    scaled = [
        total(two, two.run(lambda x, k=k: x.sum() * k, (ones(two),))) for k in (1.0, 2)
    ]
    assert scaled == [16, 32]

    def made(k):
        return lambda x: x.sum() * k

    assert [total(two, two.run(made(k), (ones(two),))) for k in (1.5, 2.5)] == [24, 40]


# How often a function is traced and compiled.


class Trainer:
    """Counts its calls on the host, in an attribute with a common name."""

    def __init__(self, strategy):
        with strategy.scope():
            self.model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
            self.optimizer = nnx.Optimizer(self.model, optax.adam(0.1), wrt=nnx.Param)
        self.step, self.history = 0, []

    def train(self, x):
        print("traced")  # noqa: T201
        loss_fn = lambda m: ml.losses.compute_average_loss((m(x) ** 2).sum(-1))  # noqa: E731
        loss, grads = nnx.value_and_grad(loss_fn)(self.model)
        self.optimizer.update(self.model, grads)
        return loss, self.optimizer.step[...]


def test_a_counter_called_step_does_not_compile_a_trainer_at_every_step(two, capsys):
    trainer = Trainer(two)
    for step in range(5):
        loss, num_updates = two.run(trainer.train, (ones(two),))
        trainer.step += 1
        trainer.history.append(total(two, loss))
        assert int(two.local_results(num_updates)[0]) == step + 1
    # Once to see what it uses and what differs between replicas, once to compile.
    assert capsys.readouterr().out.count("traced") == 2
    assert trainer.history[-1] < trainer.history[0]


def test_a_function_that_is_compiled_again_and_again_gets_one_warning(two):
    models = [linear(two, seed) for seed in range(4)]
    holder = Holder()

    def evaluate(x):
        return holder.model(x).sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model in models:
            holder.model = model
            two.run(evaluate, (ones(two),))
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 1, texts
    assert "evaluate" in texts[0]
    assert "model" in texts[0]


def test_shapes_and_modes_are_no_reason_for_a_warning(two):
    with two.scope():
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (2, 4, 6, 8, 10):
            dropout.train()
            two.run(lambda x: dropout(x), (ones(two, rows),))
            dropout.eval()
            two.run(lambda x: dropout(x), (ones(two, rows),))


# Side effects.

NOTES: list[object] = []
TABLE: dict[str, object] = {}


class Notebook:
    def __init__(self):
        self.history = []

    def step(self, x):
        self.history.append(x)
        return x


def test_what_a_list_or_dict_would_get_only_once_is_refused_with_its_name(two):
    cell, table = [], {}
    notebook = Notebook()

    def appends_to_a_cell(x):
        cell.append(x)

    def enters_into_a_dict(x):
        table["x"] = x

    def appends_to_a_global(x):
        NOTES.append(x)

    def enters_into_a_global(x):
        TABLE["x"] = x

    for fn, name in (
        (appends_to_a_cell, "cell"),
        (enters_into_a_dict, "table"),
        (appends_to_a_global, "NOTES"),
        (enters_into_a_global, "TABLE"),
        (notebook.step, "history"),
    ):
        assert name in message_of(two.run, fn, (1.0,), error=StrategyError)
        # At every call: nothing has been compiled.
        assert name in message_of(two.run, fn, (1.0,), error=StrategyError)


# Short batches.


def test_six_rows_on_two_replicas_of_four_are_three_and_three(two):
    *_, last = two.distribute_dataset(np.arange(14, dtype="f"), 8)
    assert [x.tolist() for x in two.local_results(last)] == [[8, 9, 10], [11, 12, 13]]
    # Nothing is padded, so a function needs no mask.
    shares = two.run(lambda x: x.mean(), (last,))
    assert [float(x) for x in two.local_results(shares)] == [9, 12]

    def has_mask(x):
        assert get_replica_context().example_mask is None
        return ml.losses.compute_average_loss(x)

    assert total(two, two.run(has_mask, (last,))) == pytest.approx(10.5)


def test_five_rows_carry_a_mask_that_a_function_must_ask_for(two):
    (short,) = two.distribute_dataset(np.arange(1, 6, dtype="f"), 8)
    assert sum(len(x) for x in two.local_results(short)) == 5
    assert total(two, two.run(lambda x: x**2, (short,)), axis=0) == 55
    message_of(two.run, lambda x: x.mean(), (short,), error=StrategyError)

    def masked_sum(x):
        return (x * get_replica_context().example_mask).sum()

    assert total(two, two.run(masked_sum, (short,))) == 15


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.concatenate([x, -x]),
        lambda x: get_replica_context().all_gather(x, 0),
        lambda x: x.reshape(-1),
        lambda x: jnp.repeat(x, 2, axis=0),
    ],
)
def test_results_with_more_rows_than_a_short_batch_get_a_sentence(two, fn):
    (full,) = two.distribute_dataset(np.ones((4, 4), "f"), 4)
    two.run(fn, (full,))
    (short,) = two.distribute_dataset(np.ones((3, 4), "f"), 4)
    assert message_of(two.run, fn, (short,), error=StrategyError).endswith(".")


def test_a_head_of_zeros_trains_on_a_short_batch_as_on_one_device():
    strategy = MirroredStrategy([f"CPU:{i}" for i in range(4)])
    model = linear(strategy, kernel_init=nnx.initializers.zeros)
    with strategy.scope():
        optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 4)).astype("f")
    y = rng.integers(3, size=3).astype("int32")

    def losses_of(model, x, y):
        logits = model(x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return loss + (logits**2).sum(-1)

    def step(x, y):
        loss_fn = lambda m: ml.losses.compute_average_loss(losses_of(m, x, y))  # noqa: E731
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    losses = []
    for _ in range(2):
        (batch,) = strategy.distribute_dataset((x, y), 8)
        losses.append(total(strategy, strategy.run(step, batch)))
    plain = nnx.Linear(4, 3, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
    plain_optimizer = nnx.Optimizer(plain, optax.sgd(1.0), wrt=nnx.Param)
    for loss in losses:
        mean = lambda m: losses_of(m, x, y).mean()  # noqa: E731
        expected, grads = nnx.value_and_grad(mean)(plain)
        plain_optimizer.update(plain, grads)
        assert loss == pytest.approx(float(expected), rel=1e-5)


# Variables whose replicas would differ. TensorFlow's number, or a refusal.


def read(variable):
    return variable[...]


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
        result = two.run(fn, (variable, per_replica(two, 2, 5)))
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
    for expected in ([2, 5], [4, 10]):
        result = two.run(count, (per_replica(two, 2, 5),))
        assert [float(x) for x in two.local_results(result)] == expected
    summed = two.reduce("SUM", own, axis=None)
    assert isinstance(summed, jax.Array)
    assert summed == 14
    own[...] = jnp.zeros(())
    assert two.reduce("SUM", own, axis=None) == 0
    result = two.run(count, (per_replica(two, 2, 5),))
    assert [float(x) for x in two.local_results(result)] == [2, 5]
    if hasattr(own, "set_value"):  # not in flax 0.11
        own.set_value(jnp.ones(()))
    else:
        own.value = jnp.ones(())
    assert two.reduce("SUM", own, axis=None) == 2
    result = two.run(count, (per_replica(two, 2, 5),))
    assert [float(x) for x in two.local_results(result)] == [3, 6]


def test_variables_that_are_set_to_one_array_stay_two(two):
    with two.scope():
        sums = nnx.Variable(jnp.zeros(())), nnx.Variable(jnp.ones(()))

    def add(x):
        for variable in sums:
            variable[...] += get_replica_context().all_reduce("SUM", x)

    two.run(add, (per_replica(two, 2, 5),))
    shared = jnp.zeros(())
    for variable in sums:
        variable[...] = shared
    two.run(add, (per_replica(two, 2, 5),))
    assert [float(variable[...]) for variable in sums] == [7, 7]


class Largest(nnx.Metric):
    """A metric of the user's with sums."""

    def __init__(self):
        self.total = nnx.metrics.MetricState(jnp.zeros(()))
        self.count = nnx.metrics.MetricState(jnp.zeros(()))

    def update(self, *, values, **_):
        self.total[...] += (values**2).sum()
        self.count[...] += values.size

    def compute(self):
        return jnp.sqrt(self.total[...] / self.count[...])

    def reset(self):
        self.total[...] = self.count[...] = jnp.zeros(())


@pytest.mark.parametrize(
    "make",
    [nnx.metrics.Average, nnx.metrics.Welford, Largest],
)
def test_metrics_of_flax_and_of_users_agree_with_one_device(two, make):
    with two.scope():
        metric = make()
    plain = make()
    rng = np.random.default_rng(0)
    for rows in (8, 8, 4):
        values = (rng.normal(size=rows) + 3).astype("f")
        (batch,) = two.distribute_dataset(values, rows)
        two.run(lambda values: metric.update(values=values), (batch,))
        plain.update(values=jnp.asarray(values))
    for actual, expected in zip(
        jax.tree.leaves(metric.compute()), jax.tree.leaves(plain.compute()), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
    metric.reset()
    two.run(lambda values: metric.update(values=values), (ones(two),))


# Linen.


def test_a_state_of_linen_comes_back_plain_and_may_not_differ(two):
    model = nn.Dense(3)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("f")
    with two.scope():
        params = model.init(jax.random.key(0), x)
    tx = optax.adam(0.1)
    opt_state = tx.init(params)
    (batch,) = two.distribute_dataset(x, 8)

    def step(params, opt_state, x, *, summed=True):
        def loss_fn(params):
            losses = (model.apply(params, x) ** 2).sum(-1)
            return ml.losses.compute_average_loss(losses)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        context = get_replica_context()
        if summed:
            loss, grads = context.all_reduce("SUM", (loss, grads))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    expected, expected_state = params, opt_state
    for _ in range(3):
        mean = lambda p: (model.apply(p, x) ** 2).sum(-1).mean()  # noqa: E731
        expected_loss, grads = jax.value_and_grad(mean)(expected)
        updates, expected_state = tx.update(grads, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
        params, opt_state, loss = two.run(step, (params, opt_state, batch))
        assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    for leaf in jax.tree.leaves((params, opt_state, loss)):
        assert isinstance(leaf, jax.Array)
        assert leaf.sharding.is_fully_replicated
    np.testing.assert_allclose(
        model.apply(params, x), model.apply(expected, x), rtol=1e-4, atol=1e-5
    )
    # TensorFlow's sum of a value per replica counts it once for each.
    np.testing.assert_allclose(total(two, loss), 2 * float(loss), rtol=1e-6)
    assert float(two.reduce("MEAN", loss, axis=None)) == pytest.approx(float(loss))
    assert len(two.local_results(loss)) == 2

    forgotten = lambda *args: step(*args, summed=False)  # noqa: E731
    message = message_of(
        two.run, forgotten, (params, opt_state, batch), error=StrategyError
    )
    assert "kernel" in message
    assert "all_reduce" in message


# Variables in host memory.

needs_host_memory = pytest.mark.skipif(
    not hasattr(jax, "reshard"), reason="XLA's CPU client computes in one memory"
)


@needs_host_memory
@pytest.mark.parametrize("tx", [optax.adam(0.1), optax.adafactor(0.1)])
def test_a_model_in_host_memory_trains_and_is_called_outside_of_run(two, tx):
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("f")

    def trained(strategy):
        model = linear(strategy)
        with strategy.scope():
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        def step(x):
            loss_fn = lambda m: ml.losses.compute_average_loss((m(x) ** 2).sum(-1))  # noqa: E731
            optimizer.update(model, nnx.grad(loss_fn)(model))

        for batch in strategy.distribute_dataset(x, 8, epochs=3):
            strategy.run(step, (batch,))
        return model

    hosted = CentralStorageStrategy(["CPU:0", "CPU:1"])
    np.testing.assert_allclose(trained(hosted)(x), trained(two)(x), rtol=1e-5)


# What is gone, and what stays, of tf.distribute's names.


def test_what_is_gone_is_gone_and_what_stays_works(two):
    extended = two.extended
    for name in ("update", "variable_created_in_scope"):
        assert not hasattr(extended, name)
    assert not hasattr(get_replica_context(), "merge_call")
    assert len(extended.worker_devices) == 2
    assert extended.parameter_devices
    value = per_replica(two, 2, 5)
    device = jax.devices()[2]
    moved = extended.reduce_to("SUM", value, device)
    assert (float(moved), moved.devices()) == (7, {device})
    assert [
        float(x) for x in extended.batch_reduce_to("SUM", [(value, device)] * 2)
    ] == [7, 7]


def test_the_replicas_of_a_batch_that_does_not_divide_are_named():
    three = MirroredStrategy([f"CPU:{i}" for i in range(3)])
    message = message_of(three.distribute_dataset, np.ones((64, 4)), 64)
    assert "64" in message
    assert "3" in message


# The examples of tf.distribute.Strategy's page that other tests do not have.


def test_values_placed_on_devices_are_distributed(two):
    devices = two.extended.worker_devices
    placed = [jax.device_put(1.0, device) for device in devices]
    values = two.distribute_values_from_function(
        lambda context: placed[context.replica_id_in_sync_group]
    )
    assert [float(x) for x in two.local_results(values)] == [1, 1]


def test_a_constant_is_the_same_value_once_per_replica(two):
    result = two.run(lambda x: x * 2.0, (3.0,))
    assert [float(x) for x in two.local_results(result)] == [6, 6]
    assert total(two, result) == 12
    assert float(two.reduce("MEAN", result, axis=None)) == 6
    number = two.distribute_values_from_function(lambda c: c.num_replicas_in_sync)
    doubled = two.run(lambda x: x * 2, (number,))
    assert [int(x) for x in two.local_results(doubled)] == [4, 4]
    ids = two.distribute_values_from_function(lambda c: c.replica_id_in_sync_group)
    summed = two.run(lambda x: get_replica_context().all_reduce("sum", x), (ids,))
    assert [int(x) for x in two.local_results(summed)] == [1, 1]


def test_a_variable_of_the_scope_is_mirrored_and_one_made_outside_works(two):
    with two.scope():
        mirrored = nnx.Variable(jnp.asarray(1.0))
    regular = nnx.Variable(jnp.asarray(1.0))
    assert len(mirrored[...].sharding.device_set) == 2
    assert [float(x) for x in two.local_results(mirrored)] == [1, 1]
    assert total(two, two.run(lambda: mirrored[...] + regular[...])) == 4
