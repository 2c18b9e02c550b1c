"""Which processes a program consists of, as a function of its environment."""

import json

import jax
import pytest

from meshlayout import _jax
from meshlayout.cluster.settings import find_settings
from meshlayout.errors import ClusterError


YES = True

ALL_THREE = (
    " Give all three: initialize('10.0.0.1:1234', num_processes=2, process_id=0), or the "
    "variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
)
RIGHT = (
    ' Right for the first of two processes is \'{"cluster": {"worker": '
    '["10.0.0.1:1234", "10.0.0.2:1234"]}, "task": {"type": "worker", "index": 0}}\'.'
)
OTHERS = (
    " Unset the variable that was not meant for this program, or give the arguments "
    "coordinator_address, num_processes and process_id."
)

JAX = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}
DTENSOR = {"DTENSOR_JOBS": "a:1,b:1,c:1", "DTENSOR_CLIENT_ID": "2"}
KERAS = {
    "KERAS_DISTRIBUTION_JOB_ADDRESSES": "k:77",
    "KERAS_DISTRIBUTION_NUM_PROCESSES": "5",
    "KERAS_DISTRIBUTION_PROCESS_ID": "4",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
ARGUMENTS = {"coordinator_address": "h:9", "num_processes": 2, "process_id": 1}


def tf_config(cluster=None, kind="worker", index=0):
    cluster = {"worker": ["w0:1", "w1:1"]} if cluster is None else cluster
    task = {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def no_scheduler(*known):
    return None


def process(settings):
    """Address, number and index; the address alone is None on one process."""
    return (
        settings.coordinator_address,
        settings.num_processes,
        settings.process_index,
    )


def message(arguments, environment, detect=no_scheduler):
    with pytest.raises(ClusterError) as error:
        find_settings(arguments, environment, detect)
    return str(error.value)


CHIEF = {"chief": ["c:1"], "worker": ["w0:1", "w1:1"]}


@pytest.mark.parametrize(
    ("arguments", "environment", "expected", "source"),
    [
        ({}, {}, (None, 1, 0), ""),
        (
            ARGUMENTS,
            {},
            ("h:9", 2, 1),
            "coordinator_address, num_processes and process_id",
        ),
        (
            {},
            JAX,
            ("10.0.0.1:1234", 4, 3),
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID",
        ),
        ({}, tf_config(index=1), ("w0:1", 2, 1), "TF_CONFIG"),
        ({}, tf_config(index="1"), ("w0:1", 2, 1), "TF_CONFIG"),
        ({}, tf_config(CHIEF, "chief"), ("c:1", 3, 0), "TF_CONFIG"),
        ({}, tf_config(CHIEF, "worker", 1), ("c:1", 3, 2), "TF_CONFIG"),
        ({}, DTENSOR, ("a:1", 3, 2), "DTENSOR_JOBS and DTENSOR_CLIENT_ID"),
        ({}, DTENSOR | {"DTENSOR_NUM_CLIENTS": "3"}, ("a:1", 3, 2), None),
        # As in TensorFlow, the id is 0 unless set.
        ({}, {"DTENSOR_JOBS": "[::1]:1,[::1]:2"}, ("[::1]:1", 2, 0), "DTENSOR_JOBS"),
        (
            {},
            KERAS,
            ("k:77", 5, 4),
            "KERAS_DISTRIBUTION_JOB_ADDRESSES, KERAS_DISTRIBUTION_NUM_PROCESSES and "
            "KERAS_DISTRIBUTION_PROCESS_ID",
        ),
        (
            {},
            {
                "KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1, b:1",
                "KERAS_DISTRIBUTION_PROCESS_ID": "1",
            },
            ("a:1", 2, 1),
            "KERAS_DISTRIBUTION_JOB_ADDRESSES and KERAS_DISTRIBUTION_PROCESS_ID",
        ),
        # What one source lacks comes from the next.
        (
            {"process_id": 1},
            JAX,
            ("10.0.0.1:1234", 4, 1),
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and process_id",
        ),
        (
            {"coordinator_address": "h:9"},
            tf_config(index=1),
            ("h:9", 2, 1),
            "coordinator_address and TF_CONFIG",
        ),
        # Arguments override variables, also malformed ones.
        (ARGUMENTS, JAX | DTENSOR | {"TF_CONFIG": "junk"}, ("h:9", 2, 1), None),
        ({"num_processes": 1}, JAX, (None, 1, 0), "num_processes"),
        # Variables that are empty or of one process say nothing.
        ({}, dict.fromkeys(JAX | DTENSOR | KERAS, ""), (None, 1, 0), ""),
        ({}, {"TF_CONFIG": "{}"}, (None, 1, 0), ""),
        ({}, tf_config({}), (None, 1, 0), ""),
        ({}, tf_config({"chief": ["c:1"]}, "chief"), (None, 1, 0), ""),
        ({}, JAX | tf_config({"worker": ["w:1"]}), ("10.0.0.1:1234", 4, 3), None),
        ({}, {"DTENSOR_JOBS": "a:1"}, (None, 1, 0), "DTENSOR_JOBS"),
        ({}, {"DTENSOR_CLIENT_ID": "0"}, (None, 1, 0), ""),
        ({}, {"DTENSOR_NUM_CLIENTS": "1"}, (None, 1, 0), "DTENSOR_NUM_CLIENTS"),
        ({}, {"JAX_NUM_PROCESSES": " 1 ", "JAX_PROCESS_ID": "0"}, (None, 1, 0), None),
    ],
)
def test_processes_come_from_the_first_source_that_has_them(
    arguments, environment, expected, source
):
    settings = find_settings(arguments, environment)
    assert process(settings) == expected
    assert settings.bind_address == expected[0]
    if source is not None:
        assert settings.source == source


def test_sources_that_agree_are_taken_in_order():
    same = tf_config({"worker": ["w0:1", "w1:1", "w2:1"]}, index=2) | DTENSOR
    assert find_settings({}, same).source == "TF_CONFIG"
    both = {**same, **JAX, "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}
    assert find_settings({}, both).coordinator_address == "10.0.0.1:1234"


def test_each_setting_says_where_it_came_from():
    bound = {"JAX_COORDINATOR_BIND_ADDRESS": "0.0.0.0:1234"}
    environment = tf_config() | bound | {"JAX_LOCAL_DEVICE_IDS": "2, 3"}
    settings = find_settings({"process_id": 1}, environment)
    assert settings.bind_address == "0.0.0.0:1234"
    assert settings.local_device_ids == (2, 3)
    assert settings.sources == {
        "coordinator_address": "TF_CONFIG",
        "num_processes": "TF_CONFIG",
        "process_id": "process_id",
        "coordinator_bind_address": "JAX_COORDINATOR_BIND_ADDRESS",
        "local_device_ids": "JAX_LOCAL_DEVICE_IDS",
    }
    assert str(settings) == (
        "process 1 of 2, coordinator w0:1, bound to 0.0.0.0:1234, local devices 2 and 3"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        *(
            (
                {"coordinator_address": value},
                "coordinator_address must be the host of process 0 and a free port on "
                f"it, such as '10.0.0.1:1234', got {shown}.",
            )
            for value, shown in [
                ("10.0.0.1", "'10.0.0.1'"),
                ("10.0.0.1:0", "'10.0.0.1:0'"),
                ("10.0.0.1:65536", "'10.0.0.1:65536'"),
                (":1234", "':1234'"),
                ("a b:1234", "'a b:1234'"),
                ("http://a:1234", "'http://a:1234'"),
                ("a..b:1234", "'a..b:1234'"),
                ("a\0:1234", r"'a\x00:1234'"),
                ("::1:1234", "'::1:1234'"),
                ("", "''"),
                (1234, "1234"),
                (YES, "True"),
                (object(), "an object"),
            ]
        ),
        (
            {"coordinator_bind_address": "0.0.0.0"},
            "coordinator_bind_address must be an address of this machine and a free "
            "port, such as '0.0.0.0:1234', got '0.0.0.0'.",
        ),
        *(
            (
                {"num_processes": v},
                f"num_processes must be a positive integer, got {s}.",
            )
            for v, s in [
                (0, "0"),
                (-1, "-1"),
                (2.0, "2.0"),
                ("2", "'2'"),
                (YES, "True"),
            ]
        ),
        (
            {"num_processes": 10**12},
            "num_processes must be at most 1048576, got 1000000000000.",
        ),
        *(
            ({"process_id": v}, f"process_id must be a non-negative integer, got {s}.")
            for v, s in [(-1, "-1"), (float("nan"), "nan"), ("x", "'x'"), ([], "[]")]
        ),
        *(
            (
                {"local_device_ids": value},
                "local_device_ids must be distinct non-negative integers, such as "
                f"'0,1', got {shown}.",
            )
            for value, shown in [
                (-1, "-1"),
                ("0", "'0'"),
                ([], "[]"),
                ([0, 0], "[0, 0]"),
                ([0, 1.5], "[0, 1.5]"),
            ]
        ),
        (
            ARGUMENTS | {"process_id": 2},
            "process_id=2 does not fit num_processes=2: the index of a process must be "
            "0 or 1.",
        ),
        (
            {"num_processes": 1, "process_id": 1},
            "process_id=1 does not fit num_processes=1: the index of a process must be "
            "0.",
        ),
        (
            {"process_id": 1},
            "got process_id=1, but no coordinator_address and num_processes."
            + ALL_THREE,
        ),
        (
            {"coordinator_address": "h:9", "num_processes": 2},
            "got coordinator_address='h:9' and num_processes=2, but no process_id."
            + ALL_THREE,
        ),
    ],
)
def test_what_is_said_about_bad_arguments(arguments, text):
    assert message(arguments, {}) == f"initialize: {text}"


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (
            JAX | {"JAX_COORDINATOR_ADDRESS": "10.0.0.1"},
            "JAX_COORDINATOR_ADDRESS must be the host of process 0 and a free port on "
            "it, such as '10.0.0.1:1234', got '10.0.0.1'.",
        ),
        (
            JAX | {"JAX_NUM_PROCESSES": "four"},
            "JAX_NUM_PROCESSES must be a positive integer, such as '4', got 'four'.",
        ),
        (
            JAX | {"JAX_NUM_PROCESSES": "9" * 5000},
            "JAX_NUM_PROCESSES must be a positive integer, such as '4', got "
            f"'{'9' * 2000}'....",
        ),
        (
            JAX | {"JAX_NUM_PROCESSES": "2000000"},
            "JAX_NUM_PROCESSES must be at most 1048576, got '2000000'.",
        ),
        (
            JAX | {"JAX_NUM_PROCESSES": "0"},
            "JAX_NUM_PROCESSES must be a positive integer, such as '4', got '0'.",
        ),
        (
            JAX | {"JAX_PROCESS_ID": "-1"},
            "JAX_PROCESS_ID must be a non-negative integer, such as '0', got '-1'.",
        ),
        (
            JAX | {"JAX_PROCESS_ID": "4"},
            "JAX_PROCESS_ID='4' does not fit JAX_NUM_PROCESSES='4': the index of a "
            "process must be between 0 and 3.",
        ),
        (
            JAX | {"JAX_COORDINATOR_BIND_ADDRESS": "eth0"},
            "JAX_COORDINATOR_BIND_ADDRESS must be an address of this machine and a free "
            "port, such as '0.0.0.0:1234', got 'eth0'.",
        ),
        (
            JAX | {"JAX_LOCAL_DEVICE_IDS": "0,a"},
            "JAX_LOCAL_DEVICE_IDS must be distinct non-negative integers, such as '0,1',"
            " got '0,a'.",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_PROCESS_ID": "0"},
            "got JAX_COORDINATOR_ADDRESS='a:1' and JAX_PROCESS_ID='0', but no "
            "num_processes." + ALL_THREE,
        ),
        *(
            (
                {"TF_CONFIG": text},
                f"TF_CONFIG={text!r}: it must be JSON with a 'cluster' and a 'task'."
                + RIGHT,
            )
            for text in [
                "junk",
                "[]",
                "4",
                '{"cluster": ["a:1"]}',
                '{"cluster": {"worker": "a:1,b:1"}}',
                '{"cluster": {"worker": ["a:1", "b:1"]}, "task": 1}',
            ]
        ),
        *(
            (environment, f"TF_CONFIG={environment['TF_CONFIG']!r}: {fact}.{RIGHT}")
            for environment, fact in [
                (
                    tf_config(index=2),
                    "the task's index must be 0 or 1, as the cluster has 2 tasks of "
                    "type 'worker', got 2",
                ),
                (
                    tf_config(index=None),
                    "the task's index must be 0 or 1, as the cluster has 2 tasks of "
                    "type 'worker', got None",
                ),
                (
                    tf_config(CHIEF, "chief", 1),
                    "the task's index must be 0, as the cluster has 1 task of type "
                    "'chief', got 1",
                ),
                (
                    tf_config(kind="chief"),
                    "the task's type must be 'worker', got 'chief'",
                ),
                (
                    tf_config(CHIEF, None),
                    "the task's type must be 'chief' or 'worker', got None",
                ),
                (
                    tf_config(kind="evaluator"),
                    "a task of type 'evaluator' has no place here: all processes train, "
                    "and hold their part of the parameters. Start chief and workers "
                    "only",
                ),
                (
                    tf_config({"worker": ["a:1", "b:1"], "ps": ["p:1"]}),
                    "a task of type 'ps' has no place here: all processes train, and "
                    "hold their part of the parameters. Start chief and workers only",
                ),
                (
                    tf_config({"worker": ["a", "b"]}),
                    "'a' is not a host with a port, such as '10.0.0.1:1234'",
                ),
                (
                    tf_config({"worker": ["a:1", 7]}),
                    "7 is not a host with a port, such as '10.0.0.1:1234'",
                ),
                (tf_config({"worker": ["a:1", "a:1"]}), "'a:1' is there twice"),
                (
                    tf_config({"worker": ["a:1"]}, index=1),
                    "the task's index must be 0, as the cluster has 1 task of type "
                    "'worker', got 1",
                ),
                (
                    tf_config(index=float("inf")),
                    "the task's index must be 0 or 1, as the cluster has 2 tasks of "
                    "type 'worker', got inf",
                ),
                (
                    tf_config({"workers": ["a:1", "b:1"]}, "workers"),
                    "the cluster must have one 'chief' or none and 'worker's, got "
                    "'workers'",
                ),
                (
                    tf_config({"chief": ["a:1", "b:1"]}, "chief"),
                    "the cluster must have one 'chief' or none and 'worker's, got 2 "
                    "chiefs",
                ),
            ]
        ),
        (
            {"TF_CONFIG": "[" * 100_000},
            f"TF_CONFIG='{'[' * 2000}'...: it must be JSON with a 'cluster' and a "
            f"'task'.{RIGHT}",
        ),
        (
            DTENSOR | {"DTENSOR_JOBS": "a:1,b"},
            "DTENSOR_JOBS='a:1,b': 'b' is not a host with a port, such as "
            "'10.0.0.1:1234'. Right for two processes is '10.0.0.1:1234,10.0.0.2:1234'.",
        ),
        (
            DTENSOR | {"DTENSOR_NUM_CLIENTS": "2"},
            "DTENSOR_JOBS='a:1,b:1,c:1' has 3 addresses, but DTENSOR_NUM_CLIENTS='2'. "
            "Set both for the same processes, or the addresses alone.",
        ),
        (
            DTENSOR | {"DTENSOR_CLIENT_ID": "3"},
            "DTENSOR_CLIENT_ID='3' does not fit DTENSOR_JOBS='a:1,b:1,c:1': the index "
            "of a process must be between 0 and 2.",
        ),
        (
            {"DTENSOR_CLIENT_ID": "1"},
            "got DTENSOR_CLIENT_ID='1', but no coordinator_address and num_processes."
            + ALL_THREE,
        ),
        (
            KERAS | {"KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1,b:1"},
            "KERAS_DISTRIBUTION_JOB_ADDRESSES='a:1,b:1' has 2 addresses, but "
            "KERAS_DISTRIBUTION_NUM_PROCESSES='5'. Set both for the same processes, or "
            "the addresses alone.",
        ),
        (
            KERAS | {"KERAS_DISTRIBUTION_PROCESS_ID": "x"},
            "KERAS_DISTRIBUTION_PROCESS_ID must be a non-negative integer, such as '0', "
            "got 'x'.",
        ),
        (
            JAX | KERAS,
            "JAX_NUM_PROCESSES='4' and KERAS_DISTRIBUTION_NUM_PROCESSES='5' contradict "
            "each other: they give 4 and 5 processes." + OTHERS,
        ),
        (
            JAX | DTENSOR | {"JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "1"},
            "JAX_PROCESS_ID='1' and DTENSOR_CLIENT_ID='2' contradict each other: "
            "they give this process the ids 1 and 2." + OTHERS,
        ),
    ],
)
def test_what_is_said_about_bad_variables(environment, text):
    assert message({}, environment) == f"initialize: {text}"


def test_jax_detects_the_tasks_of_slurm(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    settings = find_settings({}, SLURM, detect)
    assert process(settings) == (f"node01:{61440 + 7}", 4, 3)
    assert settings.local_device_ids == (1,)
    assert settings.sources == {
        "coordinator_address": "JAX's detection of slurm",
        "num_processes": "SLURM_NTASKS",
        "process_id": "SLURM_PROCID",
        "local_device_ids": "JAX's detection of slurm",
    }
    # What is known already is not asked for.
    known = find_settings({"coordinator_address": "h:9"}, SLURM, detect)
    assert process(known) == ("h:9", 4, 3)


def detect(*known):
    return _jax.detect_cluster(*known, timeout_s=1)


def test_jax_detects_the_ranks_of_open_mpi(monkeypatch):
    environment = {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = find_settings({}, environment, detect)
    assert settings.coordinator_address.startswith("10.96.0.1:")
    assert (settings.num_processes, settings.process_index) == (2, 1)
    assert settings.source == (
        "JAX's detection of ompi, OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_RANK"
    )


def test_a_process_that_srun_did_not_start_is_alone(monkeypatch):
    environment = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
    monkeypatch.delenv("SLURM_STEP_NODELIST", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_settings({}, environment, detect).num_processes == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"SLURM_NTASKS": "many"},
            "SLURM_NTASKS must be a non-negative integer, such as '0', got 'many'.",
        ),
        (
            {"SLURM_PROCID": "4"},
            "SLURM_PROCID=4 does not fit SLURM_NTASKS=4: the index of a process must be "
            "between 0 and 3.",
        ),
    ],
)
def test_what_is_said_about_bad_variables_of_slurm(monkeypatch, changes, text):
    environment = SLURM | changes
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert message({}, environment, detect) == f"initialize: {text}"


