"""Agreement between processes, through the key-value store of `jax.distributed`.

No device takes part, so that any thread may ask at any time.
"""

import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax

from meshlayout import _jax
from meshlayout.data.rows import processes_of
from meshlayout.errors import DataError, MeshLayoutError
from meshlayout.layout import Layout


# How long to wait for the other processes. They may still be compiling, or reading.
TIMEOUT_S = 600

_counts: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


class Agreement:
    """What some processes exchange about one data set.

    All of them have to make their data sets in the same order.

    Args:
        processes: Which processes; this one is among them.
    """

    def __init__(self, processes: list[int]) -> None:
        self._processes = processes
        self._here = jax.process_index()
        number = next(_counts[tuple(processes)])
        named = "-".join(map(str, processes))
        self._name = f"meshlayout/data/{named}/{number}"
        self._iterations = itertools.count()

    def new_iteration(self) -> str:
        """Returns a name for one iteration, the same on all processes."""
        return f"iteration{next(self._iterations)}"

    def exchange(self, what: str, value: Any) -> dict[int, Any]:
        """Returns what each process says.

        Args:
            what: A name for it, which no other exchange has.
            value: What this process says, as JSON takes it.

        Raises:
            DataError: If a process says nothing in time.
        """
        self.say(what, value)
        client = _jax.coordination_client()
        key = f"{self._name}/{what}"
        said: dict[int, Any] = {}
        for process in self._processes:
            try:
                text = client.blocking_key_value_get(
                    f"{key}/{process}", TIMEOUT_S * 1000
                )
            except jax.errors.JaxRuntimeError as error:
                msg = (
                    f"process {process} did not answer process {self._here} about its "
                    f"data within {TIMEOUT_S} s. All processes have to make the same "
                    "data sets in the same order, and to iterate over them alike."
                )
                raise DataError(msg) from error
            said[process] = json.loads(text)
        return said

    def fail(self, what: str, error: Exception) -> None:
        """Tells the other processes of an error, in an exchange that they come to.

        Args:
            what: As for `exchange`.
            error: The error, which this process raises whatever the others say.
        """
        with contextlib.suppress(DataError):
            self.exchange(what, {_FAILED: _text(error)})

    def say(self, what: str, value: Any) -> None:
        """Answers the other processes, and does not wait for theirs.

        Args:
            what: As for `exchange`.
            value: What this process says.
        """
        key = f"{self._name}/{what}/{self._here}"
        client = _jax.coordination_client()
        client.key_value_set(key, json.dumps(value), allow_overwrite=True)

    def forget(self, what: str) -> None:
        """Removes what this process said in an exchange that all have finished.

        Args:
            what: Its name.
        """
        client = _jax.coordination_client()
        client.key_value_delete(f"{self._name}/{what}/{self._here}")


# The exchanges in which a data set is made.
FACTS, PLAN = "facts", "plan"

_FAILED = "failed"


def agreement_of(layout: Layout) -> Agreement | None:
    """Returns the agreement of the processes of a layout's mesh.

    Args:
        layout: How batches lie on the mesh.

    Returns:
        None where this process has nobody to agree with.
    """
    processes = processes_of(layout.mesh)
    is_alone = len(processes) == 1 or jax.process_index() not in processes
    if is_alone or _jax.coordination_client() is None:
        return None
    return Agreement(processes)


@contextlib.contextmanager
def telling(agreement: Agreement | None, what: str) -> Iterator[None]:
    """Tells the other processes of an error inside, so that none waits for this one.

    Args:
        agreement: Between which processes; None if there are none.
        what: The exchange that comes next.
    """
    try:
        yield
    except Exception as error:
        if agreement is not None:
            agreement.fail(what, error)
        raise


def failure(said: dict[int, Any]) -> tuple[int, str] | None:
    """Returns the first process that has failed, and its error.

    Args:
        said: What each process said in an exchange.

    Returns:
        None if none has.
    """
    for process, word in said.items():
        if isinstance(word, dict) and _FAILED in word:
            return process, word[_FAILED]
    return None


def check_made(agreement: Agreement) -> None:
    """Raises DataError if another process could not make its data set.

    Args:
        agreement: Between which processes.
    """
    _raise_failure(agreement.exchange(PLAN, {}))


def check_same(agreement: Agreement, facts: dict[str, Any]) -> None:
    """Raises DataError if processes make a data set differently.

    Args:
        agreement: Between which processes.
        facts: What has to be the same, by name.
    """
    said = agreement.exchange(FACTS, facts)
    _raise_failure(said)
    first = min(said)
    for process, other in said.items():
        for name, value in said[first].items():
            if other.get(name) != value:
                msg = (
                    f"process {first} makes the data set with {name}={value!r}, and "
                    f"process {process} with {name}={other.get(name)!r}. It has to be "
                    "the same on all processes."
                )
                raise DataError(msg)


def _raise_failure(said: dict[int, Any]) -> None:
    failed = failure(said)
    if failed is not None:
        process, text = failed
        raise DataError(f"process {process} cannot make the data set: {text}")


def _text(error: Exception) -> str:
    is_own = isinstance(error, MeshLayoutError)
    return str(error) if is_own else f"{type(error).__name__}: {error}"
