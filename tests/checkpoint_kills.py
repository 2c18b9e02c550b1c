"""Kills processes that save, at any moment and at any file call, and fails those calls.

A plan is a list of dicts, of two kinds:

    {"kind": "random", "mode": "sync" | "async" | "again" | "retention", "kills": 60,
     "processes": 2}
    {"kind": "calls", "keep": 2, "step": 3, "error": 0, "stride": 1, "forever": false}

The first kills one process of a run at random moments of endless saves. The second runs
one save, of a new step or of one that exists, once for every file call that it makes,
and kills there (`error` 0) or fails that call, or all from there on. For that it forks
children of a process into which `file_faults.c` is preloaded. A report says what was
seen by a reader that holds no lock, and then by the next run.
"""

import collections
import ctypes
import json
import logging
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import meshlayout as ml
from meshlayout.checkpoint import orbax
from tests import forked
from tests.processes import free_port


def reports_of(directory, plan):
    """Carries out the parts of a plan, and returns their reports."""
    reports = []
    for index, part in enumerate(plan):
        place, work = directory / str(index), {"random": random_kills, "calls": calls}
        place.mkdir()
        reports.append({**part, **work[part["kind"]](place, part)})
    return reports


def values(step, base):
    """A state of which every leaf tells the step and the base."""
    rng = np.random.default_rng([step, base])
    return {
        "kernel": rng.normal(size=(128, 64)).astype("float32"),
        "half": rng.normal(size=(16, 8)).astype(jnp.bfloat16),
        "step": np.int32(1000 * base + step),
    }


def base_of(checkpointer, step):
    """The base of which all that was saved is, with the metadata; None if it is torn."""
    base = checkpointer.inspect(step).metadata["base"]
    found, wanted = checkpointer.restore_numpy(step=step), values(step, base)
    same = (found[name].tobytes() == wanted[name].tobytes() for name in wanted)
    return base if all(same) else None


def save(checkpointer, step, base):
    state = values(step, base)
    rows = jax.make_mesh((2,), ("x",)), jax.sharding.PartitionSpec("x")
    place = jax.sharding.NamedSharding(*rows), state["kernel"].__getitem__
    state["kernel"] = jax.make_array_from_callback(state["kernel"].shape, *place)
    state["half"] = jnp.asarray(state["half"])
    checkpointer.save(step, state, metadata={"base": base})
    # Donated at once: what is saved must not change any more.
    for name in ("kernel", "half"):
        jax.jit(lambda x: x * 0, donate_argnums=0)(state[name])


# Random moments.


def live(index, processes, port, directory, mode, life):
    """Looks at what is there, and then saves one step after another forever."""

    def say(kind, value=None):
        if index == 0:
            forked.say([kind, value])

    jax.config.update("jax_num_cpu_devices", 2 // processes)
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, index)
    say("opening")
    checkpointer = ml.Checkpointer(directory, keep=1 if mode == "retention" else 2)
    steps = checkpointer.all_steps()
    bases = [base_of(checkpointer, step) for step in steps]
    say("found", [steps, bases])
    step, base, previous = max(steps, default=0), 1000 * life, None
    while True:
        base += 1
        step += mode != "again" or base % 3 == 0 or step == 0
        say("begin")
        save(checkpointer, step, base)
        if mode != "async":
            checkpointer.wait()
            previous = [step, base]
        if previous:
            say("acked", previous)
        previous = [step, base]


def random_kills(directory, part):
    rng, acked, report = random.Random(part.get("seed", 0)), None, collections.Counter()
    run, processes = directory / "run", part.get("processes", 1)
    for life in range(part["kills"] + 1):
        job = (processes, free_port(), str(run), part["mode"], life)
        logs = [directory / f"{life}-{index}.txt" for index in range(processes)]
        group = [forked.start(x, live, i, *job) for i, x in enumerate(logs)]
        is_last = life == part["kills"]
        acked = watch(group[0], rng, acked, report, is_last=is_last)
        rng.choice(group).kill()
        time.sleep(rng.uniform(0, 0.5) if processes > 1 else 0)  # for the other one
        for one in group:
            one.kill()
        codes = [one.wait() for one in group]
        if codes[0] != -signal.SIGKILL:
            report[f"problem: {logs[0].read_text()[-300:]}"] += 1
        names = [path.name for path in run.glob("*")]
        report["kills"] += not is_last
        report["in a save"] += any(".new" in name for name in names)
        report["in a deletion"] += any(".deleting" in name for name in names)
    return report


