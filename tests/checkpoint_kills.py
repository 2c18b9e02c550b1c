"""Kills processes that save, at any moment and at any file call, and fails those calls.

`python -m tests.checkpoint_kills directory plan` runs a plan, a list of dicts as JSON:

    {"kind": "random", "mode": "sync" | "async" | "again" | "retention", "kills": 60}
    {"kind": "calls", "keep": 2, "step": 3, "error": 0, "stride": 1, "forever": false}

The first kills at random moments of endless saves. The second runs one save, of a new
step or of one that exists, once for every file call that it makes, and kills there
(`error` 0) or fails that call, or all from there on. It needs `file_faults.c`,
preloaded by `command`. The last line of the output is a report as JSON: what was seen
by a reader that holds no lock, and then by the next run.

This process imports everything, starts no backend, and forks one child after another:
a start takes a fraction of a second.
"""

import collections
import ctypes
import functools
import json
import logging
import os
import random
import select
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


ROOT = Path(__file__).parent.parent


def command(directory, plan):
    """Starts a plan in another process, with the faults preloaded if it needs them."""
    library, environment = Path(directory) / "faults.so", dict(os.environ)
    if any(part["kind"] == "calls" for part in plan):
        compiler = shutil.which("cc") or "gcc"
        source = ROOT / "tests" / "file_faults.c"
        flags = ["-shared", "-fPIC", "-O1", "-o", str(library)]
        subprocess.run([compiler, *flags, str(source), "-ldl"], check=True)
        environment["LD_PRELOAD"] = environment["FAULTS"] = str(library)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint_kills", directory, json.dumps(plan)],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(job, timeout_s=500):
    """Returns a plan's reports."""
    try:
        out, said = job.communicate(timeout=timeout_s)
    finally:
        job.kill()
    assert job.returncode == 0, said[-3000:]
    return json.loads(out.splitlines()[-1])


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
    state = jax.tree.map(jnp.asarray, values(step, base))
    checkpointer.save(step, state, metadata={"base": base})
    # Donated at once: what is saved must not change any more.
    jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)(state)


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


# Random moments.


def live(directory, say, mode, life):
    """Looks at what is there, and then saves one step after another for ever."""
    say("opening")
    keep = 1 if mode == "retention" else 2
    checkpointer = ml.Checkpointer(directory, keep=keep)
    steps = checkpointer.all_steps()
    bases = [base_of(checkpointer, step) for step in steps]
    say("found", json.dumps([steps, bases]))
    step, base, previous = max(steps, default=0), 1000 * life, None
    while True:
        base += 1
        step += mode != "again" or base % 3 == 0 or step == 0
        say("begin")
        save(checkpointer, step, base)
        if mode == "async":
            if previous:
                say("acked", json.dumps(previous))
            previous = [step, base]
        else:
            checkpointer.wait()
            say("acked", json.dumps([step, base]))


def tell(pipe, *words):
    os.write(pipe, (" ".join(words) + "\n").encode())


def random_kills(directory, part, report):
    rng, acked = random.Random(part.get("seed", 0)), None
    for life in range(part["kills"] + 1):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            say = functools.partial(tell, write)
            try:
                live(directory, say, part["mode"], life)
            except BaseException as error:
                say("problem", repr(error)[:300].replace("\n", " "))
            finally:
                os._exit(1)
        os.close(write)
        acked = watch(read, life, part, rng, acked, report)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        names = [path.name for path in directory.glob("*")]
        report["kills"] += life < part["kills"]
        report["in a save"] += any(".new" in name for name in names)
        report["in a deletion"] += any(".deleting" in name for name in names)


def watch(read, life, part, rng, acked, report):
    """Waits until a child is to be killed; returns what it was told is saved."""
    text, deadline, turns = b"", time.monotonic() + 120, rng.randint(2, 4)
    if rng.random() < 0.1:
        turns = 0  # while it opens and looks
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([read], [], [], left)[0]:
            break
        some = os.read(read, 65536)
        if not some:
            break
        *lines, text = (text + some).split(b"\n")
        for line in lines:
            kind, _, rest = line.decode().partition(" ")
            if kind == "opening" and turns == 0 and life < part["kills"]:
                deadline = time.monotonic() + rng.uniform(0, 0.1)
            elif kind == "found":
                steps, bases = json.loads(rest)
                report["steps read"] += len(steps)
                report["bad"] += bases.count(None)
                newest = [steps[-1], bases[-1]] if steps else [0, 0]
                report["lost"] += acked is not None and newest < acked
                if life == part["kills"]:
                    return acked
            elif kind == "begin":
                turns -= 1
                if turns == 0:
                    deadline = time.monotonic() + rng.uniform(0, 0.12)
            elif kind == "acked":
                acked = json.loads(rest)
                report["acknowledged"] += 1
            elif kind == "problem":
                report["problems"].append(rest)
    return acked


