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

# A TF_CONFIG of many workers is worth showing.
_LONGEST = 2000


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
        addresses, index = _read_tf_config(text)
    except ValueError as problem:
        example = {
            "cluster": {"worker": ["10.0.0.1:1234", "10.0.0.2:1234"]},
            "task": {"type": "worker", "index": 0},
        }
        msg = (
            f"initialize: TF_CONFIG={shown(text)}: {problem}. Right for the first of "
            f"two processes is {json.dumps(example)!r}."
        )
        raise ClusterError(msg) from None
    if len(addresses) < 2:
        return {}  # As platforms set it on a single machine.
    values = {ADDRESS: addresses[0], COUNT: len(addresses), INDEX: index}
    return {
        field: Setting(value, "TF_CONFIG", shown(text))
        for field, value in values.items()
    }


def _read_tf_config(text: str) -> tuple[list[str], int]:
    """Returns the addresses of all processes, and the index of this one.

    Raises:
        ValueError: With what is wrong.
    """
    try:
        config = json.loads(text)
        jobs, task = config.get("cluster") or {}, config.get("task") or {}
        is_well_formed = all(isinstance(jobs[job], list) for job in jobs)
        job, index = task.get("type"), task.get("index")
    except (ValueError, TypeError, AttributeError, RecursionError):
        is_well_formed, jobs, task, job, index = False, {}, {}, None, None
    if not is_well_formed:
        msg = "it must be JSON with a 'cluster' and a 'task'"
        raise ValueError(msg)
    for other in ("ps", "evaluator"):
        if job == other or (other == "ps" and jobs.get(other)):
            msg = (
                f"a task of type {other!r} has no place here: all processes train, and "
                "hold their part of the parameters. Start chief and workers only"
            )
            raise ValueError(msg)
    unknown = set(jobs) - {"chief", "worker", "ps", "evaluator"}
    if unknown or len(jobs.get("chief", [])) > 1:
        got = repr(min(unknown)) if unknown else f"{len(jobs['chief'])} chiefs"
        msg = f"the cluster must have one 'chief' or none and 'worker's, got {got}"
        raise ValueError(msg)
    chief, workers = jobs.get("chief", []), jobs.get("worker", [])
    addresses = [*chief, *workers]
    _check_addresses(addresses)
    if len(addresses) < 2 and not task:
        return addresses, 0
    types = [name for name in ("chief", "worker") if jobs.get(name)]
    if addresses and job not in types:
        msg = f"the task's type must be {' or '.join(map(repr, types))}, got {job!r}"
        raise ValueError(msg)
    tasks = jobs.get(job, [])
    # Some launchers write "0".
    number = _number(str(index)) if isinstance(index, (int, str)) else None
    if addresses and (number is None or number >= len(tasks)):
        msg = (
            f"the task's index must be {span(len(tasks))}, as the cluster has "
            f"{len(tasks)} task{'s' * (len(tasks) > 1)} of type {job!r}, got {index!r}"
        )
        raise ValueError(msg)
    return addresses, (number or 0) + (len(chief) if job == "worker" else 0)


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
    try:
        _check_addresses(addresses)
    except ValueError as problem:
        msg = (
            f"initialize: {name}={shown(text)}: {problem}. Right for two processes is "
            "'10.0.0.1:1234,10.0.0.2:1234'."
        )
        raise ClusterError(msg) from None
    first = Setting(addresses[0], name, shown(text))
    if are_all or len(addresses) > 1:
        count = found.setdefault(COUNT, first._replace(value=len(addresses)))
        if count.value != len(addresses):
            msg = (
                f"initialize: {name}={shown(text)} has {len(addresses)} addresses, but "
                f"{count}. Set both for the same processes, or the addresses alone."
            )
            raise ClusterError(msg)
    return found | {ADDRESS: first}


def _check_addresses(addresses: Sequence[Any]) -> None:
    """Refuses malformed or repeated addresses of processes.

    Raises:
        ValueError: With what is wrong.
    """
    for position, address in enumerate(addresses):
        if split_address(address) is None:
            msg = f"{address!r} is not a host with a port, such as '10.0.0.1:1234'"
            raise ValueError(msg)
        if address in addresses[:position]:
            msg = f"{address!r} is there twice"
            raise ValueError(msg)


def _from_names(names: Mapping[str, str], environment: Mapping[str, str]) -> Found:
    """Returns the settings of variables that hold one field each."""
    found = {}
    for field, name in names.items():
        # An empty variable is how shells unset one for a command.
        text = environment.get(name, "").strip()
        if text:
            value = parsed(field, text)
            if value is None:
                raise malformed(field, name, shown(text))
            found[field] = Setting(value, name, shown(text))
    return found


def parsed(field: str, text: str) -> Any:
    """Returns the value of a field that a variable holds; None if it is malformed."""
    if field in (ADDRESS, BIND):
        return text if split_address(text) else None
    if field == DEVICES:
        ids = [_number(part.strip()) for part in text.split(",")]
        return tuple(ids) if None not in ids and len(set(ids)) == len(ids) else None
    number = _number(text)
    return None if field == COUNT and number == 0 else number


def _number(text: str) -> int | None:
    """Returns the number that a text is; None if it is not one."""
    # `int` alone would take "+1" and "1_000", and refuse thousands of digits.
    return int(text) if text.isdecimal() and len(text) < 10 else None


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
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return None
    number = _number(port)
    try:
        host.encode("idna")  # As Python's sockets do: no empty or very long parts.
    except UnicodeError:
        return None
    if not host or not host.isprintable() or any(c in " /,[]" for c in host):
        return None
    return (host, number) if number and number <= _LARGEST_PORT else None


def listed(names: Sequence[object]) -> str:
    """Returns names as a sentence has them.

    Example:
        >>> listed(["a"]), listed([1, 2, 3])
        ('a', '1, 2 and 3')
    """
    *first, last = map(str, names) if names else [""]
    return f"{', '.join(first)} and {last}" if first else last


def shown(text: str) -> str:
    """Returns what a variable holds as messages show it: whole, unless it is huge."""
    return repr(text) if len(text) <= _LONGEST else f"{text[:_LONGEST]!r}..."


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
