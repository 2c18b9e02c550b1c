"""Ready global batches: ours beside a NumPy loop, Grain and tf.data; and fed steps.

`python benchmarks/input.py --devices 8` prints, for each kind of source, global batches
a second that are ready on the mesh, and ratios to the fastest of the other ways of that
source in the same round; then the steps a second of an MLP that is fed by each. All
ways of a source are run in turn, an epoch each, in one process; the figures are medians
over the rounds. tf.data takes part where TensorFlow is installed.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import optax
from flax import __version__ as flax_version, nnx
from PIL import Image

import meshlayout as ml
from models.data import read_carried_part
from models.mlp import MLP


Batch = dict[str, Any]
Way = Callable[[], Iterator[Any]]
OURS = "distribute_dataset"


def images(num_rows: int) -> Batch:
    """Returns pictures in memory, as many as asked for."""
    train = read_carried_part("of the benchmark").train
    rows = np.arange(num_rows) % len(train)
    return {"image": train.images[rows], "label": train.labels[rows]}


class Contest:
    """The ways to make batches of each kind of source."""

    def __init__(self, num_devices: int, num_rows: int, size: int) -> None:
        self.mesh = ml.create_mesh({"batch": num_devices})
        self.layout = self.mesh.layout("batch", ...)
        self.data, self.size = images(num_rows), size
        self.num_batches = num_rows // size
        self.rng = np.random.default_rng(0)

    def sources(self, folder: Path) -> dict[str, Callable[[], dict[str, Way]]]:
        """Returns what makes the ways of every source, ours last."""
        found = {
            "NumPy arrays": self.arrays,
            "Grain MapDataset of rows": self.grain_rows,
            "Grain IterDataset of batches": self.grain_batches,
            "generator of rows": self.generator_of_rows,
            "generator of batches": self.generator_of_batches,
            "TFDS name, decoded once": lambda: self.tfds(folder, in_memory=True),
            "TFDS name, record by record": lambda: self.tfds(folder, in_memory=False),
        }
        if importlib.util.find_spec("tensorflow"):
            found["tf.data of batches"] = self.tf_data
        return found

    def put(self, batch: Batch) -> Batch:
        """Returns a batch on the mesh, as plain JAX puts it there."""
        rows = jax.sharding.PartitionSpec("batch")
        sharding = jax.sharding.NamedSharding(self.mesh.jax_mesh, rows)
        return jax.device_put(batch, sharding)

    def placed(self, batches: Any) -> Iterator[Batch]:
        """Yields batches on the mesh."""
        for batch in batches:
            yield self.put(batch)

    def ours(self, source: Any, **options: Any) -> Way:
        """A pipeline over a source, an epoch at a time."""
        data = ml.distribute_dataset(
            source,
            self.layout,
            global_batch_size=self.size,
            remainder="drop",
            **options,
        )
        return lambda: iter(data)

    def arrays(self) -> dict[str, Way]:
        """Shuffled rows of arrays in memory."""

        def loop() -> Iterator[Batch]:
            order = self.rng.permutation(len(self.data["label"]))
            for at in range(self.num_batches):
                rows = order[at * self.size : (at + 1) * self.size]
                yield self.put({name: leaf[rows] for name, leaf in self.data.items()})

        ways = {
            "NumPy loop + device_put": loop,
            "Grain + device_put": lambda: self.placed(
                self.rows().batch(self.size, drop_remainder=True)
            ),
        }
        if importlib.util.find_spec("tensorflow"):
            ways["tf.data + device_put"] = lambda: self.placed(
                self.slices().as_numpy_iterator()
            )
        return {**ways, OURS: self.ours(self.data, shuffle=0)}

    def rows(self) -> Any:
        """Returns shuffled rows as Grain gives them, one by one."""
        return grain.MapDataset.source(Rows(self.data)).shuffle(seed=0)

    def slices(self) -> Any:
        """Returns shuffled batches as tf.data gives them."""
        tf = importlib.import_module("tensorflow")
        dataset = tf.data.Dataset.from_tensor_slices(self.data)
        dataset = dataset.shuffle(10_000, seed=0)
        return dataset.batch(self.size, drop_remainder=True).prefetch(2)

    def grain_rows(self) -> dict[str, Way]:
        """Rows that Grain gives one by one."""
        batches = self.rows().batch(self.size, drop_remainder=True)
        return {
            "Grain + device_put": lambda: self.placed(batches),
            OURS: self.ours(self.rows()),
        }

    def grain_batches(self) -> dict[str, Way]:
        """Batches that Grain gives, with its own threads."""
        batches = self.rows().batch(self.size, drop_remainder=True).to_iter_dataset()
        return {
            "Grain + device_put": lambda: self.placed(batches),
            OURS: self.ours(batches, batched=True),
        }

    def generator_of_rows(self) -> dict[str, Way]:
        """A generator of single examples."""

        def examples() -> Iterator[Batch]:
            for image, label in zip(*self.data.values(), strict=True):
                yield {"image": image, "label": label}

        def loop() -> Iterator[Batch]:
            rows = examples()
            for _ in range(self.num_batches):
                batch = [next(rows) for _ in range(self.size)]
                yield self.put(
                    {name: np.stack([row[name] for row in batch]) for name in batch[0]}
                )

        return {"NumPy loop + device_put": loop, OURS: self.ours(examples)}

    def generator_of_batches(self) -> dict[str, Way]:
        """A generator of batches."""

        def batches() -> Iterator[Batch]:
            for at in range(self.num_batches):
                rows = slice(at * self.size, (at + 1) * self.size)
                yield {name: leaf[rows].copy() for name, leaf in self.data.items()}

        return {
            "NumPy loop + device_put": lambda: self.placed(batches()),
            OURS: self.ours(batches, batched=True),
        }

    def tf_data(self) -> dict[str, Way]:
        """A tf.data pipeline of batches."""
        slices = self.slices()
        return {
            "tf.data + device_put": lambda: self.placed(slices.as_numpy_iterator()),
            OURS: self.ours(slices),
        }

    def tfds(self, folder: Path, *, in_memory: bool) -> dict[str, Way]:
        """A prepared TFDS dataset of PNG pictures, by its name."""
        tfds = importlib.import_module("tensorflow_datasets")
        source = tfds.data_source("clothes", split="train", data_dir=folder)
        records = grain.MapDataset.source(source).shuffle(seed=0)
        batches = records.batch(self.size, drop_remainder=True)
        data = ml.data.from_tfds(
            "clothes",
            "train",
            self.layout,
            global_batch_size=self.size,
            remainder="drop",
            in_memory=in_memory,
            data_dir=folder,
        )
        return {
            "Grain + device_put": lambda: self.placed(batches),
            "from_tfds": lambda: iter(data),
        }


class Rows:
    """Arrays as a source of single rows."""

    def __init__(self, data: Batch) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data["label"])

    def __getitem__(self, row: int) -> Batch:
        return {name: leaf[row] for name, leaf in self._data.items()}


def prepare(folder: Path, num_rows: int) -> None:
    """Writes pictures as a TFDS dataset."""
    tfds = importlib.import_module("tensorflow_datasets")
    data = images(num_rows)

    class Clothes(tfds.core.GeneratorBasedBuilder):
        """Small pictures of clothes."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            features = {
                "image": tfds.features.Image(shape=(28, 28, 1)),
                "label": tfds.features.ClassLabel(num_classes=10),
            }
            features = tfds.features.FeaturesDict(features)
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager: Any) -> Any:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Iterator[Any]:
            for row, image in enumerate(data["image"]):
                file = io.BytesIO()
                Image.fromarray(image[:, :, 0]).save(file, "PNG")
                file.seek(0)
                yield row, {"image": file, "label": int(data["label"][row])}

    tfds.disable_progress_bar()
    builder = Clothes(data_dir=folder, file_format="array_record")
    config = tfds.download.DownloadConfig(num_shards=4)
    with contextlib.redirect_stdout(sys.stderr):
        builder.download_and_prepare(download_config=config)


