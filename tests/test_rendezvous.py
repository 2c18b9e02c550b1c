"""The processes of a program meet before JAX starts, or an error says who did not."""

import logging
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshlayout.cluster import startup as rendezvous
from meshlayout.cluster.environment import find_settings
from meshlayout.errors import ClusterError
from tests.processes import free_port


NAMES = [f"process {i} ({socket.gethostname()}, pid {os.getpid()})" for i in range(5)]
LOOK = (
    " Look at the output there, check that all were given the same address and can "
    "reach it, or wait longer with timeout_s."
)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for name, seconds in [("_TOLD_S", 0.6), ("_GONE_S", 0.8), ("_BIND_S", 0.6)]:
        monkeypatch.setattr(rendezvous, name, seconds)


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


def process(address, count, index, **arguments):
    arguments |= {"num_processes": count, "process_id": index}
    return find_settings({"coordinator_address": address, **arguments}, {})


def message(settings, timeout_s=10.0, delay_s=0.0):
    """The error with which a process leaves the meeting; "" if it knows all others."""
    time.sleep(delay_s)
    try:
        names = rendezvous.meet(settings, timeout_s)
    except ClusterError as error:
        return str(error)
    assert names == NAMES[: settings.num_processes]
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


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
@pytest.mark.parametrize("delays", [(0, 0, 0), (0.3, 0.2, 0)])
def test_all_processes_meet_in_whatever_order_they_come(host, delays):
    address = f"{host}:{free_port()}"
    everyone = [process(address, 3, index) for index in range(3)]
    assert messages(everyone, delays=delays) == [""] * 3


def test_process_0_can_listen_at_another_address(address):
    bound = {"coordinator_bind_address": f"0.0.0.0:{address.rpartition(':')[2]}"}
    everyone = [process(address, 2, index, **bound) for index in range(2)]
    assert messages(everyone) == ["", ""]


def test_all_that_came_name_those_that_did_not(address):
    present = [process(address, 5, index) for index in (0, 3, 1)]
    text = (
        f"initialize: processes 1-2,4 did not come (process 0 waited 1 s at {address})."
    )
    # One comes when it is too late, and hears of it.
    assert messages(present, timeout_s=0.8, delays=(0, 0, 1.1)) == [text + LOOK] * 3


def test_two_processes_with_one_id_are_named_to_all(address):
    everyone = [process(address, 4, i) for i in (0, 1, 2, 1)]
    text = "initialize: two processes were given process_id=1: "
    assert messages(everyone) == [f"{text}{NAMES[1]} and {NAMES[1]}."] * 4


@pytest.mark.parametrize(
    ("fact", "value", "here"),
    [("num_processes", 3, 2), ("jax", "0.1.2", rendezvous.jax.__version__)],
)
def test_what_differs_is_named_on_all(address, monkeypatch, fact, value, here):
    send = rendezvous._send

    def other(connection, said):
        send(connection, said | {fact: value} if "name" in said else said)

    monkeypatch.setattr(rendezvous, "_send", other)
    text = f"initialize: {fact} is {value} on {NAMES[1]}, and {here} on {NAMES[0]}."
    everyone = [process(address, 2, index) for index in range(2)]
    assert messages(everyone) == [text] * 2


def come_and_leave(address, sent, seconds=0.1):
    """What a process that is killed while it waits looks like, or a stranger."""
    for _ in range(100):
        try:
            connection = socket.create_connection(rendezvous.split_address(address))
        except OSError:
            time.sleep(0.02)
            continue
        with connection:
            connection.sendall(sent)
            time.sleep(seconds)
        return


HELLO = (
    b'{"process_id": 1, "num_processes": 3, "name": "a", "jax": "%s"}\n'
    % rendezvous.jax.__version__.encode()
)


def test_a_process_that_came_and_ended_is_named(address):
    first = threading.Thread(target=come_and_leave, args=(address, HELLO))
    first.start()
    told = messages([process(address, 3, 0), process(address, 3, 2)], 20, (0, 0.2))
    first.join()
    start = "initialize: process 1 came, and ended before all did (process 0 waited"
    assert all(text.startswith(start) for text in told)


def test_a_process_0_that_came_and_ended_is_named(address):
    with socket.create_server(rendezvous.split_address(address)) as server:

        def serve():
            server.accept()[0].close()
            server.close()

        thread = threading.Thread(target=serve)
        thread.start()
        text = message(process(address, 2, 1), 30)
        thread.join()
    assert text == (
        f"initialize: {NAMES[1]} waited for process 0, which did not come to "
        f"{address}: it came, and ended before all did.{LOOK}"
    )


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b'{"process_id": 1}\n']
)
def test_strangers_that_connect_do_no_harm(address, sent):
    stranger = threading.Thread(target=come_and_leave, args=(address, sent, 0.5))
    stranger.start()
    everyone = [process(address, 2, index) for index in range(2)]
    assert messages(everyone, delays=(0, 0.2)) == ["", ""]
    stranger.join()


def test_a_port_in_use_is_waited_for_and_then_named(address):
    target = rendezvous.split_address(address)
    earlier = socket.create_server(target)
    threading.Timer(0.2, earlier.close).start()
    everyone = [process(address, 2, index) for index in range(2)]
    assert messages(everyone) == ["", ""]
    with socket.create_server(target):
        text = message(everyone[0])
    start = f"initialize: process 0 cannot listen at {address}: [Errno 98] Address alre"
    assert text.startswith(start)


@pytest.mark.parametrize("host", ["10.99.98.97", "nowhere.invalid"])
def test_an_address_of_no_or_another_machine_is_named(host):
    text = message(process(f"{host}:1234", 2, 0))
    assert text.startswith(f"initialize: process 0 cannot listen at {host}:1234: ")
    host = socket.gethostname()
    assert f"It must be an address of {host} and a free port; behind a" in text


def test_long_waits_are_logged_once(address, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "_WARN_AFTER_S", 0.2)
    with caplog.at_level(logging.WARNING):
        message(process(address, 3, 1), 0.6)
        message(process(address, 3, 0), 0.6)
    assert caplog.messages == [
        f"{NAMES[1]} has waited 10 s for process 0.",
        f"{NAMES[0]} has waited 10 s for processes 1-2.",
    ]
