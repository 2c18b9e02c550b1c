"""`virtual_devices` decides before JAX starts, so each case has its own process."""

import os
import subprocess
import sys
import warnings

import jax

from meshlayout.errors import MeshError
from meshlayout.mesh import virtual_devices
from tests.error_messages import message_of


def run(body, **environment):
    """Runs Python in a process where JAX has not started, and returns what it says."""
    unset = {"NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    env = {key: value for key, value in os.environ.items() if key not in unset}
    script = (
        "import os, jax\n"
        "from meshlayout.mesh import virtual_devices\n"
        "from meshlayout.errors import MeshError\n" + body
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=env | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_importing_starts_no_backend_and_then_it_makes_that_many_devices_and_threads():
    """Also where flags of XLA name another number, and of NumPy's numbers."""
    said = run(
        "import meshlayout, numpy as np\n"
        "from jax._src.xla_bridge import backends_are_initialized\n"
        "print(backends_are_initialized(), 'NPROC' in os.environ)\n"
        "devices = virtual_devices(np.int64(5))\n"
        "print(len(devices), devices == jax.devices(), os.environ['NPROC'])\n"
        "print(len(virtual_devices(5)), len(meshlayout.create_mesh().local_devices))\n",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    assert said == ["False False", "5 True 10", "5 5"]


def test_the_users_number_of_threads_wins():
    body = "virtual_devices(8); print(jax.device_count(), os.environ.get('NPROC'))"
    assert run(body, NPROC="2") == ["8 2"]


def test_it_comes_too_late_once_jax_runs_with_another_number():
    said = run(
        "jax.devices()\n"
        "try:\n    virtual_devices(8)\n"
        "except MeshError as error:\n    print(error)\n"
        "print(len(virtual_devices(1)), os.environ.get('NPROC'))\n"
    )
    assert said == [
        "virtual_devices(8) comes too late: JAX already runs with 1 CPU device. "
        "Restart the kernel or process and call it before any other use of JAX, or make a mesh of the devices that exist: create_mesh().",
        "1 None",
    ]


def test_what_is_said_about_a_bad_number():
    assert message_of(virtual_devices, 2.0, error=MeshError) == (
        "virtual_devices: n must be a positive integer, got 2.0."
    )


def test_on_an_accelerator_it_changes_nothing_and_says_so(monkeypatch):
    class Chip:
        platform = "tpu"

    chips = [Chip(), Chip(), Chip(), Chip()]
    before = dict(os.environ)
    monkeypatch.setattr(jax, "local_devices", lambda: chips)
    monkeypatch.setattr(jax, "devices", lambda: chips)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with warnings.catch_warnings(record=True, action="always") as said:
        assert virtual_devices(8) == chips
    assert [str(warning.message) for warning in said] == [
        "virtual_devices(8) has no effect here: JAX runs on 4 TPU devices. "
        "To try virtual CPU devices, set JAX_PLATFORMS=cpu before Python starts."
    ]
    assert dict(os.environ) == before
