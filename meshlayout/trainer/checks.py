"""Checks of a trainer's options, data and callbacks, and of what user steps return."""

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from meshlayout import _checks
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
        options: The options.
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


def check_needless(
    metrics: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> None:
    """Raises for options of `make_train_step` if there is no loss function."""
    names = [name for name in options if name not in ("weights", "steps_per_call")]
    names += [] if metrics is None else ["metrics"]
    if names:
        msg = (
            f"Trainer was given no loss function, and {', '.join(names)} for the steps "
            "that are made from it. Give loss_fn, or leave these to your own steps."
        )
        raise MeshLayoutError(msg)


def check_weights(data: object, weights: str | int) -> None:
    """Raises MeshLayoutError if batches carry weights that the trainer would ignore.

    Args:
        data: What the trainer is given.
        weights: Where it looks for them.
    """
    place = data.weights if isinstance(data, DistributedDataset) else None
    if place is not None and place != weights:
        msg = (
            f"the data's batches carry their weights at {place!r}, 0 for padding, and "
            f"the trainer looks for them at {weights!r}, so that padding would count. "
            f"Give the trainer weights={place!r}."
        )
        raise MeshLayoutError(msg)


def as_callbacks(callbacks: Any) -> list[Callback]:
    """Returns the callbacks of a `fit` as a list.

    Raises:
        MeshLayoutError: If it is not a list of callbacks.
    """
    if isinstance(callbacks, (Callback, type)) or not isinstance(callbacks, Iterable):
        msg = (
            f"fit: callbacks must be a list of callbacks, got "
            f"{_checks.shown(callbacks)}. Give callbacks=[...], or leave it out."
        )
        raise MeshLayoutError(msg)
    callbacks = [*callbacks]
    for index, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            shown = _checks.shown(callback)
            msg = f"fit: callbacks[{index}] is {shown}. {_way_out(callback)}"
            raise MeshLayoutError(msg)
    return callbacks


def _way_out(value: object) -> str:
    """Returns a hint how to turn an object into a callback."""
    if isinstance(value, type) and issubclass(value, Callback):
        return f"Give an instance of it, {value.__name__}(...)."
    return (
        "A callback derives from ml.callbacks.Callback, which does nothing at the "
        "moments that it does not override."
    )


def not_like_the_first(where: str, difference: str) -> MeshLayoutError:
    """Returns the error for a batch that a step could not take.

    Args:
        where: Which batch.
        difference: How it differs from the first one.
    """
    msg = (
        f"{where} is not like the first one: {difference}. All batches of a dataset "
        "must have the same arrays."
    )
    return MeshLayoutError(msg)


def _text(result: object) -> str:
    return "None" if result is None else f"a {type(result).__name__}"


def as_pair(trainer: "Trainer", result: Any) -> tuple[Any, Any]:
    """Returns a train step's result, checked to be a pair.

    Args:
        trainer: Whose step.
        result: What it returned.

    Raises:
        MeshLayoutError: If it is anything else.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        size = f" of {len(result)}" if isinstance(result, tuple) else ""
        msg = (
            f"{type(trainer).__name__}.train_step must return a pair, (state, "
            f"metrics), got {_text(result)}{size}."
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
            f"{type(trainer).__name__}.{step} must return {pair}, with metrics that "
            f"are ml.metrics.Metrics, got a {type(metrics).__name__}."
        )
        raise MeshLayoutError(msg)


def missing(trainer: "Trainer", step: str) -> str:
    """Returns the message for a step with neither a loss function nor an override."""
    name = type(trainer).__name__
    return (
        f"{name} has no loss function to make its {step} from: give loss_fn, or "
        f"override {step} in a subclass."
    )
