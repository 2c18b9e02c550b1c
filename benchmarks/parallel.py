"""What ready-made rules send, and how long their steps take, next to maps by hand.

`python -m benchmarks.parallel` prints, for each model and way of sharding, megabytes on
the wire per device and step: of the program for eight CPU devices, for a slice of eight
TPU v5e chips (where libtpu is installed) and for eight H100s (where JAX's CUDA plugin
is). With `--rounds` it then runs the CPU programs, in turn, and prints medians of the
seconds, and of the ratios to the first one within a round.

Besides the maps at the foot of the models, FSDP is compared with two that anyone would
write first: the first dim of every matrix, and the largest dim that divides.

`--models context` is one sequence of 32,768 tokens on v5e:2x4, by how it is split: what
a chip sends, the peak of its memory, and a step by the schedule of its program.
"""

import argparse
import dataclasses
import functools
import importlib.util
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


# Read when the compiler for TPUs is loaded, which otherwise asks a metadata server.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.update(
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-8",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_WORKER_ID="0",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)

import jax
import numpy as np
import optax
from flax import __version__ as flax_version, nnx

import meshlayout as ml
from meshlayout import parallel
from meshlayout.planning import CHIPS, replay
from models import convnet, mlp, resnet, transformer
from tests.gpu import create_gpu_mesh
from tests.tpu import create_slice_mesh


CONFIG = transformer.TransformerConfig(
    vocab_size=8192, max_length=128, features=256, num_layers=4, mlp_features=1024
)
MESHES = {
    "fsdp": {"batch": 8},
    "tensor": {"batch": 2, "model": 4},
    "fsdp+tensor": {"batch": 4, "model": 2},
}
STEPS = 4  # in a timed window
LONG = dataclasses.replace(
    CONFIG, max_length=32768, features=1024, num_heads=8, mlp_features=4096
)
# For the long sequence: a mesh axis over all chips, and what attends.
WAYS = {
    "fsdp alone": ("batch", transformer.causal_attention),
    "tensor": ("model", transformer.causal_attention),
    "ring": ("seq", parallel.ring_attention),
    "all-to-all": ("seq", parallel.all_to_all_attention),
}


@dataclass(frozen=True)
class Work:
    """A model, its layouts by hand, and its batches."""

    build: Callable[[], nnx.Module]
    by_hand: Mapping[str, Any]
    loss_fn: Callable[[Any, Any], Any]
    batch: dict[str, np.ndarray]

    def layouts(self, kind: str, mesh: ml.Mesh) -> dict[str, ml.LayoutMap]:
        """Returns the maps to compare, the ready-made one first."""
        inputs = next(iter(self.batch.values()))
        fsdp = ml.parallel.fsdp(mesh) if "fsdp" in kind else None
        tensor = None
        if "tensor" in kind:
            tensor = ml.parallel.tensor_parallel(mesh, self.build, inputs)
        if fsdp is not None and tensor is not None:
            maps = {"ready-made": ml.parallel.compose(tensor, fsdp)}
        else:
            maps = {"ready-made": fsdp if tensor is None else tensor}
        if kind in self.by_hand:
            maps["by hand"] = ml.LayoutMap(mesh, self.by_hand[kind])
        if kind == "fsdp":
            first = ("batch", ...)
            rules = {r"kernel|embedding": ml.Rule(first, on_uneven="replicate")}
            maps["first dim"] = ml.LayoutMap(mesh, rules)
            rule = ml.zero_rule(mesh, min_size=2**11)
            maps["largest dim"] = ml.LayoutMap(mesh, default=rule)
        return maps

    def step(self) -> Any:
        """Returns a train step that measures accuracy, too."""
        metrics = {"accuracy": ml.metrics.Accuracy()}
        return ml.make_train_step(self.loss_fn, metrics=metrics)

    def describe(self, layouts: ml.LayoutMap) -> Any:
        """Describes the state for some layouts."""
        return ml.TrainState.describe(self.build, optax.adam(1e-3), layouts)

    def sent(self, layouts: ml.LayoutMap) -> int:
        """Returns the bytes that each device sends in one step."""
        rows = layouts.mesh.layout("batch", ...)
        batch = {
            name: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=rows.with_rank(x.ndim).sharding
            )
            for name, x in self.batch.items()
        }
        state = self.describe(layouts).abstract
        return self.step().communication(state, batch).wire_bytes


def classify(model: Any, batch: Any) -> Any:
    """Returns cross entropies and logits."""
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"logits": logits}


def predict_next(model: Any, batch: Any) -> Any:
    """Returns cross entropies of the next tokens, and logits."""
    logits = model(batch["tokens"])
    outputs = {"logits": logits[:, :-1], "label": batch["tokens"][:, 1:]}
    return transformer.next_token_losses(logits, batch["tokens"]), outputs


def images(size: int) -> dict[str, np.ndarray]:
    """Returns a batch of images and labels."""
    random = np.random.default_rng(0)
    return {
        "image": random.normal(size=(128, size, size, 1)).astype("float32"),
        "label": random.integers(0, 10, 128).astype("int32"),
    }


def by_hand(module: Any) -> dict[str, Any]:
    """Returns the layouts at the foot of a model, by the kind of sharding."""
    names = {"fsdp": "FSDP", "tensor": "MODEL_PARALLEL"}
    names["fsdp+tensor"] = "FSDP_MODEL_PARALLEL"
    return {k: getattr(module, v) for k, v in names.items() if hasattr(module, v)}


