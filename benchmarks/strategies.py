"""What `Strategy.run` costs over the same step by `make_train_step`.

`python benchmarks/strategies.py --devices 8` prints, for each model, the collectives of
both programs and the bytes that they send, milliseconds a step, and CPU microseconds of
the calling thread alone. Both run in turn, window by window, in one process; ratios are
medians of the ratios within a round, and host times the best of the windows.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import meshlayout as ml
from meshlayout.distribute.values import PerReplica
from models.convnet import ConvNet
from models.mlp import MLP


STEPS = 16


def cross_entropy(model: nnx.Module, batch: dict[str, Any]) -> jax.Array:
    """Returns one loss per example."""
    logits = model(batch["image"])  # pyright: ignore[reportCallIssue]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def by_train_step(build: Callable[[], Any], batch: Any, mesh: ml.Mesh) -> Any:
    """Returns a step by make_train_step, and its communication."""
    state = ml.TrainState.create(build, optax.adam(1e-3), ml.LayoutMap(mesh))
    step = ml.make_train_step(cross_entropy)
    held = [state]

    def call() -> Any:
        held[0], metrics = step(held[0], batch)
        return metrics

    return call, step.communication(state, batch)


def by_run(
    build: Callable[[], Any], batch: Any, strategy: ml.distribute.Strategy
) -> Any:
    """Returns the same step by run, and its communication."""
    with strategy.scope():
        model = build()
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(batch: Any) -> jax.Array:
        def loss_fn(model: nnx.Module) -> jax.Array:
            return ml.losses.compute_average_loss(cross_entropy(model, batch))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return ml.distribute.get_replica_context().all_reduce("SUM", loss)

    replicas = strategy.num_replicas_in_sync
    values = jax.tree.map(lambda x: PerReplica(x, num_replicas=replicas), batch)

    def call() -> Any:
        return strategy.run(step, args=(values,))

    return call, strategy.communication(step, args=(values,))


def window(call: Callable[[], Any]) -> tuple[float, float]:
    """Returns seconds a step, and CPU seconds of this thread alone."""
    start, cpu = time.perf_counter(), time.thread_time()
    for _ in range(STEPS):
        result = call()
    cpu = time.thread_time() - cpu
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / STEPS, cpu / STEPS


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    ml.virtual_devices(options.devices)
    strategy = ml.distribute.MirroredStrategy()
    rows = 8 * strategy.num_replicas_in_sync
    images = np.random.default_rng(0).normal(size=(rows, 28, 28, 1)).astype("float32")
    batch = {"image": images, "label": np.arange(rows, dtype=np.int32) % 10}
    layout = strategy.mesh.layout("batch", ...)
    batch = {
        name: jax.device_put(x, layout.with_rank(x.ndim).sharding)
        for name, x in batch.items()
    }
    print("model    step             ms/step  ratio  host us  collectives  bytes")
    models: dict[str, Callable[[], nnx.Module]] = {
        "mlp": lambda: MLP(rngs=nnx.Rngs(0)),
        "convnet": lambda: ConvNet(rngs=nnx.Rngs(0)),
    }
    for name, build in models.items():
        calls = {
            "make_train_step": by_train_step(build, batch, strategy.mesh),
            "run": by_run(build, batch, strategy),
        }
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in calls}
        for call, _ in calls.values():
            window(call)
        for _ in range(options.rounds):
            for way, (call, _) in calls.items():
                times[way].append(window(call))
        plain = times["make_train_step"]
        for way, (_, sent) in calls.items():
            ratio = statistics.median(
                a[0] / b[0] for a, b in zip(times[way], plain, strict=True)
            )
            seconds = statistics.median(t[0] for t in times[way])
            host = min(t[1] for t in times[way])
            print(
                f"{name:8} {way:16} {seconds * 1e3:7.2f}  {ratio:5.2f}  "
                f"{host * 1e6:7.0f}  {sum(sent.values()):11}  {sent.wire_bytes}"
            )


if __name__ == "__main__":
    main()