def seconds_a_batch(way: Way, most: int) -> float:
    """Returns how long a batch takes until it is ready, over an epoch or some of it."""
    start, count = time.perf_counter(), 0
    for batch in way():
        jax.block_until_ready(batch)
        count += 1
        if count == most:
            break
    return (time.perf_counter() - start) / count


@dataclass(frozen=True)
class Fed:
    """What a step did with the batches of an epoch.

    Attributes:
        seconds: How long a step took.
        waited: The share of the time for which the loop waited for batches.
        idle: The share of the batches that came when the device had done all its work,
            of those that were asked for when it had some.
    """

    seconds: float
    waited: float
    idle: float


class Step:
    """The train step of an MLP for pictures of MNIST's size."""

    def __init__(self, mesh: ml.Mesh) -> None:
        layouts = ml.LayoutMap(mesh, {}, unused="ignore")
        self.state = ml.TrainState.create(
            lambda: MLP(rngs=nnx.Rngs(0)), optax.adam(1e-3), layouts
        )
        self.step = ml.make_train_step(self.losses)

    def losses(self, model: Any, batch: Batch) -> jax.Array:
        """Returns cross entropies; pixels are scaled here, on the device."""
        logits = model(batch["image"].astype("float32") / 255)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    def run(self, batches: Iterator[Any], most: int) -> "Fed":
        """Runs an epoch, or some of it, never more than 8 steps ahead of the device."""
        start, waited, count = time.perf_counter(), 0.0, 0
        idle: list[bool] = []
        while count < most:
            asked = time.perf_counter()
            batch = next(batches, None)
            waited += time.perf_counter() - asked
            if batch is None:
                break
            if count % 8:
                idle.append(self.state.step.is_ready())
            self.state, metrics = self.step(self.state, batch)
            count += 1
            if count % 8 == 0:
                jax.block_until_ready(metrics)
        jax.block_until_ready(self.state)
        seconds = time.perf_counter() - start
        return Fed(seconds / count, waited / seconds, statistics.mean(idle))


