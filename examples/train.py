"""Trains a small classifier: the same program on a laptop and on a cluster.

    python examples/train.py
    python -m meshlayout.launch -n 4 --devices-per-process 2 examples/train.py

The job files beside it start it under SLURM, on Kubernetes, on a TPU pod slice and
under Ray. `ml.initialize()` finds the other processes, wherever it was started. What
changes from one place to another is the mesh: `--mesh` has its axes, and `--dcn` names
the one that crosses slices. Started again with the same `--checkpoints`, it resumes at
the exact batch.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import meshlayout as ml


class Classifier(nnx.Module):
    """Two dense layers; nothing in it knows of devices."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(64, 512, rngs=rngs)
        self.down = nnx.Linear(512, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits."""
        return self.down(nnx.relu(self.up(x)))


def loss_fn(model: Classifier, batch: dict[str, jax.Array]) -> Any:
    """Returns one loss per example, and the logits."""
    logits = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses, {"logits": logits}


def examples(num: int) -> dict[str, np.ndarray[Any, Any]]:
    """Returns images with labels that can be learned."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num, 64)).astype("float32")
    y = np.argmax(x @ rng.normal(size=(64, 10)), axis=-1).astype("int32")
    return {"x": x, "y": y}


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Trains as the command line says; returns the metrics of the last epoch."""
    parser = argparse.ArgumentParser(description="Trains a small classifier.")
    parser.add_argument("--mesh", default="batch=-1", help="as replica=2,fsdp=-1")
    parser.add_argument("--dcn", help="the axis that crosses slices, as replica")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch-size", type=int, default=64)
    parser.add_argument("--checkpoints", help="a shared directory, or gs://bucket/run")
    options = parser.parse_args(arguments)

    ml.initialize()
    mesh = ml.create_mesh(options.mesh, dcn=options.dcn)
    state = ml.TrainState.create(
        lambda: Classifier(nnx.Rngs(0)), optax.adam(1e-3), ml.parallel.fsdp(mesh)
    )
    data = ml.distribute_dataset(
        examples(2000), mesh, global_batch_size=options.global_batch_size, shuffle=0
    )
    accuracy = ml.metrics.Accuracy(labels="y")
    trainer = ml.Trainer(state, loss_fn, metrics={"accuracy": accuracy})
    if options.checkpoints is None:
        history = trainer.fit(data, options.epochs, progress=False)
    else:
        with ml.Checkpointer(options.checkpoints) as checkpointer:
            save = ml.callbacks.Checkpoint(checkpointer, every=20)
            history = trainer.fit(
                data, options.epochs, callbacks=[save], resume=True, progress=False
            )
    metrics = {name: values[-1] for name, values in history.items()}
    if ml.cluster.is_main():
        print(f"{jax.process_count()} processes, {mesh}")
        print(f"loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.4f}")
    ml.shutdown()
    return metrics


if __name__ == "__main__":
    main()
