"""Ordinary programs under a strategy, beside the same on one device or a closed form."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout.distribute import MirroredStrategy, get_replica_context
from meshlayout.errors import StrategyError


def mirrored(replicas):
    return MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def split(strategy, x):
    """The rows of an array, equally many for each replica."""
    size = len(x) // strategy.num_replicas_in_sync

    def rows(context):
        start = context.replica_id_in_sync_group * size
        return x[start : start + size]

    return strategy.distribute_values_from_function(rows)


ROWS = np.arange(12, dtype="float32").reshape(4, 3)


class Regression(nnx.Module):
    """A linear model, whose bias has the same gradient whatever the batch is."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones(3))
        self.bias = nnx.Param(jnp.zeros(()))
        self.penalized = nnx.Param(jnp.full(3, 2.0))

    def __call__(self, x):
        return (x * self.weight[None]).sum(-1) + self.bias[...]


def made(strategy, build=Regression, rate=1.0):
    with strategy.scope():
        model = build()
        return model, nnx.Optimizer(model, optax.sgd(rate), wrt=nnx.Param)


def loss_of(model, x):
    penalty = 0.1 * (model.penalized[...] ** 2).sum()
    mean = ml.losses.compute_average_loss(model(x))
    return mean + ml.losses.scale_regularization_loss(penalty)


def reduced(op, grads):
    return get_replica_context().all_reduce(op, grads)


COMBINED = {
    "by the optimizer": lambda grads: grads,
    "by a sum": lambda grads: reduced("SUM", grads),
    "by a mean": lambda grads: jax.tree.map(lambda x: 2 * x, reduced("MEAN", grads)),
    "by jax.lax.psum": lambda grads: jax.lax.psum(grads, "batch"),
    "by a sum, and clipped": lambda grads: jax.tree.map(
        lambda x: x / jnp.maximum(optax.global_norm(x) / 1e3, 1.0),
        reduced("SUM", grads),
    ),
    "in part by a sum": lambda grads: nnx.State(
        {**grads, "weight": reduced("SUM", grads["weight"])}
    ),
}


@pytest.mark.parametrize("how", COMBINED)
def test_gradients_that_do_not_depend_on_the_batch_are_added_up_like_others(how):
    strategy = mirrored(2)
    model, optimizer = made(strategy)

    def step(x):
        optimizer.update(model, COMBINED[how](nnx.grad(loss_of)(model, x)))

    strategy.run(step, args=(split(strategy, ROWS),))
    np.testing.assert_allclose(model.weight, 1 - ROWS.mean(axis=0))
    np.testing.assert_allclose(model.bias, -1)
    np.testing.assert_allclose(model.penalized, np.full(3, 1.6), rtol=1e-6)


def test_a_batch_that_is_the_same_on_all_replicas_counts_as_on_one_device():
    strategy = mirrored(2)
    model, optimizer = made(strategy)

    def step(x):
        for _ in range(2):
            optimizer.update(model, nnx.grad(loss_of)(model, x))

    strategy.run(step, args=(ROWS,))
    np.testing.assert_allclose(model.weight, 1 - 2 * ROWS.mean(axis=0))
    np.testing.assert_allclose(model.penalized, np.full(3, 2 * 0.8**2), rtol=1e-6)


def train_step(model, optimizer, x):
    optimizer.update(model, nnx.grad(loss_of)(model, x))


@pytest.mark.parametrize("replicas", [1, 2])
def test_copies_of_a_model_stay_while_it_is_trained(replicas):
    strategy = mirrored(replicas)
    model, optimizer = made(strategy, rate=0.1)
    average = nnx.clone(model)  # which has the same arrays

    def step(x):
        train_step(model, optimizer, x)
        old, new = nnx.state(average), nnx.state(model)
        nnx.update(average, jax.tree.map(lambda a, b: (a + b) / 2, old, new))

    x = split(strategy, ROWS)
    strategy.run(step, args=(x,))
    weight = model.weight[...]
    snapshot = nnx.clone(model)
    strategy.run(step, args=(x,))
    rows = ROWS.mean(axis=0)
    np.testing.assert_allclose(weight, 1 - 0.1 * rows, rtol=1e-6)
    np.testing.assert_allclose(snapshot.weight, 1 - 0.1 * rows, rtol=1e-6)
    np.testing.assert_allclose(model.weight, 1 - 0.2 * rows, rtol=1e-6)
    np.testing.assert_allclose(average.weight, 1 - 0.125 * rows, rtol=1e-6)


def test_memory_of_variables_that_nobody_else_has_is_reused():
    strategy = mirrored(2)
    model, optimizer = made(strategy)
    x = split(strategy, ROWS)

    def step(x):
        train_step(model, optimizer, x)

    strategy.run(step, args=(x,))
    weight = model.weight[...].addressable_data(0).unsafe_buffer_pointer()
    strategy.run(step, args=(x,))
    strategy.run(step, args=(x,))
    now = model.weight[...].addressable_data(0).unsafe_buffer_pointer()
    assert now == weight


def test_run_may_be_a_part_of_a_function_under_nnx_jit():
    strategy = mirrored(2)
    model, optimizer = made(strategy)

    @nnx.jit
    def distributed_step(model, optimizer, x):
        def step(x):
            train_step(model, optimizer, x)
            return loss_of(model, x)

        return strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)

    for _ in range(2):
        loss = distributed_step(model, optimizer, split(strategy, ROWS))
    weight = 1 - 2 * ROWS.mean(axis=0)
    np.testing.assert_allclose(model.weight, weight)
    penalty = 0.1 * 3 * (2 * 0.8**2) ** 2
    expected = (ROWS @ weight).mean() - 2 + penalty
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_threads_that_train_one_model_lose_no_update():
    strategy = mirrored(2)
    model, optimizer = made(strategy)
    x = split(strategy, ROWS)

    def steps(_):
        for _ in range(5):
            strategy.run(lambda x: train_step(model, optimizer, x), args=(x,))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(steps, range(4)))
    np.testing.assert_allclose(model.bias, -20)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.linear(x)))


