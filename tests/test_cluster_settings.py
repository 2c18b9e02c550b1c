"""Which processes a program consists of, as a function of its environment."""

import json
import sys

import pytest

from meshlayout import _jax
from meshlayout.cluster.environment import find_settings
from meshlayout.errors import ClusterError


ALL_THREE = (
    "Give all three: initialize('10.0.0.1:1234', num_processes=2, process_id=0), or the "
    "variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
)
OTHERS = (
    ". Unset what was not meant for this program, or give all of coordinator_address, "
    "num_processes, process_id."
)
JAX = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
ARGUMENTS = {"coordinator_address": "h:9", "num_processes": 2, "process_id": 1}
CHIEF = {"chief": ["c:1"], "worker": ["w0:1", "w1:1"]}


def tf_config(cluster=None, kind="worker", index=0):
    cluster = {"worker": ["w0:1", "w1:1"]} if cluster is None else cluster
    task = {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def process(settings):
    """Address, number and index; the address alone is empty on one process."""
    address = settings.coordinator_address
    return address, settings.num_processes, settings.process_index


def message(arguments, environment, detect=lambda *known: None):
    with pytest.raises(ClusterError) as error:
        find_settings(arguments, environment, detect)
    return str(error.value)


@pytest.mark.parametrize(
    ("arguments", "environment", "expected", "source"),
    [
        ({}, {}, ("", 1, 0), ""),
        (ARGUMENTS, {}, ("h:9", 2, 1), "arguments"),
        ({}, JAX, ("10.0.0.1:1234", 4, 3), "JAX's variables"),
        ({}, tf_config(index="1"), ("w0:1", 2, 1), "TF_CONFIG"),
        ({}, tf_config(CHIEF, "worker", 1), ("c:1", 3, 2), "TF_CONFIG"),
        # What one source lacks comes from the next.
        ({"process_id": 1}, JAX, ("10.0.0.1:1234", 4, 1), "arguments, JAX's variables"),
        # Arguments override variables, also malformed ones.
        (ARGUMENTS, JAX | {"TF_CONFIG": "junk"}, ("h:9", 2, 1), "arguments"),
        ({"num_processes": 1}, JAX, ("", 1, 0), "arguments"),
        # Variables that are empty or of one process say nothing.
        ({}, {"WORLD_SIZE": "1"}, ("", 1, 0), ""),
        ({}, tf_config({"chief": ["c:1"]}, "chief"), ("", 1, 0), ""),
        ({}, {"JAX_NUM_PROCESSES": " 1 "}, ("", 1, 0), "JAX's variables"),
    ],
)
def test_processes_come_from_the_first_source_that_has_them(
    arguments, environment, expected, source
):
    settings = find_settings(arguments, environment)
    assert process(settings) == expected
    assert settings.bind_address == expected[0]
    assert settings.source == source


def test_a_bind_address_and_devices_may_come_from_elsewhere():
    bound = {"JAX_COORDINATOR_BIND_ADDRESS": "0.0.0.0:1234"}
    environment = tf_config() | bound | {"JAX_LOCAL_DEVICE_IDS": "2, 3"}
    settings = find_settings({}, environment)
    assert settings.bind_address == "0.0.0.0:1234"
    assert settings.local_device_ids == (2, 3)
    assert str(settings) == "process 0 of 2, coordinator w0:1 (from TF_CONFIG)"
    assert find_settings({"local_device_ids": 2}, {}).local_device_ids == (2,)


ADDRESS = "must be a host and a port, such as '10.0.0.1:1234', got "
SEVERAL = "JAX_NUM_PROCESSES must be a positive integer, got "
NO_ADDRESS = (
    *("10.0.0.1", "10.0.0.1:0", "10.0.0.1:65536", "http://a:1234", "::1:1234", ""),
)


@pytest.mark.parametrize(
    ("arguments", "environment", "text"),
    [
        *(
            ({"coordinator_address": x}, {}, f"coordinator_address {ADDRESS}{x!r}.")
            for x in NO_ADDRESS
        ),
        (
            {"num_processes": "2"},
            {},
            "num_processes must be a positive integer, got '2'.",
        ),
        ({"process_id": -1}, {}, "process_id must be a non-negative integer, got -1."),
        (
            {"num_processes": 1, "process_id": 1},
            {},
            "got num_processes=1, process_id=1, but an index must be below the number.",
        ),
        ({"process_id": 1}, {}, f"got process_id=1, which is not all. {ALL_THREE}"),
        ({}, JAX | {"JAX_NUM_PROCESSES": "four"}, f"{SEVERAL}'four'."),
        (
            {},
            JAX | {"JAX_LOCAL_DEVICE_IDS": "0,a"},
            "JAX_LOCAL_DEVICE_IDS must be a non-negative integer, got 'a'.",
        ),
        # Sources that say different things, of which one is a leftover.
        (
            {"coordinator_address": "h:9", "process_id": 1},
            JAX | tf_config(CHIEF),
            f"num_processes is 3 by TF_CONFIG, and 4 by JAX's variables{OTHERS}",
        ),
        (
            {},
            tf_config() | {"JAX_COORDINATOR_ADDRESS": "z:9"},
            f"coordinator_address is 'w0:1' by TF_CONFIG, and 'z:9' by JAX's variables"
            f"{OTHERS}",
        ),
    ],
)
def test_what_is_said_about_bad_settings(arguments, environment, text):
    assert message(arguments, environment) == f"initialize: {text}"


@pytest.mark.parametrize(
    "environment",
    [
        *({"TF_CONFIG": text} for text in ("junk", "[]", '{"cluster": ["a:1"]}')),
        tf_config(index=2),
        tf_config(index=None),
        tf_config(kind="chief"),
        tf_config({"worker": ["a:1", "b:1"], "ps": ["p:1"]}, "ps"),
    ],
    ids=str,
)
def test_a_tf_config_that_cannot_be_followed_is_shown(environment):
    text = message({}, environment)
    assert text.startswith(f"initialize: TF_CONFIG={environment['TF_CONFIG']!r}: ")
    assert text.endswith("list chief and workers, and one of them as the task.")


def detect(*known):
    return _jax.detect_cluster(*known, timeout_s=1)


def test_jax_detects_the_tasks_of_slurm(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    settings = find_settings({}, SLURM, detect)
    assert process(settings) == (f"node01:{61440 + 7}", 4, 3)
    assert settings.local_device_ids == (1,)
    assert settings.source == "JAX's detection of slurm"
    known = find_settings({"coordinator_address": "h:9"}, SLURM, detect)
    assert process(known) == ("h:9", 4, 3)
    text = message({}, SLURM | {"JAX_NUM_PROCESSES": "2"}, detect)
    assert text == (
        "initialize: num_processes is 2 by JAX's variables, and 4 by JAX's detection of "
        f"slurm{OTHERS}"
    )
    alone = find_settings({}, SLURM, lambda *known: ("slurm", "n:1", 1, 0, [0]))
    assert alone.local_device_ids is None  # one process has all GPUs


# torchrun; sbatch without srun; launchers of MPI; those of other frameworks; a pod.
@pytest.mark.parametrize(
    "name",
    [
        *("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
        *("DTENSOR_NUM_CLIENTS", "KERAS_DISTRIBUTION_NUM_PROCESSES"),
        "JOB_COMPLETION_INDEX",
    ],
)
def test_processes_that_are_not_found_do_not_run_each_alone(name):
    assert message({}, {name: "4"}) == (
        f"initialize: {name}='4', but the other processes were not found, and each "
        "would run alone. Under SLURM, start the script with srun; on Kubernetes, `pip "
        "install kubernetes` lets JAX find them; in place of torchrun, write `python -m "
        f"meshlayout.launch`. {ALL_THREE} To run alone, give num_processes=1."
    )
    assert process(find_settings({"num_processes": 1}, {name: "4"})) == ("", 1, 0)


def test_the_first_pod_of_a_job_runs_alone_only_on_a_tpu_host(monkeypatch):
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    for name, value in pod.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match="Kubernetes environment detected"):
        assert "JOB_COMPLETION_INDEX='0', but the other" in message({}, pod, detect)
    alone = find_settings({}, pod | {"TPU_WORKER_HOSTNAMES": "a"}, detect)
    assert process(alone) == ("", 1, 0)


@pytest.mark.parametrize(
    ("environment", "is_asked"),
    [
        # Notebooks: of Kaggle (or Colab), on a TPU host, in a pod.
        ({"KAGGLE_KERNEL_RUN_TYPE": "a", "TPU_WORKER_HOSTNAMES": "a,b"}, False),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_SKIP_MDS_QUERY": "1"}, False),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_COORDINATOR_ADDRESS": "b"}, True),
        ({"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "0"}, True),
        ({}, True),
    ],
)
def test_jax_is_asked_where_there_can_be_other_processes(environment, is_asked):
    settings = find_settings({}, environment, lambda *known: ("tpu", "a:8", 2, 1, None))
    assert process(settings) == (("a:8", 2, 1) if is_asked else ("", 1, 0))
