"""What arguments and environment variables say of a program's processes.

One function reads each source, and returns what it has of the same five settings, by
the name of the argument of `initialize`. `settings` decides between the sources.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from meshlayout import _checks
from meshlayout.errors import ClusterError


ADDRESS, COUNT, INDEX = "coordinator_address", "num_processes", "process_id"
BIND, DEVICES = "coordinator_bind_address", "local_device_ids"

# By field: what it must be, and one that is right.
KINDS = {
    ADDRESS: ("the host of process 0 and a free port on it", "10.0.0.1:1234"),
    BIND: ("an address of this machine and a free port", "0.0.0.0:1234"),
    COUNT: ("a positive integer", "4"),
    INDEX: ("a non-negative integer", "0"),
    DEVICES: ("distinct non-negative integers", "0,1"),
}

_LARGEST_PORT = 65535


class Setting(NamedTuple):
    """A setting, and the argument or variable that it came from with what it held."""

    value: Any
    source: str
    held: str

    def __str__(self) -> str:
        return f"{self.source}={self.held}"


# The settings of one source, by field.
Found: TypeAlias = dict[str, Setting]


def from_arguments(arguments: Mapping[str, Any]) -> Found:
    """Returns the settings of the arguments that were given."""
    found = {}
    for field in KINDS:
        value = arguments.get(field)
        if value is None:
            continue
        held = _checks.shown(value)
        if field in (COUNT, INDEX):
            value = _checks.count(
                field,
                value,
                at_least=int(field == COUNT),
                where="initialize",
                error=ClusterError,
            )
        elif field == DEVICES:
            value = _device_ids(value)
        elif not isinstance(value, str) or split_address(value) is None:
            raise malformed(field, field, held)
        found[field] = Setting(value, field, held)
    return found


def _device_ids(value: Any) -> tuple[int, ...]:
    """Returns the argument `local_device_ids`, one id or several, as a tuple."""
    is_several = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    ids = value if is_several else [value]
    with contextlib.suppress(ClusterError):
        ids = [_checks.count("id", i, at_least=0, error=ClusterError) for i in ids]
        if ids and len(set(ids)) == len(ids):
            return tuple(ids)
    raise malformed(DEVICES, DEVICES, _checks.shown(value))


def from_jax(
    environment: Mapping[str, str], fields: Iterable[str] = (ADDRESS, COUNT, INDEX)
) -> Found:
    """Returns the settings of JAX's own variables.

    `jax.distributed.initialize` reads the address and the device ids; the names of the
    other two are those of its arguments, and common.
    """
    return _from_names({field: f"JAX_{field.upper()}" for field in fields}, environment)


def _from_tf_config(environment: Mapping[str, str]) -> Found:
    """Returns the settings of TF_CONFIG: the chief is process 0, then the workers."""
    text = environment.get("TF_CONFIG", "").strip()
    if not text:
        return {}
    try:
        config = json.loads(text)
        jobs, task = config.get("cluster") or {}, config.get("task") or {}
        is_well_formed = all(isinstance(jobs[job], list) for job in jobs)
        job, index = task.get("type"), task.get("index")
    except (ValueError, TypeError, AttributeError):
        is_well_formed, jobs, job, index = False, {}, None, None
    if not is_well_formed:
        raise _malformed_tf_config(
            text, "it must be JSON with a 'cluster' and a 'task'"
        )
    if job in ("ps", "evaluator") or jobs.get("ps"):
        raise _malformed_tf_config(
            text,
            f"a task of type {job if job in ('ps', 'evaluator') else 'ps'!r} has no "
            "place here: all processes train, and hold their part of the parameters. "
            "Start chief and workers only",
        )
    addresses = [*jobs.get("chief", []), *jobs.get("worker", [])]
    fact = _problem_of(addresses)
    if fact:
        raise _malformed_tf_config(text, fact)
    if len(addresses) < 2:
        return {}  # As platforms set it on a single machine.
    index = _tf_config_index(text, jobs, job, index)
    values = {ADDRESS: addresses[0], COUNT: len(addresses), INDEX: index}
    return {
        field: Setting(value, "TF_CONFIG", repr(text))
        for field, value in values.items()
    }


def _tf_config_index(
    text: str, jobs: Mapping[str, list[str]], job: Any, index: Any
) -> int:
    """Returns the index of the process of a task of TF_CONFIG."""
    known = [name for name in ("chief", "worker") if jobs.get(name)]
    if job not in known:
        types = " or ".join(map(repr, known))
        raise _malformed_tf_config(
            text, f"the task's type must be {types}, got {job!r}"
        )
    size = len(jobs[job])
    try:
        number = int(index)  # Some launchers write "0".
    except (TypeError, ValueError):
        number = -1
    if isinstance(index, (bool, float)) or not 0 <= number < size:
        raise _malformed_tf_config(
            text,
            f"the task's index must be {span(size)}, as the cluster has {size} "
            f"task{'s' * (size > 1)} of type {job!r}, got {index!r}",
        )
    return number + (len(jobs.get("chief", [])) if job == "worker" else 0)


def _from_dtensor(environment: Mapping[str, str]) -> Found:
    """Returns the settings of TensorFlow DTensor's variables.

    As in TensorFlow, a process without an id is the first one, and the first one is
    alone if there are no jobs.
    """
    names = {COUNT: "DTENSOR_NUM_CLIENTS", INDEX: "DTENSOR_CLIENT_ID"}
    found = _from_jobs("DTENSOR_JOBS", names, environment, are_all=True)
    if ADDRESS in found:
        found.setdefault(INDEX, found[ADDRESS]._replace(value=0))
    elif found.keys() == {INDEX} and not found[INDEX].value:
        return {}
    return found


def _from_keras(environment: Mapping[str, str]) -> Found:
    """Returns the settings of Keras's variables for `keras.distribution`.

    The addresses may be those of all processes, or that of process 0 alone.
    """
    names = {
        COUNT: "KERAS_DISTRIBUTION_NUM_PROCESSES",
        INDEX: "KERAS_DISTRIBUTION_PROCESS_ID",
    }
    name = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
    return _from_jobs(name, names, environment, are_all=False)


READERS = (from_jax, _from_tf_config, _from_dtensor, _from_keras)


def _from_jobs(
    name: str,
    names: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    are_all: bool,
) -> Found:
    """Returns the settings of a variable that lists addresses, and of others.

    Args:
        name: The variable with the addresses, separated by commas.
        names: The variables of the other fields.
        environment: The environment variables.
        are_all: Whether a single address means a single process.
    """
    found = _from_names(names, environment)
    text = environment.get(name, "").strip()
    if not text:
        return found
    addresses = [address.strip() for address in text.split(",")]
    fact = _problem_of(addresses)
    if fact:
        msg = (
            f"initialize: {name}={text!r}: {fact}. Right for two processes is "
            "'10.0.0.1:1234,10.0.0.2:1234'."
        )
        raise ClusterError(msg)
    first = Setting(addresses[0], name, repr(text))
    if are_all or len(addresses) > 1:
        count = found.setdefault(COUNT, first._replace(value=len(addresses)))
        if count.value != len(addresses):
            msg = (
                f"initialize: {name}={text!r} has {len(addresses)} addresses, but "
                f"{count}. Set both for the same processes, or the addresses alone."
            )
            raise ClusterError(msg)
    return found | {ADDRESS: first}


def _problem_of(addresses: Sequence[Any]) -> str:
    """Returns what is wrong with the addresses of all processes, or nothing."""
    for position, address in enumerate(addresses):
        if split_address(address) is None:
            return f"{address!r} is not a host with a port, such as '10.0.0.1:1234'"
        if address in addresses[:position]:
            return f"{address!r} is there twice"
    return ""


def _from_names(names: Mapping[str, str], environment: Mapping[str, str]) -> Found:
    """Returns the settings of variables that hold one field each."""
    found = {}
    for field, name in names.items():
        # An empty variable is how shells unset one for a command.
        text = environment.get(name, "").strip()
        if text:
            value = parsed(field, text)
            if value is None:
                raise malformed(field, name, repr(text))
            found[field] = Setting(value, name, repr(text))
    return found


def parsed(field: str, text: str) -> Any:
    """Returns the value of a field that a variable holds; None if it is malformed."""
    if field in (ADDRESS, BIND):
        return text if split_address(text) else None
    parts = text.split(",") if field == DEVICES else [text]
    # `int` alone would take "+1" and "1_000".
    if not all(part.strip().isdecimal() for part in parts):
        return None
    numbers = tuple(map(int, parts))
    if field == DEVICES:
        return numbers if len(set(numbers)) == len(numbers) else None
    return None if field == COUNT and not numbers[0] else numbers[0]


def split_address(address: object) -> tuple[str, int] | None:
    """Returns the host and the port of an address; None if it is malformed.

    Example:
        >>> split_address("10.0.0.1:1234"), split_address("[::1]:1234")
        (('10.0.0.1', 1234), ('::1', 1234))
        >>> split_address("10.0.0.1"), split_address("a:0"), split_address("::1:1234")
        (None, None, None)
    """
    if not isinstance(address, str):
        return None
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return None
    is_port = colon and port.isdecimal() and 0 < int(port) <= _LARGEST_PORT
    is_host = host and not any(c.isspace() or c in "/,[]" for c in host)
    return (host, int(port)) if is_port and is_host else None


def listed(names: Sequence[object]) -> str:
    """Returns names as a sentence has them.

    Example:
        >>> listed(["a"]), listed([1, 2, 3])
        ('a', '1, 2 and 3')
    """
    *first, last = map(str, names) if names else [""]
    return f"{', '.join(first)} and {last}" if first else last


def span(size: int) -> str:
    """Returns the indices of a number of things, as `"0 or 1"`."""
    return {1: "0", 2: "0 or 1"}.get(size, f"between 0 and {size - 1}")


def malformed(field: str, name: str, held: str) -> ClusterError:
    """Returns the error of a malformed setting.

    Args:
        field: Which setting it is.
        name: The argument or variable.
        held: What it held, as messages show it.
    """
    what, example = KINDS[field]
    msg = f"initialize: {name} must be {what}, such as {example!r}, got {held}."
    return ClusterError(msg)


def _malformed_tf_config(text: str, fact: str) -> ClusterError:
    example = {
        "cluster": {"worker": ["10.0.0.1:1234", "10.0.0.2:1234"]},
        "task": {"type": "worker", "index": 0},
    }
    msg = (
        f"initialize: TF_CONFIG={text!r}: {fact}. Right for the first of two processes "
        f"is {json.dumps(example)!r}."
    )
    return ClusterError(msg)
