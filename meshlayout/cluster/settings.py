"""Which processes a program consists of: from arguments, the environment, or JAX.

Launchers and schedulers each have their own variables for the same three facts: where
process 0 listens, how many processes there are, and which one this is. A fact is taken
from the first source that has it: the arguments, JAX's own variables, TF_CONFIG,
DTENSOR_*, KERAS_DISTRIBUTION_*, and then JAX's detection of SLURM, Open MPI, Kubernetes
and Cloud TPU. Arguments override the environment, but variables that contradict each
other are an error: one of them is a leftover, and only the user knows which.

`find_settings` is a function of the arguments and a mapping of variables, so that every
environment can be tested without being in it.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from meshlayout import _checks
from meshlayout.errors import ClusterError


_ADDRESS, _COUNT, _INDEX = "coordinator_address", "num_processes", "process_id"
_BIND, _DEVICES = "coordinator_bind_address", "local_device_ids"

# By field: what it must be, and one that is right.
_KINDS = {
    _ADDRESS: ("the host of process 0 and a free port on it", "10.0.0.1:1234"),
    _BIND: ("an address of this machine and a free port", "0.0.0.0:1234"),
    _COUNT: ("a positive integer", "4"),
    _INDEX: ("a non-negative integer", "0"),
    _DEVICES: ("distinct non-negative integers", "0,1"),
}

# As JAX's detection gives them: the name of the environment, the coordinator's address,
# the number of processes, the index of this one, and the ids of its devices.
Detected: TypeAlias = tuple[str, str | None, int | None, int | None, Any]
Detect: TypeAlias = Callable[[], Detected | None]


_LARGEST_PORT = 65535

_ALL_THREE = (
    "Say all three: initialize('10.0.0.1:1234', num_processes=2, process_id=0), or the "
    "variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The processes of a program, and which one this is.

    Attributes:
        coordinator_address: Where process 0 can be reached, as `"host:port"`; None for
            a program of one process.
        num_processes: The number of processes.
        process_index: The index of this one.
        bind_address: Where process 0 listens, as `"host:port"`: the coordinator's
            address unless given.
        local_device_ids: The ids of the accelerators that this process may use; None
            for all of the machine.
        sources: Where each of these came from: the argument or variable, by field of
            `initialize`.
    """

    coordinator_address: str | None = None
    num_processes: int = 1
    process_index: int = 0
    bind_address: str | None = None
    local_device_ids: tuple[int, ...] | None = None
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def source(self) -> str:
        """Where the settings came from, as text; empty if nothing was set.

        Example:
            >>> environment = {
            ...     "DTENSOR_JOBS": "a:1234,b:1234",
            ...     "DTENSOR_CLIENT_ID": "1",
            ... }
            >>> settings = find_settings({}, environment)
            >>> settings.process_index, settings.num_processes, settings.source
            (1, 2, 'DTENSOR_JOBS and DTENSOR_CLIENT_ID')
        """
        return listed(list(dict.fromkeys(self.sources.values())))

    def __str__(self) -> str:
        if self.num_processes == 1:
            return "one process"
        ids = self.local_device_ids
        devices = "" if ids is None else f", local devices {listed(ids)}"
        bind = self.bind_address
        elsewhere = "" if bind == self.coordinator_address else f", bound to {bind}"
        return (
            f"process {self.process_index} of {self.num_processes}, coordinator "
            f"{self.coordinator_address}{elsewhere}{devices}"
        )


class _Setting(NamedTuple):
    """A setting, and the argument or variable that it came from with what it held."""

    value: Any
    source: str
    held: str

    def __str__(self) -> str:
        return f"{self.source}={self.held}"


# The settings of one source, by field.
_Found: TypeAlias = dict[str, _Setting]


def find_settings(
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    detect: Detect = lambda: None,
) -> Settings:
    """Returns the processes of this program.

    Args:
        arguments: The arguments of `initialize`, by name; None or missing if not given.
        environment: The environment variables.
        detect: JAX's detection of a cluster, called if the arguments and variables do
            not say everything.

    Raises:
        ClusterError: If a value is malformed, if something is missing, or if the
            sources contradict each other.
    """
    found = _from_arguments(arguments)
    if not _is_complete(found):
        variables = [read(environment) for read in _READERS]
        _check_agreement(variables)
        for source in variables:
            found = {**source, **found}
    found = {**_from_jax(environment, [_BIND, _DEVICES]), **found}
    if not _is_complete(found) and _may_be_a_cluster(environment):
        found = {**_detected(detect), **found}
    _check_index(found)
    if found.keys().isdisjoint([_ADDRESS, _COUNT, _INDEX]) or _is_alone(found):
        # Where process 0 listens does not matter if there is no other.
        found = {field: found[field] for field in (_COUNT, _DEVICES) if field in found}
    else:
        _check_completeness(found)
        found.setdefault(_BIND, found[_ADDRESS])
    values = {field: found[field].value for field in found}
    return Settings(
        coordinator_address=values.get(_ADDRESS),
        num_processes=values.get(_COUNT, 1),
        process_index=values.get(_INDEX, 0),
        bind_address=values.get(_BIND),
        local_device_ids=values.get(_DEVICES),
        sources={field: found[field].source for field in _KINDS if field in found},
    )


