"""What `Strategy.run` costs over the same step by `make_train_step`.

`python benchmarks/strategies.py --devices 2` prints, for each model: collectives and
bytes of both programs; CPU microseconds of the calling thread per call, measured in
pairs; and CPU seconds of the process for a first call, each in a process of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import meshlayout as ml


CALLS, ROUNDS = 32, 9


class Tower(nnx.Module):
    """Linear layers, one after another."""

    def __init__(self, num_layers: int, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(num_layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns what the last layer gives."""
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        return x


def losses_of(model: Any, batch: jax.Array) -> jax.Array:
    """Returns one loss per example."""
    return (model(batch) ** 2).mean(-1)


def by_train_step(num_layers: int, strategy: ml.distribute.Strategy, x: Any) -> Any:
    """Returns a step by make_train_step, and its communication."""
    layouts = ml.LayoutMap(strategy.mesh)
    state = ml.TrainState.create(
        lambda: Tower(num_layers, nnx.Rngs(0)), optax.adam(1e-3), layouts
    )
    step = ml.make_train_step(losses_of)
    held = [state]

    def call() -> Any:
        held[0], metrics = step(held[0], x)
        return metrics

    return call, lambda: step.communication(held[0], x)


def by_run(num_layers: int, strategy: ml.distribute.Strategy, x: Any) -> Any:
    """Returns the same step by run, and its communication."""
    with strategy.scope():
        model = Tower(num_layers, nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(x: jax.Array) -> jax.Array:
        def loss_fn(model: nnx.Module) -> jax.Array:
            return ml.losses.compute_average_loss(losses_of(model, x))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return ml.distribute.get_replica_context().all_reduce("SUM", loss)

    batch = ml.distribute.PerReplica(x, num_replicas=strategy.num_replicas_in_sync)

    def call() -> Any:
        return strategy.run(step, args=(batch,))

    return call, lambda: strategy.communication(step, args=(batch,))


WAYS = {"make_train_step": by_train_step, "run": by_run}


def made(way: str, num_layers: int) -> Any:
    """Returns a step of a model on all devices."""
    strategy = ml.distribute.MirroredStrategy()
    rows = np.ones((8 * strategy.num_replicas_in_sync, 8), "float32")
    x = jax.device_put(rows, strategy.mesh.layout("batch", ...).with_rank(2).sharding)
    return WAYS[way](num_layers, strategy, x)


def host_us(call: Callable[[], Any]) -> float:
    """Returns CPU microseconds of this thread per call."""
    start = time.thread_time()
    for _ in range(CALLS):
        result = call()
    seconds = time.thread_time() - start
    jax.block_until_ready(result)
    return seconds / CALLS * 1e6


def first_call_s(way: str, num_layers: int, devices: int) -> float:
    """Returns CPU seconds of a first call, in a process of its own, with compiling."""
    arguments = [str(num_layers), "--devices", str(devices), "--first", way]
    command = [sys.executable, __file__, "--layers", *arguments]
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    how: Any = {"env": environment, "capture_output": True, "check": True}
    return json.loads(subprocess.run(command, **how).stdout)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 40, 100])
    parser.add_argument("--first", choices=WAYS)
    options = parser.parse_args()
    ml.virtual_devices(options.devices)
    if options.first:
        call, _ = made(options.first, *options.layers)
        start = time.process_time()
        jax.block_until_ready(call())
        print(json.dumps(time.process_time() - start))
        return
    print("| layers | step | host us | ratio | first call s | ratio | sent |")
    print("|---|---|---|---|---|---|---|")
    for num_layers in options.layers:
        calls, times, first = {}, {}, {}
        for way in WAYS:
            call, communication = made(way, num_layers)
            host_us(call)
            calls[way], times[way] = (call, communication), []
            first[way] = statistics.median(
                first_call_s(way, num_layers, options.devices) for _ in range(3)
            )
        for _ in range(ROUNDS):
            for way, (call, _) in calls.items():
                times[way].append(host_us(call))
        for way, (_, communication) in calls.items():
            plain, sent = times["make_train_step"], communication()
            pairs = zip(times[way], plain, strict=True)
            ratio = statistics.median(a / b for a, b in pairs)
            first_ratio = first[way] / first["make_train_step"]
            print(
                f"| {num_layers} | {way} | {statistics.median(times[way]):.0f} | "
                f"{ratio:.2f} | {first[way]:.2f} | {first_ratio:.2f} | "
                f"{sum(sent.values())} collectives, {sent.wire_bytes} bytes |",
                flush=True,
            )


if __name__ == "__main__":
    main()
