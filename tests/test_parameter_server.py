"""Parameter servers and workers without Ray: in this process, with the same code."""

import functools
import itertools
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout import distribute
from meshlayout.errors import StrategyError
from tests.bad_values import BAD, refusal
from tests.error_messages import message_of
from tests.local_ray import RayActorError, WorkerKilled, start


class Net(nnx.Module):
    """A small network of odd sizes, which do not divide over servers."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(3, 5, rngs=rngs)
        self.out = nnx.Linear(5, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))


def batches(seed=0):
    """Batches of one shape, forever."""
    rng = np.random.default_rng(seed)
    while True:
        x = rng.normal(size=(4, 3)).astype(np.float32)
        yield x, x.sum(axis=1)


def loss_of(model, batch):
    x, y = batch
    return jnp.mean((model(x)[:, 0] - y) ** 2)


class Training:
    """A model, an optimizer and a counter in a strategy's scope, and a step."""

    def __init__(self, strategy, coordinator, *, tx=None, make=Net, data=batches):
        with strategy.scope():
            model = make(rngs=nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, tx or optax.adam(0.1), wrt=nnx.Param)
            num_steps = nnx.Variable(jnp.array(0), aggregation="sum")

        def step(iterator):
            batch = next(iterator)
            loss, grads = nnx.value_and_grad(loss_of)(model, batch)
            optimizer.update(model, grads)
            num_steps[...] += 1
            return loss

        self.strategy, self.coordinator, self.step = strategy, coordinator, step
        self.model, self.optimizer, self.num_steps = model, optimizer, num_steps
        dataset_fn = lambda context: data(context.input_pipeline_id)
        self.iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))

    def schedule(self, count):
        args = (self.iterator,)
        return [self.coordinator.schedule(self.step, args) for _ in range(count)]

    def run(self, count):
        results = self.schedule(count)
        self.coordinator.join()
        return self.coordinator.fetch(results)


@pytest.fixture
def make_training(monkeypatch):
    """Returns a function that makes a `Training` on a local Ray."""

    def make(num_workers=1, num_servers=1, fault=None, checkpointer=None, **options):
        counts = num_workers, num_servers
        started = start(monkeypatch, *counts, fault, checkpointer=checkpointer)
        made = Training(*started[:2], **options)
        made.ray = started[2]
        return made

    return make


def trained_alone(count, tx=None):
    """The same training with Flax alone."""
    model = Net(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx or optax.adam(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer, x) for x in itertools.islice(batches(), count)]
    return model, optimizer, losses


def assert_same_state(*pair):
    pairs = zip(*(jax.tree.leaves(nnx.state(x)) for x in pair), strict=True)
    for x, y in pairs:
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("num_servers", [1, 3])
def test_one_worker_computes_what_flax_alone_does(make_training, num_servers):
    training = make_training(1, num_servers)
    losses = training.run(4)
    losses += training.run(2)  # starts from where the first round ended
    model, optimizer, expected = trained_alone(6)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert_same_state(training.model, model)
    assert_same_state(training.optimizer, optimizer)
    assert training.num_steps[...] == 6


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_killed_workers_closure_runs_elsewhere_and_counts_once(make_training, when):
    def fault(*event):
        if event == (when, 3):
            raise WorkerKilled

    training = make_training(2, 2, fault=fault)
    losses = training.run(12)
    assert np.isfinite(losses).all()
    assert training.ray.num_workers_started == 3
    assert training.optimizer.step[...] == training.num_steps[...] == len(losses) == 12
    assert training.coordinator.done()


def test_a_closure_that_kills_every_worker_is_given_up(make_training):
    def fault(when, count):
        raise WorkerKilled

    training = make_training(1, fault=fault)
    with pytest.raises(RayActorError, match="killed"):
        training.run(1)
    assert training.ray.num_workers_started == 5


def test_a_dead_server_is_an_error_that_names_the_last_checkpoint(
    make_training, tmp_path
):
    with ml.Checkpointer(tmp_path / "run") as ck:
        training = make_training(1, 2, checkpointer=ck)
        coordinator = training.coordinator
        training.run(3)
        ck.save(3, {"model": training.model, "optimizer": training.optimizer})
        ck.wait()
        training.ray.kill(training.ray.servers[1])
        result = coordinator.schedule(training.step, (training.iterator,))
        for call in (
            coordinator.join,
            coordinator.join,
            coordinator.done,
            result.fetch,
        ):
            assert message_of(call) == (
                "parameter server 1 of 2 died, and all updates since the last join. The "
                f"last checkpoint: step 3 in {tmp_path / 'run'}. Go on from that or from "
                "the last join with another coordinator."
            )
        assert "server 1" in message_of(coordinator.schedule, training.step)
    # Another coordinator goes on from the objects, which are as they were.
    with distribute.ClusterCoordinator(training.strategy) as coordinator:
        batch = next(itertools.islice(batches(), 3, None))
        iterator = iter(coordinator.create_per_worker_dataset(lambda: [batch]))
        coordinator.schedule(training.step, (iterator,))
        coordinator.join()
    assert_same_state(training.model, trained_alone(4)[0])
    assert_same_state(training.optimizer, trained_alone(4)[1])


