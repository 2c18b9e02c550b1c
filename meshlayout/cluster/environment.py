"""Which processes a program consists of: from arguments, variables, or JAX's detection.

Arguments override variables. Variables that contradict each other are an error: one of
them is a leftover, and only the user knows which. Where another launcher has started
several processes that nothing here finds, each would run alone: that is an error, too.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from meshlayout import _checks
from meshlayout.errors import ClusterError


ADDRESS, COUNT, INDEX = _FACTS = ("coordinator_address", "num_processes", "process_id")
BIND, DEVICES = "coordinator_bind_address", "local_device_ids"

# What is known: a value and its source, by the argument of `initialize`.
_Facts: TypeAlias = dict[str, tuple[Any, str]]

# Numbers of processes, in variables of launchers that JAX does not (always) detect.
_OTHER_COUNTS = (
    *("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    *("DTENSOR_NUM_CLIENTS", "KERAS_DISTRIBUTION_NUM_PROCESSES"),
)
_ADDRESS = re.compile(r"(\[[^\s\[\]]+\]|[^\s/,:\[\]]+):([0-9]{1,5})")

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
    """The processes of a program, which one this is, and what said so."""

    coordinator_address: str = ""
    num_processes: int = 1
    process_index: int = 0
    bind_address: str = ""  # where process 0 listens
    local_device_ids: tuple[int, ...] | None = None
    source: str = field(default="", compare=False)

    def __str__(self) -> str:
        where = f"{self.coordinator_address}, bound to {self.bind_address}"
        text = f"process {self.process_index} of {self.num_processes}, coordinator "
        source = f" (from {self.source})" if self.source else ""
        return (text + where if self.num_processes > 1 else "one process") + source


def find_settings(
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    detect: Callable[..., Any] = lambda *known: None,
) -> Settings:
    """Returns the processes of this program.

    Args:
        arguments: The arguments of `initialize`, by name; None or missing if not given.
        environment: The environment variables.
        detect: `_jax.detect_cluster`, called if the rest does not say everything.

    Raises:
        ClusterError: If a value is malformed or missing, or if sources contradict each
            other.
    """
    facts = _Facts()
    _add(facts, ((n, x, n) for n, x in arguments.items() if x is not None))
    names = [BIND, DEVICES]
    if not _is_complete(facts):
        _add(facts, _from_tf_config(environment.get("TF_CONFIG", "").strip()))
        names += _FACTS
    variables = {name: f"JAX_{name.upper()}" for name in names}
    texts = {name: environment.get(x, "").strip() for name, x in variables.items()}
    _add(facts, ((n, text, variables[n]) for n, text in texts.items() if text))
    if not _is_complete(facts) and _may_be_a_cluster(environment):
        _add(facts, _detected(detect, facts))
    told = [_text(name, *facts[name]) for name in _FACTS if name in facts]
    if not told:
        _check_not_one_of_several(environment)
    values = {name: value for name, (value, _) in facts.items()}
    count, index = values.get(COUNT, 0 if told else 1), values.get(INDEX, 0)
    problem = ""
    if count != 1 and len(told) < 3:
        problem = f"which is not all. {_ALL_THREE}"
    elif index >= count:
        problem = "but an index must be below the number."
    if problem:
        raise ClusterError(f"initialize: got {' and '.join(told)}, {problem}")
    source = ", ".join(dict.fromkeys(source for _, source in facts.values()))
    devices = values.get(DEVICES)
    if count == 1:
        return Settings(local_device_ids=devices, source=source)
    bind = values.get(BIND, values[ADDRESS])
    return Settings(values[ADDRESS], count, index, bind, devices, source)


def split_address(address: object) -> tuple[str, int] | None:
    """Returns the host and the port of an address; None if it is malformed."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    is_port = match is not None and 0 < int(match[2]) < 2**16
    return (match[1].strip("[]"), int(match[2])) if match and is_port else None


def _is_complete(facts: _Facts) -> bool:
    return facts.keys() >= {*_FACTS} or facts.get(COUNT, (0,))[0] == 1


def _text(name: str, value: object, source: str) -> str:
    return f"{name}={value!r} (from {source})"


