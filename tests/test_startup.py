"""Programs of several processes start together, or end with an error that says why."""

import json
import logging
import os
import socket
from pathlib import Path

import jax
import pytest

import meshlayout as ml
from meshlayout import _jax
from meshlayout.cluster import rendezvous
from meshlayout.cluster.settings import find_settings
from tests.bad_values import BAD, refusal
from tests.processes import free_port, run_processes


TOO_LATE = (
    "initialize comes too late: JAX has already started its devices, and other "
    "processes can no longer join them. Call it before any other use of JAX, "
    "virtual_devices included; in a notebook, restart the kernel first."
)


def attempt(function, *args, **kwargs):
    """The message of the error of a call; "" if it works."""
    try:
        function(*args, **kwargs)
    except ml.errors.ClusterError as error:
        return str(error)
    return ""


def listeners(address):
    """The hosts, as Linux writes them, at which somebody listens at a port."""
    port, hosts = int(address.rpartition(":")[2]), []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A" and int(local.partition(":")[2], 16) == port:
                hosts.append(local.partition(":")[0])
    return hosts


def job(ports):
    """What each of two processes sees of starts that fail, and of one that works."""
    rendezvous._GRACE_S = 0.5
    here = int(os.environ["JAX_PROCESS_ID"])
    address = [f"127.0.0.1:{port}" for port in ports]
    start = ml.initialize
    seen = {"name": f"pid {os.getpid()} on {socket.gethostname()}"}
    seen["missing"] = attempt(start, address[0], 4, here, timeout_s=2)
    seen["missing first"] = attempt(start, address[1], 3, here + 1, timeout_s=1)
    seen["double"] = attempt(start, address[2], 3, 0, timeout_s=5)
    seen["numbers"] = attempt(start, address[3], 2 + here, here, timeout_s=5)
    seen["taken"] = attempt(start, address[4], 2, here, timeout_s=0.5)
    seen["nothing started"] = not jax.distributed.is_initialized()

    seen["start"] = attempt(start, timeout_s=60, step_timeout_s=9)
    seen["again"] = [attempt(start), attempt(start, num_processes=2)]
    seen["others"] = attempt(start, process_id=0, num_processes=1)
    seen["time-out"] = attempt(start, step_timeout_s=8)
    seen["process"] = [ml.cluster.process_index(), ml.cluster.process_count()]
    seen["is main"] = ml.cluster.is_main()
    seen["listens at"] = listeners(os.environ["JAX_COORDINATOR_ADDRESS"])
    seen["no devices yet"] = not _jax.has_backend()
    ml.shutdown()
    seen["restart"] = attempt(start, timeout_s=60)
    seen["devices"] = len(ml.virtual_devices(2))
    seen["with devices"] = attempt(start)
    if here == 0:
        seen["late"] = attempt(ml.shutdown, timeout_s=0.5)
    ml.cluster.barrier("process 0 has given up", 60)
    if here == 1:
        seen["late"] = attempt(ml.shutdown, timeout_s=60)
    ml.cluster.barrier("so has process 1", 60)
    ml.shutdown()
    seen["after"] = attempt(start)
    return seen


@pytest.fixture(scope="module")
def both():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports = [*(free_port() for _ in range(4)), other.getsockname()[1]]
        processes = run_processes(2, job, ports, initialize=False)
    return [{**process, "ports": ports} for process in processes]


def texts(both, case):
    return [seen[case] for seen in both]


@pytest.mark.multiprocess
def test_every_process_that_came_names_those_that_did_not(both):
    text = (
        "initialize: processes 2 and 3 did not come to 127.0.0.1:{} within 2 s; 2 of 4 "
        "processes did. Look at the output of those that did not, check that they were "
        "given the same address and can reach it, or wait longer with timeout_s."
    )
    assert texts(both, "missing") == [text.format(both[0]["ports"][0])] * 2


@pytest.mark.multiprocess
def test_without_process_0_the_others_say_so(both):
    assert texts(both, "missing first") == [
        f"initialize: process {index} waited 1 s for process 0, which did not come to "
        f"127.0.0.1:{both[0]['ports'][1]} (from coordinator_address): connection "
        "refused. Look at the output of process 0, check that it was given the same "
        "address, or wait longer with timeout_s."
        for index in (1, 2)
    ]


@pytest.mark.multiprocess
def test_two_processes_with_one_id_are_named_to_both(both):
    first, second = texts(both, "double")
    assert first == second
    opening = "initialize: two processes were given process_id=0: "
    names = texts(both, "name")
    assert first in [
        f"{opening}{one}, and {other}. Give each of the 3 processes its own, from 0 to 2."
        for one, other in (names, reversed(names))
    ]


