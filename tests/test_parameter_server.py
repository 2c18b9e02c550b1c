"""Parameter servers and workers without Ray: in this process, with the same code."""

import itertools
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
from tests.local_ray import WorkerKilled, start


# Training.


class Net(nnx.Module):
    """A small network of odd sizes, which do not divide over servers."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(3, 5, rngs=rngs)
        self.out = nnx.Linear(5, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))


def batches(seed=0):
    """Batches of one shape, for ever."""
    rng = np.random.default_rng(seed)
    while True:
        x = rng.normal(size=(4, 3)).astype(np.float32)
        yield x, x.sum(axis=1)


def loss_of(model, batch):
    x, y = batch
    return jnp.mean((model(x)[:, 0] - y) ** 2)


class Training:
    """A model, an optimizer and a counter in a strategy's scope, and a step."""

    def __init__(self, monkeypatch, *args, tx=None, make=Net, data=batches, **options):
        strategy, coordinator, ray = start(monkeypatch, *args, **options)
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

        self.strategy, self.coordinator, self.ray = strategy, coordinator, ray
        self.model, self.optimizer, self.num_steps = model, optimizer, num_steps
        self.step = step
        self.iterator = iter(coordinator.create_per_worker_dataset(lambda: data()))

    def run(self, count):
        results = [
            self.coordinator.schedule(self.step, (self.iterator,)) for _ in range(count)
        ]
        self.coordinator.join()
        return self.coordinator.fetch(results)


def trained_alone(count, tx=None, make=Net):
    """The same training with Flax alone."""
    model = make(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx or optax.adam(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer, x) for x in itertools.islice(batches(), count)]
    return model, optimizer, losses


def assert_same_state(actual, expected):
    actual, expected = (
        jax.tree.leaves(nnx.state(actual)),
        jax.tree.leaves(nnx.state(expected)),
    )
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("num_servers", [1, 3])
def test_one_worker_computes_what_flax_alone_does(monkeypatch, num_servers):
    training = Training(monkeypatch, 1, num_servers)
    losses = training.run(6)
    model, optimizer, expected = trained_alone(6)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert_same_state(training.model, model)
    assert_same_state(training.optimizer, optimizer)
    assert training.num_steps[...] == 6
    # A second round starts from where the first one ended.
    training.run(2)
    assert_same_state(training.model, trained_alone(8)[0])


def test_two_workers_apply_each_closure_once(monkeypatch):
    training = Training(monkeypatch, 2, 2)
    losses = training.run(20)
    assert np.isfinite(losses).all()
    assert training.optimizer.step[...] == training.num_steps[...] == 20
    assert training.coordinator.done()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_killed_workers_closure_runs_elsewhere_and_counts_once(monkeypatch, when):
    def fault(*event):
        if event == (when, 3):
            raise WorkerKilled

    training = Training(monkeypatch, 1, 2, fault=fault)
    losses = training.run(6)
    assert len(losses) == 6
    assert np.isfinite(losses).all()
    assert training.ray.num_workers_started == 2
    assert training.optimizer.step[...] == training.num_steps[...] == 6


def test_a_closure_that_kills_every_worker_is_given_up(monkeypatch):
    def fault(when, count):
        raise WorkerKilled

    training = Training(monkeypatch, 1, fault=fault)
    assert message_of(training.run, 1) == (
        "Training.__init__.<locals>.step was running on 5 workers, one after another, "
        "when they died. The last one: killed"
    )


def test_a_dead_server_is_an_error_that_names_the_last_checkpoint(
    monkeypatch, tmp_path
):
    with ml.Checkpointer(tmp_path / "run") as ck:
        training = Training(monkeypatch, 1, 2, checkpointer=ck)
        training.run(3)
        ck.save(3, {"model": training.model, "optimizer": training.optimizer})
        ck.wait()
        before = jax.tree.map(np.asarray, nnx.state(training.model))
        training.ray.kill(training.ray.servers[1])
        result = training.coordinator.schedule(training.step, (training.iterator,))
        message = message_of(training.coordinator.join)
        assert message == (
            "parameter server 1 died. Lost are its values of model/hidden/kernel "
            "f32[3, 5], model/out/kernel f32[5, 1], optimizer/opt_state/0/count i32[], "
            "optimizer/opt_state/0/mu/hidden/kernel f32[3, 5], optimizer/opt_state/0/mu"
            "/out/kernel f32[5, 1] and 3 more variables, with all updates since the "
            "last join, whose values the objects on the coordinator still have. The "
            f"last checkpoint is step 3 in {tmp_path / 'run'}. Restore it, or keep the "
            "objects as they are, and go on with another coordinator."
        )
        assert message_of(training.coordinator.join) == message
        assert message_of(training.coordinator.schedule, training.step) == message
        assert message_of(training.coordinator.done) == message
        assert message_of(result.fetch) == message
        jax.tree.map(np.testing.assert_array_equal, nnx.state(training.model), before)
        training.coordinator.shutdown()
        # Another coordinator goes on from the objects.
        with distribute.ClusterCoordinator(training.strategy) as coordinator:
            batch = next(itertools.islice(batches(), 3, None))
            iterator = iter(coordinator.create_per_worker_dataset(lambda: [batch]))
            coordinator.schedule(training.step, (iterator,))
            coordinator.join()
        assert_same_state(training.model, trained_alone(4)[0])
        assert_same_state(training.optimizer, trained_alone(4)[1])


