"""Parameter servers and workers as Ray actors; needs the extra `ray`."""

import contextlib
import os
import random
import signal
import threading
import time
import warnings

import numpy as np
import optax
import pytest

import meshlayout as ml
from meshlayout import distribute
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
