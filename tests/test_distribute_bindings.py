"""What a replica function uses besides its arguments, and does to Python."""

import dataclasses
import functools
import itertools
import random
import types
from collections import Counter, deque

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from meshlayout.distribute.bindings import find

import meshlayout as ml
from meshlayout.errors import StrategyError
from tests.error_messages import message_of


ONCE = (
    "The function runs once per compiled program, not at every call, so this would "
    "happen only once."
)

# Globals of a user's program.
scale = 2.0
net = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
history: list[float] = []
config = types.SimpleNamespace(rate=0.1, unused=0)
generator = np.random.default_rng(0)
calls = 0


class Settings:
    rate = 0.5


@dataclasses.dataclass
class Options:
    rate: float = 0.5


class Layer(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        history.append(1.0)
        return self.weight[...] * x


def helper(x):
    return net(x) * scale


def names(fn):
    return [name for name, _ in find(fn).objects]


class Trainer:
    def __init__(self):
        self.model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1), wrt=nnx.Param)
        self.metrics = {"loss": nnx.metrics.Average(), "rest": [nnx.Param(jnp.ones(2))]}
        self.other = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.steps = 0
        self.rate = 0.1
        self.losses = []

    def step(self, x):
        loss = jnp.sum(self.model(x)) * self.rate
        self.optimizer.update(self.model, nnx.state(self.model, nnx.Param))
        self.metrics["loss"].update(values=loss)
        return loss

    @property
    def twice(self):
        return self.model

    @functools.cached_property
    def size(self):
        return 3

    def uses_properties(self, x):
        return self.twice(x) * self.size


class CallableTrainer(Trainer):
    def __call__(self, x):
        return super().step(x)


def test_objects_are_found_wherever_code_names_them():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    weight = nnx.Param(jnp.ones(2))
    layers = (model, {"a": Layer()})
    trainer = Trainer()

    def inner(x, layer=weight):
        return model(x) * layer

    def partial_step(layer, rate, x):
        return layer(x) * rate

    assert names(lambda x: model(x)) == ["model"]
    assert names(lambda x: helper(x)) == ["net"]
    assert names(lambda x: inner(x)) == ["model", "layer"]
    assert names(lambda x: [layer(x) for layer in layers]) == [
        "layers[0]",
        "layers[1]['a']",
    ]
    expected = [
        "self.metrics['loss']",
        "self.metrics['rest'][0]",
        "self.model",
        "self.optimizer",
    ]
    assert sorted(names(trainer.step)) == expected
    assert sorted(names(CallableTrainer())) == expected
    assert sorted(names(lambda x: trainer.step(x))) == [
        name.replace("self", "trainer") for name in expected
    ]
    assert names(trainer.uses_properties) == ["self.model"]
    assert names(functools.partial(partial_step, model, rate=weight)) == [
        "layer",
        "rate",
    ]
    assert names(model.__call__) == ["self"]
    assert names(model) == ["self"]
    jitted = jax.jit(lambda x: model(x))
    assert names(lambda x: jitted(x)) == ["model"]
    assert names(lambda x: nnx.jit(jax.vmap(inner))(x)) == ["model", "layer"]
    grad = nnx.value_and_grad(lambda x: model(x).sum())
    assert names(lambda x: grad(x)) == ["model"]
    assert names(lambda x: Trainer.step(trainer, x))[:1] == ["trainer.model"]
    assert names(jnp.sum) == []


def test_an_object_is_found_once():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    same = model

    def fn(x):
        return model(x) + same(x) + fn(x)

    assert len(names(fn)) == 1


def test_custom_derivatives_and_schedules_are_followed():
    weight = nnx.Param(jnp.ones(()))

    @jax.custom_vjp
    def times(x):
        return x

    times.defvjp(lambda x: (x, None), lambda _, g: (g * weight[...],))
    assert names(lambda x: times(x)) == ["weight"]

    def schedule(count):
        return scale / (count + 1)

    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)
    bindings = find(lambda: optimizer.update(model, None))
    globals()["scale"] = 3.0
    assert bindings.change() == "scale"
    globals()["scale"] = 2.0
    assert bindings.is_current()


