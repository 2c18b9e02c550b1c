"""Programs of a strategy: what they are for, how often there is a new one, and sums."""

import collections
import functools
import gc
import types
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flax
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
from tests.replicas import Scale, made, mirrored, scale, split, total


X = np.arange(8, dtype="float32")
ROWS = np.arange(12, dtype="float32").reshape(4, 3)


@pytest.fixture
def two():
    return mirrored(2)


# Models that code reaches in its own ways.


class Holder:
    """An object of the user's."""

    def __init__(self, *models):
        for number, model in enumerate(models):
            setattr(self, f"model_{number}", model)


def held_by_computed_names(models):
    holder = Holder(*models)
    return lambda: [getattr(holder, f"model_{i}") for i in range(len(models))]


def held_by_vars(models):
    holder = Holder(*models)
    return lambda: list(vars(holder).values())


def held_by_a_dicts_values(models):
    values = dict(enumerate(models)).values()
    return lambda: list(values)


def held_by_a_long_list(models):
    everything = [0.0] * 5000 + models
    return lambda: everything[-2:]


def held_by_subclasses(models):
    base = type("Base", (), {})
    kinds = [type("Sub", (base,), {"model": model}) for model in models]
    return lambda kinds=kinds: [kind.model for kind in base.__subclasses__()]


def held_by_globals(models):
    globals().update(hidden_models=models)
    return lambda: globals()["hidden_models"]


def held_by(container):
    def held(models):
        values = container(dict(enumerate(models)))
        return lambda: [values[0], values[1]]

    return held


HELD = {
    "computed names": held_by_computed_names,
    "vars": held_by_vars,
    "dict.values()": held_by_a_dicts_values,
    "a long list": held_by_a_long_list,
    "subclasses": held_by_subclasses,
    "globals()": held_by_globals,
    "FrozenDict": held_by(flax.core.FrozenDict),
    "UserDict": held_by(collections.UserDict),
    "ChainMap": held_by(collections.ChainMap),
    "MappingProxyType": held_by(types.MappingProxyType),
}


@pytest.mark.parametrize("name", HELD)
def test_a_model_is_trained_and_evaluated_however_it_is_reached(two, name):
    models, optimizers = zip(
        *[made(two, lambda: Scale(2.0)) for _ in "ab"], strict=True
    )
    held, held_optimizers = HELD[name]([*models]), HELD["vars"]([*optimizers])

    def step(x):
        for model, optimizer in zip(held(), held_optimizers(), strict=True):
            mean = lambda m: ml.losses.compute_average_loss(m(x))  # noqa: E731
            optimizer.update(model, nnx.grad(mean)(model))
        return sum(model(x).sum() for model in held())

    x, factors = split(two, X), [2.0, 2.0]
    for _ in range(2):  # then with other weights, that were set outside
        result = total(two, two.run(step, (x,)))
        factors = [factor - X.mean() for factor in factors]
        assert [float(model.factor[...]) for model in models] == factors
        assert result == sum(factors) * X.sum()
        models[1].factor[...], factors[1] = jnp.zeros(()), 0


class Base:
    def evaluate(self, x):
        return self.model(x)


class Trainer(Base):
    model = None

    def evaluate(self, x):
        return super().evaluate(x)


class Doubling:
    factor = 2

    def scaled(self, x):
        return self.factor * x


class Tripling(Doubling):
    factor = 3


PLACES = types.SimpleNamespace(model=None)
NAMED: dict[str, Any] = {"model": None}
TRAINER = Trainer()


def by_a_global(x):
    return NAMED["model"](x)


BOUND = {
    "attribute": (functools.partial(setattr, TRAINER, "model"), TRAINER.evaluate),
    "class": (functools.partial(setattr, Trainer, "model"), Trainer().evaluate),
    "dict": (functools.partial(NAMED.__setitem__, "model"), by_a_global),
    "computed name": (
        functools.partial(setattr, PLACES, "model"),
        lambda x: getattr(PLACES, "".join(["mo", "del"]))(x),
    ),
}


@pytest.mark.parametrize("name", BOUND)
def test_a_name_that_is_bound_to_another_model_means_that_one(two, name):
    bind, evaluate = BOUND[name]
    for factor in (2, 3):
        bind(scale(two, factor))
        assert total(two, two.run(evaluate, (split(two, X),)), 0) == factor * X.sum()


def test_an_item_that_is_another_object_means_its_class(two):
    used = {}
    for kind in (Doubling, Tripling, Doubling):
        used["way"] = kind()
        scaled = two.run(lambda x: used["way"].scaled(x), (split(two, X),))
        assert total(two, scaled, 0) == kind.factor * X.sum()