def _is_complete(found: _Found) -> bool:
    return found.keys() >= {_ADDRESS, _COUNT, _INDEX} or _is_alone(found)


def _is_alone(found: _Found) -> bool:
    return _COUNT in found and found[_COUNT].value == 1


def _from_arguments(arguments: Mapping[str, Any]) -> _Found:
    """Returns the settings of the arguments that were given."""
    found = {}
    for field in _KINDS:
        value = arguments.get(field)
        if value is None:
            continue
        held = _checks.shown(value)
        if field in (_COUNT, _INDEX):
            value = _checks.count(
                field,
                value,
                at_least=int(field == _COUNT),
                where="initialize",
                error=ClusterError,
            )
        elif field == _DEVICES:
            value = _device_ids(value)
        elif not isinstance(value, str) or split_address(value) is None:
            raise _malformed(field, field, held)
        found[field] = _Setting(value, field, held)
    return found


def _device_ids(value: Any) -> tuple[int, ...]:
    """Returns the argument `local_device_ids`, one id or several, as a tuple."""
    is_several = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    ids = value if is_several else [value]
    with contextlib.suppress(ClusterError):
        ids = [_checks.count("id", i, at_least=0, error=ClusterError) for i in ids]
        if ids and len(set(ids)) == len(ids):
            return tuple(ids)
    raise _malformed(_DEVICES, _DEVICES, _checks.shown(value))


def _from_jax(
    environment: Mapping[str, str], fields: Iterable[str] = (_ADDRESS, _COUNT, _INDEX)
) -> _Found:
    """Returns the settings of JAX's own variables.

    `jax.distributed.initialize` reads the address and the device ids; the names of the
    other two are those of its arguments, and common.
    """
    return _from_names({field: f"JAX_{field.upper()}" for field in fields}, environment)


def _from_tf_config(environment: Mapping[str, str]) -> _Found:
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
    if not addresses:
        return {}
    for address in addresses:
        if split_address(address) is None:
            raise _malformed_tf_config(
                text, f"{address!r} must be an address such as 'a:1234'"
            )
    if len(addresses) > 1:
        index = _tf_config_index(text, jobs, job, index)
    return {
        _ADDRESS: _Setting(addresses[0], "TF_CONFIG", text),
        _COUNT: _Setting(len(addresses), "TF_CONFIG", text),
        _INDEX: _Setting(index if len(addresses) > 1 else 0, "TF_CONFIG", text),
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
            f"the task's index must be {_span(size)}, as the cluster has {size} tasks "
            f"of type {job!r}, got {index!r}",
        )
    return number + (len(jobs.get("chief", [])) if job == "worker" else 0)


def _from_dtensor(environment: Mapping[str, str]) -> _Found:
    """Returns the settings of TensorFlow DTensor's variables.

    As in TensorFlow, a process without an id is the first one.
    """
    names = {_COUNT: "DTENSOR_NUM_CLIENTS", _INDEX: "DTENSOR_CLIENT_ID"}
    found = _from_jobs("DTENSOR_JOBS", names, environment)
    if _ADDRESS in found:
        address = found[_ADDRESS]
        found.setdefault(_COUNT, address._replace(value=1))
        found.setdefault(_INDEX, address._replace(value=0))
    return found


def _from_keras(environment: Mapping[str, str]) -> _Found:
    """Returns the settings of Keras's variables for `keras.distribution`.

    The addresses may be those of all processes, or that of process 0 alone.
    """
    names = {
        _COUNT: "KERAS_DISTRIBUTION_NUM_PROCESSES",
        _INDEX: "KERAS_DISTRIBUTION_PROCESS_ID",
    }
    return _from_jobs("KERAS_DISTRIBUTION_JOB_ADDRESSES", names, environment)


_READERS = (_from_jax, _from_tf_config, _from_dtensor, _from_keras)


