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
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from meshlayout.cluster.variables import (
    ADDRESS,
    BIND,
    COUNT,
    DEVICES,
    INDEX,
    KINDS,
    READERS,
    Found,
    Setting,
    from_arguments,
    from_jax,
    listed,
    malformed,
    parsed,
    shown,
    span,
)
from meshlayout.errors import ClusterError


# JAX's detection. It takes the coordinator's address, the number of processes and the
# index of this one, each None if not known, and returns them after the name of the
# scheduler, with the ids of this process's devices; None if there is no scheduler.
Detect: TypeAlias = Callable[
    [str | None, int | None, int | None], tuple[Any, ...] | None
]

# The variables from which JAX takes its numbers of processes and indices.
_SCHEDULERS = {
    "slurm": {COUNT: "SLURM_NTASKS", INDEX: "SLURM_PROCID"},
    "ompi": {COUNT: "OMPI_COMM_WORLD_SIZE", INDEX: "OMPI_COMM_WORLD_RANK"},
}
# Set by launchers of MPI, of which each JAX detects only some.
_MPI_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# Set in notebooks of Colab and Kaggle, which have one machine.
_NOTEBOOKS = ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE")
_LOCAL_IDS = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_NUMBERS = (
    *("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_RANK", *_LOCAL_IDS, "JOB_COMPLETION_INDEX", "TPU_WORKER_ID"),
    *("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "JAX_COORDINATOR_PORT"),
)

# Far more than there are anywhere: each is waited for by its number.
_MOST = 2**20

_ALL_THREE = (
    "Give all three: initialize('10.0.0.1:1234', num_processes=2, process_id=0), or "
    "the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
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


def find_settings(
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    detect: Detect = lambda *known: None,
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
    found = from_arguments(arguments)
    if not _is_complete(found):
        variables = [read(environment) for read in READERS]
        _check_agreement(variables)
        for source in variables:
            found = {**source, **found}
    found = {**from_jax(environment, [BIND, DEVICES]), **found}
    if not _is_complete(found) and _may_be_a_cluster(environment):
        found = {**_detected(detect, found, environment), **found}
    elif not _is_alone(found) and any(name in environment for name in _LOCAL_IDS):
        found = {**_detected_devices(detect, found, environment), **found}
    _check_index(found)
    if found.keys().isdisjoint([ADDRESS, COUNT, INDEX]):
        _check_undetected(environment)
    if found.keys().isdisjoint([ADDRESS, COUNT, INDEX]) or _is_alone(found):
        # Where process 0 listens does not matter if there is no other.
        found = {field: found[field] for field in (COUNT, DEVICES) if field in found}
    else:
        _check_completeness(found)
    values = {field: found[field].value for field in found}
    return Settings(
        coordinator_address=values.get(ADDRESS),
        num_processes=values.get(COUNT, 1),
        process_index=values.get(INDEX, 0),
        bind_address=values.get(BIND, values.get(ADDRESS)),
        local_device_ids=values.get(DEVICES),
        sources={field: found[field].source for field in KINDS if field in found},
    )


def _is_complete(found: Found) -> bool:
    return found.keys() >= {ADDRESS, COUNT, INDEX} or _is_alone(found)


def _is_alone(found: Found) -> bool:
    return COUNT in found and found[COUNT].value == 1


def _may_be_a_cluster(environment: Mapping[str, str]) -> bool:
    """Returns whether JAX's detection may find several processes.

    Without this, notebooks on one TPU host or in a Kubernetes pod would wait for
    metadata servers and permissions that they do not have.
    """
    if "SLURM_JOB_ID" in environment or "OMPI_COMM_WORLD_SIZE" in environment:
        return True
    if any(name in environment for name in _NOTEBOOKS):
        return False
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get(
        "TPU_WORKER_HOSTNAMES"
    )
    if hosts is not None:
        is_multislice = "MEGASCALE_COORDINATOR_ADDRESS" in environment
        return "," in hosts or is_multislice
    in_pod = "KUBERNETES_SERVICE_HOST" in environment
    return not in_pod or "JOB_COMPLETION_INDEX" in environment


def _detected(detect: Detect, found: Found, environment: Mapping[str, str]) -> Found:
    """Returns the settings that JAX's detection adds to what is known."""
    fields = (ADDRESS, COUNT, INDEX)
    known = [found[field].value if field in found else None for field in fields]
    try:
        detected = detect(*known)
    except Exception as problem:
        for name in _NUMBERS:
            if name in environment and parsed(INDEX, environment[name]) is None:
                raise malformed(INDEX, name, shown(environment[name])) from problem
        msg = (
            "initialize: JAX's detection of the cluster failed with "
            f"{type(problem).__name__}: {problem}. {_ALL_THREE}"
        )
        raise ClusterError(msg) from problem
    if detected is None:
        return {}
    scheduler, *values, devices = detected
    origin = f"JAX's detection of {scheduler}"
    settings = {
        field: Setting(
            value, _SCHEDULERS.get(scheduler, {}).get(field, origin), repr(value)
        )
        for field, value in zip(fields, values, strict=True)
    }
    # GPUs are one per process under SLURM and Open MPI. One process has all of them.
    if devices is not None and settings[COUNT].value > 1:
        settings[DEVICES] = Setting(tuple(devices), origin, repr(devices))
    return settings


def _detected_devices(
    detect: Detect, found: Found, environment: Mapping[str, str]
) -> Found:
    """Returns the devices that a scheduler has for this process, if it started it.

    The processes may also have been started by something else inside one of its tasks,
    which shows in other numbers.
    """
    with contextlib.suppress(ClusterError):
        detected = _detected(detect, {}, environment)
        if all(
            field in detected and detected[field].value == found[field].value
            for field in (COUNT, INDEX)
        ):
            return {field: detected[field] for field in [DEVICES] if field in detected}
    return {}


def _check_undetected(environment: Mapping[str, str]) -> None:
    """Refuses to run several processes of a launcher each for itself."""
    for name in _MPI_COUNTS:
        text = environment.get(name, "1")
        if text != "1":
            msg = (
                f"initialize: {name}={shown(text)}, but JAX {jax.__version__} does not "
                "detect the other processes of this launcher, and each would run "
                f"alone. {_ALL_THREE} If each is to run alone, give num_processes=1."
            )
            raise ClusterError(msg)


def _check_agreement(variables: Sequence[Found]) -> None:
    """Refuses variables that give different numbers of processes or indices."""
    for field, given in (
        (COUNT, "they give {} and {} processes"),
        (INDEX, "they give this process the ids {} and {}"),
    ):
        values = [found[field] for found in variables if field in found]
        for first, other in itertools.pairwise(values):
            if other.value != first.value:
                msg = (
                    f"initialize: {first} and {other} contradict each other: "
                    f"{given.format(first.value, other.value)}. Unset the variable "
                    "that was not meant for this program, or give the arguments "
                    "coordinator_address, num_processes and process_id."
                )
                raise ClusterError(msg)


def _check_completeness(found: Found) -> None:
    """Refuses settings of which some are missing."""
    fields = (ADDRESS, COUNT, INDEX)
    missing = [field for field in fields if field not in found]
    if missing:
        values = listed([str(found[field]) for field in fields if field in found])
        msg = f"initialize: got {values}, but no {listed(missing)}. {_ALL_THREE}"
        raise ClusterError(msg)


def _check_index(found: Found) -> None:
    """Refuses an index that the number of processes does not have."""
    if COUNT in found and found[COUNT].value > _MOST:
        msg = f"initialize: {found[COUNT].source} must be at most {_MOST}, got "
        raise ClusterError(f"{msg}{found[COUNT].held}.")
    if COUNT not in found or INDEX not in found:
        return
    number, index = found[COUNT], found[INDEX]
    if index.value >= number.value:
        msg = (
            f"initialize: {index} does not fit {number}: the index of a process must "
            f"be {span(number.value)}."
        )
        raise ClusterError(msg)
