"""Saving and restoring a state: the stall of a step loop, seconds and bytes, memory.

`python benchmarks/checkpoint.py --devices 8` trains a network whose state, optimiser
included, has some 100 MB, and prints

- the time of a step without saves, with saves in the background and with saves that are
  waited for, and how long `save` kept the loop; a window ends when its last save is
  done;
- the seconds of a save that is waited for, and of restores with `verify` on and off,
  on the same mesh and on another one, beside plain Orbax (its v1 API) on the same
  arrays;
- the host memory that `Checkpointer.memory` says a save takes, beside how far the
  memory of this process rose.

All ways are run in turn, round by round, in one process; figures are medians over the
rounds, and ratios medians of the ratios within a round.
"""

import argparse
import ctypes
import importlib.metadata
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import __version__ as flax_version, nnx
from orbax.checkpoint import v1 as ocp

import meshlayout as ml


BATCH_SIZE = 64
MB = 1e6
Figures = dict[str, float]


class Network(nnx.Module):
    """Two dense layers of some width."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(width, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Returns the outputs."""
        return self.second(nnx.relu(self.first(x)))


def loss_fn(model: Any, batch: Any) -> Any:
    """Returns the size of the outputs."""
    return (model(batch["x"]) ** 2).mean(axis=-1)


class Bench:
    """A state on a mesh, a step, and a directory to save in."""

    def __init__(self, num_devices: int, width: int, directory: Path) -> None:
        self.width, self.directory = width, directory
        self.mesh = ml.create_mesh({"batch": 2, "model": num_devices // 2})
        self.state = ml.TrainState.create(
            self.build, optax.adam(1e-3), self.layouts(self.mesh, "model")
        )
        self.step = ml.make_train_step(loss_fn)
        x = np.random.default_rng(0).random((BATCH_SIZE, width), "float32")
        self.batch = ml.relayout({"x": x}, self.mesh.layout("batch", ...))

    def build(self) -> nnx.Module:
        """Returns the network."""
        return Network(self.width, rngs=nnx.Rngs(0))

    def layouts(self, mesh: ml.Mesh, axis: str) -> ml.LayoutMap:
        """Returns a map that cuts every array over an axis."""
        return ml.LayoutMap(mesh, {"kernel": (None, axis), "bias": (axis,)})

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        arrays = jax.tree.leaves((self.state.params, self.state.opt_state))
        return sum(x.nbytes for x in arrays)

    # A loop with saves.

    def window(self, save: Callable[[int], None] | None, steps: int) -> float:
        """Runs steps, saves after the first, and returns the seconds in `save`.

        Args:
            save: Saves; None for a window without.
            steps: How many steps.
        """
        stall = 0.0
        for step in range(steps):
            self.state, metrics = self.step(self.state, self.batch)
            jax.block_until_ready((self.state, metrics))
            if save is not None and step == 0:
                start = time.perf_counter()
                save(int(self.state.step))
                stall = time.perf_counter() - start
        return stall

    def loops(self, steps: int) -> dict[str, Callable[[], Figures]]:
        """Returns the ways to save in a loop."""
        behind = ml.Checkpointer(self.directory / "behind", keep=1)
        waited = ml.Checkpointer(self.directory / "waited", keep=1, async_save=False)
        pending: list[Any] = []

        def plain(step: int) -> None:
            path = fresh(self.directory / "plain")
            pending.append(ocp.save_async(path, self.arrays()))

        def measured(
            save: Callable[[int], None] | None, end: Callable[[], Any]
        ) -> Callable[[], Figures]:
            def run() -> Figures:
                start, used = time.perf_counter(), time.process_time()
                stall = self.window(save, steps)
                end()
                return {
                    "window": time.perf_counter() - start,
                    "processor": time.process_time() - used,
                    "stall": stall,
                }

            return run

        def save(checkpointer: ml.Checkpointer) -> Callable[[int], None]:
            return lambda step: void(checkpointer.save(step, self.state))

        return {
            "no saves": measured(None, lambda: None),
            "Checkpointer": measured(save(behind), behind.wait),
            "Checkpointer, async_save=False": measured(save(waited), waited.wait),
            "plain Orbax, save_async": measured(
                plain, lambda: [pending.pop().result() for _ in pending[:]]
            ),
        }

    def arrays(self) -> Any:
        """Returns the state as plain Orbax takes it: a dict of arrays."""
        slots = dict(enumerate(jax.tree.leaves(self.state.opt_state)))
        return {"params": self.state.params, "opt_state": slots}

    # Saves and restores alone.

    def transfers(self) -> dict[str, tuple[str, Callable[[], Any]]]:
        """Returns the ways to save and to restore, each with the one it is beside."""
        path = self.directory / "alone"
        ck = ml.Checkpointer(path, keep=1, async_save=False)
        plain_path = self.directory / "plain-alone"
        devices = {"fsdp": self.mesh.size}
        other = self.layouts(ml.create_mesh(devices), "fsdp")
        here, there = (
            self.state,
            ml.TrainState.describe(self.build, optax.adam(1e-3), other),
        )
        abstract = shapes(self.arrays())
        rows = other.mesh.layout
        abstract_there = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=rows(*elsewhere(x.ndim)).sharding
            ),
            abstract,
        )
        arrays = self.arrays()
        saved = "save: plain Orbax"
        read = "restore: plain Orbax"
        moved = "restore on another mesh: plain Orbax"
        return {
            saved: (saved, lambda: ocp.save(fresh(plain_path), arrays)),
            "save: Checkpointer": (saved, lambda: ck.save(1, here, force=True)),
            read: (read, lambda: ocp.load(str(plain_path), abstract)),
            "restore: verify=False": (read, lambda: ck.restore(here, verify=False)),
            "restore: verify=True": (read, lambda: ck.restore(here)),
            moved: (moved, lambda: ocp.load(str(plain_path), abstract_there)),
            "restore on another mesh: verify=False": (
                moved,
                lambda: ck.restore(there, verify=False),
            ),
            "restore on another mesh: verify=True": (moved, lambda: ck.restore(there)),
            "restore_numpy: verify=True": (read, ck.restore_numpy),
        }

    # Memory.

    def memory(self) -> list[tuple[str, int, int]]:
        """Returns what is said and what is measured, in bytes."""
        ck = ml.Checkpointer(self.directory / "memory", keep=1, async_save=False)
        said, arrays = ck.memory(self.state), self.arrays()
        path = self.directory / "plain-memory"

        def save() -> None:
            ck.save(1, self.state, force=True)

        def plain() -> None:
            ocp.save(fresh(path), arrays)

        def restore() -> None:
            jax.block_until_ready(ck.restore(self.state))

        def load() -> None:
            jax.block_until_ready(ocp.load(str(path), shapes(arrays)))

        with ml.Checkpointer(self.directory / "warm", async_save=False) as warm:
            warm.save(1, self.batch)
        ways = {
            "save: Checkpointer": (said, save),
            "save: plain Orbax": (said, plain),
            "restore, the state itself included: Checkpointer": (self.nbytes, restore),
            "restore, the state itself included: plain Orbax": (self.nbytes, load),
        }
        return [(name, said, took(way)) for name, (said, way) in ways.items()]