def test_an_exception_surfaces_in_join_with_the_users_traceback(monkeypatch):
    training = Training(monkeypatch)

    def broken(iterator):
        next(iterator)
        raise KeyError("a mistake")  # this line

    training.run(2)
    failed = training.coordinator.schedule(broken, (training.iterator,))
    waiting = [
        training.coordinator.schedule(training.step, (training.iterator,))
        for _ in range(3)
    ]
    with pytest.raises(KeyError, match="a mistake") as caught:
        training.coordinator.join()
    (note,) = caught.value.__notes__[-1:]
    assert 'raise KeyError("a mistake")  # this line' in note
    with pytest.raises(KeyError, match="a mistake"):
        failed.fetch()
    for result in waiting:
        assert message_of(result.fetch).endswith("broken raised KeyError.")
    # It is raised once, and training goes on.
    training.coordinator.join()
    training.run(2)
    assert training.num_steps[...] == 4


# What else changes.


class Noisy(nnx.Module):
    """With statistics of batches and dropout."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(5, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(self.linear(x))))


@pytest.mark.slow
def test_statistics_of_batches_move_as_on_one_device(monkeypatch):
    training = Training(monkeypatch, make=Noisy, tx=optax.sgd(0.0))
    training.run(5)
    model, _, _ = trained_alone(5, optax.sgd(0.0), Noisy)
    for name in ("mean", "var"):
        x, y = getattr(training.model.norm, name), getattr(model.norm, name)
        np.testing.assert_allclose(x[...], y[...], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_dropout_differs_between_closures_and_not_between_runs(monkeypatch):
    def losses():
        data = lambda: itertools.repeat(next(batches()))  # noqa: E731
        training = Training(monkeypatch, make=Noisy, tx=optax.sgd(0.0), data=data)
        return np.array(training.run(4))

    first, second = losses(), losses()
    assert len(set(first.tolist())) == 4
    np.testing.assert_array_equal(first, second)


@pytest.mark.slow
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


def test_keys_and_numbers_travel(monkeypatch):
    _, coordinator, _ = start(monkeypatch)

    def draw(key, low, size):
        assert size is True
        return low + jax.random.uniform(key)

    key = jax.random.key(3)
    value = coordinator.schedule(draw, (key, 2), {"size": True}).fetch()
    assert f"{value:.4f}" == f"{2 + float(jax.random.uniform(key)):.4f}"
    assert coordinator.schedule(draw, (key, 5), {"size": True}).fetch() == value + 3


def test_an_optimizer_that_holds_its_model_works_alike(monkeypatch):
    training = Training(monkeypatch)
    with training.strategy.scope():
        model = Net(rngs=nnx.Rngs(0))
        both = nnx.ModelAndOptimizer(model, optax.adam(0.1), wrt=nnx.Param)

    def step(iterator):
        both.update(nnx.grad(loss_of)(both.model, next(iterator)))

    training.step = step
    training.run(3)
    assert_same_state(model, trained_alone(3)[0])


def test_a_strategys_run_and_reduce_work_in_a_closure(monkeypatch):
    strategy, coordinator, _ = start(monkeypatch)

    def step(x):
        per_replica = strategy.run(lambda x: 2 * x, args=(x,))
        return strategy.reduce("MEAN", per_replica, axis=0)

    assert coordinator.schedule(step, (np.arange(4.0),)).fetch() == 3.0


def test_a_closure_may_draw_several_batches_and_learns_that_a_dataset_ends(monkeypatch):
    _, coordinator, _ = start(monkeypatch)

    def dataset(context):
        assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
        assert context.num_replicas_in_sync == 1
        return [{"x": np.float32(i)} for i in range(5)]

    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    def pair(iterator):
        return next(iterator)["x"] + 10 * next(iterator)["x"]

    results = [coordinator.schedule(pair, (iterator,)) for _ in range(2)]
    assert coordinator.fetch(results) == [10.0, 32.0]
    coordinator.schedule(pair, (iterator,))
    assert message_of(coordinator.join).startswith(
        "test_a_closure_may_draw_several_batches_and_learns_that_a_dataset_ends.<locals>"
        ".pair asked for a batch on worker 0, where the dataset has ended."
    )

    def rest(iterator):
        return sum(batch["x"] for batch in iterator)

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    assert coordinator.schedule(rest, (iterator,)).fetch() == 10.0


@pytest.mark.slow
def test_a_mode_that_is_switched_between_closures_counts(monkeypatch):
    strategy, coordinator, _ = start(monkeypatch)
    with strategy.scope():
        model = Noisy(rngs=nnx.Rngs(0))

    def predict(x):
        return model(x)

    x = np.ones((2, 3), np.float32)
    model.eval()
    first = coordinator.schedule(predict, (x,)).fetch()
    np.testing.assert_allclose(first, model(x), rtol=1e-5, atol=1e-6)
    model.train()
    second = coordinator.schedule(predict, (x,)).fetch()
    assert not np.allclose(first, second)


# Refusals.


def test_optimizers_that_look_further_are_refused_where_they_would_be_wrong(
    monkeypatch,
):
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))
    assert message_of(Training(monkeypatch, 1, 2, tx=tx).run, 1) == (
        "the optimizer looks at all parameters at once, as clipping by the global norm "
        "does, and they are on 2 parameter servers, each of which would see its own "
        "alone. Use num_servers=1; or call optax.clip_by_global_norm on the gradients in "
        "the closure, before optimizer.update."
    )
    late = optax.MultiSteps(tx, 3)
    assert "4 parameter servers" in message_of(
        Training(monkeypatch, 1, 4, tx=late).run, 1
    )
    assert "looks at all" in message_of(
        Training(monkeypatch, 1, 2, tx=optax.apply_if_finite(optax.sgd(0.1), 3)).run, 1
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "num_servers"),
    [
        (optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)), 1),
        (optax.lamb(0.1), 2),
        (optax.adafactor(0.1, min_dim_size_to_factor=2), 2),
        (optax.MultiSteps(optax.adam(0.1), 2), 2),
    ],
)
def test_they_are_exact_where_a_server_has_all_they_look_at(
    monkeypatch, tx, num_servers
):
    training = Training(monkeypatch, 1, num_servers, tx=tx)
    training.run(3)
    assert_same_state(training.model, trained_alone(3, tx)[0])


def test_closures_that_would_be_wrong_are_refused(monkeypatch):
    training = Training(monkeypatch)
    model, optimizer, coordinator = (
        training.model,
        training.optimizer,
        training.coordinator,
    )
    batch = next(batches())

    def refused(step, *args):
        coordinator.schedule(step, args)
        return message_of(coordinator.join)

    def twice():
        grads = nnx.grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        optimizer.update(model, grads)

    def reads_later():
        optimizer.update(model, nnx.grad(loss_of)(model, batch))
        return loss_of(model, batch)

    def changes_later():
        optimizer.update(model, nnx.grad(loss_of)(model, batch))
        model.out.bias[...] = jnp.zeros(1)

    def sets_later():
        optimizer.update(model, nnx.grad(loss_of)(model, batch))
        model.out.bias.set_value(jnp.zeros(1))

    for step in (twice, reads_later, changes_later, sets_later):
        message = refused(step)
        assert message.startswith("the closure uses model/"), message
        assert "after optimizer.update, which changes it on the" in message

    def by_hand():
        model.out.bias[...] -= 0.1

    assert refused(by_hand).startswith(
        "the closure changes model/out/bias without an nnx.Optimizer"
    )

    @nnx.jit
    def inner(model, optimizer):
        optimizer.update(model, nnx.grad(loss_of)(model, batch))

    assert refused(lambda: inner(model, optimizer)).startswith(
        "optimizer.update got other parameters than its model's own"
    )
    # None of these has left anything behind.
    training.run(1)
    assert_same_state(model, trained_alone(1)[0])


def test_a_jitted_step_is_taken_apart(monkeypatch):
    training = Training(monkeypatch)
    training.step = nnx.jit(training.step)
    training.run(3)
    assert_same_state(training.model, trained_alone(3)[0])


def test_what_cannot_be_scheduled_is_refused_at_once(monkeypatch):
    strategy, coordinator, _ = start(monkeypatch)
    schedule = coordinator.schedule
    for call in ((3,), (max, 3)):
        message = message_of(schedule, *call)
        assert message.startswith("schedule takes a function and a tuple of its")
    lock = threading.Lock()

    def holds_a_lock():
        return lock

    assert "cannot be pickled: TypeError: cannot pickle '_thread.lock'" in message_of(
        schedule, holds_a_lock
    )
    result = schedule(lambda: jnp.ones(2))
    for value in (result, coordinator):
        assert "cannot be pickled" in message_of(schedule, lambda x: x, (value,))
    mirrored = distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with mirrored.scope():
        other = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    assert message_of(schedule, lambda: other.kernel[...]) == (
        "other/bias is on several devices: it belongs to another strategy or mesh. Make "
        "it in the scope of the ParameterServerStrategy."
    )
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [1]))
    assert message_of(next, iterator).startswith(
        "next(iterator) was called on the coordinator"
    )
    create = coordinator.create_per_worker_dataset
    assert message_of(create, 3).startswith("dataset_fn must be a function")
    assert message_of(create, lambda a, b: []) == (
        "dataset_fn is called as dataset_fn(context), but takes (a, b)."
    )
    assert message_of(strategy.run, lambda: 1).startswith(
        "ParameterServerStrategy.run was called on the coordinator"
    )
    coordinator.shutdown()
    assert message_of(schedule, max) == "the coordinator was shut down."


def test_without_ray_it_says_how_to_install_it(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    assert message_of(distribute.ParameterServerStrategy, 1) == (
        "ParameterServerStrategy needs ray, which is not installed: pip install "
        "'meshlayout[ray]'."
    )


def test_a_strategy_refuses_bad_values_in_a_sentence(monkeypatch):
    from meshlayout import _optional

    monkeypatch.setattr(_optional, "require", lambda *args, **kwargs: None)
    make = distribute.ParameterServerStrategy
    for value in BAD:
        assert refusal(StrategyError, make, value)
        assert refusal(StrategyError, make, 1, value)


@pytest.mark.slow
def test_a_restored_optimizer_goes_on_from_the_restored_state(monkeypatch):
    training = Training(monkeypatch, 1, 2)
    training.run(2)
    saved = jax.tree.map(
        jnp.copy, (nnx.state(training.model), nnx.state(training.optimizer))
    )
    training.run(2)
    nnx.update(training.model, saved[0])
    nnx.update(training.optimizer, saved[1])
    training.run(1)
    assert training.optimizer.step[...] == 3
    # The fifth batch, on the state after two.
    model, optimizer, _ = trained_alone(2)
    batch = next(itertools.islice(batches(), 4, None))
    optimizer.update(model, nnx.grad(loss_of)(model, batch))
    assert_same_state(training.model, model)


def test_a_learning_rate_that_is_set_arrives_on_all_servers(monkeypatch):
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    training = Training(monkeypatch, 1, 2, tx=tx)
    training.run(1)
    before = jax.tree.map(np.asarray, nnx.state(training.model))
    training.optimizer.opt_state.hyperparams["learning_rate"][...] = jnp.array(0.0)
    training.run(2)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(training.model), before)
    assert training.optimizer.step[...] == 3


def test_the_last_of_what_is_assigned_is_kept_and_each_change_added(monkeypatch):
    strategy, coordinator, _ = start(monkeypatch)
    with strategy.scope():
        own = nnx.Variable(jnp.array(5), aggregation="per_replica")
        last = nnx.Variable(jnp.array(0), aggregation="first")
        count = nnx.Variable(jnp.array(1), aggregation="sum")

    def assign(x, *, doubles):
        count[...] += 2 if doubles else 1
        last[...] = x
        return count[...]

    args = [(3, True), (4, False), (7, True)]
    results = [coordinator.schedule(assign, (x,), {"doubles": y}) for x, y in args]
    coordinator.join()
    assert coordinator.fetch(results) == [3, 4, 6]
    assert (count[...], last[...]) == (6, 7)

    def keeps():
        own[...] += 1

    coordinator.schedule(keeps)
    assert message_of(coordinator.join).startswith("the closure changes own without")


@pytest.mark.parametrize(
    ("dataset_fn", "expected"),
    [
        (lambda: [1], 1),
        (lambda ctx: [2 + ctx.input_pipeline_id], 2),
        (lambda size=3: [size], 3),
        (lambda context=None: [4 if context else 0], 4),
        (lambda *args: [5 + len(args)], 5),
    ],
)
def test_a_dataset_function_gets_a_context_if_it_takes_one(
    monkeypatch, dataset_fn, expected
):
    _, coordinator, _ = start(monkeypatch)
    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    assert coordinator.schedule(lambda x: next(x), (iterator,)).fetch() == expected


def test_a_dataset_function_may_distribute_by_the_strategy(monkeypatch):
    strategy, coordinator, _ = start(monkeypatch)

    def dataset_fn(context):
        size = context.get_per_replica_batch_size(4)
        return [np.full(size, i, np.float32) for i in range(3)]

    def per_worker_dataset_fn():
        return strategy.distribute_datasets_from_function(dataset_fn)

    iterator = iter(coordinator.create_per_worker_dataset(per_worker_dataset_fn))

    def step(iterator):
        total = strategy.run(lambda x: x.sum(), args=(next(iterator),))
        return strategy.reduce("SUM", total, axis=None)

    results = [coordinator.schedule(step, (iterator,)) for _ in range(3)]
    assert coordinator.fetch(results) == [0.0, 4.0, 8.0]