def test_names_that_stand_for_something_else_are_noticed():
    rate, flags, sizes, offset = 0.1, {"a": 1}, [1, 2], np.zeros(2)
    options = Options()
    trainer = Trainer()

    def fn(x):
        return (
            helper(x)
            * rate
            * options.rate
            * config.rate
            * len(flags)
            * sizes[0]
            * trainer.rate
            * Settings.rate
            + offset
        )

    bindings = find(fn)
    assert bindings.is_current()

    def is_noticed(change, undo, name):
        change()
        label = bindings.change()
        undo()
        assert bindings.is_current()
        assert label == name

    def set_rate(value):
        nonlocal rate
        rate = value

    is_noticed(lambda: set_rate(0.2), lambda: set_rate(float("0.1")), "rate")
    is_noticed(lambda: set_rate(jnp.ones(2)), lambda: set_rate(0.1), "rate")
    here = globals()
    for name, value in (("net", Layer()), ("scale", 5), ("helper", print)):
        put = functools.partial(here.__setitem__, name)
        is_noticed(
            functools.partial(put, value), functools.partial(put, here[name]), name
        )
    is_noticed(
        lambda: vars(config).update(rate=3),
        lambda: vars(config).update(rate=0.1),
        "config.rate",
    )
    is_noticed(lambda: flags.update(a=2), lambda: flags.update(a=1), "the dict flags")
    is_noticed(lambda: sizes.append(3), sizes.pop, "the list sizes")
    is_noticed(
        lambda: setattr(trainer, "rate", 1),
        lambda: setattr(trainer, "rate", 0.1),
        "trainer.rate",
    )
    is_noticed(
        lambda: setattr(Settings, "rate", 1),
        lambda: setattr(Settings, "rate", 0.5),
        "Settings.rate",
    )
    offset.fill(1)
    assert message_of(bindings.is_current, error=StrategyError) == (
        "run: the values of the NumPy array offset have changed, and compiled programs "
        "hold the old ones. Pass it as an argument, keep it in an nnx.Variable, or "
        "create a new array."
    )
    offset = np.ones(2)
    assert bindings.change() == "offset"
    bindings = find(fn)
    set_option = functools.partial(setattr, options, "rate")
    is_noticed(lambda: set_option(1), lambda: set_option(0.5), "options.rate")
    # Nothing in this code reads these.
    trainer.steps += 1
    trainer.losses.append(1.0)
    config.unused = 1
    assert bindings.is_current()


def test_a_check_of_what_is_current_calls_few_functions():
    trainer = Trainer()
    bindings = find(trainer.step)
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.runcall(bindings.is_current)
    assert pstats.Stats(profile).total_calls < 60


def refusal(fn, *args):
    with pytest.raises(StrategyError) as caught, find(fn).watch():
        fn(*args)
    return str(caught.value)


def allowed(fn, *args):
    with find(fn).watch():
        fn(*args)


def test_side_effects_are_refused():
    losses, table, seen, last, count = [], {"n": 0}, set(), deque(maxlen=2), 0
    total = np.zeros(2000)
    trainer = Trainer()
    counter = Counter()

    def rebinds():
        nonlocal count
        count += 1

    def rebinds_global():
        global calls
        calls += 1

    def creates_global():
        global created
        created = 1

    def sets_attribute(x):
        trainer.loss = x

    way_out = "Return the value, or keep it in an nnx.Variable."
    assert refusal(lambda: losses.append(1.0)) == (
        f"run: the function changes the list losses from 0 to 1 entries. {ONCE} {way_out}"
    )
    assert (
        refusal(rebinds)
        == f"run: the function sets count from 0 to 1. {ONCE} {way_out}"
    )
    assert (
        refusal(rebinds_global)
        == f"run: the function sets calls from 0 to 1. {ONCE} {way_out}"
    )
    assert refusal(creates_global) == (
        f"run: the function sets created from nothing to 1. {ONCE} {way_out}"
    )
    del globals()["created"]
    assert refusal(sets_attribute, 1.0) == (
        f"run: the function sets trainer.loss from nothing to 1.0. {ONCE} {way_out}"
    )
    assert "sets trainer.loss from 1.0 to a traced value" in refusal(
        jax.jit(sets_attribute), 2.0
    )
    assert "changes the dict table. " in refusal(lambda: table.update(n=1))
    assert "changes the set seen from 0 to 1" in refusal(lambda: seen.add(1))
    assert "changes the deque last from 0 to 1" in refusal(lambda: last.append(1))
    assert "changes the Counter counter from 0" in refusal(lambda: counter.update("a"))
    assert "changes the list trainer.losses" in refusal(
        lambda: trainer.losses.append(1)
    )
    assert "sets trainer.steps from 0 to 1" in refusal(
        lambda: setattr(trainer, "steps", 1)
    )
    assert "sets Settings.rate" in refusal(lambda: setattr(Settings, "rate", 0.5 + 1))
    Settings.rate = 0.5
    assert refusal(lambda: total.__setitem__(0, 1)) == (
        f"run: the function writes to the NumPy array total. {ONCE} {way_out}"
    )
    layer = Layer()
    assert "changes the list history from" in refusal(lambda: layer(1.0))
    assert "changes the list history from" in refusal(nnx.Sequential(layer), 1.0)
    assert "changes the list history" in refusal(lambda: history.append(0) or 1)


