"""Which processes a program consists of: from arguments, variables, or JAX's detection.

Arguments override variables. Variables that contradict each other are an error: one of
them is a leftover, and only the user knows which. Where another launcher has started
several processes that nothing here finds, each would run alone: that is an error, too.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from meshlayout import _checks
from meshlayout.errors import ClusterError


ADDRESS, COUNT, INDEX = _FACTS = ("coordinator_address", "num_processes", "process_id")
BIND, DEVICES = "coordinator_bind_address", "local_device_ids"

# JAX's detection. It takes an address, a number and an index, each None if not known,
# and returns them after the name of the scheduler, with the ids of this process's
# devices; None if there is no scheduler.
Detect: TypeAlias = Callable[
    [str | None, int | None, int | None], tuple[Any, ...] | None
]

# What one source says, by the argument of `initialize`: a value, and the source.
_Found: TypeAlias = dict[str, tuple[Any, str]]

# Numbers of processes, in variables of launchers that JAX does not (always) detect.
_OTHER_COUNTS = (
    *("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    *("DTENSOR_NUM_CLIENTS", "KERAS_DISTRIBUTION_NUM_PROCESSES"),
)

_ALL_THREE = (
    "Give all three: initialize('10.0.0.1:1234', num_processes=2, process_id=0), or "
    "the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
)
_TF_CONFIG = (
    '{"cluster": {"worker": ["10.0.0.1:1234", "10.0.0.2:1234"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


@dataclass(frozen=True)
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
    source: str = field(default="", compare=False)

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
    given = {name: (x, name) for name, x in arguments.items() if x is not None}
    found = {name: (_checked(name, *pair), pair[1]) for name, pair in given.items()}
    if not _is_complete(found):
        variables = _from_jax(_FACTS, environment)
        config = _from_tf_config(environment.get("TF_CONFIG", "").strip())
        found = {**_agreed(config, variables), **found}
    if not _is_complete(found) and _may_be_a_cluster(environment):
        found = _agreed(_detected(detect, found), found)
    found = {**_from_jax((BIND, DEVICES), environment), **found}
    values = {name: value for name, (value, _) in found.items()}
    texts = [_text(found, name) for name in _FACTS if name in found]
    if not texts:
        _check_not_one_of_several(environment)
    count, index = values.get(COUNT, 0 if texts else 1), values.get(INDEX, 0)
    if count and index >= count:
        msg = f"initialize: {' and '.join(texts)}: an index must be below the number."
        raise ClusterError(msg)
    if count != 1 and len(texts) < 3:
        msg = f"initialize: got {' and '.join(texts)}, which is not all. {_ALL_THREE}"
        raise ClusterError(msg)
    source = ", ".join(dict.fromkeys(source for _, source in found.values()))
    devices = values.get(DEVICES)
    if count == 1:  # where process 0 listens does not matter
        return Settings(local_device_ids=devices, source=source)
    bind = values.get(BIND, values[ADDRESS])
    return Settings(values[ADDRESS], count, index, bind, devices, source)


def _is_complete(found: _Found) -> bool:
    return found.keys() >= {*_FACTS} or found.get(COUNT, (0,))[0] == 1


def _text(found: _Found, name: str) -> str:
    value, source = found[name]
    return f"{name}={value!r} (from {source})"


def _agreed(first: _Found, second: _Found) -> _Found:
    """Merges what two sources say, which must not contradict each other."""
    for name in [x for x in (COUNT, INDEX, ADDRESS) if x in first and x in second]:
        if first[name][0] != second[name][0]:
            msg = f"initialize: {_text(first, name)} and {_text(second, name)} "
            msg += "contradict each other. Unset the "
            msg += "variable that was not meant for this program, or give all three of "
            raise ClusterError(f"{msg}coordinator_address, num_processes, process_id.")
    return {**first, **second}


def _checked(name: str, value: object, source: str) -> Any:
    """Returns a value as it is used, if it is one."""
    where: dict[str, Any] = {"where": "initialize", "error": ClusterError}
    if name in (COUNT, INDEX):
        return _checks.count(source, value, at_least=int(name == COUNT), **where)
    if name == DEVICES:
        is_several = isinstance(value, Sequence) and not isinstance(value, str)
        ids: Any = value if is_several else [value]
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
    is_host = host[:1] + host[-1:] == "[]" or not set(host) & {*" /,:[]"}
    is_port = port.isdecimal() and len(port) < 6 and 0 < int(port) < 2**16
    return (host.strip("[]"), int(port)) if host and is_host and is_port else None


def _from_jax(names: Sequence[str], environment: Mapping[str, str]) -> _Found:
    """Returns what JAX's own variables say."""
    found: _Found = {}
    for name in names:
        source = f"JAX_{name.upper()}"
        text = environment.get(source, "").strip()
        if text:  # an empty variable is how shells unset one for a command
            value: Any = text
            if name in (COUNT, INDEX):
                value = int(text) if text.isdecimal() and len(text) < 10 else text
            elif name == DEVICES:
                parts = [part.strip() for part in text.split(",")]
                value = [int(x) if x.isdecimal() else x for x in parts]
            found[name] = (_checked(name, value, source), source)
    return found


