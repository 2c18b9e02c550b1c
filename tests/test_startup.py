"""Programs of several processes start together, or end with an error that says why."""

import os
import socket

import jax
import pytest

import meshlayout as ml
from meshlayout import _jax
from meshlayout.cluster import rendezvous
from tests.processes import free_port, run_processes


def attempt(function, *args, **kwargs):
    """The message of the error of a call; "" if it works."""
    try:
        function(*args, **kwargs)
    except ml.errors.ClusterError as error:
        return str(error)
    return ""


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
    assert (
        texts(both, "after")
        == [
            "initialize comes too late: JAX has already started its devices, and other "
            "processes can no longer join them. Call it before any other use of JAX, "
            "virtual_devices included; in a notebook, restart the kernel first."
        ]
        * 2
    )


@pytest.mark.multiprocess
def test_shutdown_names_the_process_that_is_late(both):
    late = (
        "process 0 waited 1 s for process 1, which did not come to shutdown(). Process "
        "1 last came to barrier 'process 0 has given up'. All processes must call it, "
        "or all end without it."
    )
    assert texts(both, "late") == [late, late]
