"""Programs of a strategy: what they are for, how often there is a new one, and sums."""

import functools
import gc
import types
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.lax import psum

import meshlayout as ml
from meshlayout.distribute import get_replica_context
from meshlayout.errors import RecompileWarning, StrategyError
from tests.error_messages import message_of
from tests.flax_versions import set_value
from tests.replicas import Scale, made, mirrored, scale, split, total


X = np.arange(8, dtype="float32")
ROWS = np.arange(12, dtype="float32").reshape(4, 3)


def ways_to(*models):
    """Returns functions, each of which has a way of its own to one of the models."""
    kept = types.SimpleNamespace(model_1=models[0])
    everything = [0.0] * 5000 + [models[1]]
    base = type("Base", (), {})
    kinds = [type("Sub", (base,), {"model": models[2]})]
    proxy = types.MappingProxyType({"model": models[3]})
    globals().update(hidden_model=models[4])
    return [
        lambda: getattr(kept, f"model_{1}"),
        lambda: everything[-1],
        lambda kinds=kinds: base.__subclasses__()[0].model,
        lambda: next(iter(proxy.values())),
        lambda: globals()["hidden_model"],
    ]


def test_a_model_is_trained_and_evaluated_however_it_is_reached(two):
    pairs = [made(two, lambda: Scale(2.0)) for _ in range(5)]
    models, optimizers = zip(*pairs, strict=True)
    ways = ways_to(*models)

    def step(x):
        for held, optimizer in zip(ways, optimizers, strict=True):
            mean = lambda m: ml.losses.compute_average_loss(m(x))
            optimizer.update(held(), nnx.grad(mean)(held()))
        return [held()(x).sum() for held in ways]

    x, factor = split(two, X), 2.0
    for start in (2.0, 0.0):  # then with other weights, that were set outside
        factor = start - X.mean()
        results = two.run(step, (x,))
        assert [total(two, result) for result in results] == [factor * X.sum()] * 5
        assert [float(model.factor[...]) for model in models] == [factor] * 5
        for model in models:
            model.factor[...] = jnp.zeros(())


class Trainer:
    model: Any = None

    def evaluate(self, x):
        return self.model(x)


class Inheriting(Trainer):
    def evaluate(self, x):
        return super().evaluate(x)


PLACES = types.SimpleNamespace(model=None)
NAMED: dict[str, Any] = {"model": None}
TRAINER = Trainer()


@pytest.mark.parametrize(
    ("bind", "evaluate"),
    [
        (functools.partial(setattr, TRAINER, "model"), TRAINER.evaluate),
        (functools.partial(setattr, Inheriting, "model"), Inheriting().evaluate),
        (functools.partial(NAMED.__setitem__, "model"), lambda x: NAMED["model"](x)),
        (
            functools.partial(setattr, PLACES, "model"),
            lambda x: getattr(PLACES, "".join(["mo", "del"]))(x),
        ),
    ],
    ids=["attribute", "class", "dict", "computed name"],
)
def test_a_name_that_is_bound_to_another_model_means_that_one(two, bind, evaluate):
    for factor in (2, 3):
        bind(scale(two, factor))
        assert total(two, two.run(evaluate, (split(two, X),)), 0) == factor * X.sum()


def test_a_cell_that_is_bound_to_another_object_means_that_one(two):
    model, used, shift = scale(two, 2), {}, jnp.zeros(())

    def evaluate(x):
        return used["model"](x) + model(x) + shift

    for factor, other in ((2, 5), (2, 4), (3, 4)):
        model = model if factor == 2 else scale(two, factor)
        used, shift = {"model": scale(two, other)}, jnp.float32(other)
        with warnings.catch_warnings(action="ignore", category=RecompileWarning):
            result = total(two, two.run(evaluate, (split(two, X),)), 0)
        assert result == (other + factor) * X.sum() + 8 * other