# Every file call.


def every_call(directory, part, report):
    faults = ctypes.CDLL(os.environ["FAULTS"])
    faults.fault_disarm.restype = ctypes.c_long
    keep, step, error = part["keep"], part["step"], part["error"]
    base, told = directory / "base", directory / "told.json"

    def prepare():
        with ml.Checkpointer(base, keep=keep) as checkpointer:
            for number in (1, 2):
                save(checkpointer, number, 0)

    assert in_child(prepare) == 0
    number, copies = part.get("first", 1), []
    while True:
        copy = directory / f"at-{number}"
        shutil.copytree(base, copy, ignore=shutil.ignore_patterns(".lock"))
        told.unlink(missing_ok=True)

        def save_there(copy=copy, number=number):
            checkpointer = ml.Checkpointer(copy, keep=keep)
            last = 2**40 if part.get("forever") else number
            faults.fault_arm(str(copy).encode(), number, error, ctypes.c_long(last))
            problem = ""
            try:
                save(checkpointer, step, 1)
                checkpointer.wait()
            except ml.errors.CheckpointError as caught:
                problem = str(caught)
            num_calls = faults.fault_disarm()
            told.write_text(json.dumps([num_calls, problem]))
            if error and num_calls >= number:  # the disk is well again
                is_there = (
                    base_of(checkpointer, step) == 1
                    if step in (checkpointer.all_steps())
                    else False
                )
                if not problem and not is_there:
                    report["silent"] += 1
                save(checkpointer, step, 2)
                checkpointer.wait()
                if base_of(checkpointer, step) != 2:
                    report["next save bad"] += 1
                told.write_text(
                    json.dumps([num_calls, problem, {**report, "problems": []}])
                )

        status = in_child(save_there)
        outcome = json.loads(told.read_text()) if told.exists() else [number, "", {}]
        if status == 0 and outcome[0] < number:
            break  # there are no more calls
        copies.append(copy)
        report["faults"] += 1
        report["told"] += bool(outcome[1])
        if status != (0 if error else -signal.SIGKILL):
            report["problems"].append(f"call {number}: status {status}")
        for name in ("silent", "next save bad"):
            report[name] = max(report[name], (*outcome, {})[2].get(name, 0))
        number += part.get("stride", 1)
    report["calls of a save"] = outcome[0]
    result = directory / "result.json"

    def look():
        for copy in copies:
            try:
                look_at(copy, keep, step, report)
            except BaseException as problem:
                report["problems"].append(f"{copy.name}: {problem!r}"[:400])
        result.write_text(json.dumps(report))

    assert in_child(look) == 0
    report.clear()
    report.update(json.loads(result.read_text()))


def look_at(copy, keep, step, report):
    """Reads what a killed save left, without the lock, and then goes on in its place."""
    reader = ml.Checkpointer(copy, keep=keep)
    bases = {number: base_of(reader, number) for number in reader.all_steps()}
    report["bad"] += list(bases.values()).count(None)
    report["bad"] += any(base not in (0, 1, 2) for base in bases.values())
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


COUNTS = (
    *("kills", "in a save", "in a deletion", "steps read", "acknowledged"),
    *("faults", "told", "with the new copy", "calls of a save"),
    *("bad", "lost", "leftovers", "silent", "next save bad", "next run bad"),
)


def main(directory, plan):
    warnings.filterwarnings("ignore", "os.fork")
    logging.disable(logging.CRITICAL)
    jax.config.update("jax_num_cpu_devices", 2)
    orbax.quiet("orbax.checkpoint")
    reports = []
    for index, part in enumerate(json.loads(plan)):
        report = collections.Counter(dict.fromkeys(COUNTS, 0))
        report["problems"] = []
        place = Path(directory) / str(index)
        place.mkdir()
        if part["kind"] == "random":
            random_kills(place / "run", part, report)
        else:
            every_call(place, part, report)
        reports.append({**part, **{k: v for k, v in report.items() if v}})
        shutil.rmtree(place)
    sys.stdout.write(json.dumps(reports) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