def test_random_numbers_and_iterators_that_advance_are_refused():
    element = iter([1, 2, 3])
    numbers = itertools.count()
    pairs = zip([1, 2], [3, 4], strict=True)
    generated = (x for x in range(3))
    own = random.Random(0)
    draw = random.random

    assert refusal(lambda: np.random.normal()) == (  # noqa: NPY002
        "run: the function draws random numbers from np.random. The function runs once "
        "per compiled program, so every call would use the same numbers. Use nnx.Rngs "
        "or jax.random, or pass the numbers as an argument."
    )
    assert "numbers from random. " in refusal(lambda: random.random())
    assert "numbers from draw. " in refusal(lambda: draw())
    assert "numbers from own. " in refusal(lambda: own.shuffle([1, 2, 3]))
    assert "numbers from generator. " in refusal(lambda: generator.normal())
    assert refusal(lambda: next(element)) == (
        "run: the function advances the iterator element. The function runs once per "
        "compiled program, so every call would use the same element. Pass the element "
        "as an argument."
    )
    assert "the iterator numbers" in refusal(lambda: next(numbers))
    assert "the iterator pairs" in refusal(lambda: next(pairs))
    assert "the iterator generated" in refusal(lambda: next(generated))


def test_what_happens_elsewhere_or_to_own_objects_is_allowed():
    trainer = Trainer()
    numbers = itertools.cycle([1, 2])

    @functools.lru_cache
    def cached(x):
        return x

    def fn(x):
        values = []
        values.append(cached(3))
        table = {"a": trainer.size}
        table["a"] += 1
        note = types.SimpleNamespace(rate=1)
        note.rate = 2
        jax.random.normal(jax.random.key(0))
        np.float32(0)
        return jax.jit(lambda y: helper(y) + table["a"])(x)

    allowed(fn, jnp.ones((1, 2)))
    bindings = find(
        lambda: (numbers, random.Random, np.random.Generator, generator.bit_generator)
    )
    with bindings.watch():
        random.random()  # of another thread, say: this function does not name it
        np.random.normal()  # noqa: NPY002
    assert bindings.is_current()


def test_run_computes_with_what_names_stand_for_at_each_call():
    strategy = ml.distribute.MirroredStrategy(jax.devices()[:2])
    rate = 2.0

    def fn(x):
        return x * rate * config.rate

    results = []
    for rate in (2.0, 3.0, 2.0, 3.0):  # noqa: B007
        results.append(
            strategy.local_results(strategy.run(fn, args=(jnp.ones(()),)))[1]
        )
    np.testing.assert_allclose(results, [0.2, 0.3, 0.2, 0.3], rtol=1e-6)
    model = Layer()
    assert "the list history" in message_of(
        strategy.run, lambda layer, x: layer(x), args=(model, 1.0), error=StrategyError
    )


def test_a_function_that_is_made_anew_for_each_call_is_compiled_once(capsys):
    strategy = ml.distribute.MirroredStrategy(jax.devices()[:1])
    weight = nnx.Param(jnp.ones(()))
    factor = 1.0

    def scaled(layer, x):
        print("traced")  # noqa: T201
        return layer[...] * x * factor

    for factor in (1.0, 1.0, 2.0, 1.0):
        calls = [
            strategy.run(lambda x: scaled(weight, x), args=(jnp.ones(()),)),
            strategy.run(functools.partial(scaled, weight), args=(jnp.ones(()),)),
        ]
        assert [float(strategy.local_results(x)[0]) for x in calls] == [factor] * 2
    traces = capsys.readouterr().out.count("traced")
    strategy.run(lambda x: scaled(weight, x) + 0, args=(jnp.ones(()),))
    once = capsys.readouterr().out.count("traced")
    assert traces == 4 * once  # two functions, each with two factors


@pytest.mark.parametrize("num_devices", [1, 2])
def test_variables_that_nnx_jit_returns_unchanged_stay(num_devices):
    strategy = ml.distribute.MirroredStrategy(jax.devices()[:num_devices])
    with strategy.scope():
        dense = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        rngs = nnx.Rngs(1)
    kernel, key = (
        np.array(dense.kernel[...]),
        jax.random.key_data(rngs.default.key[...]),
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


def test_the_error_of_the_function_comes_first():
    losses = []

    def fn():
        losses.append(1)
        raise KeyError

    with pytest.raises(KeyError), find(fn).watch():
        fn()


@pytest.mark.parametrize("fn", [print, len, int, str.upper, map, type, [].append])
def test_functions_without_python_code_have_no_objects(fn):
    bindings = find(fn)
    assert bindings.objects == ()
    assert bindings.is_current()
    with bindings.watch():
        pass