def test_modes_and_static_attributes_are_those_of_the_call(two):
    with two.scope():
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    rows, forward = split(two, np.ones((4, 4), "f")), lambda x: dropout(x)
    run = lambda: two.gather(two.run(forward, (rows,)), 0)
    assert not run().all()
    dropout.eval()
    assert run().tolist() == np.ones((4, 4)).tolist()
    dropout.train()
    dropout.rate = 0.0
    assert run().tolist() == np.ones((4, 4)).tolist()
    dropout.rate = 0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nnx.Dropout, "__call__", None)  # a trace would fail
        assert not run().all()


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_assigned_learning_rate_is_that_of_the_next_call(replicas):
    strategy = mirrored(replicas)
    with strategy.scope():
        model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
        tx = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    hyperparams, changes = optimizer.opt_state.hyperparams, list[float]()
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    assign = functools.partial(hyperparams.__setitem__, "learning_rate")
    set_rate = lambda x: set_value(hyperparams["learning_rate"], x)
    for way in (assign, set_rate, lambda x: assign(jnp.float32(x)), set_rate):
        way(len(changes) / 2)
        before = np.array(model.kernel[...])
        strategy.run(lambda: optimizer.update(model, grads))
        changes.append((before - model.kernel[...]).item())
    np.testing.assert_allclose(changes, [0, 0.5, 1, 1.5], atol=1e-6)


def test_numbers_are_seen_by_a_function_that_is_defined_anew(two):
    namespace = {"number": 1.0}
    define = functools.partial(exec, "def step(x): return x.sum() * number", namespace)
    sums = lambda fn: total(two, two.run(fn, (split(two, X),))) / X.sum()
    define()
    for expected in (1, 1, 2):
        assert sums(namespace["step"]) == expected
        if namespace["number"] == 2:
            define()  # as a cell of a notebook that is run again
        namespace["number"] = 2.0
    cells = [lambda x, k=k: x.sum() * k for k in (1, 2.0)]
    assert [sums(fn) for fn in cells] == [1, 2]
    times = lambda x, factor: x.sum() * factor
    assert [sums(functools.partial(times, factor=k)) for k in (1, 2.0)] == [1, 2]


class Counting:
    """Counts on the host, in attributes with names that the model has as well."""

    def __init__(self, strategy):
        self.model, self.optimizer = made(strategy, rate=0.001)
        self.step, self.history = 0, []

    def train(self, x):
        print("traced")  # noqa: T201
        loss_fn = lambda m: ml.losses.compute_average_loss(m(x) ** 2)
        loss, grads = nnx.value_and_grad(loss_fn)(self.model)
        self.optimizer.update(self.model, grads)
        return loss, self.optimizer.step[...]


def test_what_a_trainer_counts_on_the_host_does_not_compile_it_again(two, capsys):
    trainer = Counting(two)
    for _ in range(4):
        loss, step = two.run(trainer.train, (split(two, ROWS),))
        trainer.step += 1
        trainer.history = [*trainer.history, total(two, loss)]
        assert step == trainer.step
    # Once to see what it uses and what differs between replicas, once to compile.
    assert capsys.readouterr().out.count("traced") == 2
    assert trainer.history[-1] < trainer.history[0]


def test_a_function_that_is_compiled_again_and_again_gets_one_warning(two):
    holder = types.SimpleNamespace()

    def evaluate(x):
        return holder.model(x)

    with warnings.catch_warnings(record=True, action="always") as caught:
        for factor in range(5):
            holder.model = scale(two, factor)  # the one before is freed
            two.run(evaluate, (split(two, X),))
    (warning,) = caught
    assert str(warning.message) == (
        "evaluate was compiled a third time for arguments of the same shapes and "
        "types: holder.model stands for another object than before. Pass arrays and "
        "numbers that change as arguments, or keep them in an nnx.Variable. A new "
        "model or optimizer compiles again even as an argument: nnx.update(model, "
        "nnx.state(new_model)) does not."
    )
    with warnings.catch_warnings(action="error"):
        for factor in range(4):
            nnx.update(holder.model, nnx.state(scale(two, factor)))
            assert (
                total(two, two.run(evaluate, (split(two, X),)), 0) == factor * X.sum()
            )


def test_an_attribute_is_not_the_global_of_its_name(two):
    model = types.SimpleNamespace(bias=1.0)
    function = lambda x: x + model.bias
    cells = function.__closure__
    step = types.FunctionType(function.__code__, globals(), "step", (), cells)
    for number in range(4):  # a third program would be warned of
        globals().update(bias=(number,))
        assert np.array_equal(two.run(step, args=(X,)), X + 1)


def test_functions_that_are_defined_anew_are_compiled_once(two, capsys):
    model, optimizer = made(two, rate=0.1)
    x = split(two, ROWS)

    def epoch(penalty):
        tx = optax.chain(optax.clip(1e6), optax.sgd(1.0))

        def loss_fn(model, x):
            return ml.losses.compute_average_loss(model(x)) * penalty[0]

        def step(x, ignored, *, grad):
            print("traced")  # noqa: T201
            tx.init(ignored)
            optimizer.update(model, grad(loss_fn)(model, x))

        two.run(functools.partial(step, ignored=0.0, grad=nnx.grad), args=(x,))
        return capsys.readouterr().out.count("traced")

    penalty = [1.0]
    assert [epoch(penalty) for _ in range(3)] == [2, 0, 0]
    # Another list is another program; what is in one is frozen, as under jax.jit.
    assert epoch([2.0]) == 2
    np.testing.assert_allclose(model.bias, -0.5, rtol=1e-6)


