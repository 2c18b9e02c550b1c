"""Programs of several processes start together, or end with an error that says why."""

import json
import logging
import os
import socket

import jax
import pytest

import meshlayout as ml
from meshlayout import _jax
from meshlayout.cluster import startup as rendezvous
from tests.bad_values import BAD, refusal
from tests.processes import free_port, run_processes


TOO_LATE = (
    "initialize comes too late: JAX has started its devices or its own jax.distributed. "
    "Call it before any other use of JAX, virtual_devices included; in a notebook, "
    "restart the kernel first."
)


def attempt(function, *args, **kwargs):
    """The message of the error of a call; "" if it works."""
    try:
        function(*args, **kwargs)
    except ml.errors.ClusterError as error:
        return str(error)
    return ""


def environments(ports, here):
    """The variables of each launcher, for process `here` of two."""
    cluster = {"chief": [f"localhost:{ports[0]}"], "worker": ["localhost:1"]}
    task = {"type": "worker" if here else "chief", "index": 0}
    return [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})},
        {
            "SLURM_JOB_ID": str(ports[1]),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(here),
            "SLURM_LOCALID": str(here),
        },
    ]


def job(ports):
    """What each of two processes sees of starts that fail, and of those that work."""
    rendezvous._TOLD_S = rendezvous._BIND_S = 0.5
    here = int(os.environ["JAX_PROCESS_ID"])
    address = [f"127.0.0.1:{port}" for port in ports]
    start, seen = ml.initialize, {}
    seen["missing"] = attempt(start, address[0], 4, here, timeout_s=2)
    seen["taken"] = attempt(start, address[1], 2, here, timeout_s=0.5)
    seen["nothing started"] = not jax.distributed.is_initialized()
    seen["start"] = attempt(start, timeout_s=60)
    seen["again"] = attempt(start)
    seen["others"] = attempt(start, process_id=0, num_processes=1)
    seen["process"] = [ml.cluster.process_index(), ml.cluster.process_count()]
    seen["is main"] = ml.cluster.is_main()
    seen["no devices yet"] = not _jax.has_backend()
    ml.shutdown()
    jax_variables = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    kept = {name: os.environ.pop(name) for name in jax_variables}
    for environment in environments(ports[2:], here):
        os.environ.update(environment)
        start(timeout_s=60)
        seen.setdefault("gathered", []).append(ml.cluster.all_gather(here).tolist())
        ml.shutdown()
        for name in environment:
            del os.environ[name]
    os.environ.update(kept)
    seen["restart"] = attempt(start, timeout_s=60)
    seen["devices"] = len(ml.virtual_devices(2))
    seen["with devices"] = attempt(start)
    ml.shutdown()
    seen["after"] = attempt(start)
    return seen


@pytest.mark.multiprocess
def test_processes_start_together_as_often_as_they_like_and_failures_are_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = [free_port(), other.getsockname()[1], free_port(), free_port()]
        both = run_processes(2, job, ports, initialize=False)
    address = f"127.0.0.1:{ports[0]}"
    missing = (
        f"initialize: processes 2-3 did not come (process 0 waited 2 s at {address}"
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
        assert seen["gathered"] == [[0, 1]] * 2
        assert seen["restart"] == seen["with devices"] == ""
        assert seen["devices"] == 4
        assert seen["after"] == TOO_LATE


@pytest.fixture
def alone():
    ml.shutdown()
    yield
    ml.shutdown()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "one process; no cluster was found."),
        ({"num_processes": 1}, "one process (from arguments)."),
    ],
)
def test_on_one_process_it_does_nothing_and_says_so(alone, caplog, arguments, text):
    with caplog.at_level(logging.INFO, "meshlayout"):
        ml.initialize(**arguments, timeout_s=5)
        ml.initialize()
    assert caplog.messages == [text]
    assert not jax.distributed.is_initialized()
    assert (ml.cluster.process_index(), ml.cluster.process_count()) == (0, 1)
    assert ml.cluster.is_main()


def test_one_process_cannot_become_one_of_several(alone):
    ml.initialize()
    assert attempt(ml.initialize, "10.0.0.1:1234", 2, 0) == (
        "initialize: this program already runs as one process, and cannot become "
        "process 0 of 2, coordinator 10.0.0.1:1234 (from arguments). Call shutdown() "
        "before."
    )


def test_it_comes_too_late_when_jax_has_devices(alone):
    jax.devices()
    assert attempt(ml.initialize, "10.0.0.1:1234", 2, 0) == TOO_LATE
    assert attempt(ml.initialize, local_device_ids=0) == TOO_LATE
    ml.initialize()  # one process: nothing to start


def test_jaxs_own_start_is_not_repeated(alone, monkeypatch):
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
    "name",
    [
        *("coordinator_address", "num_processes", "process_id", "local_device_ids"),
        *("coordinator_bind_address", "timeout_s"),
        *("heartbeat_timeout_s", "step_timeout_s"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(alone, name, value):
    jax.devices()
    message = refusal(ml.errors.ClusterError, ml.initialize, **{name: value})
    if value is None and name not in ("timeout_s", "heartbeat_timeout_s"):
        assert message is None
    elif name == "local_device_ids" and message == TOO_LATE:
        assert value == 0 or value == []
    else:
        assert message.startswith("initialize: ")
        assert name in message