WORKS = {
    "mlp": Work(lambda: mlp.MLP(rngs=nnx.Rngs(0)), by_hand(mlp), classify, images(28)),
    "convnet": Work(
        lambda: convnet.ConvNet(rngs=nnx.Rngs(0)),
        by_hand(convnet),
        classify,
        images(28),
    ),
    "resnet": Work(
        lambda: resnet.ResNet(rngs=nnx.Rngs(0)), by_hand(resnet), classify, images(32)
    ),
    "transformer": Work(
        lambda: transformer.Transformer(CONFIG, rngs=nnx.Rngs(0)),
        by_hand(transformer),
        predict_next,
        {"tokens": np.random.default_rng(0).integers(0, 8192, (32, 128), "int32")},
    ),
}


def targets() -> dict[str, Callable[[dict[str, int]], ml.Mesh]]:
    """Returns what there is a compiler for, by name."""
    found: dict[str, Callable[[dict[str, int]], ml.Mesh]] = {"CPU": ml.create_mesh}
    if importlib.util.find_spec("libtpu"):
        found["v5e:2x4"] = lambda axes: create_slice_mesh(**axes)
    if importlib.util.find_spec("jax_cuda12_plugin"):
        found["8 H100"] = create_gpu_mesh
    return found


def windows(work: Work, kind: str) -> dict[str, Callable[[], float]]:
    """Returns for each map a function that runs some steps: seconds per step."""

    def window(layouts: ml.LayoutMap) -> Callable[[], float]:
        step, states = work.step(), [work.describe(layouts).create()]
        batch = ml.relayout(work.batch, layouts.mesh.layout("batch", ...))

        def run() -> float:
            start = time.perf_counter()
            for _ in range(STEPS):
                states[0], metrics = step(states[0], batch)
            jax.block_until_ready((states[0].params, metrics["loss"]))
            return (time.perf_counter() - start) / STEPS

        run()
        return run

    maps = work.layouts(kind, ml.create_mesh(MESHES[kind]))
    return {name: window(layouts) for name, layouts in maps.items()}


def context(way: str) -> list[str]:
    """Returns megabytes sent, the peak in GiB, and milliseconds of a long step."""
    axis, attention = WAYS[way]
    if axis == "seq":
        attention = functools.partial(attention, axis=axis, causal=True)
    mesh = create_slice_mesh(**{axis: 8})
    config = dataclasses.replace(LONG, attention=attention)
    build = lambda: transformer.Transformer(config, rngs=nnx.Rngs(0))
    tokens = jax.ShapeDtypeStruct((1, config.max_length), "int32")
    layouts = ml.LayoutMap(mesh, {"kernel|embedding": (axis, None)})
    if axis == "model":
        layouts = parallel.tensor_parallel(mesh, build, tokens)
    activations = {"residual": (None, "seq", None)} if axis == "seq" else {}
    step = ml.make_train_step(
        lambda model, batch: predict_next(model, batch)[0].mean(axis=1),
        layouts=ml.LayoutMap(mesh, activations),
        precision="bfloat16",
        remat="blocks",
    )
    state = ml.TrainState.describe(build, optax.adam(1e-3), layouts).abstract
    # One sequence has no rows to share: fsdp alone computes it on every chip.
    rows = mesh.layout(None, axis if axis == "seq" else None).sharding
    try:
        program = step.compile_for(
            mesh, state, {"tokens": tokens.update(sharding=rows)}
        )
    except ml.errors.StepError as error:
        return ["", str(error), ""]
    ms = 1000 * replay(program.compiled.as_text(), CHIPS["v5e"]).total_s
    sent, peak = program.communication.wire_bytes, program.memory.peak_bytes
    return [f"{sent / 1e6:.1f}", f"{peak / 2**30:.2f}", f"{ms:.1f}"]


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*WORKS, *["context"] * bool(importlib.util.find_spec("libtpu"))]
    parser.add_argument("--models", nargs="*", choices=names, default=names)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=0, help="timed windows of each")
    options = parser.parse_args()
    ml.virtual_devices(8)
    places = targets()
    print(
        f"jax {jax.__version__}, flax {flax_version}, Python "
        f"{platform.python_version()}; megabytes sent by each device in one step"
    )
    for name in options.models:
        if name == "context":
            print("\n| context | MB sent | peak GiB | ms |\n|---|---|---|---|")
            for way in options.ways:
                print(f"| {' | '.join([way, *context(way)])} |", flush=True)
            continue
        work = WORKS[name]
        columns = [name, "layouts", *places, *["ms", "ratio"] * bool(options.rounds)]
        print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
        for kind, axes in MESHES.items():
            sent: dict[str, list[str]] = {}
            for create in places.values():
                for title, layouts in work.layouts(kind, create(axes)).items():
                    megabytes = work.sent(layouts) / 1e6
                    sent.setdefault(title, []).append(f"{megabytes:.3f}")
            if options.rounds:
                runs = windows(work, kind)
                rounds = [
                    {title: run() for title, run in runs.items()}
                    for _ in range(options.rounds)
                ]
                for title in runs:
                    ms = statistics.median(1000 * taken[title] for taken in rounds)
                    ratio = statistics.median(
                        taken[title] / taken["ready-made"] for taken in rounds
                    )
                    sent[title] += [f"{ms:.1f}", f"{ratio:.2f}"]
            for title, row in sent.items():
                print(f"| {' | '.join([kind, title, *row])} |", flush=True)


if __name__ == "__main__":
    main()