def test_a_replaced_model_is_freed_with_its_programs(two):
    trainer, refs = types.SimpleNamespace(), []

    def evaluate(x):
        return trainer.model(x), trainer.models[0](x), trainer.named["model"](x)

    for _ in range(2):
        trainer.model, optimizer = made(two, lambda: Scale(1.0))
        trainer.models, trainer.named = [scale(two, 2)], {"model": scale(two, 3)}
        two.run(evaluate, (split(two, X),))
        two.run(lambda m, o, x: m(x) + o.step[...], (trainer.model, optimizer, X))
        models = (trainer.model, optimizer, *trainer.models, trainer.named["model"])
        refs += map(weakref.ref, models)
    trainer.model = trainer.models = trainer.named = models = optimizer = None
    gc.collect()
    assert [ref() for ref in refs] == [None] * 8


def test_the_program_that_is_called_is_not_the_one_that_is_dropped(
    two, capsys, monkeypatch
):
    monkeypatch.setattr("meshlayout.distribute.replica_program._MOST_PROGRAMS", 3)

    def hot(x):
        print("traced")  # noqa: T201
        return x

    for number in range(1, 5):  # five programs, of which three are kept
        two.run(hot, args=(1.0,))
        two.run(lambda x: x + 1, args=(jnp.ones(number),))
    assert capsys.readouterr().out.count("traced") == 2


NOTES: list[object] = []
TABLE: dict[str, object] = {}


class Notebook:
    def __init__(self):
        self.history, self.steps = [], 0

    def step(self, x):
        self.history.append(x)

    def count(self, x):
        self.steps += 1
        return x

    def keep(self, x):
        self.last = x
        return x


@functools.cache
def table():
    return np.arange(4.0)


def test_what_a_list_or_dict_would_get_only_once_is_refused_with_its_name(two):
    cell, entries = [], {}
    for fn, what in (
        (lambda x: cell.append(x), "the list cell"),
        (lambda x: entries.update(x=x), "the dict entries"),
        (lambda x: NOTES.append(x), "the list NOTES"),
        (lambda x: TABLE.update(x=x), "the dict TABLE"),
        (Notebook().step, "the list self.history"),
    ):
        for _ in range(2):  # at every call: nothing has been compiled
            assert message_of(two.run, fn, (1.0,), error=StrategyError) == (
                f"{fn.__name__} changes {what}. It runs in Python once per compiled "
                "program, not at every call: return the value instead, or keep it in "
                "an nnx.Variable."
            )
    notebook, count = Notebook(), 0

    def add(x):
        nonlocal count
        count += 1
        return x

    for fn, what in (
        (notebook.count, "self.steps"),
        (notebook.keep, "self.last"),
        (add, "count"),
    ):
        said = message_of(two.run, fn, (1.0,), error=StrategyError)
        assert said.startswith(f"{fn.__name__} changes {what}. It runs in Python once")
    # What is computed once on purpose is.
    assert two.run(lambda x: x + table()[-1], (1.0,)) == 4


def test_attributes_of_modules_are_put_back_and_a_change_is_refused(two):
    with two.scope():
        block = nnx.Sequential(Scale(1.0), Scale(2.0))
    layer, other = block.layers[0], nnx.Sequential(Scale(3.0)).layers
    adds = lambda x: setattr(block.layers[0], "extra", nnx.Param(x))
    replaces = lambda x: setattr(block, "layers", other)
    for fn, what in ((adds, "changes Scale.extra"), (replaces, "changes Sequen")):
        with pytest.raises(StrategyError, match=what):
            two.run(fn, args=(1.0,))
        assert block.layers[0] is layer
        assert not hasattr(layer, "extra")


def test_threads_see_a_model_as_it_is_and_lose_no_update(two):
    model, optimizer = made(two)
    seen, x = [None], split(two, ROWS)

    def step(x):  # other threads read while it is traced
        with ThreadPoolExecutor(1) as thread:
            seen[0] = thread.submit(lambda: np.asarray(model.bias[...])).result()
        train_step(model, optimizer, x)

    two.run(step, args=(x,))
    assert seen == [0]
    with ThreadPoolExecutor(4) as threads:
        run = lambda _: two.run(lambda: train_step(model, optimizer, ROWS))
        list(threads.map(run, range(20)))
    np.testing.assert_allclose(model.bias, -21)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, float])
