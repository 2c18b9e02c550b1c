"""Batches of seeded sources, as digests that never change.

`batches_golden.json` holds what an earlier implementation of the whole input pipeline
yielded (commit bb727a3): batches of arrays, sources, streams and `fit`, by seed, epoch,
shuffle, remainder, weights and number of processes. A saved run may resume anywhere, so
another digest means that it would train on other rows. To add a case, add it here, and
write down its digests from a version known to be right (`digest` of its batches).
"""

import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import meshlayout as ml


EXPECTED = json.loads(Path(__file__).with_suffix(".json").read_text())

CASES: dict[str, Callable[[], Iterable[Any]]] = {}


def case(function: Callable[[], Iterable[Any]]) -> Callable[[], Iterable[Any]]:
    """Adds a function that returns batches."""
    CASES[function.__name__] = function
    return function


def mesh() -> ml.Mesh:
    """Four devices, of any number of processes."""
    return ml.create_mesh({"batch": 2, "model": 2}, devices=jax.devices()[:4])


def table(rows: int) -> dict[str, np.ndarray]:
    """Columns of several dtypes."""
    rng = np.random.default_rng(7)
    return {
        "image": rng.integers(0, 256, (rows, 3, 2), np.uint8),
        "label": np.arange(rows),
        "score": rng.normal(size=rows),
        "is_odd": np.arange(rows) % 2 == 1,
        "half": rng.normal(size=(rows, 5)).astype(np.float16),
    }


def batches(source: Any, *, size: int = 8, loops: int = 2, **options: Any) -> list[Any]:
    """The batches of several loops over one dataset."""
    data = ml.distribute_dataset(source, mesh(), global_batch_size=size, **options)
    return [batch for _ in range(loops) for batch in data]


@case
def arrays_in_order() -> Any:
    return batches(table(22))


@case
def arrays_shuffled_by_seed_and_epoch() -> Any:
    return [
        batch
        for seed in (0, 1, 12345)
        for batch in batches(table(37), shuffle=seed, epochs=3)
    ]


@case
def remainders() -> Any:
    return [
        batch
        for rows in (21, 24, 29)
        for remainder in ("pad", "drop", "repeat")
        for shuffle in (None, 3)
        for batch in batches(
            table(rows), remainder=remainder, shuffle=shuffle, epochs=2
        )
    ]


@case
def weights() -> Any:
    columns = table(13)
    own = columns | {"weight": np.linspace(0, 2, 13)}
    pair = columns["image"], columns["label"]
    return [
        *batches(own, shuffle=1),
        *batches(columns, shuffle=1, weights="mask"),
        *batches(pair, shuffle=1, weights=2),
        *batches((*pair, own["weight"]), weights=2),
        *batches(table(16), weights=None),
        *batches(columns["score"][:8], weights=None),
    ]


class Rows:
    """Rows that know their epoch, too many for a table of their order."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def read_rows(self, indices: np.ndarray, epoch: int) -> Any:
        return {"row": indices, "epoch": np.full(len(indices), epoch)}


@case
def many_rows() -> Any:
    found = []
    for rows, seed in ((2**20 + 3, 0), (2**21, 9), (5, 4), (1, 0)):
        data = ml.distribute_dataset(
            Rows(rows), mesh(), global_batch_size=32, shuffle=seed, epochs=2
        )
        found += itertools.islice(data, 4)
    return found


def examples(rows: int = 21) -> Iterator[Any]:
    """One example after another, in a buffer that is used again."""
    columns = table(rows)
    image = np.empty((3, 2), np.uint8)
    for row in range(rows):
        image[...] = columns["image"][row]
        yield {
            "image": image,
            "label": row,
            "score": columns["score"][row],
            "flag": row % 2 == 0,
        }


def ragged_batches(rows: int = 21) -> Iterator[Any]:
    """Batches of other sizes than those asked for."""
    columns, start = table(rows), 0
    for size in itertools.cycle((5, 1, 7)):
        if start >= rows:
            return
        yield {name: leaf[start : start + size] for name, leaf in columns.items()}
        start += size


@case
def streams_of_examples() -> Any:
    return [
        batch
        for remainder in ("pad", "drop", "repeat")
        for batch in batches(examples, remainder=remainder, epochs=2)
    ]


@case
def streams_of_batches() -> Any:
    return [
        batch
        for remainder in ("pad", "drop", "repeat")
        for batch in batches(
            ragged_batches, remainder=remainder, epochs=2, batched=True
        )
    ]


@case
def resumed_in_the_middle() -> Any:
    found = []
    for source in (table(22), examples, ragged_batches):
        options = {"shuffle": 3} if isinstance(source, dict) else {"batched": None}
        if source is ragged_batches:
            options = {"batched": True}
        data = ml.distribute_dataset(
            source, mesh(), global_batch_size=8, epochs=2, **options
        )
        for steps in (1, 3, 4):
            it = iter(data)
            list(itertools.islice(it, steps))
            other = iter(data)
            other.set_state(json.loads(json.dumps(it.get_state())), skip=True)
            found += other
    return found


@case
def sources_of_each_process() -> Any:
    here, count = jax.process_index(), jax.process_count()
    devices = jax.devices()[:4]
    rows = [11, 5, 8, 3][here] + 8 * (4 - count)
    columns = {"y": np.arange(rows) + 1000 * here}
    data = [
        ml.distribute_dataset(
            columns if kind == "rows" else [{"y": y} for y in columns["y"]].__iter__,
            ml.create_mesh({"batch": 4}, devices=devices),
            global_batch_size=8,
            per_process=True,
            remainder=remainder,
            shuffle=4 if kind == "rows" else None,
        )
        for kind in ("rows", "stream")
        for remainder in ("pad", "drop")
    ]
    return [batch for one in data for batch in one]


@case
def rows_mapped_with_a_generator() -> Any:
    from tests.tfds_directory import tiny_directory

    def noisy(example: Any, rng: np.random.Generator) -> Any:
        image = example["image"] + rng.normal(size=(6, 6, 1))
        return {"image": image.astype(np.float32), "number": example["number"]}

    with tempfile.TemporaryDirectory() as directory:
        tiny_directory(Path(directory))
        data = ml.data.from_tfds(
            "tiny",
            "train[:90%]",
            mesh(),
            global_batch_size=32,
            shuffle=3,
            map=noisy,
            num_workers=0,
            epochs=2,
            data_dir=directory,
        )
        return list(data)


@case
def arrays_given_to_fit() -> Any:
    seen = []

    class Spy(ml.Trainer):
        def train_step(self, state: Any, batch: Any, metrics: Any = None) -> Any:
            seen.append(batch)
            return super().train_step(state, batch, metrics)

    def loss_fn(model: Any, batch: Any) -> Any:
        x, y, _ = batch
        return (model(x)[:, 0] - y) ** 2

    state = ml.TrainState.create(
        lambda: nnx.Linear(4, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), ml.LayoutMap(mesh())
    )
    x = np.arange(84, dtype=np.float32).reshape(21, 4) / 84
    trainer = Spy(state, loss_fn, weights=2)
    trainer.fit(x, x.sum(1), batch_size=8, epochs=3, progress=False)
    return seen


def digest(found: Iterable[Any]) -> str:
    """A digest of batches: structure, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for batch in found:
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
            array = np.ascontiguousarray(ml.to_numpy(leaf))
            total.update(f"{path}{array.dtype}{array.shape}".encode())
            total.update(array.tobytes())
    return total.hexdigest()[:16]


def digests() -> dict[str, str]:
    """The digest of every case, on any number of processes."""
    return {name: digest(function()) for name, function in CASES.items()}
