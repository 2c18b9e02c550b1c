"""Which processes a program consists of: from arguments, variables, or JAX's detection.

Arguments override the rest. Contradictory variables are an error: one of them is a
leftover, and only the user knows which. It is also an error if another launcher started
several processes that are not found here, as each would run alone.
"""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from meshlayout import _checks
from meshlayout.errors import ClusterError


ADDRESS, COUNT, INDEX = _FACTS = ("coordinator_address", "num_processes", "process_id")
BIND, DEVICES = "coordinator_bind_address", "local_device_ids"

_Facts: TypeAlias = dict[str, Any]  # by the argument of `initialize`

# Process counts of launchers that JAX may not detect, and Kubernetes' index of a pod.
_OTHER_COUNTS = (
    *("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    *("DTENSOR_NUM_CLIENTS", "KERAS_DISTRIBUTION_NUM_PROCESSES"),
)
_POD = "JOB_COMPLETION_INDEX"
_ADDRESS = re.compile(r"(\[[^\s\[\]]+\]|[^\s/,:\[\]]+):([0-9]{1,5})")

_ALL_THREE = (
    "Give all three: initialize('10.0.0.1:1234', num_processes=2, process_id=0), or "
    "the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
)


@dataclass(frozen=True)
class Settings:
    """The processes of a program, the index of this one, and the source of both."""

    coordinator_address: str = ""
    num_processes: int = 1
    process_index: int = 0
    bind_address: str = ""  # where process 0 listens
    local_device_ids: tuple[int, ...] | None = None
    source: str = field(default="", compare=False)

    def __str__(self) -> str:
        text = f"process {self.process_index} of {self.num_processes}, coordinator "
        text += self.coordinator_address
        source = f" (from {self.source})" if self.source else ""
        return (text if self.num_processes > 1 else "one process") + source


def find_settings(
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    detect: Callable[..., Any] = lambda *known: None,
) -> Settings:
    """Returns the processes of this program, from the arguments of `initialize`.

    `detect` is `_jax.detect_cluster`, called if the rest is not enough.
    """
    values = {k: _checked(k, x, k) for k, x in arguments.items() if x is not None}
    facts, sources = values, dict[str, _Facts]()
    if not _is_complete(facts):
        config = _from_tf_config(environment.get("TF_CONFIG", "").strip())
        variables = _from_variables(_FACTS, environment)
        sources = {"TF_CONFIG": config, "JAX's variables": variables}
        facts = {**variables, **config, **facts}
    may_ask = not _is_complete(facts) and _may_be_a_cluster(environment)
    if may_ask and (detection := detect(facts.get(ADDRESS), None, None)):
        name, *three, ids = detection
        detected: _Facts = dict(zip(_FACTS, three, strict=True))
        # GPUs are one per process under SLURM and Open MPI. One process has all.
        if ids is not None and detected[COUNT] > 1:
            detected[DEVICES] = tuple(ids)
        sources[f"JAX's detection of {name}"] = detected
        facts = {**detected, **facts}
    for (first, a), (second, b) in itertools.combinations(sources.items(), 2):
        for name in a.keys() & b.keys() - values.keys():
            if a[name] != b[name]:
                msg = f"initialize: {name} is {a[name]!r} by {first}, and {b[name]!r}"
                way = "Unset what was not meant for this program, or give all of"
                raise ClusterError(f"{msg} by {second}. {way} {', '.join(_FACTS)}.")
    facts = {**_from_variables((BIND, DEVICES), environment), **facts}
    text = ", ".join(f"{name}={facts[name]!r}" for name in _FACTS if name in facts)
    count, index = facts.get(COUNT, 0 if text else 1), facts.get(INDEX, 0)
    several = [x for x in _OTHER_COUNTS if environment.get(x, "1") not in ("", "1")]
    if "TPU_WORKER_HOSTNAMES" not in environment:  # a slice knows its hosts
        several += {_POD} & environment.keys()
    for name in () if text else several:
        msg = f"initialize: {name}={environment[name]!r}, but the other processes were "
        msg += "not found, and each would run alone. Under SLURM, start the script "
        msg += "with srun; on Kubernetes, `pip install kubernetes` lets JAX find them; "
        msg += "in place of torchrun, write `python -m meshlayout.launch`. "
        raise ClusterError(f"{msg}{_ALL_THREE} To run alone, give num_processes=1.")
    if count != 1 and not facts.keys() >= {*_FACTS}:
        raise ClusterError(f"initialize: got {text}, which is not all. {_ALL_THREE}")
    if index >= count:
        msg = f"initialize: got {text}, but an index must be below the number."
        raise ClusterError(msg)
    names = ["arguments"] * bool(values) + [name for name in sources if sources[name]]
    source, devices = ", ".join(names), facts.get(DEVICES)
    if count == 1:
        return Settings(local_device_ids=devices, source=source)
    bind = facts.get(BIND, facts[ADDRESS])
    return Settings(facts[ADDRESS], count, index, bind, devices, source)


def split_address(address: object) -> tuple[str, int] | None:
    """Returns the host and the port of an address; None if it is malformed."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    is_port = match is not None and 0 < int(match[2]) < 2**16
    return (match[1].strip("[]"), int(match[2])) if match and is_port else None


def _is_complete(facts: _Facts) -> bool:
    return facts.keys() >= {*_FACTS} or facts.get(COUNT) == 1


def _checked(name: str, value: Any, source: str) -> Any:
    where: dict[str, Any] = {"where": "initialize", "error": ClusterError}
    if name in (COUNT, INDEX):
        return _checks.count(source, value, at_least=int(name == COUNT), **where)
    if name == DEVICES:
        is_several = isinstance(value, Sequence) and not isinstance(value, str)
        ids = value if is_several else [value]
        return tuple(_checks.count(source, x, at_least=0, **where) for x in ids)
    if split_address(value) is None:
        msg = f"initialize: {source} must be a host and a port, such as "
        raise ClusterError(f"{msg}'10.0.0.1:1234', got {_checks.shown(value)}.")
    return value


def _from_variables(names: Sequence[str], environment: Mapping[str, str]) -> _Facts:
    facts: _Facts = {}
    for name in names:
        variable = f"JAX_{name.upper()}"
        value: Any = environment.get(variable, "").strip()
        if value and name in (COUNT, INDEX, DEVICES):
            value = [int(x) if x.strip().isdecimal() else x for x in value.split(",")]
            value = value[0] if len(value) == 1 else value
        if value != "":  # an empty one says nothing
            facts[name] = _checked(name, value, variable)
    return facts


def _from_tf_config(text: str) -> _Facts:
    # The chief is process 0, then come the workers.
    try:
        config = json.loads(text or "{}")
        jobs, task = config.get("cluster") or {}, config.get("task") or {}
        addresses = [*jobs.get("chief", []), *jobs.get("worker", [])]
        if len(addresses) < 2:
            return {}  # as platforms set it on a single machine
        # Those of parameter servers and evaluators are not among the addresses.
        index = addresses.index(jobs[task["type"]][int(task["index"])])
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        msg = f"initialize: TF_CONFIG={text[:2000]!r}: {type(error).__name__}: {error}."
        way = "It must list chief and workers, and one of them as the task."
        raise ClusterError(f"{msg} {way}") from None
    address = _checked(ADDRESS, addresses[0], "TF_CONFIG")
    return {ADDRESS: address, COUNT: len(addresses), INDEX: index}


def _may_be_a_cluster(environment: Mapping[str, str]) -> bool:
    # Otherwise JAX may wait for metadata servers that do not exist (notebooks, pods).
    names = environment.keys()
    if names & {"SLURM_JOB_ID", "OMPI_COMM_WORLD_SIZE"}:
        return True
    if names & {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"}:
        return False
    for name in names & {"TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"}:
        return "," in environment[name] or "MEGASCALE_COORDINATOR_ADDRESS" in names
    return "KUBERNETES_SERVICE_HOST" not in names or _POD in names