def test_arguments_of_later_calls_are_placed_as_those_of_the_first(two, kind):
    model, optimizer = made(two, lambda: Scale(1.0), rate=0.5)

    def step(x):
        optimizer.update(model, nnx.grad(lambda model: model(x))(model))

    for x in (1.0, 2.0, 3.0):
        two.run(step, (kind(x),))
    assert model.factor[...] == 1 - (1 + 2 + 3)


def loss_of(model, x):
    penalty = 0.1 * (model.penalized[...] ** 2).sum()
    mean = ml.losses.compute_average_loss(model(x))
    return mean + ml.losses.scale_regularization_loss(penalty)


def train_step(model, optimizer, x):
    optimizer.update(model, nnx.grad(loss_of)(model, x))


reduced = lambda op, grads: get_replica_context().all_reduce(op, grads)
COMBINED = {
    "by the optimizer": lambda grads: grads,
    "by a sum": lambda grads: reduced("SUM", grads),
    "by a mean": lambda grads: jax.tree.map(lambda x: 2 * x, reduced("MEAN", grads)),
    "by psum, under a name of its own": lambda grads: psum(grads, "batch"),
    "by a sum, and clipped": lambda grads: jax.tree.map(
        lambda x: jnp.clip(x, -1e3, 1e3), reduced("SUM", grads)
    ),
    "in part by a sum": lambda grads: nnx.State(
        {**grads, "weight": reduced("SUM", grads["weight"])}
    ),
}


def test_gradients_that_do_not_depend_on_the_batch_are_added_up_like_others(two):
    models = {how: made(two) for how in COMBINED}

    def step(x):
        for how, (model, optimizer) in models.items():
            optimizer.update(model, COMBINED[how](nnx.grad(loss_of)(model, x)))

    def step_on_all(x):
        for _ in range(2):
            train_step(*same, x)

    two.run(step, args=(split(two, ROWS),))
    same = made(two)
    two.run(step_on_all, args=(ROWS,))  # counts as on one device
    np.testing.assert_allclose(same[0].weight, 1 - 2 * ROWS.mean(axis=0))
    np.testing.assert_allclose(same[0].penalized, np.full(3, 2 * 0.8**2), rtol=1e-6)
    for how, (model, _) in models.items():
        np.testing.assert_allclose(model.weight, 1 - ROWS.mean(axis=0), err_msg=how)
        np.testing.assert_allclose(model.bias, -1, err_msg=how)
        np.testing.assert_allclose(model.penalized, np.full(3, 1.6), rtol=1e-6)


