"""Batches of seeded sources and packed rows are those of earlier releases, bit for bit.

A run that resumes after an upgrade has to see the rows that it has not seen yet, so the
order, the random numbers of `map` and the packing may never change. `golden_data.json`
has the digests of what commit bb727a3 yielded, before these parts were rewritten. What
batches of a known order hold is compared with NumPy elsewhere. To add a case, add it
here, and write down its digest from a version known to be right.
"""

import functools
import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout.data import from_tfds, pack_sequences
from tests.tfds_directory import tiny_directory


EXPECTED = json.loads(Path(__file__).with_name("golden_data.json").read_text())

# What any number of processes yields.
CASES: dict[str, Callable[[], Iterable[Any]]] = {}


def case(function: Callable[[], Iterable[Any]]) -> Callable[[], Iterable[Any]]:
    """Adds a function that returns batches."""
    CASES[function.__name__] = function
    return function


def digest(trees: Iterable[Any]) -> str:
    """A digest of trees: names, dtypes, shapes and bytes of their leaves."""
    total = hashlib.sha256()
    for tree in ml.to_numpy(list(trees)):
        for path, array in jax.tree_util.tree_flatten_with_path(tree)[0]:
            total.update(f"{path}{array.dtype}{array.shape}".encode())
            total.update(array.tobytes())
    return total.hexdigest()[:16]


def digests() -> dict[str, str]:
    """The digest of every case."""
    return {name: digest(function()) for name, function in CASES.items()}


def expected_on(num_processes: int) -> dict[str, str]:
    """The digests on so many processes; of one case they differ."""
    own = EXPECTED["sources_of_each_process"][str(num_processes)]
    return {name: EXPECTED[name] for name in CASES} | {"sources_of_each_process": own}


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


def batches(source: Any, **options: Any) -> list[Any]:
    """The batches of two loops over one dataset."""
    data = ml.distribute_dataset(source, mesh(), global_batch_size=8, **options)
    return [batch for _ in range(2) for batch in data]


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
        for batch in batches(table(rows), remainder=remainder, shuffle=3, epochs=2)
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
    def noisy(example: Any, rng: np.random.Generator) -> Any:
        image = example["image"] + rng.normal(size=(6, 6, 1))
        return {"image": image.astype(np.float32), "number": example["number"]}

    with tempfile.TemporaryDirectory() as directory:
        return list(
            from_tfds(
                "tiny",
                "train[:90%]",
                mesh(),
                global_batch_size=32,
                shuffle=3,
                map=noisy,
                num_workers=0,
                epochs=2,
                data_dir=tiny_directory(Path(directory)),
            )
        )


@pytest.mark.parametrize("name", CASES)
def test_batches_of_arrays_and_sources(name):
    assert digest(CASES[name]()) == expected_on(1)[name]


def test_batches_of_arrays_given_to_fit():
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
    assert digest(seen) == EXPECTED["arrays given to fit"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_directory(tmp_path_factory.mktemp("tfds"))


FROM_TFDS = {
    "default order": {},
    "seed 3": {"shuffle": 3, "epochs": 2},
    "in order": {"shuffle": None},
    "part": {"split": "train[10:50]", "shuffle": 1},
    "supervised": {"supervised": True, "map": None, "shuffle": 2},
}


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("name", FROM_TFDS)
def test_batches_of_a_tfds_dataset(directory, name, in_memory):
    def numbers_and_images(example):
        return {"image": example["image"], "number": example["number"]}

    options = {"split": "train", "map": numbers_and_images, **FROM_TFDS[name]}
    load = functools.partial(from_tfds, "tiny", options.pop("split"), mesh())
    rows = load(
        global_batch_size=32, data_dir=directory, in_memory=in_memory, **options
    )
    assert digest(rows) == EXPECTED[f"from_tfds {name}"]


PACKED = {
    "pack": (24, {"mode": "pack"}),
    "pack targets": (24, {"mode": "pack", "targets": True}),
    "pack all": (
        17,
        {"mode": "pack", "targets": True, "document_ids": True, "separator": 7},
    ),
    "chunk": (24, {}),
    "chunk all": (17, {"targets": True, "document_ids": True, "separator": 7}),
    "chunk dropped": (23, {"targets": True, "remainder": "drop"}),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows(name):
    rng, (length, options) = np.random.default_rng(0), PACKED[name]
    documents = [rng.integers(1, 250, rng.integers(0, 60)) for _ in range(300)]
    rows = pack_sequences(documents, length, **options)
    assert digest(rows) == EXPECTED[f"packed {name}"]