@pytest.mark.parametrize(
    "transform",
    [
        nnx.remat,
        pytest.param(lambda f: f, marks=pytest.mark.slow),
        pytest.param(nnx.jit, marks=pytest.mark.slow),
    ],
)
def test_scanned_blocks_with_dropout_are_trained(transform):
    strategy = mirrored(2)

    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def blocks_of(rngs):
        return Block(rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    @transform
    def scanned(block, x):
        return jax.lax.cond(x.sum() > 1e6, lambda x: x, lambda x: x, block(x))

    blocks, optimizer = made(strategy, lambda: blocks_of(nnx.Rngs(0)))

    def step(x):
        grads = nnx.grad(lambda blocks: scanned(blocks, x).sum())(blocks)
        optimizer.update(blocks, grads)
        return scanned(blocks, x)

    before = blocks.dropout.rngs.key[...]
    kernel = np.asarray(blocks.linear.kernel)
    results = strategy.run(step, args=(jnp.ones((4, 3)),))
    assert not np.array_equal(*results.values)  # each replica drops others
    assert not np.array_equal(blocks.linear.kernel, kernel)
    assert (blocks.dropout.rngs.key[...] == before).all()
    assert blocks.dropout.rngs.count[...].tolist() == [2, 2]


def test_a_bool_among_the_arguments_is_one_for_python():
    def step(x, training):
        return x if training else -x

    strategy = mirrored(2)
    for training in (True, False, True):
        result = strategy.run(step, args=(1.0,), kwargs={"training": training})
        assert float(result.values[1]) == (1 if training else -1)


def test_a_number_that_python_needs_is_explained():
    with pytest.raises(jax.errors.TracerIntegerConversionError) as error:
        mirrored(2).run(lambda n: [0.0 for _ in range(n)], args=(3,))
    (note, *_) = error.value.__notes__
    assert note == (
        "run: while the function is compiled, its arguments are arrays without "
        "values, also those that are Python numbers. Fix a number that Python needs, "
        "as in range(n), with functools.partial or a closure."
    )


def test_gradients_may_be_results_and_arguments():
    strategy = mirrored(2)
    model, optimizer = made(strategy)

    def gradients(x):
        return nnx.grad(loss_of)(model, x)

    def update(grads):
        optimizer.update(model, grads)

    for _ in range(2):
        grads = strategy.run(gradients, args=(split(strategy, ROWS),))
        strategy.run(update, args=(grads,))
    mean = strategy.reduce("MEAN", grads, axis=None)
    np.testing.assert_allclose(mean["weight"], ROWS.mean(axis=0) / 2)
    strategy.run(update, args=(mean,))
    np.testing.assert_allclose(model.weight, 1 - 3 * ROWS.mean(axis=0))
    np.testing.assert_allclose(model.bias, -3)


def test_arguments_are_moved_to_the_replicas():
    strategy = mirrored(2)
    x = jax.device_put(jnp.arange(3.0), jax.devices()[5])
    (own, _) = strategy.local_results(strategy.run(lambda x: 2 * x, args=(x,)))
    (_, again) = strategy.run(lambda x: x + 1, args=(own,)).values
    assert again.tolist() == [1, 3, 5]


def test_a_function_under_jit_may_read_a_model_and_not_change_it():
    strategy = mirrored(2)
    model, optimizer = made(strategy)
    x = split(strategy, ROWS)

    def step(x):
        train_step(model, optimizer, x)

    predict = jax.jit(lambda x: strategy.gather(strategy.run(model, args=(x,)), 0))
    np.testing.assert_allclose(predict(x), model(ROWS))
    message = (
        "step changes the variable model/bias from outside of the function that is "
        "being compiled. run compiles by itself: call it without jit, or pass the "
        "objects through nnx.jit as arguments."
    )
    for weight in (1, 1 - ROWS.mean(axis=0)):
        with pytest.raises(StrategyError) as error:
            jax.jit(lambda x: strategy.run(step, args=(x,)))(x)
        assert str(error.value) == message
        np.testing.assert_allclose(model.weight, weight * np.ones(3))
        strategy.run(step, args=(x,))


def test_functions_that_each_epoch_defines_anew_are_compiled_once(monkeypatch):
    strategy = mirrored(2)
    model, optimizer = made(strategy, rate=0.1)
    programs = []
    monkeypatch.setattr(
        "meshlayout.distribute.strategy.compile_step",
        lambda *args, **options: (
            programs.append(args) or ml.compile_step(*args, **options)
        ),
    )

    def epoch(model, optimizer, penalty, sign=1.5 - 0.5):
        def loss_fn(model, x):
            return ml.losses.compute_average_loss(model(x)) * penalty[0] * sign

        def step(x):
            optimizer.update(model, nnx.grad(loss_fn)(model, x))

        strategy.run(step, args=(split(strategy, ROWS),))

    penalty = [1.0]
    for _ in range(3):
        epoch(model, optimizer, penalty)
    assert len(programs) == 1
    penalty[0] = 2.0
    epoch(model, optimizer, penalty)
    epoch(model, optimizer, [10.0], float("1"))
    epoch(model, optimizer, penalty, -1.0)
    assert len(programs) == 4
    np.testing.assert_allclose(model.bias, -1.3, rtol=1e-6)