def again(batch: Any) -> Iterator[Any]:
    """Yields the same batch forever."""
    while True:
        yield batch


def compare(ways: dict[str, Way], rounds: int, most: int) -> list[list[str]]:
    """Returns for each way batches a second, and the ratio to the best other way."""
    for way in ways.values():
        seconds_a_batch(way, most)
    timed = [
        {name: seconds_a_batch(way, most) for name, way in ways.items()}
        for _ in range(rounds)
    ]
    *others, _ = ways
    found = []
    for name in ways:
        rate = statistics.median(1 / one[name] for one in timed)
        best = [min(one[other] for other in others) for one in timed]
        ratio = statistics.median(
            first / one[name] for first, one in zip(best, timed, strict=True)
        )
        found.append([name, f"{rate:,.0f}", f"{ratio:.2f}"])
    return found


def main() -> None:
    """Measures and prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--batches", type=int, default=200, help="most in a window")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="sources that contain this text")
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    ml.virtual_devices(options.devices)
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), options.rows // 12)
        contest = Contest(options.devices, options.rows, options.size)
        sources = contest.sources(Path(folder))
        sources = {n: make() for n, make in sources.items() if options.only in n}
        versions = f"jax {jax.__version__}, flax {flax_version}, grain "
        versions += f"{importlib.metadata.version('grain')}"
        print(
            f"{options.rows:,} pictures in global batches of {options.size} on "
            f"{options.devices} devices, {options.rounds} rounds; {versions}, Python "
            f"{platform.python_version()}"
        )
        print("\n| source | way | batches/s | ratio |\n|---|---|---|---|")
        for name, ways in sources.items():
            for row in compare(ways, options.rounds, options.batches):
                print("|", " | ".join([name, *row]), "|", flush=True)
        feed(contest, sources, options)


def feed(contest: Contest, sources: dict[str, dict[str, Way]], options: Any) -> None:
    """Prints what the step does with the batches of each source."""
    step = Step(contest.mesh)
    held = contest.put({n: leaf[: options.size] for n, leaf in contest.data.items()})
    ours = {name: list(ways.values())[-1] for name, ways in sources.items()}
    for way in ours.values():
        step.run(way(), options.batches)
    timed: list[dict[str, Fed]] = []
    for _ in range(options.rounds):
        alone = step.run(again(held), contest.num_batches)
        fed = {name: step.run(way(), options.batches) for name, way in ours.items()}
        timed.append({"one batch, held ready": alone, **fed})
    print("\n| step fed by | steps/s | ratio | waited | idle |\n|---|---|---|---|---|")
    for name in timed[0]:
        ratio = statistics.median(
            one["one batch, held ready"].seconds / one[name].seconds for one in timed
        )
        rate = statistics.median(1 / one[name].seconds for one in timed)
        waited = statistics.median(one[name].waited for one in timed)
        idle = statistics.median(one[name].idle for one in timed)
        print(f"| {name} | {rate:,.0f} | {ratio:.2f} | {waited:.1%} | {idle:.1%} |")


if __name__ == "__main__":
    main()