def test_gradients_of_a_loss_that_is_combined_are_added_up_as_in_tensorflow(two):
    model, optimizer = made(two)

    def step(x):
        loss = lambda model: reduced("SUM", loss_of(model, x))
        optimizer.update(model, nnx.grad(loss)(model))

    two.run(step, (split(two, ROWS),))
    np.testing.assert_allclose(model.weight, 1 - 2 * ROWS.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(model.bias, -2)
    np.testing.assert_allclose(model.penalized, np.full(3, 1.2), rtol=1e-6)


def test_gradients_that_were_sent_around_a_ring_are_refused(two):
    model, optimizer = made(two)

    def step(x):
        send = lambda x: jax.lax.ppermute(x, "batch", [(0, 1), (1, 0)])
        grads = nnx.grad(loss_of)(model, x)
        optimizer.update(model, jax.tree.map(lambda x: x + send(x), grads))

    message = message_of(two.run, step, (split(two, ROWS),), error=StrategyError)
    assert "jax.lax.ppermute" in message
    assert "all_reduce" in message
    np.testing.assert_array_equal(model.weight, 1)


def test_gradients_may_be_results_and_arguments(two):
    model, optimizer = made(two)
    gradients = lambda x: nnx.grad(loss_of)(model, x)
    update = lambda grads: optimizer.update(model, grads)
    for _ in range(2):
        grads = two.run(gradients, args=(split(two, ROWS),))
        two.run(update, args=(grads,))
    mean = two.reduce("MEAN", grads, axis=None)
    np.testing.assert_allclose(mean["weight"], ROWS.mean(axis=0) / 2)
    weight = nnx.Variable(jnp.zeros(3), aggregation="sum")

    def accumulate(grads):
        weight[...] += grads["weight"] / 2
        update(nnx.State({**mean, "weight": nnx.Param(weight[...])}))

    two.run(accumulate, args=(grads,))  # these are the same on both replicas,
    two.run(update, args=(mean,))  # and are not added up
    two.run(lambda: update(mean))
    two.run(lambda: update(jax.tree.map(lambda x: 2 * x, mean)))
    np.testing.assert_allclose(model.weight, 1 - 4.5 * ROWS.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(model.bias, -4.5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_copies_of_a_model_stay_while_it_is_trained_in_its_memory(replicas):
    strategy = mirrored(replicas)
    model, optimizer = made(strategy, rate=0.1)
    average, x = nnx.clone(model), split(strategy, ROWS)  # which has the same arrays

    def step(x):
        train_step(model, optimizer, x)
        old, new = nnx.state(average), nnx.state(model)
        nnx.update(average, jax.tree.map(lambda a, b: (a + b) / 2, old, new))

    def pointer():
        return model.weight[...].addressable_data(0).unsafe_buffer_pointer()

    strategy.run(step, args=(x,))
    weight, before, rows = np.array(model.weight[...]), pointer(), ROWS.mean(axis=0)
    for _ in range(2):
        np.testing.assert_allclose(weight, 1 - 0.1 * rows, rtol=1e-6, atol=1e-7)
        strategy.run(step, args=(x,))
    np.testing.assert_allclose(model.weight, 1 - 0.3 * rows, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(average.weight, 1 - 0.2125 * rows, rtol=1e-6, atol=1e-7)
    copied = nnx.clone(model)  # which has arrays of the model that run changes
    strategy.run(step, args=(x,))
    message = message_of(strategy.run, lambda x: copied(x), (x,), error=StrategyError)
    assert message.startswith(
        "copied/weight was used up: run reuses the memory of what"
    )
    assert replicas == 1 or pointer() == before


def test_run_may_be_a_part_of_a_function_under_nnx_jit(two):
    model, optimizer = made(two)

    @nnx.jit
    def distributed_step(model, optimizer, x):
        two.run(lambda x: train_step(model, optimizer, x), args=(x,))
        return two.gather(two.run(model, args=(x,)), axis=0)

    for _ in range(2):
        result = distributed_step(model, optimizer, split(two, ROWS))
    weight = 1 - 2 * ROWS.mean(axis=0)
    np.testing.assert_allclose(model.weight, weight)
    np.testing.assert_allclose(result, ROWS @ weight - 2, rtol=1e-5)


def test_a_function_under_jit_may_read_a_model_and_not_change_it(two):
    model, optimizer = made(two)
    step, x = lambda x: train_step(model, optimizer, x), split(two, ROWS)
    predict = jax.jit(lambda x: two.gather(two.run(model, args=(x,)), 0))
    (padded,) = two.distribute_dataset((ROWS[:3], ROWS[:3]), 4)
    with pytest.raises(StrategyError, match="padding is unknown under jit"):
        jax.jit(lambda pair: two.run(lambda x, y: x, args=pair))(padded)
    np.testing.assert_allclose(predict(x), model(ROWS))
    for weight in (1, 1 - ROWS.mean(axis=0)):
        with pytest.raises(StrategyError, match="changes variables from outside"):
            jax.jit(lambda x: two.run(step, args=(x,)))(x)
        np.testing.assert_allclose(model.weight, weight * np.ones(3))
        two.run(step, args=(x,))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.linear(x)))


def test_scanned_blocks_with_dropout_are_trained(two):
    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def blocks_of(rngs):
        return Block(rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    @nnx.remat
    def scanned(block, x):
        return jax.lax.cond(x.sum() > 1e6, lambda x: x, lambda x: x, block(x))

    blocks, optimizer = made(two, lambda: blocks_of(nnx.Rngs(0)))

    def step(x):
        grads = nnx.grad(lambda blocks: scanned(blocks, x).sum())(blocks)
        optimizer.update(blocks, grads)
        return scanned(blocks, x)

    key, kernel = blocks.dropout.rngs.key[...], np.asarray(blocks.linear.kernel)
    results = two.run(step, args=(jnp.ones((4, 3)),))
    assert not np.array_equal(*results.values)  # each replica drops others
    assert not np.array_equal(blocks.linear.kernel, kernel)
    assert (blocks.dropout.rngs.key[...] == key).all()
    assert blocks.dropout.rngs.count[...].tolist() == [2, 2]