def test_what_is_said_when_the_detection_fails():
    def fail(*known):
        raise RuntimeError("no such pod")

    assert message({}, {}, fail) == (
        "initialize: JAX's detection of the cluster failed with RuntimeError: no such "
        f"pod.{ALL_THREE}"
    )


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_that_jax_does_not_detect_do_not_run_each_alone(name):
    assert message({}, {name: "4"}) == (
        f"initialize: {name}='4', but JAX {jax.__version__} does not detect the other "
        f"processes of this launcher, and each would run alone.{ALL_THREE} If each is "
        "to run alone, give num_processes=1."
    )
    assert process(find_settings({"num_processes": 1}, {name: "4"})) == (None, 1, 0)
    assert process(find_settings({}, {name: "1"})) == (None, 1, 0)
    assert process(find_settings(ARGUMENTS, {name: "2"})) == ("h:9", 2, 1)


@pytest.mark.parametrize(
    "environment",
    [
        # Notebooks: of Colab, of Kaggle, on a TPU host, in a pod.
        {"COLAB_RELEASE_TAG": "release-colab_20251001"},
        {"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "TPU_WORKER_HOSTNAMES": "a,b"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_SKIP_MDS_QUERY": "1"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        {"TPU_WORKER_HOSTNAMES": "t1v", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    ],
)
def test_where_there_can_be_no_other_process_no_server_is_asked(environment):
    def ask(*known):
        raise AssertionError("asked")

    assert process(find_settings({}, environment, ask)) == (None, 1, 0)


@pytest.mark.parametrize(
    "environment",
    [
        {"TPU_WORKER_HOSTNAMES": "a,b"},
        {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_COORDINATOR_ADDRESS": "b"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"},
        {},
    ],
)
def test_where_there_can_be_other_processes_jax_is_asked(environment):
    settings = find_settings({}, environment, lambda *known: ("tpu", "a:8", 2, 1, None))
    assert process(settings) == ("a:8", 2, 1)
    assert settings.source == "JAX's detection of tpu"


def test_processes_have_the_gpus_that_their_scheduler_has_for_them():
    def slurm(*known):
        return ("slurm", "n:1", 4, 3, [1])

    given = {"coordinator_address": "h:9", "num_processes": 4, "process_id": 3}
    assert find_settings(given, SLURM, slurm).local_device_ids == (1,)
    # Those that something else started inside a task share its GPUs.
    assert find_settings(ARGUMENTS, SLURM, slurm).local_device_ids is None
    # One process has all of them.
    alone = find_settings({}, SLURM, lambda *known: ("slurm", "n:1", 1, 0, [0]))
    assert alone.local_device_ids is None
    assert find_settings({"local_device_ids": 2}, {}).local_device_ids == (2,)