def test_an_exception_surfaces_in_join_with_the_users_traceback(make_training):
    training = make_training()
    schedule, args = training.coordinator.schedule, (training.iterator,)

    def broken():
        raise KeyError("a mistake")  # this line

    training.run(1)
    failed = schedule(broken)
    waiting = [schedule(training.step, args) for _ in range(3)]
    for call in (training.coordinator.join, failed.fetch):
        with pytest.raises(KeyError, match="a mistake") as caught:
            call()
        assert 'KeyError("a mistake")  # this line' in caught.value.__notes__[-1]
    for result in waiting:
        assert "another one raised KeyError" in message_of(result.fetch)
    # It is raised once, and training goes on.
    training.coordinator.join()
    training.run(2)
    assert training.num_steps[...] == 3


class Noisy(nnx.Module):
    """With statistics of batches and dropout."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(x)))


@pytest.mark.slow
def test_statistics_dropout_and_modes_are_those_of_a_closures_model(make_training):
    def trained():
        data = lambda _: itertools.repeat(next(batches()))
        training = make_training(make=Noisy, tx=optax.sgd(0.0), data=data)
        return training, training.run(4)

    (training, first), (_, second) = trained(), trained()
    assert len(set(map(float, first))) == 4  # dropout differs between closures
    np.testing.assert_array_equal(first, second)  # and not between runs
    norm, x, model = Noisy(nnx.Rngs(0)).norm, next(batches())[0], training.model
    for _ in range(4):
        norm(x)
    for pair in ((model.norm.mean, norm.mean), (model.norm.var, norm.var)):
        np.testing.assert_allclose(*(v[...] for v in pair), rtol=1e-5, atol=1e-6)
    model.eval()
    predict = lambda x: model(x)
    predicted = training.coordinator.schedule(predict, (x,)).fetch()
    np.testing.assert_allclose(predicted, model(x), rtol=1e-5, atol=1e-6)


def test_metrics_add_up_and_what_is_assigned_outside_arrives(monkeypatch):
    strategy, coordinator, _ = start(monkeypatch, 2, 2)
    with strategy.scope():
        average = nnx.metrics.Average()
        scale = nnx.Variable(jnp.array(1.0))

    def evaluate(x):
        average.update(values=x * scale[...])

    for x in range(5):
        coordinator.schedule(evaluate, (float(x),))
    coordinator.join()
    assert average.compute() == 2.0
    average.reset()
    scale[...] = jnp.array(10.0)
    coordinator.schedule(evaluate, (3.0,))
    coordinator.join()
    assert average.compute() == 30.0


def test_two_updates_in_a_closure_are_two_updates(make_training):
    training = make_training(1, 2, tx=optax.sgd(0.1))
    before = jax.tree.map(np.asarray, nnx.state(training.model, nnx.Param))
    ones = jax.tree.map(jnp.ones_like, before)

    def step(strategy, model, optimizer):
        optimizer.update(model, ones)
        return strategy.run(lambda: optimizer.update(model, ones) or 0)

    args = training.strategy, training.model, training.optimizer
    training.coordinator.schedule(step, args)
    training.coordinator.join()
    for old, new in zip(*map(jax.tree.leaves, (before, training.model)), strict=True):
        np.testing.assert_allclose(new, old - 0.2, atol=1e-6)
    assert training.optimizer.step[...] == 2


def test_a_closure_may_draw_several_batches_and_learns_that_a_dataset_ends(monkeypatch):
    _, coordinator, _ = start(monkeypatch)

    def dataset(context):
        assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
        return [{"x": np.float32(i)} for i in range(5)]

    data = coordinator.create_per_worker_dataset(dataset)
    iterator = iter(data)
    pair = lambda batches: next(batches)["x"] + 10 * next(batches)["x"]
    results = [coordinator.schedule(pair, (iterator,)) for _ in range(3)]
    assert message_of(coordinator.join).endswith(
        "<lambda> asked for a batch, and the worker's dataset has ended: let the "
        "dataset function return one that repeats."
    )
    assert coordinator.fetch(results[:2]) == [10.0, 32.0]
    rest = lambda batches: sum(batch["x"] for batch in batches)
    assert coordinator.schedule(rest, (iter(data),)).fetch() == 10.0


OLD = not hasattr(nnx.Variable, "get_raw_value")


def matrices(params):
    """Returns a mask for Optax."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


@pytest.mark.parametrize(
    ("tx", "num_servers"),
    [
        (optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)), 1),
        (optax.MultiSteps(optax.lamb(0.1), 2), 2),
        pytest.param(
            optax.chain(optax.masked(optax.trace(0.9), matrices), optax.sgd(0.1)),
            2,
            marks=pytest.mark.skipif(OLD, reason="flax 0.11 cannot mask"),
        ),
    ],
)
def test_optimizers_are_exact_where_a_server_has_all_they_look_at(
    make_training, tx, num_servers
):
    training = make_training(1, num_servers, tx=tx)
    training.run(3)
    assert_same_state(training.model, trained_alone(3, tx)[0])


