"""Programs of several processes start together, or end with an error that says why."""

import json
import logging
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

import meshlayout as ml
from meshlayout import _jax
from meshlayout.cluster import startup
from meshlayout.cluster.environment import find_settings, split_address
from meshlayout.errors import ClusterError
from tests.bad_values import BAD, refusal
from tests.processes import free_port, run_processes


TOO_LATE = (
    "initialize comes too late: JAX has started its devices or its own jax.distributed. "
    "Call it before any other use of JAX, virtual_devices included; in a notebook, "
    "restart the kernel first."
)
NAMES = [f"process {i} ({socket.gethostname()}, pid {os.getpid()})" for i in range(5)]
LOOK = (
    " Look at the output there, check that all were given the same address and can "
    "reach it, or wait longer with timeout_s."
)


def attempt(*call, **kwargs):
    """The message of the error of a call; "" if it works."""
    return refusal(ClusterError, *call, **kwargs) or ""


def job(ports):
    """What each of two processes sees of starts that fail, and of those that work."""
    startup._TOLD_S = startup._BIND_S = 0.5
    here = int(os.environ["JAX_PROCESS_ID"])
    address = [f"127.0.0.1:{port}" for port in ports]
    start, seen = ml.initialize, {}
    seen["missing"] = attempt(start, address[0], 4, here, timeout_s=1)
    seen["taken"] = attempt(start, address[1], 2, here, timeout_s=0.5)
    seen["nothing started"] = not jax.distributed.is_initialized()
    seen["start"] = attempt(start, timeout_s=60)
    seen["again"] = attempt(start)
    seen["others"] = attempt(start, process_id=0, num_processes=1)
    seen["process"] = [ml.cluster.process_index(), ml.cluster.process_count()]
    seen["is main"] = ml.cluster.is_main()
    seen["no devices yet"] = not _jax.has_backend()
    ml.shutdown()
    seen["restart"] = attempt(start, timeout_s=60)
    seen["gathered"] = ml.cluster.all_gather(here).tolist()
    seen["devices"] = len(ml.virtual_devices(2))
    seen["with devices"] = attempt(start)
    ml.shutdown()
    seen["after"] = attempt(start)
    return seen


@pytest.mark.multiprocess
def test_processes_start_together_as_often_as_they_like_and_failures_are_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = [free_port(), other.getsockname()[1]]
        both = run_processes(2, job, ports, initialize=False)
    address = f"127.0.0.1:{ports[0]}"
    missing = (
        f"initialize: processes 2-3 did not come (process 0 waited 1 s at {address}"
    )
    for here, seen in enumerate(both):
        assert seen["missing"].startswith(missing)
        taken = ("process 0 cannot listen at", "waited for process 0, which")
        assert taken[here] in seen["taken"]
        assert seen["nothing started"]
        assert seen["start"] == seen["again"] == ""
        opening = f"initialize: this program already runs as process {here} of 2, coord"
        assert seen["others"].startswith(opening)
        assert "cannot become one process (from arguments" in seen["others"]
        assert (seen["process"], seen["is main"]) == ([here, 2], here == 0)
        assert seen["no devices yet"]
        assert seen["gathered"] == [0, 1]
        assert seen["restart"] == seen["with devices"] == ""
        assert seen["devices"] == 4
        assert seen["after"] == TOO_LATE


@pytest.fixture
def address(monkeypatch):
    for name, seconds in [("_TOLD_S", 0.6), ("_GONE_S", 0.8), ("_BIND_S", 0.6)]:
        monkeypatch.setattr(startup, name, seconds)
    return f"127.0.0.1:{free_port()}"


def process(address, count, index, **arguments):
    arguments |= {"num_processes": count, "process_id": index}
    return find_settings({"coordinator_address": address, **arguments}, {})


def message(settings, timeout_s=10.0, delay_s=0.0):
    """The error with which a process leaves the meeting; "" if it knows all others."""
    time.sleep(delay_s)
    try:
        names = startup.meet(settings, timeout_s)
    except ClusterError as error:
        return str(error)
    assert names == NAMES[: settings.num_processes]
    return ""


def messages(address, count, indices, timeout_s=10.0, delays=(0, 0, 0, 0), **arguments):
    """The messages of processes that come together."""
    everyone = [process(address, count, index, **arguments) for index in indices]
    with ThreadPoolExecutor(len(everyone)) as pool:
        futures = [
            pool.submit(message, settings, timeout_s, delay_s)
            for settings, delay_s in zip(everyone, delays, strict=False)
        ]
        return [future.result() for future in futures]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
@pytest.mark.parametrize("delays", [(0, 0, 0), (0.3, 0.2, 0)])
def test_all_processes_meet_in_whatever_order_they_come(host, delays):
    address = f"{host}:{free_port()}"
    assert messages(address, 3, range(3), delays=delays) == [""] * 3


