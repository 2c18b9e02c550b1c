"""What is refused before training begins, and what a step of one's own may return."""

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlayout.data import DistributedDataset
from meshlayout.errors import MeshLayoutError, did_you_mean
from meshlayout.metrics import Metrics
from meshlayout.trainer.callbacks import Callback


if TYPE_CHECKING:
    from meshlayout.trainer.trainer import Trainer


def check_options(
    trainer: type["Trainer"], options: Mapping[str, Any], known: Collection[str]
) -> None:
    """Raises MeshLayoutError for options that do not exist.

    Args:
        trainer: The class.
        options: What was given.
        known: The names of those that exist.
    """
    own = [*inspect.signature(trainer).parameters][:-1]
    for name in options:
        if name not in known:
            msg = (
                f"Trainer has no option {name!r}.{did_you_mean(name, [*own, *known])} "
                f"Those of its steps are {', '.join(known)}."
            )
            raise MeshLayoutError(msg)


def check_needless(metrics: Any, options: Mapping[str, Any]) -> None:
    """Raises for options of a step that is not made, for want of a loss function."""
    given = [name for name in options if name not in ("weights", "steps_per_call")]
    given += [] if metrics is None else ["metrics"]
    if given:
        msg = (
            f"Trainer was given no loss function, and {', '.join(given)} for the steps "
            "that are made of it. Give loss_fn, or leave these to your own steps."
        )
        raise MeshLayoutError(msg)


def check_counts(**counts: int | None) -> None:
    """Raises MeshLayoutError for what is no number of epochs or steps."""
    for name, value in counts.items():
        is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if value is not None and (not is_whole or value < 1):
            msg = f"fit: {name}={value!r} is no whole number from 1 on."
            raise MeshLayoutError(msg)


def check_weights(data: Any, weights: str | int) -> None:
    """Raises MeshLayoutError if batches carry weights where the trainer sees none.

    Args:
        data: What the trainer is given.
        weights: Where it looks for them.
    """
    theirs = data.weights if isinstance(data, DistributedDataset) else None
    if theirs is not None and theirs != weights:
        msg = (
            f"the data's batches carry their weights at {theirs!r}, 0 for padding, and "
            f"the trainer looks for them at {weights!r}, so that padding would count. "
            f"Give the trainer weights={theirs!r}."
        )
        raise MeshLayoutError(msg)


def as_callbacks(given: Any) -> list[Callback]:
    """Returns the callbacks that were given, each of which is one.

    Args:
        given: What `callbacks=` is.

    Raises:
        MeshLayoutError: If it is no list of callbacks.
    """
    if isinstance(given, (Callback, type)) or not isinstance(given, Iterable):
        msg = (
            f"fit: callbacks= takes a list of callbacks, and got {_text(given)}. Give "
            "callbacks=[...], or leave it out."
        )
        raise MeshLayoutError(msg)
    callbacks = [*given]
    for at, one in enumerate(callbacks):
        if not isinstance(one, Callback):
            msg = f"fit: callbacks[{at}] is {_text(one)}. {_way_out(one)}"
            raise MeshLayoutError(msg)
    return callbacks


def _text(given: Any) -> str:
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return "None" if given is None else f"a {type(given).__name__}"


def _way_out(given: Any) -> str:
    """Says how to make a callback of what is none."""
    if isinstance(given, type) and issubclass(given, Callback):
        return f"Give an instance of it, {given.__name__}(...)."
    return (
        "A callback derives from ml.callbacks.Callback, which does nothing at the "
        "moments that it does not override."
    )


def as_pair(trainer: "Trainer", result: Any) -> tuple[Any, Any]:
    """Returns what a train step returned, which is a pair.

    Args:
        trainer: Whose step.
        result: What it returned.

    Raises:
        MeshLayoutError: If it is none.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        size = f" of {len(result)}" if isinstance(result, tuple) else ""
        msg = (
            f"{type(trainer).__name__}.train_step returns a pair, (state, metrics), "
            f"and gave {_text(result)}{size}."
        )
        raise MeshLayoutError(msg)
    return result


def check_metrics(trainer: "Trainer", step: str, metrics: Any) -> None:
    """Raises MeshLayoutError if a step returned no metrics.

    Args:
        trainer: Whose step.
        step: Its name.
        metrics: What it returned.
    """
    if not isinstance(metrics, Metrics):
        pair = "(state, metrics)" if step == "train_step" else "metrics"
        msg = (
            f"{type(trainer).__name__}.{step} returns {pair}, with metrics that are "
            f"ml.metrics.Metrics, and gave a {type(metrics).__name__}."
        )
        raise MeshLayoutError(msg)


def missing(trainer: "Trainer", step: str) -> str:
    """Returns the message for a step that was neither made nor written."""
    name = type(trainer).__name__
    return (
        f"{name} has no loss function to make its {step} of: give loss_fn, or override "
        f"{step} in a subclass."
    )
