"""Datasets of which each worker has its own, as the coordinator sees them."""

import inspect
from collections.abc import Callable
from typing import Any

import cloudpickle

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.errors import StrategyError


class PerWorkerIterator:
    """An iterator of a per-worker dataset, to be passed to scheduled functions.

    Args:
        number: Its number, by which each worker finds its own.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> PyTree:
        msg = (
            "next(iterator) was called on the coordinator, and the batches are on the "
            "workers. Pass the iterator to a scheduled function, as in schedule(step, "
            "args=(iterator,)), and call next(iterator) there."
        )
        raise StrategyError(msg)


class PerWorkerDataset:
    """A dataset of which each worker has its own.

    Made by `ClusterCoordinator.create_per_worker_dataset`.
    """

    def __init__(self, add: Callable[[], int]) -> None:
        self._add = add

    def __iter__(self) -> PerWorkerIterator:
        return PerWorkerIterator(self._add())


def pickled_dataset(dataset_fn: Callable[..., Any]) -> bytes:
    """Returns a dataset function, and whether it takes a context, for workers.

    Raises:
        StrategyError: If it is not such a function, or cannot be sent to a worker.
    """
    if isinstance(dataset_fn, type) or not callable(dataset_fn):
        msg = (
            "create_per_worker_dataset: dataset_fn must be a function that returns "
            f"a dataset, got {_checks.shown(dataset_fn)}."
        )
        raise StrategyError(msg)
    takes_context = _takes_context(dataset_fn)
    names = ("context",) if takes_context else ()
    _checks.function("dataset_fn", dataset_fn, *names, error=StrategyError)
    try:
        return cloudpickle.dumps((dataset_fn, takes_context))
    except Exception as problem:
        reason = str(problem).partition("\n")[0]
        msg = (
            "create_per_worker_dataset: dataset_fn cannot be sent to a worker: "
            f"{type(problem).__name__}: {reason} Open files and connections in it."
        )
        raise StrategyError(msg) from problem


def _takes_context(function: Callable[..., Any]) -> bool:
    """Returns whether a function needs an argument, or has one that is called so."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        parameter.default is parameter.empty or "context" in parameter.name
        for parameter in parameters[:1]
        if parameter.kind in kinds
    )
