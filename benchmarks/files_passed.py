"""How many files of meshlayout/ a first train step, restore and batch pass through.

Every distinct file in which a function is called counts, seen by a profile hook; what
runs while modules are imported does not. Whoever reads how one of these works has to
open that many files.

    python -m benchmarks.files_passed [train_step] [restore] [batch] [--names]
"""

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshlayout as ml


ROOT = Path(ml.__file__).parent


def files_passed(call: Callable[[], Any]) -> list[str]:
    """Returns the files of meshlayout/ whose functions a call runs, in any thread.

    Args:
        call: What is done.
    """
    files: set[str] = set()

    def hook(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            files.add(frame.f_code.co_filename)

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    inside = (Path(name) for name in files if name.startswith(str(ROOT)))
    return sorted(str(path.relative_to(ROOT)) for path in inside)


def loss_fn(model: nnx.Linear, batch: dict[str, Any]) -> Any:
    return jnp.square(model(batch["x"]) - batch["y"])


def create_state() -> ml.TrainState:
    layouts = ml.LayoutMap(ml.create_mesh({"batch": 8}), {})
    return ml.TrainState.create(
        lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), optax.adam(1e-3), layouts
    )


def train_step() -> Callable[[], Any]:
    """Returns the first call of a train step."""
    state = create_state()
    mesh = ml.create_mesh({"batch": 8})
    rows = np.ones((8, 4), "float32")
    batch = ml.relayout({"x": rows, "y": rows}, mesh.layout("batch", ...))
    make_train_step = ml.make_train_step  # which is imported now
    return lambda: make_train_step(loss_fn)(state, batch)


def restore() -> Callable[[], Any]:
    """Returns the restore of a checkpoint."""
    state = create_state()
    directory = tempfile.mkdtemp()
    with ml.Checkpointer(directory) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
    reader = ml.Checkpointer(directory)
    return lambda: reader.restore(like=state)


def batch() -> Callable[[], Any]:
    """Returns the making of a dataset of arrays, and of its first batch."""
    mesh = ml.create_mesh({"batch": 8})
    data = {"x": np.ones((32, 4), "float32"), "y": np.ones((32, 4), "float32")}
    distribute_dataset = ml.distribute_dataset  # which is imported now
    return lambda: next(iter(distribute_dataset(data, mesh, global_batch_size=8)))


WAYS = {"train_step": train_step, "restore": restore, "batch": batch}


def main() -> None:
    """Prints the number of files of each way, and their names with `--names`."""
    ml.virtual_devices(8)
    for name in ml.__all__:
        getattr(ml, name)  # loaded at first use, which is not part of the call
    chosen = [name for name in sys.argv[1:] if name in WAYS] or list(WAYS)
    for name in chosen:
        files = files_passed(WAYS[name]())
        print(f"{name}: {len(files)} files")
        if "--names" in sys.argv:
            print("".join(f"  {file}\n" for file in files), end="")


if __name__ == "__main__":
    main()
