"""Strategies over several real processes."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from tests.processes import run_processes


pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

ROWS, BATCH = 22, 8


def source():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype("float32")
    return x, np.tanh(x[:, :3])


def trained(strategy):
    """What a training loop computes, with a short last batch."""
    with strategy.scope():
        model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        metric = nnx.metrics.Average()
        count = nnx.Variable(np.float32(0), aggregation="per_replica")

    def losses_of(model, x, y):
        return ((model(x) - y) ** 2).mean(axis=-1)

    def train_step(inputs):
        x, y = inputs

        def loss_fn(model):
            return ml.losses.compute_average_loss(losses_of(model, x, y))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        metric.update(values=loss)
        replica = ml.distribute.get_replica_context()
        count[...] += replica.replica_id_in_sync_group
        return loss

    losses = []
    for _ in range(2):
        for inputs in strategy.distribute_dataset(source(), global_batch_size=BATCH):
            loss = strategy.run(train_step, args=(inputs,))
            losses.append(float(strategy.reduce("SUM", loss, axis=None)))
    return {
        "losses": losses,
        "kernel": np.asarray(model.kernel[...]).tolist(),
        "metric": float(metric.compute()),
        "counts": [float(x) for x in strategy.local_results(count.get_value())],
    }


def on_processes():
    strategy = ml.distribute.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    local = ml.distribute.MirroredStrategy()
    return {
        **trained(strategy),
        "replicas": (strategy.num_replicas_in_sync, local.num_replicas_in_sync),
        "task": (resolver.task_type, resolver.task_id, resolver.num_workers),
    }


def test_several_workers_compute_what_one_process_does():
    results = run_processes(2, on_processes, devices_per_process=2)
    strategy = ml.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    expected = trained(strategy)
    for index, result in enumerate(results):
        for name in ("losses", "kernel", "metric"):
            np.testing.assert_allclose(
                result[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name
            )
        assert result["counts"] == expected["counts"][2 * index : 2 * index + 2]
        assert tuple(result["replicas"]) == (4, 2)
        assert tuple(result["task"]) == ("worker", index, 2)


def with_other_constants():
    strategy = ml.distribute.MultiWorkerMirroredStrategy()
    factor = jax.process_index() + 1.0
    values = strategy.distribute_values_from_function(lambda context: 1.0)
    with pytest.raises(ml.errors.ClusterError) as error:
        strategy.run(lambda x: x * factor, args=(values,))
    return str(error.value)


def test_constants_that_differ_between_processes_are_noticed():
    for text in run_processes(2, with_other_constants, devices_per_process=2):
        assert "process" in text
        assert "<lambda>" in text