@pytest.mark.multiprocess
def test_different_numbers_of_processes_are_named_to_both(both):
    zero, one = texts(both, "name")
    assert (
        texts(both, "numbers")
        == [
            f"initialize: process 1 ({one}) was given num_processes=3 (from num_processes), "
            f"but process 0 ({zero}) was given 2 (from num_processes). Give all processes "
            "the same number."
        ]
        * 2
    )


@pytest.mark.multiprocess
def test_a_port_in_use_is_named(both):
    address = f"127.0.0.1:{both[0]['ports'][4]}"
    assert texts(both, "taken") == [
        f"initialize: process 0 cannot listen at {address} (from coordinator_address): "
        "address already in use. Another program listens there, perhaps an earlier run: "
        "end it, or choose another port.",
        "initialize: process 1 waited 0.5 s for process 0, which did not come to "
        f"{address} (from coordinator_address): it did not answer. Look at the output "
        "of process 0, check that it was given the same address, or wait longer with "
        "timeout_s.",
    ]


@pytest.mark.multiprocess
def test_after_starts_that_failed_another_one_works(both):
    assert texts(both, "nothing started") == [True, True]
    assert texts(both, "start") == ["", ""]
    assert texts(both, "process") == [[0, 2], [1, 2]]
    assert texts(both, "is main") == [True, False]
    assert texts(both, "no devices yet") == [True, True]


@pytest.mark.multiprocess
def test_process_0_listens_at_its_address_and_at_no_other(both):
    # 127.0.0.1, which a socket of version 6 writes as the second one.
    loopback = ["0100007F", "0000000000000000FFFF00000100007F"]
    for hosts in texts(both, "listens at"):
        assert hosts
        assert set(hosts) <= set(loopback)


@pytest.mark.multiprocess
def test_a_second_call_is_harmless_with_the_same_settings_only(both):
    assert texts(both, "again") == [["", ""]] * 2
    assert texts(both, "with devices") == ["", ""]
    assert (
        texts(both, "time-out")
        == [
            "initialize: step_timeout_s is 9.0 since the first call, and cannot become 8.0. "
            "Give it in the first call."
        ]
        * 2
    )
    for index, text in enumerate(texts(both, "others")):
        opening, _, rest = text.partition(", coordinator 127.0.0.1:")
        assert (
            opening == f"initialize: this program already runs as process {index} of 2"
        )
        assert rest.partition(" ")[2] == (
            "(from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID), and "
            "cannot become one process (from num_processes). Call initialize once, or "
            "shutdown() before other settings."
        )


@pytest.mark.multiprocess
def test_a_program_can_start_again_until_jax_has_devices(both):
    assert texts(both, "restart") == ["", ""]
    assert texts(both, "devices") == [4, 4]
    assert texts(both, "after") == [TOO_LATE] * 2


@pytest.mark.multiprocess
def test_shutdown_names_the_process_that_is_late(both):
    late = (
        "process 0 waited 1 s for process 1, which did not come to shutdown(). Process "
        "1 last came to barrier 'process 0 has given up'. All processes must call it, "
        "or all end without it."
    )
    assert texts(both, "late") == [late, late]


def environments(host, ports, here):
    """The variables of each launcher, for process `here` of two."""
    addresses = [[f"{host}:{port}", f"{host}:1"] for port in ports]
    cluster = {"chief": addresses[0][:1], "worker": addresses[0][1:]}
    task = {"type": "worker" if here else "chief", "index": 0}
    return [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})},
        {"DTENSOR_JOBS": ",".join(addresses[1]), "DTENSOR_CLIENT_ID": str(here)},
        {
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": addresses[2][0],
            "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
            "KERAS_DISTRIBUTION_PROCESS_ID": str(here),
        },
        {
            "SLURM_JOB_ID": str(ports[3]),
            "SLURM_STEP_NODELIST": host,
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(here),
            "SLURM_LOCALID": str(here),
        },
    ]


