"""Saving and restoring a state beside plain Orbax: processor seconds, stall, memory.

`python benchmarks/checkpoint.py` measures three states on eight virtual devices: a
network with its optimizer (100 MB in 14 arrays), 400 small arrays, and 60 arrays of 60
shapes. Each way runs in a process of its own, in turn, round by round, as a first save
or restore pays for imports and compilation and no process should pay for another one.
With `--paired`, all ways run call by call in turn in one process, which compares later
calls best on a busy machine. It prints

- processor seconds inside of the call, which a training loop waits for, and until the
  files are there; of the first call in a process, and the median of the later ones;
- how far the host memory of the process rises in a save.

Seconds of processors are what a busy machine does not change; figures are medians over
the rounds.
"""

import argparse
import ctypes
import hashlib
import importlib.metadata
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from orbax.checkpoint import v1 as ocp

import meshlayout as ml


MB = 1e6
STATES = ("network", "many leaves", "many shapes")
WAYS = (
    "save: plain Orbax",
    "save: Checkpointer, no hashes",
    "save: Checkpointer",
    "restore: plain Orbax",
    "restore: Checkpointer, verify=False",
    "restore: Checkpointer",
)


class Network(nnx.Module):
    """Two dense layers of some width."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(width, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)


def create_state(name: str, width: int) -> dict[str, Any]:
    """Returns arrays on a mesh, as plain Orbax takes them, too: in a dict."""
    mesh = ml.create_mesh({"batch": 2, "model": jax.device_count() // 2})
    if name == "network":
        layouts = ml.LayoutMap(mesh, {"kernel": (None, "model"), "bias": ("model",)})
        state = ml.TrainState.create(
            lambda: Network(width, rngs=nnx.Rngs(0)), optax.adam(1e-3), layouts
        )
        # Moments as after a step: those of a new optimizer are zeros, which cost a
        # compressing writer nothing.
        moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
        slots = [
            x + jax.random.normal(jax.random.key(i), x.shape)
            for i, x in enumerate(moments)
        ]
        return {"params": state.params, "opt_state": dict(enumerate(slots))}
    rng = np.random.default_rng(0)
    sizes = [8] * 400 if name == "many leaves" else [8 * (i + 1) for i in range(60)]
    sharding = mesh.layout(None, "model").sharding
    return {
        f"w{i:03d}": jax.device_put(rng.random((size, 64), "float32"), sharding)
        for i, size in enumerate(sizes)
    }


def shapes_of(state: Any) -> Any:
    """Returns arrays without values, with their shardings."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def ways(state: Any, directory: Path) -> dict[str, Callable[[int], Callable[[], Any]]]:
    """Returns for each way what starts it, and returns what waits for its end."""
    checkpointer = ml.Checkpointer(directory / "ours", keep=1)
    plain, abstract = directory / "plain", shapes_of(state)

    def save_plainly(turn: int) -> Callable[[], Any]:
        shutil.rmtree(plain, ignore_errors=True)
        return ocp.save_async(str(plain), state).result

    def save(turn: int) -> Callable[[], Any]:
        checkpointer.save(turn, state)
        return checkpointer.wait

    def save_unhashed(turn: int) -> Callable[[], Any]:
        # Files are still listed, made durable and sealed.
        digest = hashlib.file_digest
        hashlib.file_digest = lambda file, name: hashlib.sha256()  # type: ignore[assignment]
        finish = save(turn)

        def finish_unhashed() -> None:
            finish()
            hashlib.file_digest = digest

        return finish_unhashed

    def restore(*, verify: bool) -> Callable[[int], Callable[[], Any]]:
        def start(turn: int) -> Callable[[], Any]:
            restored = checkpointer.restore(abstract, verify=verify)
            return lambda: jax.block_until_ready(restored)

        return start

    def restore_plainly(turn: int) -> Callable[[], Any]:
        restored = ocp.load(str(plain), abstract)
        return lambda: jax.block_until_ready(restored)

    unverified, verified = restore(verify=False), restore(verify=True)
    starts = (save_plainly, save_unhashed, save, restore_plainly, unverified, verified)
    return dict(zip(WAYS, starts, strict=True))


def measure(way: str, state: Any, directory: Path, calls: int) -> dict[str, float]:
    """Returns the processor seconds of one way, in this process.

    Args:
        way: One of `WAYS`.
        state: The state.
        directory: Where to save; restores read what is there.
        calls: How many calls.
    """
    start = ways(state, directory)[way]
    inside, whole = [], []
    for turn in range(calls):
        begin = time.process_time()
        finish = start(turn)
        inside.append(time.process_time() - begin)
        finish()
        whole.append(time.process_time() - begin)
    return {
        "first call": inside[0],
        "first whole": whole[0],
        "call": statistics.median(inside[1:]),
        "whole": statistics.median(whole[1:]),
    }


