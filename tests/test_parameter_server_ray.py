"""Parameter servers and workers as Ray actors; needs the extra `ray`."""

import contextlib
import itertools
import os
import random
import signal
import threading
import time
import warnings

import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout import distribute
from models.convnet import ConvNet
from models.data import read_carried_part
from tests.error_messages import message_of
from tests.test_parameter_server import Training


ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    with warnings.catch_warnings():
        # Of a fork, which is followed by exec at once.
        warnings.simplefilter("ignore", RuntimeWarning)
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": environment},
        )
    yield
    ray.shutdown()


@contextlib.contextmanager
def training(num_servers, num_workers=1, **options):
    strategy = distribute.ParameterServerStrategy(num_workers, num_servers)
    with distribute.ClusterCoordinator(strategy, **options) as coordinator:
        yield Training(strategy, coordinator, tx=optax.adam(0.01))


def kill(actors, index, after_s=0.0):
    """Ends the process of an actor, whatever it is doing."""
    while True:
        try:
            call = actors[index].__ray_call__
            pid = ray.get(call.remote(lambda _: os.getpid()))
            break
        except (KeyError, ray.exceptions.RayActorError):
            time.sleep(0.1)  # until it has been replaced
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)


def test_each_closure_is_applied_once_although_workers_are_killed():
    # At random times: while workers compile, compute, are sent values, or wait.
    times = random.Random(0)
    with training(2, num_workers=2) as t:
        workers, results = t.coordinator._workers, t.schedule(20)
        t.coordinator.join()
        for _ in range(4):
            results += t.schedule(60)
            kill(workers, times.randrange(2), times.uniform(0, 0.3))
        # Both at once.
        results += t.schedule(60)
        for worker in (0, 1):
            kill(workers, worker)
        t.coordinator.join()
        assert t.coordinator.done()
        losses = t.coordinator.fetch(results)
        assert len(losses) == 320
        assert np.isfinite(losses).all()
        assert np.mean(losses[-20:]) < np.mean(losses[:20]) / 2
        assert t.optimizer.step[...] == t.num_steps[...] == 320


class StubbornError(Exception):
    """Cannot be pickled."""

    def __init__(self, text):
        super().__init__(text, threading.Lock())


def test_a_dead_server_and_what_a_closure_raised_are_errors_of_join(tmp_path):
    with ml.Checkpointer(tmp_path / "run") as ck, training(2, checkpointer=ck) as t:

        def fails():
            raise StubbornError("what went wrong")  # this line

        t.coordinator.schedule(fails)
        with pytest.raises(Exception, match="what went wrong") as caught:
            t.coordinator.join()
        assert (
            'StubbornError("what went wrong")  # this line'
            in (caught.value.__notes__[-1])
        )
        seen = []
        t.coordinator.schedule(lambda: seen.append(1))
        assert "the list seen" in message_of(t.coordinator.join)
        t.run(2)
        ck.save(2, {"optimizer": t.optimizer})
        ck.wait()
        kill(t.coordinator._servers, 0)
        t.schedule(1)
        message = message_of(t.coordinator.join)
        assert message.startswith("parameter server 0 of 2 died, and all updates")
        assert f"The last checkpoint: step 2 in {tmp_path / 'run'}." in message
        assert message_of(t.coordinator.join) == message


# The convnet.

BATCH_SIZE, EPOCHS = 50, 5


def examples(split):
    return split.images.astype(np.float32) / 255, split.labels


def convnet_loss(model, batch):
    images, labels = batch
    losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
    return losses.mean()


def update(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(convnet_loss)(model, batch)
    optimizer.update(model, grads)
    return loss


def shuffled(split, seed):
    """Batches for ever, each example once in an epoch."""
    images, labels = examples(split)
    order = np.random.default_rng(seed)
    while True:
        rows = order.permutation(len(labels))
        for start in range(0, len(rows) - BATCH_SIZE + 1, BATCH_SIZE):
            index = rows[start : start + BATCH_SIZE]
            yield images[index], labels[index]


def adam(split, momentum):
    # To zero: at a constant rate, the accuracy of the last step is a matter of luck, two
    # points more or less for another order of the same batches.
    num_steps = EPOCHS * len(split) // BATCH_SIZE
    rate = optax.cosine_decay_schedule(1e-3, num_steps)
    return optax.adam(rate, b1=momentum)


def accuracy(model, split):
    images, labels = examples(split)
    return float((model(images).argmax(-1) == labels).mean())


@pytest.mark.parametrize("num_killed", [0, 1])
def test_the_convnet_reaches_the_accuracy_of_synchronous_training(num_killed, counts):
    data = read_carried_part("")
    num_steps = EPOCHS * len(data.train) // BATCH_SIZE
    model = ConvNet(rngs=nnx.Rngs(0))
    assert accuracy(model, data.test) < 0.3
    optimizer = nnx.Optimizer(model, adam(data.train, 0.9), wrt=nnx.Param)
    synchronous_step = nnx.jit(update)
    for batch in itertools.islice(shuffled(data.train, 0), num_steps):
        synchronous_step(model, optimizer, batch)
    expected = accuracy(model, data.test)

    strategy = distribute.ParameterServerStrategy(2, 2)
    with distribute.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            model = ConvNet(rngs=nnx.Rngs(0))
            # Gradients of former variables act like more momentum, so that less is best.
            optimizer = nnx.Optimizer(model, adam(data.train, 0.5), wrt=nnx.Param)

        def step(iterator):
            return strategy.run(update, args=(model, optimizer, next(iterator)))

        def dataset_fn(context):
            # The batches of the synchronous run, one worker after the other.
            index, count = context.input_pipeline_id, context.num_input_pipelines
            return itertools.islice(shuffled(data.train, 0), index, None, count)

        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        results = [coordinator.schedule(step, (iterator,)) for _ in range(num_steps)]
        results[num_steps // 4].fetch()
        if num_killed:
            ray.kill(coordinator._workers[0])
        coordinator.join()
        assert optimizer.step[...] == num_steps
    reached = accuracy(model, data.test)
    counts(f"accuracy {reached:.3f}, synchronous {expected:.3f}, {num_killed} killed")
    assert reached >= expected - 0.01
