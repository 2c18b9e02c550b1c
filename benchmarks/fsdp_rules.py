"""What `fsdp` sends against hand-written maps, on compiled programs of eight devices.

    python -m benchmarks.fsdp_rules          # a described v5e:2x4 slice; needs libtpu
    python -m benchmarks.fsdp_rules --gpu    # eight described H100s; needs jax-cuda12

Nothing runs: the compilers need no device. A row per model, precision and rule gives MB
on the wire per step and device, the number of collectives, and KB of arguments. Rules
are the hand-written map of the model, the first dim of every array, the largest one
that divides, and `fsdp` with several values of `min_bytes`.

The default of `min_bytes` is the largest value here for which no model sends more than
with a smaller one: from there on whole arrays cost more than they save collectives.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax
from flax import nnx

import meshlayout as ml
from meshlayout.hlo import read_communication
from models import convnet, mlp, resnet, transformer
from tests.gpu import create_gpu_mesh
from tests.tpu import create_slice_mesh


SIZES = (0, 4096, 8192, 16384, 65536)
CONFIG = transformer.TransformerConfig(
    vocab_size=8192,
    max_length=128,
    features=256,
    num_heads=4,
    num_layers=4,
    mlp_features=1024,
)


def image_loss(model: Any, batch: Any) -> Any:
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]), {
        "logits": logits
    }


def token_loss(model: Any, batch: Any) -> Any:
    logits = model(batch["tokens"])
    labels = batch["tokens"][:, 1:]
    losses = transformer.next_token_losses(logits, batch["tokens"])
    return losses, {"logits": logits[:, :-1], "label": labels}


@dataclasses.dataclass(frozen=True)
class Work:
    """A model to compile, its loss, one example of its batch, and the batch's rows."""

    module: Any
    build: Callable[[], Any]
    loss_fn: Callable[..., Any]
    example: dict[str, tuple[tuple[int, ...], str]]
    rows: int = 64


def images(size: int) -> dict[str, tuple[tuple[int, ...], str]]:
    return {"image": ((size, size, 1), "float32"), "label": ((), "int32")}


WORKS = {
    "mlp": Work(
        mlp,
        lambda: mlp.MLP(in_features=1024, hidden_features=512, rngs=nnx.Rngs(0)),
        image_loss,
        images(32),
    ),
    "convnet": Work(
        convnet, lambda: convnet.ConvNet(rngs=nnx.Rngs(0)), image_loss, images(28)
    ),
    "resnet": Work(
        resnet, lambda: resnet.ResNet(rngs=nnx.Rngs(0)), image_loss, images(8)
    ),
    "transformer": Work(
        transformer,
        lambda: transformer.Transformer(CONFIG, rngs=nnx.Rngs(0)),
        token_loss,
        {"tokens": ((CONFIG.max_length,), "int32")},
        rows=32,
    ),
}


def first_dim(path: str, shape: tuple[int, ...], dtype: Any) -> Any:
    dims = [dim for dim, size in enumerate(shape) if size % 8 == 0]
    return [*[None] * dims[0], "batch", ...] if dims else None


def rules(work: Work, mesh: ml.Mesh) -> Iterator[tuple[str, ml.LayoutMap]]:
    yield "hand-written", ml.LayoutMap(mesh, work.module.FSDP)
    yield "first dim", ml.LayoutMap(mesh, default=first_dim)
    yield "largest dim", ml.LayoutMap(mesh, default=ml.zero_rule(mesh))
    for size in SIZES:
        yield f"fsdp, {size}", ml.parallel.fsdp(mesh, min_bytes=size)


def compiled_step(work: Work, layouts: ml.LayoutMap, precision: str) -> Any:
    """Returns the compiled train step of a model, with Adam and accuracy."""
    mesh = layouts.mesh
    state = ml.TrainState.describe(work.build, optax.adam(1e-3), layouts).abstract
    batch = {
        name: jax.ShapeDtypeStruct(
            (work.rows, *shape),
            dtype,
            sharding=mesh.layout("batch", *[None] * len(shape)).sharding,
        )
        for name, (shape, dtype) in work.example.items()
    }
    metrics = {"accuracy": ml.metrics.Accuracy()}
    step = ml.make_train_step(work.loss_fn, metrics=metrics, precision=precision)
    return step.lower(state, batch).compile()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="H100s, not a TPU slice")
    parser.add_argument("--models", nargs="+", choices=WORKS, default=list(WORKS))
    options = parser.parse_args()
    mesh = create_gpu_mesh({"batch": 8}) if options.gpu else create_slice_mesh(batch=8)
    for name in options.models:
        for precision in ("float32", "bfloat16"):
            for rule, layouts in rules(WORKS[name], mesh):
                compiled = compiled_step(WORKS[name], layouts, precision)
                sent = read_communication(compiled, mesh)
                memory = compiled.memory_analysis()
                print(
                    f"{name:12} {precision:9} {rule:14} "
                    f"{sent.wire_bytes / 1e6:8.3f} MB {len(sent.collectives):4} "
                    f"{memory.argument_size_in_bytes // 1000:7} KB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
