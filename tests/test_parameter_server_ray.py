"""Parameter servers and workers as Ray actors; needs the extra `ray`."""

import itertools
import os
import random
import signal
import threading
import time
import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout import distribute
from models.convnet import ConvNet
from models.data import read_carried_part
from tests.error_messages import message_of
from tests.test_parameter_server import Net, batches, loss_of


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


class Training:
    """A model and a step on Ray, with a counter of the closures that were applied."""

    def __init__(self, *args, data=batches, **options):
        self.strategy = distribute.ParameterServerStrategy(*args)
        self.coordinator = distribute.ClusterCoordinator(self.strategy, **options)
        with self.strategy.scope():
            model = Net(rngs=nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
            num_steps = nnx.Variable(jnp.array(0), aggregation="sum")

        def step(iterator):
            batch = next(iterator)
            loss, grads = nnx.value_and_grad(loss_of)(model, batch)
            optimizer.update(model, grads)
            num_steps[...] += 1
            return loss

        self.optimizer, self.num_steps, self.step = optimizer, num_steps, step
        dataset = self.coordinator.create_per_worker_dataset(
            lambda context: data(context.input_pipeline_id)
        )
        self.iterator = iter(dataset)

    def schedule(self, count):
        args = (self.iterator,)
        return [self.coordinator.schedule(self.step, args) for _ in range(count)]

    def kill(self, actors, index, after_s=0.0):
        """Ends the process of an actor, whatever it is doing."""
        while True:
            try:
                call = actors[index].__ray_call__
                pid = ray.get(call.remote(lambda _: os.getpid()))
                break
            except ray.exceptions.RayActorError:
                time.sleep(0.1)  # until it has been replaced
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.coordinator.shutdown()


def test_each_closure_is_applied_once_although_workers_are_killed():
    # At random times: while workers compile, pull, compute, push or wait.
    times = random.Random(0)
    with Training(2, 2) as t:
        results = t.schedule(20)
        t.coordinator.join()
        for _ in range(4):
            results += t.schedule(60)
            t.kill(t.coordinator._workers, times.randrange(2), times.uniform(0, 0.3))
        # Both at once.
        results += t.schedule(60)
        for worker in (0, 1):
            t.kill(t.coordinator._workers, worker)
        t.coordinator.join()
        assert t.coordinator.done()
        losses = t.coordinator.fetch(results)
        assert len(losses) == 320
        assert np.isfinite(losses).all()
        assert np.mean(losses[-20:]) < np.mean(losses[:20]) / 2
        assert t.optimizer.step[...] == t.num_steps[...] == 320


def test_a_dead_server_and_what_a_closure_raised_are_errors_of_join(tmp_path):
    with ml.Checkpointer(tmp_path / "run") as ck, Training(1, 2, checkpointer=ck) as t:

        def broken(iterator):
            raise LookupError("a mistake")  # this line

        failed = t.coordinator.schedule(broken, (t.iterator,))
        with pytest.raises(LookupError, match="a mistake") as caught:
            t.coordinator.join()
        assert (
            'raise LookupError("a mistake")  # this line' in caught.value.__notes__[-1]
        )
        with pytest.raises(LookupError, match="a mistake"):
            failed.fetch()

        class StubbornError(Exception):
            def __init__(self, text):
                super().__init__(text, threading.Lock())

        def fails():
            raise StubbornError("what went wrong")

        t.coordinator.schedule(fails)
        with pytest.raises(Exception, match="what went wrong"):
            t.coordinator.join()

        seen = []

        def appends(x):
            seen.append(x)
            return x

        t.coordinator.schedule(appends, (1.0,))
        assert "seen" in message_of(t.coordinator.join)
        t.schedule(2)
        t.coordinator.join()
        ck.save(2, {"optimizer": t.optimizer})
        ck.wait()
        t.kill(t.coordinator._servers, 0)
        t.schedule(1)
        message = message_of(t.coordinator.join)
        assert message.startswith("parameter server 0 died. Lost are its values of ")
        assert "model/hidden/bias f32[5]" in message
        assert f"The last checkpoint is step 2 in {tmp_path / 'run'}." in message
        assert message_of(t.coordinator.join) == message


# The convnet.

BATCH_SIZE, EPOCHS = 50, 5


def examples(split):
    return split.images.astype(np.float32) / 255, split.labels


def convnet_loss(model, batch):
    images, labels = batch
    losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
    return losses.mean()


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


@pytest.fixture(scope="module")
def convnet_data():
    return read_carried_part("")


@pytest.fixture(scope="module")
def synchronous_accuracy(convnet_data):
    model = ConvNet(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, adam(convnet_data.train, 0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        optimizer.update(model, nnx.grad(convnet_loss)(model, batch))

    source = shuffled(convnet_data.train, 0)
    for _ in range(EPOCHS * len(convnet_data.train) // BATCH_SIZE):
        step(model, optimizer, next(source))
    return accuracy(model, convnet_data.test)


@pytest.mark.parametrize("num_killed", [0, 1])
def test_the_convnet_reaches_the_accuracy_of_synchronous_training(
    convnet_data, synchronous_accuracy, num_killed, counts
):
    train = convnet_data.train
    strategy = distribute.ParameterServerStrategy(2, 2)
    with distribute.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            model = ConvNet(rngs=nnx.Rngs(0))
            # Gradients of former variables act like more momentum, so that less is best.
            optimizer = nnx.Optimizer(model, adam(train, 0.5), wrt=nnx.Param)

        def replica_fn(batch):
            loss, grads = nnx.value_and_grad(convnet_loss)(model, batch)
            optimizer.update(model, grads)
            return loss

        def step(iterator):
            return strategy.run(replica_fn, args=(next(iterator),))

        def dataset_fn(context):
            # The batches of the synchronous run, one worker after the other.
            index, count = context.input_pipeline_id, context.num_input_pipelines
            return itertools.islice(shuffled(train, 0), index, None, count)

        dataset = coordinator.create_per_worker_dataset(dataset_fn)
        iterator = iter(dataset)
        num_steps = EPOCHS * len(train) // BATCH_SIZE
        results = [coordinator.schedule(step, (iterator,)) for _ in range(num_steps)]
        results[num_steps // 4].fetch()
        if num_killed:
            ray.kill(coordinator._workers[0])
        coordinator.join()
        assert optimizer.step[...] == num_steps
        reached = accuracy(model, convnet_data.test)
        counts(
            f"accuracy {reached:.3f}, synchronous {synchronous_accuracy:.3f}, "
            f"{num_killed} workers killed"
        )
        assert reached >= synchronous_accuracy - 0.01
        assert accuracy(ConvNet(rngs=nnx.Rngs(0)), convnet_data.test) < 0.3