def test_a_cell_that_is_bound_to_another_object_means_that_one(two):
    model, used, shift = scale(two, 2), {}, jnp.zeros(())

    def evaluate(x):
        return used["model"](x) * used["weight"] + model(x) + shift

    for factor, other, weight in ((2, 5, 0.5), (2, 5, 1.5), (3, 4, 2.5), (3, 4, 3.5)):
        model = model if factor == 2 else scale(two, factor)
        held = used.get("model") if weight in (1.5, 3.5) else scale(two, other)
        used = {"model": held, "weight": weight}  # where the one before last has been
        shift = jnp.float32(weight)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecompileWarning)
            result = total(two, two.run(evaluate, (split(two, X),)), 0)
        assert result == (other * weight + factor) * X.sum() + 8 * weight


def test_modes_and_static_attributes_are_those_of_the_call(two):
    with two.scope():
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    rows, forward = split(two, np.ones((4, 4), "f")), lambda x: dropout(x)
    run = lambda: two.gather(two.run(forward, (rows,)), 0)  # noqa: E731
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


def test_numbers_are_frozen_in_a_function_and_seen_by_one_that_is_defined_anew(two):
    namespace = {"number": 1.0}
    define = functools.partial(exec, "def step(x): return x.sum() * number", namespace)
    define()
    sums = lambda fn: total(two, two.run(fn, (split(two, X),))) / X.sum()  # noqa: E731

    def made_with(cell):
        return lambda x: x.sum() * cell, lambda: cell + 1

    assert sums(namespace["step"]) == 1
    namespace["number"] = 2.0
    assert sums(namespace["step"]) == 1
    define()  # as a cell of a notebook that is run again
    assert sums(namespace["step"]) == 2
    assert [sums(made_with(cell)[0]) for cell in (1.5, 2.5)] == [1.5, 2.5]
    assert [sums(lambda x, k=k: x.sum() * k) for k in (1, 2.0)] == [1, 2]
    times = lambda x, factor: x.sum() * factor  # noqa: E731
    assert [sums(functools.partial(times, factor=k)) for k in (1, 2.0)] == [1, 2]


# How often a function is traced and compiled.


class Counting:
    """Counts on the host, in attributes with names that the model has as well."""

    def __init__(self, strategy):
        self.model, self.optimizer = made(strategy, rate=0.001)
        self.step, self.history, self.loss = 0, [], None

    def penalized(self, model, x):
        return ml.losses.compute_average_loss(model(x) ** 2)

    def train(self, x):
        print("traced")  # noqa: T201
        loss_fn = lambda model: self.penalized(model, x)  # noqa: E731
        loss, grads = nnx.value_and_grad(loss_fn)(self.model)
        self.optimizer.update(self.model, grads)
        return loss, self.optimizer.step[...]

    def fit(self, strategy):
        self.history = []
        for _ in range(5):
            self.loss, step = strategy.run(self.train, (split(strategy, ROWS),))
            self.step += 1
            self.history.append(total(strategy, self.loss))
            assert step == self.step


def test_what_a_trainer_counts_on_the_host_does_not_compile_it_again(two, capsys):
    trainer = Counting(two)
    trainer.fit(two)
    # Once to see what it uses and what differs between replicas, once to compile.
    assert capsys.readouterr().out.count("traced") == 2
    assert trainer.history[-1] < trainer.history[0]


def test_a_function_that_is_compiled_again_and_again_gets_one_warning(two):
    holder = Holder()

    def evaluate(x):
        return holder.model(x)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for factor in range(5):
            holder.model = scale(two, factor)  # the one before is freed
            two.run(evaluate, (split(two, X),))
    (warning,) = caught
    assert str(warning.message) == (
        "evaluate was compiled a third time for arguments of the same shapes and "
        "types: holder.model stands for another object than before. Pass arrays and "
        "numbers that change as arguments, or keep them in an nnx.Variable; each model "
        "has its own program."
    )


def test_functions_that_are_defined_anew_are_compiled_once(two, capsys):
    model, optimizer = made(two, rate=0.1)
    x = split(two, ROWS)

    def epoch(model, optimizer, penalty, sign=1.5 - 0.5):
        tx = optax.chain(optax.clip(1e6), optax.sgd(1.0))

        def loss_fn(model, x):
            return ml.losses.compute_average_loss(model(x)) * penalty[0] * sign

        def step(x, ignored, *, grad):
            print("traced")  # noqa: T201
            tx.init(ignored)
            optimizer.update(model, grad(loss_fn)(model, x))

        two.run(functools.partial(step, ignored=0.0, grad=nnx.grad), args=(x,))
        return capsys.readouterr().out.count("traced")

    penalty = [1.0]
    assert [epoch(model, optimizer, penalty) for _ in range(3)] == [2, 0, 0]
    # Another list is another program; what is in one is frozen, as under jax.jit.
    assert epoch(model, optimizer, [2.0]) == 2
    with pytest.warns(RecompileWarning, match="penalty stands for another"):
        epoch(model, optimizer, [10.0], float("1"))
    epoch(model, optimizer, [2.0], -1.0)
    np.testing.assert_allclose(model.bias, -1.3, rtol=1e-6)


