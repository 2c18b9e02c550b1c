"""Which processes a program consists of: from arguments, variables, or JAX's detection.

Arguments override variables. Variables that contradict each other are an error: one of
them is a leftover, and only the user knows which. Where another launcher has started
several processes that nothing here finds, each would run alone: that is an error, too.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from meshlayout import _checks
from meshlayout.errors import ClusterError


ADDRESS, COUNT, INDEX = "coordinator_address", "num_processes", "process_id"
BIND, DEVICES = "coordinator_bind_address", "local_device_ids"

# JAX's detection. It takes an address, a number and an index, each None if not known,
# and returns them after the name of the scheduler, with the ids of this process's
# devices; None if there is no scheduler.
Detect: TypeAlias = Callable[
    [str | None, int | None, int | None], tuple[Any, ...] | None
]

# Numbers of processes, in variables of launchers that JAX does not (always) detect.
_OTHER_COUNTS = (
    *("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    *("DTENSOR_NUM_CLIENTS", "KERAS_DISTRIBUTION_NUM_PROCESSES"),
)

_ALL_THREE = (
    "Give all three: initialize('10.0.0.1:1234', num_processes=2, process_id=0), or "
    "the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The processes of a program, and which one this is.

    Attributes:
        coordinator_address: Where process 0 can be reached, as `"host:port"`; empty
            for a program of one process.
        num_processes: The number of processes.
        process_index: The index of this one.
        bind_address: Where process 0 listens, as `"host:port"`.
        local_device_ids: The ids of the accelerators that this process may use; None
            for all of the machine.
        source: What said so.
    """

    coordinator_address: str = ""
    num_processes: int = 1
    process_index: int = 0
    bind_address: str = ""
    local_device_ids: tuple[int, ...] | None = None
    source: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        text = f"process {self.process_index} of {self.num_processes}, coordinator "
        text += f"{self.coordinator_address}, bound to {self.bind_address}"
        source = f" (from {self.source})" if self.source else ""
        return f"{text if self.num_processes > 1 else 'one process'}{source}"


def find_settings(
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    detect: Detect = lambda *known: None,
) -> Settings:
    """Returns the processes of this program.

    Args:
        arguments: The arguments of `initialize`, by name; None or missing if not given.
        environment: The environment variables.
        detect: JAX's detection, called if the rest does not say everything.

    Raises:
        ClusterError: If a value is malformed or missing, or if sources contradict each
            other.
    """
    given = {k: v for k, v in arguments.items() if v is not None}
    found = {name: (_checked(name, value, name), name) for name, value in given.items()}
    named = _from_names((BIND, DEVICES), environment)
    if not _is_complete(found):
        sources = [
            _from_names((ADDRESS, COUNT, INDEX), environment),
            _from_tf_config(environment.get("TF_CONFIG", "")),
        ]
        _check_agreement(sources)
        found = {**sources[1], **sources[0], **found}
        if not _is_complete(found) and _may_be_a_cluster(environment):
            detected = _detected(detect, found.get(ADDRESS, (None,))[0])
            _check_agreement([detected, {**found}])
            found = {**detected, **found}
    found = {**named, **found}
    values = {name: value for name, (value, _) in found.items()}
    count, index = values.get(COUNT), values.get(INDEX, 0)
    if count and index >= count:
        msg = f"initialize: {_text(found, INDEX)} does not fit {_text(found, COUNT)}: "
        raise ClusterError(f"{msg}the index must be less than the number of processes.")
    known = [name for name in (ADDRESS, COUNT, INDEX) if name in found]
    if not known:
        _check_not_one_of_several(environment)
    if known and count != 1 and len(known) < 3:
        got = " and ".join(_text(found, name) for name in known)
        raise ClusterError(f"initialize: got {got}, which is not all. {_ALL_THREE}")
    source = ", ".join(dict.fromkeys(source for _, source in found.values()))
    if count in (None, 1):  # where process 0 listens does not matter
        return Settings(local_device_ids=values.get(DEVICES), source=source)
    bind_address = values.get(BIND, values[ADDRESS])
    devices = values.get(DEVICES)
    return Settings(values[ADDRESS], count, index, bind_address, devices, source)


# A source: the values it has, and what it is called, by the argument of `initialize`.
_Found: TypeAlias = dict[str, tuple[Any, str]]


def _is_complete(found: _Found) -> bool:
    return found.keys() >= {ADDRESS, COUNT, INDEX} or found.get(COUNT, (0,))[0] == 1


def _text(found: _Found, name: str) -> str:
    return f"{name}={found[name][0]!r} (from {found[name][1]})"


def _checked(name: str, value: Any, source: str) -> Any:
    """Returns a value as it is used, if it is one."""
    where: dict[str, Any] = {"where": "initialize", "error": ClusterError}
    if name in (COUNT, INDEX):
        return _checks.count(source, value, at_least=int(name == COUNT), **where)
    if name == DEVICES:
        is_several = isinstance(value, Sequence) and not isinstance(value, str)
        ids = value if is_several else [value]
        return tuple(_checks.count(source, i, at_least=0, **where) for i in ids)
    if split_address(value) is None:
        msg = f"initialize: {source} must be a host and a port, such as "
        raise ClusterError(f"{msg}'10.0.0.1:1234', got {_checks.shown(value)}.")
    return value


