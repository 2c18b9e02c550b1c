"""Counts the files of the library that a reader passes on four ways through it.

`python benchmarks/files_passed.py` creates a kernel, gets a first batch from arrays,
takes a first train step and restores a state, each under a profile hook, and names
every file of meshlayout/ whose code ran. Few files on a way are what makes it readable.
"""

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import optax
from flax import nnx

import meshlayout as ml


T = TypeVar("T")

PACKAGE = Path(ml.__file__).parent


def files_passed(way: Callable[[], T]) -> tuple[T, list[str]]:
    """Returns what a function returns, and the files whose code it ran."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    threading.setprofile(note)
    try:
        result = way()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    paths = (Path(file) for file in files)
    inside = [path for path in paths if path.is_relative_to(PACKAGE)]
    return result, sorted(str(path.relative_to(PACKAGE)) for path in inside)


def loss_fn(model: nnx.Linear, batch: Any) -> Any:
    """Returns one loss per example."""
    return (model(batch["x"])[:, 0] - batch["y"]) ** 2


def main() -> None:
    """Prints the files of each way."""
    ml.virtual_devices(8)
    mesh = ml.create_mesh({"batch": 2, "model": 4})
    layouts = ml.LayoutMap(mesh, {"kernel": ("model", None)})
    ways: dict[str, list[str]] = {}
    _, ways["create one kernel"] = files_passed(
        lambda: ml.create(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), layouts)
    )
    state = ml.TrainState.create(
        lambda: nnx.Linear(8, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), layouts
    )
    examples = {"x": np.ones((16, 8), np.float32), "y": np.ones(16, np.float32)}
    data = ml.distribute_dataset(examples, mesh, global_batch_size=8)
    batch, ways["first batch from arrays"] = files_passed(lambda: next(iter(data)))
    step = ml.make_train_step(loss_fn)
    (state, _), ways["first train step"] = files_passed(lambda: step(state, batch))
    with tempfile.TemporaryDirectory() as folder, ml.Checkpointer(folder) as saver:
        saver.save(1, state)
        saver.wait()
        _, ways["restore"] = files_passed(lambda: saver.restore(like=state))
    for way, files in ways.items():
        print(f"{way}: {len(files)} files")
        for file in files:
            print(f"    {file}")


if __name__ == "__main__":
    main()
