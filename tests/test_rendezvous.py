"""Processes meet at the coordinator's address, or all know why not.

The processes are threads here: the meeting itself starts nothing of JAX.
"""

import errno
import logging
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from meshlayout.cluster import rendezvous
from meshlayout.cluster.settings import find_settings
from meshlayout.errors import ClusterError
from tests.processes import free_port


NAME = f"pid {os.getpid()} on {socket.gethostname()}"

LOOK = (
    " Look at the output of those that did not, check that they were given the same "
    "address and can reach it, or wait longer with timeout_s."
)
LOOK_AT_0 = (
    " Look at the output of process 0, check that it was given the same address, or "
    "wait longer with timeout_s."
)


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(rendezvous, "_GRACE_S", 0.3)
    monkeypatch.setattr(rendezvous, "_HELLO_S", 0.3)
    monkeypatch.setattr(rendezvous, "_FOREIGN_S", 0.3)
    # What comes after the meeting is JAX's, and none of it starts here.
    monkeypatch.setattr(rendezvous, "_wait_for_service", lambda settings: None)


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


def process(address, count, index, **arguments):
    arguments |= {"num_processes": count, "process_id": index}
    return find_settings({"coordinator_address": address, **arguments}, {})


def message(settings, timeout_s, delay_s=0.0):
    """The message of the error with which a process leaves the meeting, or ""."""
    time.sleep(delay_s)
    try:
        rendezvous.meet(settings, timeout_s)
    except ClusterError as error:
        return str(error)
    return ""


def messages(processes, timeout_s=10.0, delays=()):
    """The messages of processes that come together."""
    delays = delays or [0.0] * len(processes)
    with ThreadPoolExecutor(len(processes)) as pool:
        futures = [
            pool.submit(message, settings, timeout_s, delay)
            for settings, delay in zip(processes, delays, strict=True)
        ]
        return [future.result() for future in futures]


@pytest.mark.parametrize("delays", [(0, 0, 0, 0), (0.3, 0.2, 0, 0.1)])
def test_all_processes_meet_in_whatever_order_they_come(address, delays):
    everyone = [process(address, 4, index) for index in range(4)]
    assert messages(everyone, delays=delays) == [""] * 4


def test_they_meet_at_names_and_at_addresses_of_version_6():
    for host in ("localhost", "[::1]"):
        address = f"{host}:{free_port()}"
        assert messages([process(address, 2, i) for i in range(2)]) == ["", ""]


def test_they_can_meet_behind_another_address_than_the_one_process_0_listens_at():
    port = free_port()
    bound = {"coordinator_bind_address": f"0.0.0.0:{port}"}
    address = f"127.0.0.1:{port}"
    everyone = [process(address, 2, index, **bound) for index in range(2)]
    assert messages(everyone) == ["", ""]
    assert message(everyone[0], 0.2) == (
        f"initialize: process 1 did not come to {address} (bound to 0.0.0.0:{port}) "
        f"within 0.2 s; 1 of 2 processes did.{LOOK}"
    )


def test_many_missing_processes_are_named_by_the_first_ten(address):
    present = [process(address, 15, index) for index in (0, 3)]
    assert (
        messages(present, timeout_s=0.5)
        == [
            "initialize: processes 1, 2, 4, 5, 6, 7, 8, 9, 10, 11 and 3 more did not come to "
            f"{address} within 0.5 s; 2 of 15 processes did.{LOOK}"
        ]
        * 2
    )


@pytest.mark.slow
def test_a_process_that_comes_a_moment_too_late_hears_of_it(address, monkeypatch):
    monkeypatch.setattr(rendezvous, "_GRACE_S", 2.0)
    everyone = [process(address, 3, index) for index in (0, 1)]
    assert (
        messages(everyone, timeout_s=0.5, delays=(0, 0.6))
        == [
            f"initialize: processes 1 and 2 did not come to {address} within 0.5 s; 1 of 3 "
            f"processes did.{LOOK}"
        ]
        * 2
    )


def test_two_processes_with_one_id_are_named_to_all(address):
    everyone = [process(address, 4, index) for index in (0, 1, 1, 2)]
    text = (
        f"initialize: two processes were given process_id=1: {NAME}, and {NAME}. Give "
        "each of the 4 processes its own, from 0 to 3."
    )
    assert messages(everyone) == [text] * 4