def show_pairs(name: str, width: int, directory: Path, calls: int) -> None:
    """Prints processor seconds of all ways, which take turns in this process."""
    state = create_state(name, width)
    starts, seconds = ways(state, directory), {way: [] for way in WAYS}
    for turn in range(calls + 1):
        for way in WAYS:
            begin = time.process_time()
            starts[way](turn)()
            seconds[way].append(time.process_time() - begin)
    print(
        f"\n| {name}, in turn: processor s | whole | whole / plain | lowest, highest |"
    )
    print("|---|---|---|---|")
    for way in WAYS:
        own, plain = seconds[way][1:], seconds[f"{way.partition(':')[0]}: plain Orbax"]
        ratios = [a / b for a, b in zip(own, plain[1:], strict=True)]
        middle, whole = statistics.median(ratios), statistics.median(own)
        ends = f"{min(ratios):.2f}, {max(ratios):.2f}"
        print(f"| {way} | {whole:.3f} | {middle:.2f} | {ends} |", flush=True)


def measure_memory(state: Any, directory: Path) -> dict[str, float]:
    """Returns how far the memory of this process rises in a save, in MB."""
    checkpointer = ml.Checkpointer(directory / "ours", keep=1)
    checkpointer.save(0, {"x": np.zeros(8)})  # what is imported once

    def rise(act: Callable[[int], Any]) -> float:
        rises = []
        for turn in range(1, 4):
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed is given back
            Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
            before = status("VmRSS")
            act(turn)
            rises.append(status("VmHWM") - before)
        return statistics.median(rises) / MB

    def save(turn: int) -> None:
        checkpointer.save(turn, state)
        checkpointer.wait()

    def save_plainly(turn: int) -> None:
        ocp.save(str(directory / f"plain-{turn}"), state)

    return {
        "Checkpointer": rise(save),
        "plain Orbax": rise(save_plainly),
    }


def status(name: str) -> int:
    """Returns a line of the kernel's account of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def in_own_process(options: argparse.Namespace, *args: str) -> dict[str, float]:
    """Runs a part of this program in a process of its own, and returns its figures."""
    command = [sys.executable, __file__, "--devices", str(options.devices)]
    command += ["--width", str(options.width), "--calls", str(options.calls), *args]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def show(options: argparse.Namespace, state: str, directory: str) -> None:
    """Measures and prints the table of one state."""
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(options.rounds):
        part = ["--state", state, "--directory", directory]
        rounds.append(
            {way: in_own_process(options, "--way", way, *part) for way in WAYS}
        )
    figures = list(rounds[0][WAYS[0]])
    print(f"\n| {state}: processor s | {' | '.join(figures)} | whole / plain |")
    print("|---|" + "---|" * (len(figures) + 1))
    for way in WAYS:
        plain = f"{way.partition(':')[0]}: plain Orbax"
        medians = [statistics.median(r[way][name] for r in rounds) for name in figures]
        ratio = statistics.median(r[way]["whole"] / r[plain]["whole"] for r in rounds)
        cells = " | ".join(f"{figure:.3f}" for figure in medians)
        print(f"| {way} | {cells} | {ratio:.2f} |", flush=True)


def main() -> None:
    """Measures and prints tables, or one figure of them in a child process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=5, help="calls in a process")
    parser.add_argument("--state", choices=STATES)
    parser.add_argument("--paired", action="store_true")
    parser.add_argument("--way", choices=[*WAYS, "memory"])
    parser.add_argument("--directory", type=Path, help="where to save; else a new one")
    options = parser.parse_args()
    if options.way is not None:
        ml.virtual_devices(options.devices)
        state = create_state(options.state, options.width)
        figures = (
            measure_memory(state, options.directory)
            if options.way == "memory"
            else measure(options.way, state, options.directory, options.calls)
        )
        print(json.dumps(figures))
        return
    if options.paired:
        ml.virtual_devices(options.devices)
        for state in [options.state] if options.state else STATES:
            with tempfile.TemporaryDirectory(dir=options.directory) as directory:
                show_pairs(state, options.width, Path(directory), options.calls)
        return
    print(
        f"{options.devices} devices, {options.calls} calls, {options.rounds} rounds; "
        f"jax {jax.__version__}, "
        f"orbax-checkpoint {importlib.metadata.version('orbax-checkpoint')}, "
        f"Python {platform.python_version()}"
    )
    for state in [options.state] if options.state else STATES:
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            show(options, state, directory)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        part = ["--way", "memory", "--state", "network", "--directory", directory]
        print("\nhost memory of a save, MB:", in_own_process(options, *part))


if __name__ == "__main__":
    main()