def test_a_replaced_model_is_freed_with_its_programs(two):
    trainer, refs = Holder(), []

    def evaluate(x):
        return trainer.model(x), trainer.models[0](x), trainer.named["model"](x)

    for _ in range(2):
        trainer.model, optimizer = made(two, lambda: Scale(1.0))
        trainer.models = [scale(two, 2)]
        trainer.named = {"model": scale(two, 3), "other": scale(two, 4)}
        two.run(evaluate, (split(two, X),))
        two.run(lambda m, o, x: m(x) + o.step[...], (trainer.model, optimizer, X))
        models = (trainer.model, optimizer, *trainer.models, *trainer.named.values())
        refs += map(weakref.ref, models)
    trainer.model = trainer.models = trainer.named = models = optimizer = None
    gc.collect()
    assert [ref() for ref in refs] == [None] * 10


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


# What Python does in a function.

NOTES: list[object] = []
TABLE: dict[str, object] = {}


class Notebook:
    def __init__(self):
        self.history = []

    def step(self, x):
        self.remember(x)
        return x

    def remember(self, x):
        self.history.append(x)


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

    for fn, what in (
        (appends_to_a_cell, "the list cell"),
        (enters_into_a_dict, "the dict table"),
        (appends_to_a_global, "the list NOTES"),
        (enters_into_a_global, "the dict TABLE"),
        (notebook.step, "the list self.history"),
    ):
        for _ in range(2):  # at every call: nothing has been compiled
            assert message_of(two.run, fn, (1.0,), error=StrategyError) == (
                f"{fn.__name__} changes {what}, which had 0 entries before the call "
                "and has 1 after it. It runs in Python once per compiled program, not "
                "at every call: return the value instead, or keep it in an "
                "nnx.Variable."
            )


def test_attributes_of_modules_are_put_back_and_a_change_is_refused(two):
    with two.scope():
        block = nnx.Sequential(Scale(1.0), Scale(2.0))
    layer = block.layers[0]

    def adds(x):
        setattr(block.layers[0], "extra", nnx.Param(x))  # noqa: B010

    def replaces(x):
        block.layers = nnx.Sequential(Scale(3.0)).layers

    for fn, what in (
        (adds, "changes Scale.extra"),
        (replaces, "changes Sequential.layers"),
    ):
        with pytest.raises(StrategyError, match=what):
            two.run(fn, args=(1.0,))
        assert block.layers[0] is layer
        assert not hasattr(layer, "extra")


def test_threads_see_a_model_as_it_is_and_lose_no_update(two):
    model, optimizer = made(two)
    seen, x = nnx.Variable(jnp.zeros(())), split(two, ROWS)

    def step(x):  # other threads read while it is traced
        with ThreadPoolExecutor(1) as thread:
            seen[...] = thread.submit(lambda: np.asarray(model.weight[...])).result()[0]
        train_step(model, optimizer, x)

    two.run(step, args=(x,))
    assert seen[...] == 1

    def steps(_):
        for _ in range(5):
            two.run(lambda x: train_step(model, optimizer, x), args=(x,))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(steps, range(4)))
    np.testing.assert_allclose(model.bias, -21)


def test_a_bool_among_the_arguments_is_one_for_python(two):
    step = lambda x, training: x if training else -x  # noqa: E731
    for training in (True, False, True):
        result = two.run(step, args=(1.0,), kwargs={"training": training})
        assert float(result) == (1 if training else -1)


# How gradients are added up.


def loss_of(model, x):
    penalty = 0.1 * (model.penalized[...] ** 2).sum()
    mean = ml.losses.compute_average_loss(model(x))
    return mean + ml.losses.scale_regularization_loss(penalty)


def train_step(model, optimizer, x):
    optimizer.update(model, nnx.grad(loss_of)(model, x))


