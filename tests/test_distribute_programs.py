"""Ordinary programs under a strategy, beside the same on one device or a closed form."""

import gc
import types
import weakref
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
        lambda x: jnp.clip(x, -1e3, 1e3), reduced("SUM", grads)
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
    untouched = jax.tree.map(jnp.copy, nnx.state(model))

    def step(x):
        train_step(model, optimizer, x)
        old, new = nnx.state(average), nnx.state(model)
        nnx.update(average, jax.tree.map(lambda a, b: (a + b) / 2, old, new))

    x = split(strategy, ROWS)
    strategy.run(step, args=(x,))
    np.testing.assert_array_equal(untouched["weight"][...], 1)
    weight = np.asarray(model.weight[...])
    strategy.run(step, args=(x,))
    rows = ROWS.mean(axis=0)
    np.testing.assert_allclose(weight, 1 - 0.1 * rows, rtol=1e-6)
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
        assert float(result) == (1 if training else -1)


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
    (_, again) = strategy.local_results(strategy.run(lambda x: x + 1, args=(own,)))
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
        " from outside of the function that is being compiled. run compiles by itself: "
        "call it without jit, or pass the objects through nnx.jit as arguments."
    )
    for weight in (1, 1 - ROWS.mean(axis=0)):
        with pytest.raises(StrategyError) as error:
            jax.jit(lambda x: strategy.run(step, args=(x,)))(x)
        assert str(error.value).startswith("step changes the variable model/")
        assert str(error.value).endswith(message)
        np.testing.assert_allclose(model.weight, weight * np.ones(3))
        strategy.run(step, args=(x,))


def test_functions_that_each_epoch_defines_anew_are_compiled_once(monkeypatch):
    strategy = mirrored(2)
    model, optimizer = made(strategy, rate=0.1)
    programs = []
    monkeypatch.setattr(
        "meshlayout.distribute.replica_program.compile_step",
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
    penalty = [2.0]  # another list; what is in one is frozen, as under jax.jit
    epoch(model, optimizer, penalty)
    with pytest.warns(ml.errors.RecompileWarning, match="penalty stands for another"):
        epoch(model, optimizer, [10.0], float("1"))
    epoch(model, optimizer, [2.0], -1.0)
    assert len(programs) == 4
    np.testing.assert_allclose(model.bias, -1.3, rtol=1e-6)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_variables_that_nnx_jit_returns_unchanged_stay(num_devices):
    strategy = ml.distribute.MirroredStrategy(jax.devices()[:num_devices])
    with strategy.scope():
        dense = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        rngs = nnx.Rngs(1)
    kernel, key = (
        np.array(dense.kernel[...]),
        np.array(jax.random.key_data(rngs.default.key[...])),
    )

    @nnx.jit
    def forward(dense, rngs, x):
        return dense(x) + jax.random.normal(rngs())

    def step(x):
        nnx.jit(lambda rngs: None)(rngs)
        return forward(dense, rngs, x)

    for count in range(1, 3):
        strategy.run(step, args=(jnp.ones((4, 2)),))
        assert int(rngs.default.count[...]) == count
    np.testing.assert_array_equal(jax.random.key_data(rngs.default.key[...]), key)
    np.testing.assert_array_equal(dense.kernel[...], kernel)


def test_a_replaced_model_is_freed_with_its_programs():
    strategy = mirrored(2)
    x = split(strategy, ROWS)
    trainer = types.SimpleNamespace()

    def step(x):
        train_step(trainer.model, trainer.optimizer, x)

    refs = []
    for _ in range(2):
        trainer.model, trainer.optimizer = made(strategy, rate=0.1)
        strategy.run(step, args=(x,))
        strategy.run(train_step, args=(trainer.model, trainer.optimizer, x))
        refs += [weakref.ref(trainer.model), weakref.ref(trainer.optimizer)]
    trainer.model = trainer.optimizer = None
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4


def test_the_program_that_is_called_is_not_the_one_that_is_dropped(capsys, monkeypatch):
    monkeypatch.setattr("meshlayout.distribute.program_cache._MOST_PROGRAMS", 3)
    strategy = mirrored(2)

    def hot(x):
        print("traced")  # noqa: T201
        return x

    for number in range(1, 5):  # five programs, of which three are kept
        strategy.run(hot, args=(1.0,))
        strategy.run(lambda x: x + 1, args=(jnp.ones(number),))
    assert capsys.readouterr().out.count("traced") == 2


def test_other_threads_see_a_model_as_it_is_while_it_is_traced():
    strategy = mirrored(2)
    model, optimizer = made(strategy)
    seen = []

    def step(x):
        with ThreadPoolExecutor(1) as thread:
            seen.append(thread.submit(lambda: np.asarray(model.weight[...])).result())
        train_step(model, optimizer, x)

    with pytest.raises(StrategyError, match="the list seen"):
        strategy.run(step, args=(split(strategy, ROWS),))
    strategy.run(train_step, args=(model, optimizer, split(strategy, ROWS)))
    assert isinstance(model.weight[...], jax.Array)


def test_attributes_of_modules_are_put_back_and_a_change_is_refused():
    strategy = mirrored(2)
    with strategy.scope():
        block = Block(nnx.Rngs(0))
    layer = block.linear

    def adds(x):
        block.linear.extra = nnx.Param(x)

    def replaces(x):
        block.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    for fn, what in ((adds, "adds the variable Linear.extra"), (replaces, "sets")):
        with pytest.raises(StrategyError, match=what):
            strategy.run(fn, args=(1.0,))
        assert block.linear is layer
        assert not hasattr(layer, "extra")


def test_a_forgotten_sum_of_plain_parameters_is_noticed():
    strategy = mirrored(2)
    params = {"w": jnp.ones(3)}

    def step(params, x):
        grads = jax.grad(lambda p: (x @ p["w"]).sum())(params)
        return jax.tree.map(lambda p, g: p - g, params, grads)

    with pytest.raises(
        StrategyError, match=r"different values of w on them.*all_reduce"
    ):
        strategy.run(step, args=(params, split(strategy, ROWS)))