@pytest.mark.parametrize(
    "tx",
    [
        optax.clip_by_global_norm(0.1),
        optax.MultiSteps(optax.clip_by_global_norm(0.1), 3),
        optax.apply_if_finite(optax.sgd(0.1), 3),
    ],
)
def test_others_are_refused(make_training, tx):
    assert message_of(make_training(1, 2, tx=tx).run, 1) == (
        "the optimizer looks at all parameters at once, as clipping by the global norm "
        "does, and they are on 2 servers. Use num_servers=1; or clip the gradients "
        "before optimizer.update."
    )


def test_closures_that_would_be_wrong_are_refused(make_training):
    training = make_training()
    coordinator, model = training.coordinator, training.model
    own, history = nnx.Variable(jnp.array(5), aggregation="per_replica"), []
    spread = nnx.metrics.Welford()

    def refused(step):
        coordinator.schedule(step)
        return message_of(coordinator.join)

    by_hand = lambda: model.out.bias.__setitem__(..., 0.1)
    for_itself = lambda: own.__setitem__(..., 1)
    for step, name in ((by_hand, "model/out/bias"), (for_itself, "own")):
        assert refused(step) == (
            f"the closure assigns {name}, as others may. To add changes up, make it with "
            'nnx.Variable(x, aggregation="sum").'
        )

    inner = nnx.jit(lambda optimizer, model: optimizer.update(model, nnx.state(model)))
    message = refused(functools.partial(inner, training.optimizer, model))
    assert message.startswith("optimizer.update got copies, as in nnx.jit")
    for _ in range(2):
        assert "changes the list history." in refused(lambda: history.append(1))
    assert message_of(coordinator.schedule, lambda: spread.update(values=1.0)) == (
        "schedule: closures cannot add up what an nnx.metrics.Welford keeps."
    )
    # None of these has left anything behind.
    training.run(1)
    assert_same_state(model, trained_alone(1)[0])


def test_what_cannot_be_scheduled_is_refused_at_once(monkeypatch):
    strategy, coordinator, _ = start(monkeypatch)
    schedule = coordinator.schedule
    result = schedule(lambda: jnp.ones(2))
    for value in (threading.Lock(), result, coordinator):
        with pytest.raises(TypeError, match="cannot pickle"):
            schedule(lambda x: x, (value,))
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [1]))
    assert "call next in a scheduled function" in message_of(next, iterator)
    assert "called on the coordinator" in message_of(strategy.run, lambda: 1)
    coordinator.shutdown()
    assert message_of(schedule, max) == "the coordinator was shut down."


def test_without_ray_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert message_of(distribute.ParameterServerStrategy, 1) == (
        "ParameterServerStrategy needs ray, which is not installed: pip install "
        "'meshlayout[ray] @ git+https://github.com/meshlayout/meshlayout'."
    )
    for value in BAD:
        for counts in ((value,), (1, value)):
            assert refusal(StrategyError, distribute.ParameterServerStrategy, *counts)


def test_what_is_restored_or_set_on_the_coordinator_arrives_on_all_servers(
    make_training,
):
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    training = make_training(1, 2, tx=tx)
    model, optimizer, _ = trained_alone(2, tx)
    training.run(4)
    for own, restored in ((training.model, model), (training.optimizer, optimizer)):
        nnx.update(own, jax.tree.map(jnp.copy, nnx.state(restored)))
    for x in (training.optimizer, optimizer):
        x.opt_state.hyperparams["learning_rate"][...] = jnp.array(0.3)
    training.run(1)
    # The fifth batch, on the state after two.
    batch = next(itertools.islice(batches(), 4, None))
    optimizer.update(model, nnx.grad(loss_of)(model, batch))
    assert_same_state(training.model, model)
    assert_same_state(training.optimizer, optimizer)


def test_a_strategy_distributes_runs_and_reduces_in_a_closure(monkeypatch):
    strategy, coordinator, _ = start(monkeypatch)

    def dataset_fn(context):
        size = context.get_per_replica_batch_size(4)
        return [np.full(size, i, np.float32) for i in range(3)]

    def per_worker_dataset_fn(size=4):  # it needs no context, and gets none
        assert size == 4
        return strategy.distribute_datasets_from_function(dataset_fn)

    iterator = iter(coordinator.create_per_worker_dataset(per_worker_dataset_fn))

    def step(iterator):
        total = strategy.run(lambda x: x.sum(), args=(next(iterator),))
        return strategy.reduce("SUM", total, axis=None)

    results = [coordinator.schedule(step, (iterator,)) for _ in range(3)]
    assert coordinator.fetch(results) == [0.0, 4.0, 8.0]