def reduced(op, grads):
    return get_replica_context().all_reduce(op, grads)


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
        loss = lambda model: reduced("SUM", loss_of(model, x))  # noqa: E731
        optimizer.update(model, nnx.grad(loss)(model))

    two.run(step, (split(two, ROWS),))
    np.testing.assert_allclose(model.weight, 1 - 2 * ROWS.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(model.bias, -2)
    np.testing.assert_allclose(model.penalized, np.full(3, 1.2), rtol=1e-6)


def test_gradients_that_were_sent_around_a_ring_are_refused(two):
    model, optimizer = made(two)

    def step(x):
        send = lambda x: jax.lax.ppermute(x, "batch", [(0, 1), (1, 0)])  # noqa: E731
        grads = nnx.grad(loss_of)(model, x)
        optimizer.update(model, jax.tree.map(lambda x: x + send(x), grads))

    message = message_of(two.run, step, (split(two, ROWS),), error=StrategyError)
    assert "jax.lax.ppermute" in message
    assert "all_reduce" in message
    np.testing.assert_array_equal(model.weight, 1)


def test_gradients_may_be_results_and_arguments(two):
    model, optimizer = made(two)
    gradients = lambda x: nnx.grad(loss_of)(model, x)  # noqa: E731
    update = lambda grads: optimizer.update(model, grads)  # noqa: E731
    for _ in range(2):
        grads = two.run(gradients, args=(split(two, ROWS),))
        two.run(update, args=(grads,))
    mean = two.reduce("MEAN", grads, axis=None)
    np.testing.assert_allclose(mean["weight"], ROWS.mean(axis=0) / 2)
    two.run(update, args=(mean,))
    np.testing.assert_allclose(model.weight, 1 - 3 * ROWS.mean(axis=0))
    np.testing.assert_allclose(model.bias, -3)


@pytest.mark.parametrize("replicas", [1, 2])
def test_copies_of_a_model_stay_while_it_is_trained_in_its_memory(replicas):
    strategy = mirrored(replicas)
    model, optimizer = made(strategy, rate=0.1)
    average = nnx.clone(model)  # which has the same arrays
    untouched = jax.tree.map(jnp.copy, nnx.state(model))

    def step(x):
        train_step(model, optimizer, x)
        old, new = nnx.state(average), nnx.state(model)
        nnx.update(average, jax.tree.map(lambda a, b: (a + b) / 2, old, new))

    def pointer():
        return model.weight[...].addressable_data(0).unsafe_buffer_pointer()

    x = split(strategy, ROWS)
    strategy.run(step, args=(x,))
    np.testing.assert_array_equal(untouched["weight"][...], 1)
    weight, before = np.array(model.weight[...]), pointer()
    strategy.run(step, args=(x,))
    rows = ROWS.mean(axis=0)
    np.testing.assert_allclose(weight, 1 - 0.1 * rows, rtol=1e-6)
    np.testing.assert_allclose(model.weight, 1 - 0.2 * rows, rtol=1e-6)
    np.testing.assert_allclose(average.weight, 1 - 0.125 * rows, rtol=1e-6)
    strategy.run(step, args=(x,))
    assert replicas == 1 or pointer() == before


def test_run_may_be_a_part_of_a_function_under_nnx_jit(two):
    model, optimizer = made(two)

    @nnx.jit
    def distributed_step(model, optimizer, x):
        def step(x):
            train_step(model, optimizer, x)
            return loss_of(model, x)

        return two.reduce("SUM", two.run(step, args=(x,)), axis=None)

    for _ in range(2):
        loss = distributed_step(model, optimizer, split(two, ROWS))
    weight = 1 - 2 * ROWS.mean(axis=0)
    np.testing.assert_allclose(model.weight, weight)
    penalty = 0.1 * 3 * (2 * 0.8**2) ** 2
    expected = (ROWS @ weight).mean() - 2 + penalty
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_a_function_under_jit_may_read_a_model_and_not_change_it(two):
    model, optimizer = made(two)
    x = split(two, ROWS)

    def step(x):
        train_step(model, optimizer, x)

    predict = jax.jit(lambda x: two.gather(two.run(model, args=(x,)), 0))
    np.testing.assert_allclose(predict(x), model(ROWS))
    for weight in (1, 1 - ROWS.mean(axis=0)):
        with pytest.raises(StrategyError) as error:
            jax.jit(lambda x: two.run(step, args=(x,)))(x)
        assert str(error.value).startswith("step changes the variable model/")
        assert str(error.value).endswith(
            " from outside of the function that is being compiled. run compiles by "
            "itself: call it without jit, or pass the objects through nnx.jit as "
            "arguments."
        )
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

    before = blocks.dropout.rngs.key[...]
    kernel = np.asarray(blocks.linear.kernel)
    results = two.run(step, args=(jnp.ones((4, 3)),))
    assert not np.array_equal(*results.values)  # each replica drops others
    assert not np.array_equal(blocks.linear.kernel, kernel)
    assert (blocks.dropout.rngs.key[...] == before).all()
    assert blocks.dropout.rngs.count[...].tolist() == [2, 2]