def watch(one, rng, acked, report, *, is_last):
    """Waits until a run is to be killed; returns what it was told is saved."""
    deadline, turns = time.monotonic() + 120, rng.randint(2, 4)
    if rng.random() < 0.1 and not is_last:
        turns = 0  # while it opens and looks
    while one.code is None and (left := deadline - time.monotonic()) > 0:
        try:
            event, told = one.next_event(left)
        except queue.Empty:
            break
        if event != "said":
            continue
        kind, value = json.loads(told)
        if kind == "opening" and turns == 0:
            deadline = time.monotonic() + rng.uniform(0, 0.1)
        elif kind == "found":
            steps, bases = value
            report["steps read"] += len(steps)
            report["bad"] += bases.count(None)
            newest = [steps[-1], bases[-1]] if steps else [0, 0]
            report["lost"] += acked is not None and newest < acked
            if is_last:
                break
        elif kind == "begin":
            turns -= 1
            if turns == 0:
                deadline = time.monotonic() + rng.uniform(0, 0.12)
        elif kind == "acked":
            acked = value
            report["acknowledged"] += 1
    return acked


# Every file call.


def calls(directory, part):
    """Runs `every_call` in another process, with the faults preloaded."""
    library = str(directory / "faults.so")
    source = forked.ROOT / "tests" / "file_faults.c"
    command = [shutil.which("cc") or "gcc", "-shared", "-fPIC", "-O1", str(source)]
    subprocess.run([*command, "-o", library, "-ldl"], check=True)
    program = [sys.executable, "-m", "tests.checkpoint_kills"]
    env = {"JAX_PLATFORMS": "cpu", "LD_PRELOAD": library, "FAULTS": library}
    job = subprocess.run(
        [*program, str(directory), json.dumps(part)],
        env=os.environ | env,
        cwd=forked.ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert job.returncode == 0, job.stderr[-3000:]
    return json.loads(job.stdout.splitlines()[-1])


def in_child(work):
    """Runs in a forked child, which has a backend of its own; returns its status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def every_call(directory, part):
    faults, report = ctypes.CDLL(os.environ["FAULTS"]), collections.Counter()
    faults.fault_disarm.restype = ctypes.c_long
    keep, step, error = part["keep"], part["step"], part["error"]
    base, told = directory / "base", directory / "told.json"

    def prepare():
        with ml.Checkpointer(base, keep=keep) as checkpointer:
            for number in (1, 2):
                save(checkpointer, number, 0)

    def save_there():
        checkpointer, problem = ml.Checkpointer(copy, keep=keep), ""
        last = 2**40 if part.get("forever") else number
        faults.fault_arm(str(copy).encode(), number, error, ctypes.c_long(last))
        try:
            save(checkpointer, step, 1)
            checkpointer.wait()
        except ml.errors.CheckpointError as caught:
            problem = str(caught)
        num_calls, found = faults.fault_disarm(), {"told": bool(problem)}
        if error and num_calls >= number:  # the disk is well again
            is_listed = step in checkpointer.all_steps()
            is_there = is_listed and base_of(checkpointer, step) == 1
            found["silent"] = not problem and not is_there
            save(checkpointer, step, 2)
            checkpointer.wait()
            found["next save bad"] = base_of(checkpointer, step) != 2
        told.write_text(json.dumps([num_calls, found]))

    assert in_child(prepare) == 0
    number, copies = part.get("first", 1), []
    while True:
        copy = directory / f"at-{number}"
        shutil.copytree(base, copy, ignore=shutil.ignore_patterns(".lock"))
        told.unlink(missing_ok=True)
        status = in_child(save_there)
        num_calls, found = json.loads(told.read_text()) if told.exists() else (0, {})
        if status == 0 and num_calls < number:
            break  # there are no more calls
        copies.append(copy)
        report["faults"] += 1
        report.update(found)
        if status != (0 if error else -signal.SIGKILL):
            report[f"problem: call {number}: status {status}"] += 1
        number += part.get("stride", 1)
    report["calls of a save"] = num_calls

    def look():
        for copy in copies:
            look_at(copy, keep, step, report)
        told.write_text(json.dumps(report))

    assert in_child(look) == 0
    return json.loads(told.read_text())


def look_at(copy, keep, step, report):
    """Reads what a killed save left, without the lock, and then goes on in its place."""
    reader = ml.Checkpointer(copy, keep=keep)
    bases = {number: base_of(reader, number) for number in reader.all_steps()}
    report["bad"] += sum(base not in (0, 1, 2) for base in bases.values())
    is_there = 2 in bases or (keep == 1 and bases.get(step) is not None)
    report["lost"] += not is_there
    report["with the new copy"] += bases.get(step) in (1, 2)
    with ml.Checkpointer(copy, keep=keep) as checkpointer:
        for number in (5, 6):
            save(checkpointer, number, 0)
        checkpointer.wait()
        steps = checkpointer.all_steps()
        is_right = steps == [5, 6][-keep:]
        report["next run bad"] += not is_right or None in [
            base_of(checkpointer, number) for number in steps
        ]
    names = {path.name for path in copy.iterdir()} - {".lock", *map(str, steps)}
    report["leftovers"] += bool(names)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "os.fork")
    logging.disable(logging.CRITICAL)
    jax.config.update("jax_num_cpu_devices", 2)
    orbax.quiet("orbax.checkpoint")
    found = every_call(Path(sys.argv[1]), json.loads(sys.argv[2]))
    sys.stdout.write(json.dumps(found) + "\n")