def elsewhere(ndim: int) -> tuple[Any, ...]:
    """Returns the layout of an array of dense layers on the other mesh."""
    return {0: (), 1: ("fsdp",), 2: (None, "fsdp")}[ndim]


def shapes(tree: Any) -> Any:
    """Returns arrays without values, with their shardings."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )


def void(_: Any) -> None:
    """Drops a value."""


def fresh(path: Path) -> str:
    """Returns a path where nothing is any more."""
    shutil.rmtree(path, ignore_errors=True)
    return str(path)


def took(way: Callable[[], None]) -> int:
    """Returns how far a call raised this process's memory, the median of three."""
    found = []
    for _ in range(3):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed is given back
        Path("/proc/self/clear_refs").write_text("5")  # forgets the highest one
        before = status("VmRSS")
        way()
        found.append(status("VmHWM") - before)
    return int(statistics.median(found))


def status(name: str) -> int:
    """Returns a line of the kernel's account of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def in_turn(
    ways: dict[str, Callable[[], Figures]], rounds: int
) -> list[dict[str, Figures]]:
    """Runs all ways, round by round, after one round that does not count."""
    found = [{name: way() for name, way in ways.items()} for _ in range(rounds + 1)]
    return found[1:]


def seconds(way: Callable[[], Any]) -> Figures:
    """Returns how long a call takes, to the end of what it started."""
    start, used = time.perf_counter(), time.process_time()
    jax.block_until_ready(way())
    return {
        "seconds": time.perf_counter() - start,
        "processor": time.process_time() - used,
    }


def median(rounds: list[dict[str, Figures]], name: str, figure: str) -> float:
    """Returns the median of a figure of a way."""
    return statistics.median(one[name][figure] for one in rounds)


def ratio(rounds: list[dict[str, Figures]], name: str, to: str, figure: str) -> float:
    """Returns the median ratio of a way's figure to another's of the same round."""
    return statistics.median(one[name][figure] / one[to][figure] for one in rounds)


def more(rounds: list[dict[str, Figures]], name: str, than: str, figure: str) -> float:
    """Returns the median difference to another way's figure of the same round."""
    return statistics.median(one[name][figure] - one[than][figure] for one in rounds)