def _from_jobs(
    name: str, names: Mapping[str, str], environment: Mapping[str, str]
) -> _Found:
    """Returns the settings of a variable with all addresses, and of others.

    Args:
        name: The variable with the addresses, separated by commas.
        names: The variables of the other fields.
        environment: The environment variables.
    """
    found = _from_names(names, environment)
    text = environment.get(name, "").strip()
    if not text:
        return found
    addresses = [address.strip() for address in text.split(",")]
    if any(split_address(address) is None for address in addresses):
        raise _malformed(_ADDRESS, name, repr(text))
    number = found.get(_COUNT)
    if len(addresses) > 1 and number and number.value != len(addresses):
        msg = (
            f"initialize: {name}={text!r} has {len(addresses)} addresses, but "
            f"{number}. Set both for the same processes, or the addresses alone."
        )
        raise ClusterError(msg)
    if len(addresses) > 1:
        found.setdefault(_COUNT, _Setting(len(addresses), name, repr(text)))
    return found | {_ADDRESS: _Setting(addresses[0], name, repr(text))}


def _from_names(names: Mapping[str, str], environment: Mapping[str, str]) -> _Found:
    """Returns the settings of variables that hold one field each."""
    found = {}
    for field, name in names.items():
        # An empty variable is how shells unset one for a command.
        text = environment.get(name, "").strip()
        if text:
            value = _parsed(field, text)
            if value is None:
                raise _malformed(field, name, repr(text))
            found[field] = _Setting(value, name, repr(text))
    return found


def _parsed(field: str, text: str) -> Any:
    """Returns the value of a field that a variable holds; None if it is malformed."""
    if field in (_ADDRESS, _BIND):
        return text if split_address(text) else None
    parts = text.split(",") if field == _DEVICES else [text]
    # `int` alone would take "+1" and "1_000".
    if not all(part.strip().isdecimal() for part in parts):
        return None
    numbers = tuple(map(int, parts))
    if field == _DEVICES:
        return numbers if len(set(numbers)) == len(numbers) else None
    return None if field == _COUNT and not numbers[0] else numbers[0]


def _may_be_a_cluster(environment: Mapping[str, str]) -> bool:
    """Returns whether JAX's detection may find several processes.

    Without this, notebooks on one TPU host or in a Kubernetes pod would wait for
    metadata servers and permissions that they do not have.
    """
    if "SLURM_JOB_ID" in environment or "OMPI_COMM_WORLD_SIZE" in environment:
        return True
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get(
        "TPU_WORKER_HOSTNAMES"
    )
    if hosts is not None:
        is_multislice = "MEGASCALE_COORDINATOR_ADDRESS" in environment
        return "," in hosts or is_multislice
    in_pod = "KUBERNETES_SERVICE_HOST" in environment
    return not in_pod or "JOB_COMPLETION_INDEX" in environment


def _detected(detect: Detect) -> _Found:
    """Returns the settings that JAX's detection finds."""
    try:
        detected = detect()
    except Exception as problem:
        msg = (
            "initialize: JAX's detection of the cluster failed with "
            f"{type(problem).__name__}: {problem}. {_ALL_THREE}"
        )
        raise ClusterError(msg) from problem
    if detected is None:
        return {}
    kind, address, number, index, devices = detected
    source = f"JAX's detection ({kind})"
    values = {_ADDRESS: address, _COUNT: number, _INDEX: index}
    if devices is not None:
        values[_DEVICES] = tuple(devices)
    return {
        field: _Setting(value, source, repr(value))
        for field, value in values.items()
        if value is not None
    }


def _check_agreement(variables: Sequence[_Found]) -> None:
    """Refuses variables that give different numbers of processes or indices."""
    for field, what in ((_COUNT, "processes"), (_INDEX, "process indices")):
        values = [found[field] for found in variables if field in found]
        for value in values[1:]:
            if value.value != values[0].value:
                msg = (
                    f"initialize: {values[0]} and {value} contradict each other: "
                    f"{what} {values[0].value} and {value.value}. Unset the variable "
                    "that was not meant for this program, or give the arguments "
                    "coordinator_address, num_processes and process_id."
                )
                raise ClusterError(msg)


def _check_completeness(found: _Found) -> None:
    """Refuses settings of which some are missing."""
    fields = (_ADDRESS, _COUNT, _INDEX)
    missing = [field for field in fields if field not in found]
    if missing:
        values = listed([str(found[field]) for field in fields if field in found])
        msg = f"initialize: got {values}, but no {listed(missing)}. {_ALL_THREE}"
        raise ClusterError(msg)


def _check_index(found: _Found) -> None:
    """Refuses an index that the number of processes does not have."""
    if _COUNT not in found or _INDEX not in found:
        return
    number, index = found[_COUNT], found[_INDEX]
    if index.value >= number.value:
        msg = (
            f"initialize: {index} does not fit {number}: the index of a process must "
            f"be {_span(number.value)}."
        )
        raise ClusterError(msg)


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


def _span(size: int) -> str:
    """Returns the indices of a number of things, as `"0 or 1"`."""
    return {1: "0", 2: "0 or 1"}.get(size, f"between 0 and {size - 1}")


def _malformed(field: str, name: str, held: str) -> ClusterError:
    what, example = _KINDS[field]
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