def launchers_job(ports):
    """What each of two processes is that was started in one way after another."""
    here = int(os.environ["JAX_PROCESS_ID"])
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        del os.environ[name]
    seen = []
    for environment in environments("localhost", ports, here):
        os.environ.update(environment)
        ml.initialize(timeout_s=60)
        settings = find_settings({}, os.environ)
        gathered = ml.cluster.all_gather(ml.cluster.process_index())
        late = ""
        if here == 1 and "TF_CONFIG" in environment:
            # As a third process, to which somebody gave the id of this one.
            late = attempt(rendezvous.meet, settings, 0.5)
        seen.append([settings.source, list(map(int, gathered)), late])
        ml.shutdown()
        for name in environment:
            del os.environ[name]
    return seen


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_find_each_other_by_the_variables_of_every_launcher():
    ports = [free_port() for _ in range(4)]
    seen = run_processes(2, launchers_job, ports, initialize=False)
    late = (
        "initialize: process 1 waited 0.5 s for process 0, which did not come to "
        f"localhost:{ports[0]} (from TF_CONFIG): another program answers there, or a "
        "run that began without this process. Look at the output of process 0, check "
        "that it was given the same address, or wait longer with timeout_s."
    )
    for here, process in enumerate(seen):
        assert process == [
            ["TF_CONFIG", [0, 1], late if here else ""],
            ["DTENSOR_JOBS and DTENSOR_CLIENT_ID", [0, 1], ""],
            [
                "KERAS_DISTRIBUTION_JOB_ADDRESSES, KERAS_DISTRIBUTION_NUM_PROCESSES and "
                "KERAS_DISTRIBUTION_PROCESS_ID",
                [0, 1],
                "",
            ],
            ["", [0, 1], ""],  # SLURM is detected by JAX
        ]


@pytest.fixture
def alone():
    yield
    ml.shutdown()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "one process; no cluster was found."),
        ({"num_processes": 1}, "one process (from num_processes)."),
    ],
)
def test_on_one_process_it_does_nothing_and_says_so(alone, caplog, arguments, text):
    ml.shutdown()  # also before
    with caplog.at_level(logging.INFO, "meshlayout"):
        ml.initialize(**arguments, timeout_s=5)
        ml.initialize()
    assert caplog.messages == [text]
    assert caplog.records[0].levelno == logging.INFO
    assert not jax.distributed.is_initialized()
    assert ml.cluster.process_index() == 0
    assert ml.cluster.process_count() == 1
    assert ml.cluster.is_main()


def test_one_process_cannot_become_one_of_several(alone):
    ml.initialize()
    with pytest.raises(ml.errors.ClusterError) as error:
        ml.initialize("10.0.0.1:1234", 2, 0)
    assert str(error.value) == (
        "initialize: this program already runs as one process, and cannot become "
        "process 0 of 2, coordinator 10.0.0.1:1234 (from coordinator_address, "
        "num_processes and process_id). Call initialize once, or shutdown() before "
        "other settings."
    )


def test_it_comes_too_late_when_jax_has_devices(alone):
    jax.devices()
    assert attempt(ml.initialize, "10.0.0.1:1234", 2, 0) == TOO_LATE
    assert attempt(ml.initialize, local_device_ids=0) == TOO_LATE
    ml.initialize()  # one process: nothing to start


def test_jaxs_own_start_is_not_repeated(alone, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert attempt(ml.initialize, "10.0.0.1:1234", 2, 0) == (
        "initialize: jax.distributed.initialize was called before. Call ml.initialize "
        "instead of it; it takes the same arguments."
    )


def test_a_service_of_jax_that_does_not_start_is_named(alone, monkeypatch):
    def fail(**settings):
        raise RuntimeError("UNKNOWN: Failed to start RPC server")

    monkeypatch.setattr(_jax, "has_backend", lambda: False)
    monkeypatch.setattr(_jax, "start_processes", fail)
    monkeypatch.setattr(rendezvous, "meet", lambda settings, timeout_s: None)
    assert attempt(ml.initialize, "10.0.0.1:1234", 2, 0) == (
        "initialize: process 0 could not start JAX's service at 10.0.0.1:1234: UNKNOWN: "
        "Failed to start RPC server. If another program has taken the port meanwhile, "
        "choose another one."
    )


def test_one_process_can_be_restricted_to_some_gpus(alone, monkeypatch):
    names = ("jax_cuda_visible_devices", "jax_rocm_visible_devices")
    before = {name: jax.config._read(name) for name in names}
    monkeypatch.setattr(_jax, "has_backend", lambda: False)
    try:
        ml.initialize(local_device_ids=[1, 3])
        assert [jax.config._read(name) for name in names] == ["1,3", "1,3"]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize("value", [*BAD, 1e300])
@pytest.mark.parametrize(
    "name",
    [
        "coordinator_address",
        "num_processes",
        "process_id",
        "local_device_ids",
        "coordinator_bind_address",
        "timeout_s",
        "heartbeat_timeout_s",
        "step_timeout_s",
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(alone, name, value):
    jax.devices()
    message = refusal(ml.errors.ClusterError, ml.initialize, **{name: value})
    if value is None and name != "timeout_s":
        assert message is None
    elif name == "local_device_ids" and type(value) is int and not value:
        assert message == TOO_LATE
    else:
        assert message.startswith("initialize: ")
        assert name in message
    if name == "timeout_s":
        assert refusal(ml.errors.ClusterError, ml.shutdown, value)
