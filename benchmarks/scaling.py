"""Weak scaling of ResNet-50: as many images per device on eight devices as on one.

Where there are GPUs or TPUs, `python -m benchmarks.scaling` trains on 1, 2, 4 ... of
them and counts images per second. With JAX_PLATFORMS=cpu it compiles the steps for
slices of TPU v5e (libtpu does that without a TPU), and works out the efficiency from
the programs, whose schedules are replayed (meshlayout.planning.replay):

    T = cycles / clock + waiting for collectives
    a collective takes bytes sent / bandwidth + 2 (n - 1) hops * latency
    efficiency of n chips = T of one chip / T of n chips

Two bounds stand beside: if no collective overlapped computation, and if all did.

There are two ways: the library's own step, in which batch normalization takes the mean
over the global batch, and `MirroredStrategy().run`, in which each replica normalizes
its own images, as in TensorFlow. On TPUs there is also the step with the compiler's
options for asynchronous all-reduces.
"""

import argparse
import contextlib
import os
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


# Read when the compiler for TPUs is loaded, which otherwise asks a metadata server.
if os.environ.get("JAX_PLATFORMS") == "cpu":
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v5litepod-8",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # compiling takes long: others may meanwhile
    )

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import __version__ as flax_version, nnx
from jax.experimental import topologies  # noqa: TID251

import meshlayout as ml
from meshlayout.planning import CHIPS, Replay, replay
from models.resnet import ResNet50


# What TensorFlow's MirroredStrategy did in the talk "tf.data and tf.distribute" (2019):
# ResNet-50 in Keras on Google Cloud, images per second by the number of GPUs.
TALK = {1: 1_250, 8: 10_000}

# Without the first, libtpu adds up all gradients in one all-reduce at the end. With the
# others it hides all-reduces behind matrix products; behind convolutions it did not.
OVERLAP = {
    "xla_jf_crs_combiner_threshold_in_bytes": str(4 * 2**20),
    "xla_enable_async_all_reduce": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
}
SLICES = {1: "v5e:1x1", 4: "v5e:2x2", 8: "v5e:2x4"}


@dataclass(frozen=True)
class Work:
    """What is trained, and on how many images per device."""

    width: int = 64
    depths: tuple[int, ...] = (3, 4, 6, 3)
    size: int = 224
    rows: int = 128

    def build(self) -> ResNet50:
        """Returns the model; it computes in bfloat16."""
        model = ResNet50(width=self.width, depths=self.depths, rngs=nnx.Rngs(0))
        for _, module in nnx.iter_modules(model):
            if isinstance(module, nnx.Conv | nnx.BatchNorm | nnx.Linear):
                module.dtype = jnp.bfloat16
        return model

    def batch(self, mesh: ml.Mesh) -> dict[str, Any]:
        """Returns abstract images and labels for all devices of a mesh."""
        layout, rows = mesh.layout("batch", ...), self.rows * mesh.size

        def abstract(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
            sharding = layout.with_rank(len(shape)).sharding
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        return {
            "image": abstract((rows, self.size, self.size, 3), "bfloat16"),
            "label": abstract((rows,), "int32"),
        }


def optimizer() -> optax.GradientTransformation:
    """Returns what the talk trains with."""
    return optax.sgd(0.1, momentum=0.9, nesterov=True)


def losses_of(model: Any, batch: Any) -> jax.Array:
    """Returns the cross entropy of each image."""
    logits = model(batch["image"]).astype("float32")
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def replica_step(model: Any, updates: nnx.Optimizer[Any], batch: Any) -> jax.Array:
    """Trains on one replica's images, as one writes it for `Strategy.run`."""

    def loss_of(model: Any) -> jax.Array:
        return ml.losses.compute_average_loss(losses_of(model, batch))

    loss, grads = nnx.value_and_grad(loss_of)(model)
    updates.update(model, grads)
    return loss


# Where devices are real.


def measured(
    work: Work, devices: list[Any], steps: int, rounds: int
) -> dict[str, float]:
    """Returns images per second by way, on some devices."""
    mesh = ml.create_mesh({"batch": len(devices)}, devices=devices)
    random = np.random.default_rng(0)
    image, label = work.batch(mesh).values()
    batch = {
        "image": random.normal(size=image.shape).astype("float32").astype(image.dtype),
        "label": random.integers(0, 1000, label.shape, "int32"),
    }
    layouts = ml.parallel.data_parallel(mesh)
    state = ml.TrainState.create(work.build, optimizer(), layouts)
    step = ml.make_train_step(losses_of)
    rows = ml.relayout(batch, mesh.layout("batch", ...))
    strategy = ml.distribute.MirroredStrategy(devices)
    with strategy.scope():
        model = work.build()
        updates = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)
    values = jax.tree.map(
        lambda x: ml.distribute.PerReplica(x, num_replicas=mesh.size), rows
    )
    args = (model, updates, rows if mesh.size == 1 else values)

    def plain() -> None:
        nonlocal state
        for _ in range(steps):
            state, _ = step(state, rows)
        jax.block_until_ready(state.params)

    def mirrored() -> None:
        for _ in range(steps):
            strategy.run(replica_step, args)
        jax.block_until_ready(nnx.state(model))

    taken: dict[str, list[float]] = {"make_train_step": [], "MirroredStrategy": []}
    for window in range(1 + rounds):  # the first one compiles
        for name, run in zip(taken, (plain, mirrored), strict=True):
            start = time.perf_counter()
            run()
            if window:
                taken[name].append(time.perf_counter() - start)
    images = steps * work.rows * len(devices)
    return {name: images / statistics.median(times) for name, times in taken.items()}


