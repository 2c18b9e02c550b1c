"""What comes back from workers: the results of closures, and how old gradients were."""

import threading
from dataclasses import dataclass
from typing import Any

from meshlayout import _checks
from meshlayout._annotations import PyTree
from meshlayout.distribute.parameter_server.workers import Done
from meshlayout.errors import StrategyError


class RemoteValue:
    """What a scheduled function returns, once it has run.

    Made by `ClusterCoordinator.schedule`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_ready = threading.Event()
        self._value: PyTree = None
        self._error: BaseException | None = None

    def fetch(self, timeout_s: float | None = None) -> PyTree:
        """Waits for the function, and returns what it returned, as NumPy arrays.

        Args:
            timeout_s: The seconds to wait at most; None for as long as it takes.

        Raises:
            StrategyError: If it takes longer, or the function was cancelled.
            Exception: The function's own exception, if it raised one.
        """
        if timeout_s is not None:
            timeout_s = _checks.number(
                "timeout_s", timeout_s, at_least=0, where="fetch", error=StrategyError
            )
        # In parts: Ctrl-C does not end a wait without a time on all platforms.
        while not self._is_ready.wait(0.5 if timeout_s is None else timeout_s):
            if timeout_s is not None:
                msg = f"fetch: {self._name} has not finished within {timeout_s:g} s."
                raise StrategyError(msg)
        if self._error is not None:
            raise self._error
        return self._value

    def is_ready(self) -> bool:
        """Returns whether the function has finished, failed or been cancelled."""
        return self._is_ready.is_set()

    def _set(self, value: PyTree = None, error: BaseException | None = None) -> None:
        if not self.is_ready():
            self._value, self._error = value, error
            self._is_ready.set()

    def __reduce__(self) -> Any:
        msg = (
            f"the result of {self._name} was passed to another closure, which runs "
            "elsewhere. Pass its value: result.fetch()."
        )
        raise StrategyError(msg)

    def __repr__(self) -> str:
        if not self.is_ready():
            state = "not ready"
        else:
            state = "failed" if self._error is not None else "ready"
        return f"RemoteValue({self._name}, {state})"


@dataclass(frozen=True)
class WorkerStaleness:
    """How old the gradients of one worker were.

    Attributes:
        num_pushes: The pushes that were applied. A closure that is run again, since a
            server has forgotten it, counts again.
        mean: The mean of their staleness.
        max: The largest.
        num_recomputed: How often one was computed again, as it was too old.
    """

    num_pushes: int = 0
    mean: float = 0.0
    max: int = 0
    num_recomputed: int = 0

    def _after(self, done: Done) -> "WorkerStaleness":
        if done.staleness is None:
            return self
        count = self.num_pushes + 1
        return WorkerStaleness(
            count,
            self.mean + (done.staleness - self.mean) / count,
            max(self.max, done.staleness),
            self.num_recomputed + done.num_recomputed,
        )


@dataclass(frozen=True)
class Staleness(WorkerStaleness):
    """How old gradients were when they were applied.

    The staleness of a closure is the number of other closures whose changes a server
    applied after this one had pulled its variables; of several servers, the most.

    Attributes:
        per_worker: The same for each worker.
    """

    per_worker: tuple[WorkerStaleness, ...] = ()