def test_a_second_process_0_is_told_wherever_it_runs(address):
    # It cannot listen: on this machine because the first one does, elsewhere because
    # the address is not that machine's.
    elsewhere = {"coordinator_bind_address": "10.99.98.97:1234"}
    for other in (process(address, 3, 0), process(address, 3, 0, **elsewhere)):
        text = (
            f"initialize: two processes were given process_id=0: {NAME}, and {NAME}. "
            "Give each of the 3 processes its own, from 0 to 2."
        )
        everyone = [process(address, 3, 0), other, process(address, 3, 1)]
        assert messages(everyone, delays=(0, 0.2, 0)) == [text] * 3


def test_other_versions_of_jax_are_named(address, monkeypatch):
    hello = rendezvous._hello

    def older(settings):
        said = hello(settings)
        if settings.process_index == 1:
            said["versions"] = said["versions"] | {"jax": "0.1.2"}
        return said

    monkeypatch.setattr(rendezvous, "_hello", older)
    assert (
        messages([process(address, 2, index) for index in range(2)])
        == [
            f"initialize: process 1 ({NAME}) has jax 0.1.2, but process 0 ({NAME}) has "
            f"{jax.__version__}. Install the same version for all processes."
        ]
        * 2
    )


def come_and_leave(settings):
    """What a process that is killed while it waits looks like to process 0."""
    while True:
        try:
            connection = rendezvous._connection(settings, 1.0)
        except OSError:
            time.sleep(0.02)
        else:
            break
    with connection:
        rendezvous._send(connection, rendezvous._hello(settings))
        time.sleep(0.1)


def test_a_process_that_was_started_again_takes_the_place_of_the_first(address):
    first = threading.Thread(target=come_and_leave, args=(process(address, 3, 1),))
    first.start()
    everyone = [process(address, 3, index) for index in range(3)]
    assert messages(everyone, delays=(0, 0.5, 0.8)) == [""] * 3
    first.join()


@pytest.mark.slow
def test_a_process_that_came_and_ended_is_missing(address):
    first = threading.Thread(target=come_and_leave, args=(process(address, 3, 1),))
    first.start()
    present = [process(address, 3, index) for index in (0, 2)]
    assert (
        messages(present, timeout_s=1.0, delays=(0, 0.4))
        == [
            f"initialize: process 1 did not come to {address} within 1 s; 2 of 3 processes "
            f"did.{LOOK}"
        ]
        * 2
    )
    first.join()


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"",
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", marks=pytest.mark.slow),
        pytest.param(b'{"a": 1}\n', marks=pytest.mark.slow),
    ],
)
def test_strangers_that_connect_do_no_harm(address, bytes_sent):
    def stranger():
        settings = process(address, 2, 1)
        while True:
            try:
                connection = rendezvous._connection(settings, 1.0)
            except OSError:
                time.sleep(0.01)
            else:
                break
        with connection:
            connection.sendall(bytes_sent)
            time.sleep(0.5)

    thread = threading.Thread(target=stranger)
    thread.start()
    everyone = [process(address, 2, index) for index in range(2)]
    assert messages(everyone, delays=(0, 0.2)) == ["", ""]
    thread.join()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        # As JAX's service answers, once it runs.
        (
            b"\0\0\x12\4\0\0\0\0\0\n",
            "another program answers there, or a run that began without this process",
        ),
        (None, "it did not answer"),
        (b"", "it ended before all processes had come"),
    ],
)
def test_where_something_else_listens_the_others_say_so(answer, reason):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        is_over = threading.Event()

        def serve():
            server.settimeout(0.1)
            connections = []
            while not is_over.is_set():
                try:
                    connections.append(server.accept()[0])
                except TimeoutError:
                    continue
                if answer is not None:
                    connections[-1].sendall(answer)
                    connections[-1].close()
            for connection in connections:
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        text = message(process(address, 2, 1), 0.3)
        is_over.set()
        thread.join()
    assert text == (
        "initialize: process 1 waited 0.3 s for process 0, which did not come to "
        f"{address} (from coordinator_address): {reason}.{LOOK_AT_0}"
    )


