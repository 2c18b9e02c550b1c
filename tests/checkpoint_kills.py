"""Kills processes that save, at random moments, and looks at what they leave.

Run as `python -m tests.checkpoint_kills directory saves deletions seed`: kills until so
many of them came during saves, and during deletions. The last line of its output is a
report as JSON. This process imports everything, starts no backend, and forks one child
after another: a start takes a fraction of a second.
"""

import json
import os
import random
import select
import shutil
import signal
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import meshlayout as ml
from meshlayout.checkpoint import Checkpointer, attempt, orbax


def values(step):
    """A state of which every array tells the step."""
    rng = np.random.default_rng(step)
    return {
        "kernel": rng.normal(size=(256, 512)).astype("float32"),
        "half": rng.normal(size=(64, 64)).astype(jnp.bfloat16),
        "step": np.int32(step),
    }


def is_whole(ck, step):
    found, wanted = ck.restore_numpy(step=step), values(step)
    return all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


def child(directory, say, mode, number):
    """Looks at what is there, and then saves one step after another for ever."""
    mesh = ml.create_mesh({"batch": 2})
    layouts = {"kernel": mesh.layout("batch", None), "half": mesh.layout(None, "batch")}
    asynchronous = mode == "saves" and number % 2 == 0
    if mode == "retention":
        slow_down_deleting(say)
    keep = 1 if mode == "retention" else 3
    ck = Checkpointer(directory, keep=keep, async_save=asynchronous)
    left = [one.name for one in Path(directory).rglob("*") if is_left_over(one)]
    steps = ck.all_steps()
    whole = all(is_whole(ck, step) for step in steps)
    say("found", steps[-1] if steps else 0, int(whole), len(left))
    step = (steps[-1] if steps else 0) + 1
    while True:
        state = values(step)
        placed = {
            n: jax.device_put(state[n], one.sharding) for n, one in layouts.items()
        }
        say("begin", step)
        ck.save(step, {**placed, "step": jnp.int32(step)})
        say("acked", step - 1 if asynchronous else step)
        step += 1


def is_left_over(path):
    parts = (".deleting", ".saving", ".replaced", ".owner", ".manifest", "-tmp")
    return any(part in path.name for part in parts)


def slow_down_deleting(say):
    """Gives the kills time to hit: every file takes some milliseconds to remove."""
    delete, unlink = attempt.delete, os.unlink

    def slowly(*args, **options):
        time.sleep(0.003)
        unlink(*args, **options)

    def told(folder, lease):
        os.unlink = slowly
        say("deleting", folder.name)
        delete(folder, lease)
        os.unlink = unlink
        say("deleted", folder.name)

    attempt.delete = told


@dataclass
class Report:
    """What was seen."""

    kills: int = 0
    during_saves: int = 0
    during_deletions: int = 0
    bad: int = 0
    lost: int = 0
    leftovers: int = 0
    saves: int = 0
    problems: list = field(default_factory=list)


def one_life(directory, mode, number, rng, acked, report):
    """Starts a child, kills it, and returns the last step it was told is saved."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        code = 1
        try:
            child(
                directory,
                lambda *words: os.write(
                    write, (" ".join(map(str, words)) + "\n").encode()
                ),
                mode,
                number,
            )
        except BaseException as error:
            os.write(write, f"error {error!r}\n".encode())
        finally:
            os._exit(code)
    os.close(write)
    deadline, turns, last, text = None, 0, "", b""
    begin = time.monotonic()
    while True:
        left = 60 if deadline is None else deadline - time.monotonic()
        if left <= 0 or time.monotonic() - begin > 60:
            break
        if not select.select([read], [], [], left)[0]:
            break
        some = os.read(read, 4096)
        if not some:
            break
        text += some
        *lines, text = text.split(b"\n")
        for line in lines:
            last, *rest = line.decode().split(" ")
            if last == "found":
                found, whole, leftovers = map(int, rest)
                report.bad += not whole
                report.lost += found < acked
                report.leftovers += leftovers
                turns = rng.randint(1, 3)  # the first save compiles, which takes longer
            elif last == "begin" and mode == "saves":
                turns -= 1
                if turns == 0:
                    deadline = time.monotonic() + rng.uniform(0, 0.15)
            elif last == "acked":
                acked = max(acked, int(rest[0]))
                report.saves += 1
            elif last == "deleting":
                deadline = time.monotonic() + rng.uniform(0, 0.04)
            elif last == "error":
                report.problems.append(line.decode())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(read)
    report.kills += 1
    report.during_saves += any(".saving" in one.name for one in directory.iterdir())
    report.during_deletions += last == "deleting"
    return acked


def main(directory, saves, deletions, seed):
    warnings.filterwarnings("ignore", "os.fork")
    jax.config.update("jax_num_cpu_devices", 2)
    orbax._orbax()
    rng = random.Random(seed)
    reports = {}
    for mode, hits, wanted in (
        ("saves", "during_saves", saves),
        ("retention", "during_deletions", deletions),
    ):
        place = Path(directory) / mode
        report, acked = Report(), 0
        while getattr(report, hits) < wanted and report.kills < 4 * wanted:
            acked = one_life(place, mode, report.kills, rng, acked, report)
        # Once more, to see what the last kill left.
        one_life(place, mode, 0, rng, acked, last := Report())
        for name in ("bad", "lost", "leftovers", "problems"):
            setattr(report, name, getattr(report, name) + getattr(last, name))
        reports[mode] = vars(report)
        shutil.rmtree(place)
    sys.stdout.write(json.dumps(reports) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