def show_loops(bench: Bench, steps: int, rounds: int) -> None:
    """Measures and prints what saves cost a loop."""
    found = in_turn(bench.loops(steps), rounds)
    print(
        "\n| saves | ms/step | ratio | a save costs, ms | of processors, ms "
        "| in the call, ms |\n|---|---|---|---|---|---|"
    )
    for name in found[0]:
        print(
            f"| {name} | {median(found, name, 'window') / steps * 1e3:.1f} "
            f"| {ratio(found, name, 'no saves', 'window'):.2f} "
            f"| {more(found, name, 'no saves', 'window') * 1e3:.0f} "
            f"| {more(found, name, 'no saves', 'processor') * 1e3:.0f} "
            f"| {median(found, name, 'stall') * 1e3:.0f} |"
        )


def show_transfers(bench: Bench, rounds: int) -> None:
    """Measures and prints saves and restores."""
    ways = bench.transfers()

    def timed(way: Callable[[], Any]) -> Callable[[], Figures]:
        return lambda: seconds(way)

    found = in_turn({name: timed(way) for name, (_, way) in ways.items()}, rounds)
    print("\n| way | s | MB/s | ratio | processor s |\n|---|---|---|---|---|")
    for name, (to, _) in ways.items():
        each = median(found, name, "seconds")
        print(
            f"| {name} | {each:.2f} | {bench.nbytes / MB / each:.0f} "
            f"| {ratio(found, name, to, 'seconds'):.2f} "
            f"| {median(found, name, 'processor'):.2f} |"
        )
    for name in ("alone", "plain-alone"):
        files = [one for one in (bench.directory / name).rglob("*") if one.is_file()]
        size = sum(one.stat().st_size for one in files) / MB
        print(f"\n{name}: {size:.1f} MB in {len(files)} files")


def main() -> None:
    """Measures and prints tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20, help="steps of a window")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where to save; else a new one")
    options = parser.parse_args()
    ml.virtual_devices(options.devices)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        bench = Bench(options.devices, options.width, Path(directory))
        bench.window(None, 2)
        print(
            f"{bench.nbytes / MB:.1f} MB of state on {options.devices} devices, "
            f"{options.steps} steps and one save a window, {options.rounds} rounds; "
            f"jax {jax.__version__}, flax {flax_version}, "
            f"orbax-checkpoint {importlib.metadata.version('orbax-checkpoint')}, "
            f"Python {platform.python_version()}"
        )
        said = bench.memory()
        show_loops(bench, options.steps, options.rounds)
        show_transfers(bench, options.rounds)
        print("\n| memory | said MB | measured MB |\n|---|---|---|")
        for name, expected, measured in said:
            print(f"| {name} | {expected / MB:.1f} | {measured / MB:.1f} |")


if __name__ == "__main__":
    main()
