"""What the trainer predicts: a loss function's outputs, without the padding."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from meshlayout.arrays import to_numpy
from meshlayout.errors import MeshLayoutError
from meshlayout.trainer.batches import Fed, Feeder


def outputs_of(loss_fn: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Returns a function of a model and a batch that gives the loss's outputs.

    Args:
        loss_fn: As for `make_train_step`.
    """
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    asked = inspect.signature(loss_fn).parameters

    def outputs(model: Any, batch: Any) -> Any:
        extras: dict[str, Any] = {"train": False} if "train" in asked else {}
        if "rngs" in asked:
            extras["rngs"] = nnx.Rngs(0)
        result = loss_fn(model, batch, **extras)
        if not isinstance(result, tuple) or not result[1]:
            msg = (
                f"predict: {name} returns losses and no outputs. Return a pair of "
                "losses and a dict of outputs, or give the trainer a "
                "predict_fn(model, batch)."
            )
            raise MeshLayoutError(msg)
        return result[1]

    return outputs


def real_outputs(feeder: Feeder, fed: Fed, outputs: Any) -> Any:
    """Returns the rows of the real examples, on the host.

    Args:
        feeder: What has put the batch on the mesh.
        fed: The batch.
        outputs: A tree of arrays with one row per example.

    Raises:
        MeshLayoutError: If one has not.
    """
    rows = feeder.real_rows(fed)
    size = _num_rows(fed.batch)

    def one(value: Any) -> Any:
        shape = np.shape(value)
        if shape[:1] != (size,):
            msg = (
                f"predict: an output has shape {shape} for a batch of {size} rows; it "
                "has to have one row per example."
            )
            raise MeshLayoutError(msg)
        return value[rows]

    return jax.tree.map(one, to_numpy(outputs))


def _num_rows(batch: Any) -> int:
    return next(np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf))