def test_process_0_can_listen_at_another_address(address):
    bound = f"0.0.0.0:{address.rpartition(':')[2]}"
    both = messages(address, 2, range(2), coordinator_bind_address=bound)
    assert both == ["", ""]


def test_all_that_came_name_those_that_did_not(address):
    text = (
        f"initialize: processes 1-2,4 did not come (process 0 waited 1 s at {address})."
    )
    # One comes when it is too late, and hears of it.
    told = messages(address, 5, (0, 3, 1), timeout_s=0.8, delays=(0, 0, 1.1))
    assert told == [text + LOOK] * 3


def test_two_processes_with_one_id_are_named_to_all(address):
    text = "initialize: two processes were given process_id=1: "
    told = messages(address, 4, (0, 1, 2, 1))
    assert told == [f"{text}{NAMES[1]} and {NAMES[1]}."] * 4


@pytest.mark.parametrize(
    ("fact", "value", "here"),
    [("num_processes", 3, 2), ("jax", "0.1.2", jax.__version__)],
)
def test_what_differs_is_named_on_all(address, monkeypatch, fact, value, here):
    send = startup._send

    def other(connection, said):
        send(connection, said | {fact: value} if "name" in said else said)

    monkeypatch.setattr(startup, "_send", other)
    text = f"initialize: {fact} is {value} on {NAMES[1]}, and {here} on {NAMES[0]}."
    assert messages(address, 2, range(2)) == [text] * 2


def come_and_leave(address, sent, seconds=0.1):
    """What a process that is killed while it waits looks like, or a stranger."""
    for _ in range(100):
        try:
            connection = socket.create_connection(split_address(address))
        except OSError:
            time.sleep(0.02)
            continue
        with connection:
            connection.sendall(sent)
            time.sleep(seconds)
        return


HELLO = {"process_id": 1, "num_processes": 3, "name": "a", "jax": jax.__version__}


def test_a_process_that_came_and_ended_is_named(address):
    args = address, json.dumps(HELLO).encode() + b"\n"
    with ThreadPoolExecutor() as pool:
        pool.submit(come_and_leave, *args)
        told = messages(address, 3, (0, 2), 20, (0, 0.2))
    start = "initialize: process 1 came, and ended before all did (process 0 waited"
    assert all(text.startswith(start) for text in told)


def test_a_process_0_that_came_and_ended_is_named(address):
    with socket.create_server(split_address(address)) as server:

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
    with ThreadPoolExecutor() as pool:
        pool.submit(come_and_leave, address, sent, 0.5)
        assert messages(address, 2, range(2), delays=(0, 0.2)) == ["", ""]


def test_a_port_in_use_is_waited_for_and_then_named(address):
    earlier = socket.create_server(split_address(address))
    threading.Timer(0.2, earlier.close).start()
    assert messages(address, 2, range(2)) == ["", ""]
    with socket.create_server(split_address(address)):
        text = message(process(address, 2, 0))
    start = f"initialize: process 0 cannot listen at {address}: [Errno 98] Address alre"
    assert text.startswith(start)
    host = socket.gethostname()
    assert f"It must be an address of {host} and a free port; behind a" in text


@pytest.fixture
def alone():
    ml.shutdown()
    yield
    ml.shutdown()


def test_on_one_process_it_does_nothing_and_says_so(alone, caplog):
    with caplog.at_level(logging.INFO, "meshlayout"):
        ml.initialize(timeout_s=5)
        ml.initialize()
    assert caplog.messages == ["one process; no cluster was found."]
    assert not jax.distributed.is_initialized()
    assert (ml.cluster.process_index(), ml.cluster.process_count()) == (0, 1)
    assert ml.cluster.is_main()
    assert attempt(ml.initialize, "10.0.0.1:1234", 2, 0).endswith(
        "cannot become process 0 of 2, coordinator 10.0.0.1:1234 (from arguments). Call "
        "shutdown() first."
    )


def test_it_comes_too_late_when_jax_has_devices_or_was_started(alone, monkeypatch):
    jax.devices()
    assert attempt(ml.initialize, "10.0.0.1:1234", 2, 0) == TOO_LATE
    assert attempt(ml.initialize, local_device_ids=0) == TOO_LATE
    monkeypatch.setattr(_jax, "has_backend", lambda: False)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert attempt(ml.initialize, "10.0.0.1:1234", 2, 0) == TOO_LATE


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
    "name", ["local_device_ids", "timeout_s", "heartbeat_timeout_s", "step_timeout_s"]
)
def test_bad_arguments_are_refused_in_a_sentence(alone, name, value):
    jax.devices()
    message = refusal(ClusterError, ml.initialize, **{name: value})
    if value is None and name in ("local_device_ids", "step_timeout_s"):
        assert message is None
    elif name == "local_device_ids" and message == TOO_LATE:
        assert value == 0 or value == []
    else:
        assert message.startswith("initialize: ")
        assert name in message