def split_address(address: object) -> tuple[str, int] | None:
    """Returns the host and the port of an address; None if it is malformed.

    Example:
        >>> split_address("10.0.0.1:1234"), split_address("[::1]:1234")
        (('10.0.0.1', 1234), ('::1', 1234))
        >>> split_address("10.0.0.1"), split_address("::1:1234")
        (None, None)
    """
    host, _, port = address.rpartition(":") if isinstance(address, str) else [""] * 3
    is_bare = host[:1] != "[" and ":" not in host and not set(host) & set(" /,")
    is_host = bool(host) and (is_bare or (host[0] == "[" and host[-1] == "]"))
    is_port = port.isdecimal() and len(port) < 6 and 0 < int(port) < 2**16
    return (host.strip("[]"), int(port)) if is_host and is_port else None


def _from_names(names: Sequence[str], environment: Mapping[str, str]) -> _Found:
    """Returns what JAX's own variables say."""
    found: _Found = {}
    for name in names:
        source = f"JAX_{name.upper()}"
        text = environment.get(source, "").strip()
        if text:  # an empty variable is how shells unset one for a command
            values: list[Any] = text.split(",") if name == DEVICES else [text]
            if name not in (ADDRESS, BIND):
                values = [int(x) if x.strip().isdecimal() else x for x in values]
            value = values if name == DEVICES else values[0]
            found[name] = (_checked(name, value, source), source)
    return found


def _from_tf_config(text: str) -> _Found:
    """Returns what TF_CONFIG says: the chief is process 0, then come the workers."""
    if not text.strip():
        return {}
    try:
        config = json.loads(text)
        jobs, task = config.get("cluster") or {}, config.get("task") or {}
        chiefs, workers = list(jobs.get("chief", [])), list(jobs.get("worker", []))
        addresses = [*chiefs, *workers]
        if task.get("type") in ("ps", "evaluator") or jobs.get("ps"):
            msg = "all processes train and hold parameters: start chief and workers"
            raise ValueError(f"{msg} only")
        if len(addresses) < 2:
            return {}  # as platforms set it on a single machine
        kind, index = task["type"], int(task["index"])
        own = {"chief": chiefs, "worker": workers}[kind][index]
        if index < 0 or len({*addresses}) < len(addresses):
            msg = "an address is there twice, or the index is negative"
            raise ValueError(msg)
        values = {
            ADDRESS: _checked(ADDRESS, addresses[0], "its first address"),
            COUNT: len(addresses),
            INDEX: addresses.index(own),
        }
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        example = {
            "cluster": {"worker": ["10.0.0.1:1234", "10.0.0.2:1234"]},
            "task": {"type": "worker", "index": 0},
        }
        msg = f"initialize: TF_CONFIG={text[:2000]!r} cannot be followed "
        msg += f"({type(error).__name__}: {error}). Right for the first of two "
        raise ClusterError(f"{msg}processes is {json.dumps(example)!r}.") from None
    return {name: (value, "TF_CONFIG") for name, value in values.items()}


def _may_be_a_cluster(environment: Mapping[str, str]) -> bool:
    """Returns whether JAX's detection may find several processes.

    Without this, notebooks on one TPU host or in a Kubernetes pod would wait for
    metadata servers and permissions that they do not have.
    """
    if environment.keys() & {"SLURM_JOB_ID", "OMPI_COMM_WORLD_SIZE"}:
        return True
    if environment.keys() & {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"}:
        return False
    names = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
    hosts = [environment[name] for name in names if name in environment]
    if hosts:
        return "," in hosts[0] or "MEGASCALE_COORDINATOR_ADDRESS" in environment
    is_pod = "KUBERNETES_SERVICE_HOST" in environment
    return not is_pod or "JOB_COMPLETION_INDEX" in environment


def _detected(detect: Detect, address: str | None) -> _Found:
    """Returns what JAX's detection says, given the coordinator's address if known."""
    try:
        detected = detect(address, None, None)
    except Exception as error:
        msg = "initialize: JAX's detection of the cluster failed with "
        msg += f"{type(error).__name__}: {error}. {_ALL_THREE}"
        raise ClusterError(msg) from error
    if detected is None:
        return {}
    scheduler, *values, devices = detected
    names = (ADDRESS, COUNT, INDEX)
    source = f"JAX's detection of {scheduler}"
    found = {n: (v, source) for n, v in zip(names, values, strict=True)}
    # GPUs are one per process under SLURM and Open MPI. One process has all of them.
    if devices is not None and found[COUNT][0] > 1:
        found[DEVICES] = (tuple(devices), source)
    return found


def _check_agreement(sources: Sequence[_Found]) -> None:
    """Refuses sources that say different things of the same."""
    first, second = sources
    for name in first.keys() & second.keys():
        if first[name][0] != second[name][0]:
            msg = f"initialize: {_text(first, name)} and {_text(second, name)} "
            msg += "contradict each other. Unset the variable that was not meant for "
            raise ClusterError(f"{msg}this program, or give all three arguments.")


def _check_not_one_of_several(environment: Mapping[str, str]) -> None:
    for name in _OTHER_COUNTS:
        text = environment.get(name, "1")
        if text not in ("", "1"):
            msg = f"initialize: {name}={text!r}, but the other processes were not "
            msg += "found, and each would run alone. Under SLURM, start the script "
            msg += f"with srun. {_ALL_THREE} To run alone, give num_processes=1."
            raise ClusterError(msg)