def test_the_port_of_a_run_that_is_about_to_end_is_waited_for(address, monkeypatch):
    monkeypatch.setattr(rendezvous, "_GRACE_S", 5.0)
    host, _, port = address.rpartition(":")
    with socket.socket() as earlier:
        earlier.bind((host, int(port)))
        earlier.listen()
        threading.Timer(0.2, earlier.close).start()
        assert messages([process(address, 2, index) for index in range(2)]) == ["", ""]


def test_a_connection_to_itself_is_none_and_leaves_the_port_free(address, monkeypatch):
    def connect_to_itself(target, timeout):
        connection = socket.socket()
        connection.bind(target)
        connection.connect(target)
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_connection", connect_to_itself)
        with pytest.raises(ConnectionRefusedError):
            rendezvous._connection(process(address, 2, 1), 1.0)
    monkeypatch.setattr(rendezvous, "_GRACE_S", 0.0)
    assert messages([process(address, 2, index) for index in range(2)]) == ["", ""]


def test_too_few_files_for_so_many_processes_are_named():
    class Listener:
        def settimeout(self, timeout_s):
            pass

        def accept(self):
            raise OSError(errno.EMFILE, "Too many open files")

    with pytest.raises(ClusterError) as error:
        rendezvous._accept(Listener(), 1.0)
    assert str(error.value) == (
        "initialize: process 0 cannot take the connection of another process: too many "
        "open files. `ulimit -n` must be above the number of processes."
    )


def test_an_address_that_is_not_this_machines_is_named():
    assert message(process("10.99.98.97:1234", 2, 0), 1.0) == (
        "initialize: process 0 cannot listen at 10.99.98.97:1234 (from "
        "coordinator_address): cannot assign requested address. It must be an address "
        f"of the machine of process 0, which is {socket.gethostname()}. If the others "
        "reach this machine through a gateway or service, also give "
        "coordinator_bind_address, such as '0.0.0.0:1234'."
    )


def test_names_that_are_unknown_or_lead_nowhere_are_named(monkeypatch, address, caplog):
    resolve = socket.getaddrinfo

    def resolve_as_debian(host, *args, **kwargs):
        if host == "nowhere":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1" if host == "node1" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_as_debian)
    assert message(process("nowhere:1234", 2, 0), 1.0).startswith(
        "initialize: process 0 cannot listen at nowhere:1234 (from "
        "coordinator_address): name or service not known. It must be an address of the "
    )
    assert message(process("nowhere:1234", 2, 1), 0.1) == (
        "initialize: process 1 waited 0.1 s for process 0, which did not come to "
        "nowhere:1234 (from coordinator_address): name or service not known."
        f"{LOOK_AT_0}"
    )
    port = address.rpartition(":")[2]
    with caplog.at_level(logging.WARNING):
        everyone = [process(f"node1:{port}", 2, index) for index in range(2)]
        assert messages(everyone) == ["", ""]
    assert caplog.messages == [
        "node1 is 127.0.0.1 on this machine, where processes on other machines cannot "
        "reach it. If there are any, give coordinator_bind_address, or the variable "
        f"JAX_COORDINATOR_BIND_ADDRESS, such as '0.0.0.0:{port}'."
    ]


@pytest.mark.slow
def test_long_waits_are_logged_once(address, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "_WARN_AFTER_S", 0.2)
    with caplog.at_level(logging.WARNING):
        message(process(address, 3, 1), 0.5)
        message(process(address, 3, 0), 1.2)
    assert caplog.messages == [
        f"process 1 has waited 0 s for process 0 at {address} (connection refused), and "
        "waits up to 0 s.",
        f"process 0 has waited 1 s at {address} for processes 1 and 2, and waits up to "
        "1 s.",
    ]


def test_a_service_that_does_not_start_is_named(monkeypatch, address):
    monkeypatch.undo()
    monkeypatch.setattr(rendezvous, "_SERVICE_S", 0.2)
    assert messages([process(address, 2, index) for index in range(2)]) == [
        "",
        "initialize: all processes had come, but then process 0 did not start JAX's "
        f"service at {address}: connection refused. Look at the output of process 0.",
    ]