def _from_tf_config(text: str) -> _Found:
    """Returns what TF_CONFIG says: the chief is process 0, then come the workers."""
    try:
        config = json.loads(text or "{}")
        jobs, task = config.get("cluster") or {}, config.get("task") or {}
        if task.get("type") in ("ps", "evaluator") or "ps" in jobs:
            msg = (
                "all processes train and hold parameters, so that a task of type 'ps' "
            )
            raise ValueError(f"{msg}or 'evaluator' has no place here")
        addresses = [*jobs.get("chief", []), *jobs.get("worker", [])]
        if len(addresses) < 2:
            return {}  # as platforms set it on a single machine
        index = range(len(jobs[task["type"]]))[int(task["index"])]
        own = jobs[task["type"]][index]
        if len({*addresses}) < len(addresses) or None in map(split_address, addresses):
            msg = f"the addresses must be different hosts with ports, got {addresses}"
            raise ValueError(msg)
        values = (addresses[0], len(addresses), addresses.index(own))
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        msg = (
            f"initialize: TF_CONFIG={text[:2000]!r}: {type(error).__name__}: {error}. "
        )
        msg += f"Right for the first of two processes is {_TF_CONFIG!r}."
        raise ClusterError(msg) from None
    return {n: (value, "TF_CONFIG") for n, value in zip(_FACTS, values, strict=True)}


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


def _detected(detect: Detect, found: _Found) -> _Found:
    """Returns what JAX's detection says, given the coordinator's address if known."""
    try:
        detected = detect(found.get(ADDRESS, (None,))[0], None, None)
    except Exception as error:
        msg = "initialize: JAX's detection of the cluster failed with "
        msg += f"{type(error).__name__}: {error}. {_ALL_THREE}"
        raise ClusterError(msg) from error
    if detected is None:
        return {}
    scheduler, *values, devices = detected
    source = f"JAX's detection of {scheduler}"
    facts = {n: (value, source) for n, value in zip(_FACTS, values, strict=True)}
    # GPUs are one per process under SLURM and Open MPI. One process has all of them.
    has_own = devices is not None and facts[COUNT][0] > 1
    return {**facts, DEVICES: (tuple(devices or ()), source)} if has_own else facts


def _check_not_one_of_several(environment: Mapping[str, str]) -> None:
    for name in _OTHER_COUNTS:
        text = environment.get(name, "1")
        if text not in ("", "1"):
            msg = f"initialize: {name}={text!r}, but the other processes were not "
            msg += "found, and each would run alone. Under SLURM, start the script "
            msg += f"with srun. {_ALL_THREE} To run alone, give num_processes=1."
            raise ClusterError(msg)
