"""Strategies over several real processes."""

import jax
import numpy as np
import pytest
from flax import nnx

import meshlayout as ml
from tests.processes import run_processes
from tests.replicas import made, mirrored, parts_of, total


pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

ROWS, BATCH = 22, 8


def source():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype("float32")
    return x, np.tanh(x[:, :3])


def trained(strategy):
    """What a training loop computes, with a short last batch."""
    model, optimizer = made(strategy, lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)), 0.1)
    with strategy.scope():
        metric = nnx.metrics.Average()
        count = nnx.Variable(np.float32(0), aggregation="per_replica")

    def train_step(x, y):
        def loss_fn(model):
            losses = ((model(x) - y) ** 2).mean(axis=-1)
            return ml.losses.compute_average_loss(losses)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        metric.update(values=loss)
        replica = ml.distribute.get_replica_context()
        count[...] += replica.replica_id_in_sync_group
        return loss

    data = strategy.distribute_dataset(source(), global_batch_size=BATCH, epochs=2)
    return {
        "losses": [total(strategy, strategy.run(train_step, batch)) for batch in data],
        "kernel": np.asarray(model.kernel[...]).tolist(),
        "metric": float(metric.compute()),
        "counts": parts_of(strategy, count),
    }


def read(strategy):
    """What one of two processes reads, with whether it is padded, and all rows' sum."""
    here = jax.process_index()

    def batches_of(data):
        return [
            [parts_of(strategy, x), x.mask is not None, total(strategy, x, 0)]
            for x in data
        ]

    # Process 0 has 3 batches of 2 rows, process 1 has 4 and one of one row.
    mine = [np.full(2, 10 * here + i, np.int32) for i in range(3 + here)]
    mine += [np.full(1, 99, np.int32)] * here

    def dataset_fn(context):
        assert (context.num_input_pipelines, context.input_pipeline_id) == (2, here)
        return mine

    of_function = strategy.distribute_datasets_from_function(dataset_fn)
    rows = np.arange(12, dtype=np.int32)
    own = strategy.distribute_dataset(rows[: 2 + 5 * here], BATCH, per_process=True)
    evenly = strategy.distribute_dataset(rows, BATCH)
    own_evenly = rows[6 * here : 6 * here + 6]
    own_evenly = strategy.distribute_dataset(own_evenly, BATCH, per_process=True)
    ids = strategy.distribute_values_from_function(
        lambda context: np.full(2, context.replica_id_in_sync_group, np.int32)
    )
    return {
        "function": batches_of(of_function),
        "own rows": batches_of(own),
        "evenly": batches_of(evenly),
        "own, evenly": batches_of(own_evenly),
        "repr": repr(ids),
        "gathered": strategy.gather(ids, axis=0).tolist(),
        "largest": int(strategy.reduce("MAX", ids, axis=0)),
    }


def with_other_constants(strategy):
    factor = jax.process_index() + 1.0
    values = strategy.distribute_values_from_function(lambda context: 1.0)
    with pytest.raises(ml.errors.ClusterError) as error:
        strategy.run(lambda x: x * factor, args=(values,))
    return str(error.value)


def on_processes():
    strategy = ml.distribute.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    local = ml.distribute.MirroredStrategy()
    return {
        **trained(strategy),
        **read(strategy),
        "replicas": (strategy.num_replicas_in_sync, local.num_replicas_in_sync),
        "task": (resolver.task_type, resolver.task_id, resolver.num_workers),
        "error": with_other_constants(strategy),  # at last: it ends what comes after
    }


@pytest.fixture(scope="module")
def results():
    return run_processes(2, on_processes, devices_per_process=2)


def test_several_workers_compute_what_one_process_does(results):
    expected = trained(mirrored(4))
    for index, result in enumerate(results):
        for name in ("losses", "kernel", "metric"):
            np.testing.assert_allclose(
                result[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name
            )
        assert result["counts"] == expected["counts"][2 * index : 2 * index + 2]
        assert tuple(result["replicas"]) == (4, 2)
        assert tuple(result["task"]) == ("worker", index, 2)


# Of batches: the rows of each replica, whether they are padded, and their sum.
BATCHES = {
    "function": [
        [[[0, 0], [1, 1], [10, 10], [11, 11]], False, 44],
        [[[2, 2], [], [12, 12], [13, 13]], True, 54],
        [[[], [], [99], []], True, 99],
    ],
    "own rows": [
        [[[0, 1], [], [0, 1], [2, 3]], True, 7],
        [[[], [], [4, 5], [6]], True, 15],
    ],
    "evenly": [
        [[[0, 1], [2, 3], [4, 5], [6, 7]], False, 28],
        [[[8], [9], [10], [11]], False, 38],
    ],
    "own, evenly": [
        [[[0, 1], [2, 3], [6, 7], [8, 9]], False, 36],
        [[[4], [5], [10], [11]], False, 30],
    ],
}


@pytest.mark.parametrize("source", BATCHES)
def test_processes_agree_about_padding_and_read_every_row_once(results, source):
    batches = BATCHES[source]
    rows = [[x for x, *_ in result[source]] for result in results]
    assert [a + b for a, b in zip(*rows, strict=True)] == [x for x, *_ in batches]
    for result in results:  # also where a process has no padding itself
        assert [rest for _, *rest in result[source]] == [rest for _, *rest in batches]


def test_processes_make_and_combine_values_of_all_replicas(results):
    for result in results:
        assert result["gathered"] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert result["largest"] == 3
    assert results[1]["repr"].startswith(
        "PerReplica:{\n  0: Array([2, 2], dtype=int32)"
    )


def test_constants_that_differ_between_processes_are_noticed(results):
    for result in results:
        assert "process" in result["error"]
        assert "<lambda>" in result["error"]