def _add(facts: _Facts, told: Iterable[tuple[str, Any, str]]) -> None:
    """Adds what a source says; variables and detection must not contradict another."""
    for name, told_value, source in told:
        if facts.get(name, ("", ""))[1] != name:  # else an argument has said it
            value = _checked(name, told_value, source)
            known = facts.setdefault(name, (value, source))
            if known[0] != value:
                msg = f"initialize: {_text(name, *known)} and "
                msg += f"{_text(name, value, source)} contradict each other. Unset the "
                msg += "variable that was not meant for this program, or give all of "
                raise ClusterError(f"{msg}{', '.join(_FACTS)}.")


def _checked(name: str, value: Any, source: str) -> Any:
    """Returns a value as it is used, if it is one; that of a variable is a text."""
    where: dict[str, Any] = {"where": "initialize", "error": ClusterError}
    is_text = source.startswith("JAX_")
    if name == DEVICES:
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        values = value.split(",") if is_text else value if is_list else [value]
        values = [int(x) if is_text and x.strip().isdecimal() else x for x in values]
        return tuple(_checks.count(source, x, at_least=0, **where) for x in values)
    if name in (COUNT, INDEX):
        value = int(value) if is_text and value.isdecimal() else value
        return _checks.count(source, value, at_least=int(name == COUNT), **where)
    if split_address(value) is None:
        msg = f"initialize: {source} must be a host and a port, such as "
        raise ClusterError(f"{msg}'10.0.0.1:1234', got {_checks.shown(value)}.")
    return value


def _from_tf_config(text: str) -> Iterable[tuple[str, Any, str]]:
    """Returns what TF_CONFIG says: the chief is process 0, then come the workers."""
    try:
        config = json.loads(text or "{}")
        jobs, task = config.get("cluster") or {}, config.get("task") or {}
        addresses = [*jobs.get("chief", []), *jobs.get("worker", [])]
        if len(addresses) < 2:
            return []  # as platforms set it on a single machine
        # Those of parameter servers and evaluators are not among the addresses.
        index = addresses.index(jobs[task["type"]][int(task["index"])])
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        msg = f"initialize: TF_CONFIG={text[:2000]!r}: {type(error).__name__}: {error}."
        msg += " All processes train: the chief, if there is one, and the workers. "
        msg += f"Right for the first of two is {_TF_CONFIG!r}."
        raise ClusterError(msg) from None
    values = zip(_FACTS, (addresses[0], len(addresses), index), strict=True)
    return [(name, value, "TF_CONFIG") for name, value in values]


def _may_be_a_cluster(environment: Mapping[str, str]) -> bool:
    """Returns whether JAX's detection may find several processes.

    Else notebooks on one TPU host or in a Kubernetes pod would wait for metadata
    servers and permissions that they do not have.
    """
    names = environment.keys()
    if names & {"SLURM_JOB_ID", "OMPI_COMM_WORLD_SIZE"}:
        return True
    if names & {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"}:
        return False
    for name in names & {"TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"}:
        return "," in environment[name] or "MEGASCALE_COORDINATOR_ADDRESS" in names
    return "KUBERNETES_SERVICE_HOST" not in names or "JOB_COMPLETION_INDEX" in names


def _detected(
    detect: Callable[..., Any], facts: _Facts
) -> Iterable[tuple[str, Any, str]]:
    """Returns what JAX's detection says, given the coordinator's address if known."""
    detected = detect(facts.get(ADDRESS, (None,))[0], None, None)
    if detected is None:
        return []
    scheduler, address, count, index, ids = detected
    values = {ADDRESS: address, COUNT: count, INDEX: index}
    # GPUs are one per process under SLURM and Open MPI. One process has all of them.
    values |= {DEVICES: ids} if ids is not None and count > 1 else {}
    return [(n, x, f"JAX's detection of {scheduler}") for n, x in values.items()]


def _check_not_one_of_several(environment: Mapping[str, str]) -> None:
    for name in _OTHER_COUNTS:
        if environment.get(name, "1") not in ("", "1"):
            msg = f"initialize: {name}={environment[name]!r}, but the other processes "
            msg += "were not found, and each would run alone. Under SLURM, start the "
            msg += f"script with srun. {_ALL_THREE} To run alone, give num_processes=1."
            raise ClusterError(msg)
