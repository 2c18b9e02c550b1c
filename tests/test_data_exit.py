"""Programs end at once, whatever their input does: each test runs a real one."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.processes import ROOT
from tests.tfds_directory import tiny_directory


BEGIN = """
import os, sys, threading, time
import jax
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
import meshlayout as ml

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
    mesh = ml.create_mesh({"batch": 4})
    return iter(ml.distribute_dataset(source, mesh, global_batch_size=4, **options))
"""

FOUR = """
it = batches({"stream": examples, "rows": Rows()}[sys.argv[1]])
for _ in range(4):
    next(it)
"""

slow = pytest.mark.slow
ENDS = [
    ("time.sleep(0.3)", "stream", 0, ""),
    ("time.sleep(0.3); raise ValueError('of the loop')", "rows", 1, "of the loop"),
    pytest.param("time.sleep(0.3); sys.exit(7)", "stream", 7, "", marks=slow),
    pytest.param("time.sleep(0.3); del it", "stream", 0, "", marks=slow),
]


def program(code, *args):
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + textwrap.dedent(code), *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process, *words):
    """Reads what a process prints until it has printed all of some lines."""
    assert process.stdout is not None
    missing = set(words)
    while missing:
        line = process.stdout.readline()
        assert line, process.communicate()
        missing.discard(line.strip())


def end(process, allowed_s=2.0):
    """What a process prints while it ends, which is in time."""
    start = time.monotonic()
    out, err = process.communicate(timeout=20)
    # An interpreter with JAX needs a moment to end, also without any input, and a longer
    # one where other programs take its core.
    moment_s = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert time.monotonic() - start < allowed_s + moment_s
    return out, err


@pytest.mark.parametrize(("code", "source", "status", "text"), ENDS)
def test_a_program_ends_while_its_source_blocks(code, source, status, text):
    process = program(FOUR + code, source)
    wait_for(process, "blocks")
    _, err = end(process)
    assert process.returncode == status, err
    assert text in err
    assert text or not err


def test_ctrl_c_ends_a_loop_that_waits_and_leaves_an_iterator_that_continues():
    code = """
    os.write(1, b'waits\\n')
    try:
        list(it)
    except KeyboardInterrupt:
        threading.Timer(0.5, forever.set).start()
        print([int(batch["x"][0]) for batch in it], it.get_state()["epoch"])
    os.write(1, b'again\\n')
    forever.clear()
    list(batches(examples))
    """
    process = program(FOUR + textwrap.dedent(code), "stream")
    wait_for(process, "waits", "blocks")
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    wait_for(process, "[] 0", "again", "blocks")
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = end(process)
    assert process.returncode in (-signal.SIGINT, 130)
    assert err.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("rows", ["4096, 512", pytest.param("8, 64", marks=slow)])
def test_a_program_ends_while_batches_are_made_and_never_crashes(rows):
    # A thread that is in C++ code while Python exits aborts the process, now and then.
    code = f"""
    many = [batches({{"x": np.ones(({rows}), np.float32)}}, epochs=None, prefetch=4)
            for _ in range(4)]
    for each in many:
        next(each)
    """
    process = program(code)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")


WORKERS = """
import multiprocessing

def block(example):
    if multiprocessing.parent_process():
        time.sleep(1000)
    return {"n": example["number"]}

def read():
    batches = ml.data.from_tfds(
        "tiny", "train[:90%]", ml.create_mesh({"batch": 4}), global_batch_size=4,
        data_dir=sys.argv[1], in_memory=False, num_workers=2, map=block)
    next(iter(batches))

threading.Thread(target=read, daemon=True).start()
while len(multiprocessing.active_children()) < 2:
    time.sleep(0.1)
time.sleep(3)
print("ends", flush=True)
"""


@pytest.mark.slow
def test_a_program_ends_while_worker_processes_block(tmp_path):
    tiny_directory(tmp_path)
    process = program(WORKERS, str(tmp_path))
    wait_for(process, "ends")
    end(process)
    assert process.returncode == 0
