"""Programs end at once, whatever their input does: each test runs a real one."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.processes import ROOT


BEGIN = """
import sys, threading, time
import jax
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
import meshlayout as ml

mesh = ml.create_mesh({"batch": 4})
forever = threading.Event()

def examples():
    for number in range(20):
        yield {"x": np.float32(number)}
    print("blocks", flush=True)
    forever.wait()

class Rows:
    def __len__(self):
        return 100
    def read_rows(self, indices, epoch):
        if indices[0] >= 20:
            print("blocks", flush=True)
            forever.wait()
        return {"x": indices}

def batches(source, **options):
    return iter(ml.distribute_dataset(source, mesh, global_batch_size=4, **options))

source = {"stream": examples, "rows": Rows()}[sys.argv[1]]
it = batches(source)
for _ in range(4):
    next(it)
"""

ENDS = {
    "the end": ("time.sleep(0.3)", 0, ""),
    "an exception": (
        "time.sleep(0.3); raise ValueError('of the loop')",
        1,
        "of the loop",
    ),
    "sys.exit": ("time.sleep(0.3); sys.exit(7)", 7, ""),
    "the end while a loop waits": (
        "threading.Thread(target=lambda: list(it), daemon=True).start(); time.sleep(0.3)",
        0,
        "",
    ),
    "an abandoned loop": ("time.sleep(0.3); del it", 0, ""),
    "close": ("time.sleep(0.3); it.close()", 0, ""),
}


def program(end, *args):
    code = textwrap.dedent(BEGIN) + textwrap.dedent(end)
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process, what):
    """The seconds until a process ends, after it has printed what it does last."""
    assert process.stdout is not None
    assert any(what in line for line in iter(process.stdout.readline, ""))
    start = time.monotonic()
    try:
        out, err = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return time.monotonic() - start, out, err


@pytest.fixture(scope="module")
def plain():
    """The seconds that a program takes to end whose source does not block."""
    process = program("forever.set(); print('ends', flush=True)", "rows")
    return ended(process, "ends")[0]


@pytest.mark.parametrize(
    ("name", "source"), [*((name, "stream") for name in ENDS), ("the end", "rows")]
)
def test_a_program_ends_while_its_source_blocks(name, source, plain):
    end, status, text = ENDS[name]
    process = program(end, source)
    seconds, _, err = ended(process, "blocks")
    assert process.returncode == status, err
    assert text in err
    assert text or not err
    assert seconds < 2 + plain


def test_ctrl_c_ends_a_loop_that_waits_for_its_source(plain):
    process = program("import os; os.write(1, b'waits\\n'); list(it)", "stream")
    assert process.stdout is not None
    lines = {process.stdout.readline().strip(), process.stdout.readline().strip()}
    assert lines == {"waits", "blocks"}
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - start < 2 + plain
    assert process.returncode in (-signal.SIGINT, 130)
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_leaves_an_iterator_that_goes_on():
    process = program(
        """
        import os, signal
        def later():
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
            forever.set()
        threading.Thread(target=later, daemon=True).start()
        try:
            next(it), next(it)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        print([int(batch["x"][0]) for batch in it], it.get_state()["epoch"])
        """,
        "stream",
    )
    out, err = process.communicate(timeout=30)
    assert out.split("\n")[:3] == ["blocks", "interrupted", "[] 0"], err


def test_a_program_ends_while_batches_are_placed_and_never_crashes():
    # Threads that call JAX while Python exits abort the process, now and then.
    end = """
    many = [batches({"x": np.ones((4096, 512), np.float32)}, epochs=None, prefetch=4)
            for _ in range(4)]
    for each in many:
        next(each)
    print("ends", flush=True)
    """
    for _ in range(3):
        process = program(end, "rows")
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        assert not err
        assert "ends" in out
