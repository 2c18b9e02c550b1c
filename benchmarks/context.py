"""What a step on one long sequence costs on eight TPU v5e chips, by how it is split.

`python -m benchmarks.context` compiles a train step of a transformer on one sequence of
32,768 tokens for a v5e:2x4 slice, which need not be there. It prints for each way the
megabytes that a chip sends, the peak of its memory, and the milliseconds of a step by
the schedule of its program (`meshlayout.planning.replay`). Of a program that does not
fit, it prints what the compiler says it needs.
"""

import argparse
import dataclasses
import functools
import os
import re
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
import optax
from flax import nnx

import meshlayout as ml
from meshlayout import parallel
from meshlayout.planning import CHIPS, replay
from models import transformer
from tests.tpu import create_slice_mesh


CONFIG = transformer.TransformerConfig(
    vocab_size=8192,
    max_length=32768,
    features=1024,
    num_heads=8,
    num_layers=4,
    mlp_features=4096,
)
# Mesh axis over all chips, and what attends.
WAYS = {
    "fsdp alone": ("batch", transformer.causal_attention),
    "tensor": ("model", transformer.causal_attention),
    "ring": ("seq", parallel.ring_attention),
    "all-to-all": ("seq", parallel.all_to_all_attention),
}


def lower(name: str, length: int, num_layers: int) -> Any:
    """Lowers the train step of one way for the slice."""
    axis, attention = WAYS[name]
    if axis == "seq":
        attention = functools.partial(attention, axis=axis, causal=True)
    sizes = {"max_length": length, "num_layers": num_layers}
    config = dataclasses.replace(CONFIG, attention=attention, **sizes)
    mesh = create_slice_mesh(**{axis: 8})
    build = lambda: transformer.Transformer(config, rngs=nnx.Rngs(0))
    tokens = jax.ShapeDtypeStruct((1, length), "int32")
    rule = ml.LayoutMap(mesh, {"kernel|embedding": (axis, None)})
    activations = {"residual": (None, "seq", None)} if axis == "seq" else {}
    layouts = parallel.tensor_parallel(mesh, build, tokens) if axis == "model" else rule
    state = ml.TrainState.describe(build, optax.adam(1e-3), layouts).abstract
    # One sequence has no rows to share: fsdp alone computes it on every chip.
    batch = mesh.layout(None, axis if axis == "seq" else None)
    step = ml.make_train_step(
        lambda model, batch: transformer.next_token_losses(
            model(batch["tokens"]), batch["tokens"]
        ).mean(axis=1),
        layouts=ml.LayoutMap(mesh, activations),
        precision="bfloat16",
        remat="blocks",
    )
    return step.lower(state, {"tokens": tokens.update(sharding=batch.sharding)})


def figures(name: str, length: int, num_layers: int) -> list[str]:
    """Returns megabytes sent, the peak in GB, and milliseconds of a step."""
    try:
        compiled = lower(name, length, num_layers).compile()
    except jax.errors.JaxRuntimeError as error:
        needs = re.search(r"Used ([\d.]+[GM]) of", str(error))
        if needs is None:
            raise
        return ["", f"does not fit, needs {needs[1]}B", ""]
    memory = compiled.memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
    sent = ml.hlo.read_communication(compiled).wire_bytes
    ms = 1000 * replay(compiled.as_text(), CHIPS["v5e"]).total_s
    return [f"{sent / 1e6:.1f}", f"{peak / 2**30:.2f}", f"{ms:.1f}"]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=CONFIG.max_length)
    parser.add_argument("--layers", type=int, default=CONFIG.num_layers)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    ml.virtual_devices(8)
    print("| way | MB sent | peak GiB | ms |\n|---|---|---|---|")
    for name in options.ways:
        row = figures(name, options.length, options.layers)
        print(f"| {' | '.join([name, *row])} |", flush=True)


if __name__ == "__main__":
    main()