def measure(work: Work, steps: int, rounds: int) -> None:
    """Measures and prints a table."""
    devices = jax.local_devices()
    counts = [n for n in (1, 2, 4, 8) if n <= len(devices)]
    print(f"{devices[0].device_kind}, {work.rows} images of a step on each\n")
    print("| devices | way | images/s | efficiency | talk |\n|---|---|---|---|---|")
    first: dict[str, float] = {}
    for count in counts:
        for name, rate in measured(work, devices[:count], steps, rounds).items():
            share = rate / count / first.setdefault(name, rate)
            talk = f"{TALK[count]:,}" if count in TALK else ""
            print(f"| {count} | {name} | {rate:,.0f} | {share:.1%} | {talk} |")


# Programs for slices that are not here.


def lowered(work: Work, way: str, mesh: ml.Mesh) -> Any:
    """Returns a way's step for a mesh, lowered, but not compiled."""
    batch = work.batch(mesh)
    layouts = ml.parallel.data_parallel(mesh)
    if way == "make_train_step":
        state = ml.TrainState.describe(work.build, optimizer(), layouts).abstract
        return ml.make_train_step(losses_of).lower(state, batch)

    def build() -> tuple[Any, Any]:
        model = work.build()
        return model, nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    objects = nnx.eval_shape(build)
    values = {
        name: ml.distribute.PerReplica(x, num_replicas=mesh.size)
        for name, x in batch.items()
    }
    # What `run` of these would compile; it has no public name, `communication` aside.
    strategy = ml.distribute.Strategy(mesh)
    step, inputs = strategy._compiled_for(replica_step, (*objects, values))
    return step.lower(*inputs)


def program_text(work: Work, way: str, chips: int, folder: Path | None) -> str:
    """Returns a compiled program's text, from the folder if it is there.

    Args:
        work: What is trained.
        way: One of `ways`.
        chips: The size of the slice.
        folder: Where texts are kept, because compiling one takes minutes.
    """
    kept = folder and folder / f"{way.replace(', ', '-')}-{chips}.hlo"
    if kept and kept.exists():
        return kept.read_text()
    name = SLICES[chips]
    one = {"chips_per_host_bounds": (1, 1, 1)} if chips == 1 else {}
    described = topologies.get_topology_desc(platform="tpu", topology_name=name, **one)
    mesh = ml.create_mesh({"batch": chips}, devices=described.devices)
    way, _, options = way.partition(", ")
    compiled = lowered(work, way, mesh).compile(OVERLAP if options else None)
    text = compiled.as_text()
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(text)
    return text


def ways(chips: int) -> list[str]:
    """Returns what is compiled for a slice."""
    plain = ["make_train_step", "MirroredStrategy"]
    return plain + ["make_train_step, asynchronous"] * (chips == max(SLICES))


def read(work: Work, folder: Path | None) -> None:
    """Compiles, and prints tables of what the programs say."""
    print(f"TPU v5e slices, {work.rows} images of a step on each chip\n")
    print(
        "| chips | way | collectives | overlapped | sent (MB) | compute (ms) | "
        "collectives (ms) | step (ms) | images/s | efficiency | none overlapped | all |"
    )
    print("|---" * 12 + "|")
    first: dict[str, Replay] = {}
    for chips in SLICES:
        for way in ways(chips):
            text = program_text(work, way, chips, folder)
            step = replay(text, CHIPS["v5e"])
            communication = ml.hlo.read_communication(text)
            if abs(communication.wire_bytes - step.wire_bytes) > 1e3:
                raise SystemExit(
                    f"{way} sends {communication.wire_bytes} bytes by its report, and "
                    f"{step.wire_bytes:.0f} by its schedule"
                )
            one = first.setdefault(way.partition(",")[0], step).total_s
            cells = [
                f"{chips}",
                way,
                f"{step.num_async + step.num_sync}",
                f"{step.num_async}",
                f"{step.wire_bytes / 1e6:.1f}",
                f"{step.compute_s * 1e3:.2f}",
                f"{step.alone_s * 1e3:.2f}",
                f"{step.total_s * 1e3:.2f}",
                f"{chips * work.rows / step.total_s:,.0f}",
                f"{one / step.total_s:.1%}",
                f"{one / (step.compute_s + step.alone_s):.1%}",
                f"{one / max(step.compute_s, step.alone_s):.1%}",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
    print(
        f"\nThe talk: roughly {TALK[1]:,} images/s on one GPU, close to {TALK[8]:,} on "
        f"eight: {TALK[8] / TALK[1] / 8:.0%} efficiency at most"
    )


def main() -> None:
    """Measures, or reads programs, and prints tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=128, help="images per device")
    parser.add_argument(
        "--small", action="store_true", help="a toy, to try this script"
    )
    parser.add_argument("--measure", action="store_true", help="measure also on CPUs")
    parser.add_argument("--steps", type=int, default=20, help="steps in a timed window")
    parser.add_argument("--rounds", type=int, default=5, help="timed windows")
    parser.add_argument(
        "--programs", type=Path, metavar="DIR", help="keep the programs' texts here"
    )
    options = parser.parse_args()
    work = Work(rows=options.rows)
    if options.small:
        work = Work(width=8, depths=(1, 1), size=32, rows=options.rows)
    print(
        f"jax {jax.__version__}, flax {flax_version}, Python "
        f"{platform.python_version()}"
    )
    if options.measure:
        with contextlib.suppress(ml.MeshLayoutError):
            ml.virtual_devices(8)
    if options.measure or jax.default_backend() != "cpu":
        measure(work, options.steps, options.rounds)
    else:
        read(work, options.programs)


if __name__ == "__main__":
    main()
