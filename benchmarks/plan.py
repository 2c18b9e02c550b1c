"""How good the choices of `ml.plan` are: every candidate compiled, or measured.

`python -m benchmarks.plan` compiles every candidate of each problem for slices of TPU
v5e, which needs libtpu and no TPU, and compares: what plan chooses without a budget
with the best of all, by the time that their schedules are replayed to; estimated and
compiled memory; the rank correlation of estimated and replayed times. What compilers
said is kept in plan's cache.

`--measure` runs every candidate of smaller problems on eight virtual CPU devices. They
are no TPUs, and share their cores; what shows is the order of FLOPs and bytes.
"""

import argparse
import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshlayout as ml
from meshlayout.planning import Row
from models import gpt, mlp, resnet, transformer


ENOUGH_S = 1e6
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def tokens(rows: int, length: int) -> dict[str, Any]:
    """Returns an abstract batch of text."""
    return {"tokens": jax.ShapeDtypeStruct((rows, length), "int32")}


def images(rows: int, *shape: int) -> dict[str, Any]:
    """Returns an abstract batch of images."""
    image = jax.ShapeDtypeStruct((rows, *shape), "float32")
    return {"image": image, "label": jax.ShapeDtypeStruct((rows,), "int32")}


def classes(model: Any, batch: Any) -> jax.Array:
    """Returns the cross entropy of each image."""
    return cross_entropy(model(batch["image"]).astype("float32"), batch["label"])


def next_tokens(model: Any, batch: Any) -> jax.Array:
    """Returns the cross entropy of each token."""
    return transformer.next_token_losses(model(batch["tokens"]), batch["tokens"])


def perceptron(scale: int) -> dict[str, Any]:
    """Returns the problem of an MLP."""
    sizes: Any = {"in_features": 256 * scale, "hidden_features": 1024 * scale}
    return {
        "build": lambda: mlp.MLP(256 * scale, **sizes, rngs=nnx.Rngs(0)),
        "loss_fn": classes,
        "batch": images(256 * scale, 256 * scale),
    }


def transformers(layers: int, scale: int) -> dict[str, Any]:
    """Returns the problem of a transformer."""
    config = transformer.TransformerConfig(
        vocab_size=1024,
        max_length=64 * scale,
        features=128 * scale,
        num_layers=layers,
        mlp_features=512 * scale,
        is_scanned=True,
    )
    return {
        "build": lambda: transformer.Transformer(config, rngs=nnx.Rngs(0)),
        "loss_fn": next_tokens,
        "batch": tokens(64, 64 * scale),
        "precision": "bfloat16",
        "remat": "none",  # with all blocks recomputed, all candidates are twice as many
    }


class Parameters(nnx.Module):
    """A functional model, such as that of `models/gpt.py`, as a module."""

    def __init__(self, params: dict[str, Any], apply: Callable[..., jax.Array]) -> None:
        self.params = nnx.data(jax.tree.map(nnx.Param, params))
        self.apply = apply

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits of shape (batch, length, vocabulary)."""
        is_param = lambda node: isinstance(node, nnx.Variable)
        arrays = jax.tree.map(lambda p: p[...], self.params, is_leaf=is_param)
        return self.apply(arrays, x)


def looped(
    layer: Callable[[Any, jax.Array], jax.Array], params: Any, x: jax.Array
) -> jax.Array:
    """Applies stacked layers in a scan, whose activations keep the batch's layout."""

    def body(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
        return layer(params, ml.constrain(x, "carry")), None

    return jax.lax.scan(body, x, params)[0]


def scanned(layers: int, scale: int, vocabulary: int) -> dict[str, Any]:
    """Returns the problem of a GPT with its layers in a scan."""
    config = gpt.GPTConfig(
        vocab_size=vocabulary,
        features=128 * scale,
        head_features=16 * scale,
        num_layers=layers,
        mlp_features=512 * scale,
        is_scanned=True,
    )
    return gpts(config, tokens(64, 64 * scale))


def gpts(config: gpt.GPTConfig, batch: dict[str, Any], **options: Any) -> Any:
    """Returns the problem of a GPT; with remat, its layers are recomputed."""
    remat = jax.checkpoint if options else lambda layer: layer

    def apply(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        layer = remat(gpt.apply_layer)
        x = looped(layer, params["layers"], params["embed"][tokens])
        return gpt.rms_norm(x, params["norm"]) @ params["output"]

    init = lambda: Parameters(gpt.init(config, jax.random.key(0)), apply)
    problem = {"build": init, "loss_fn": next_tokens, "batch": batch, "remat": "none"}
    return {**problem, **options}


def seven_billion() -> dict[str, Any]:
    """Returns the problem of a GPT of 7.2 billion parameters."""
    heads: Any = {"num_heads": 32, "num_kv_heads": 8, "head_features": 128}
    sizes: Any = {"features": 4096, "mlp_features": 14336, "vocab_size": 32000}
    config = gpt.GPTConfig(num_layers=32, is_scanned=True, **heads, **sizes)
    return gpts(config, tokens(256, 2048), precision="bfloat16")


def routed(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Returns the MLP of one expert for each token, of as many as it has room for."""
    gates = jax.nn.softmax(x @ layer["router"])
    length, num_experts = gates.shape[1:]
    chosen = jax.nn.one_hot(gates.argmax(-1), num_experts)
    place = (chosen.cumsum(1) - 1) * chosen
    room = jax.nn.one_hot(place.sum(-1), 2 * length // num_experts)
    sent = chosen[..., None] * room[:, :, None]  # batch, token, expert, place
    tokens = jnp.einsum("btec,btf->ebcf", sent, x)
    hidden = jax.nn.relu(jnp.einsum("ebcf,efh->ebch", tokens, layer["up"]))
    results = jnp.einsum("ebch,ehf->ebcf", hidden, layer["down"])
    return x + jnp.einsum("btec,ebcf->btf", sent * gates[..., None], results)


def experts(layers: int, num_experts: int, scale: int) -> dict[str, Any]:
    """Returns the problem of a mixture of experts, without attention."""
    features, keys = 128 * scale, jax.random.key(0)
    shapes = {
        "router": (layers, features, num_experts),
        "up": (layers, num_experts, features, 4 * features),
        "down": (layers, num_experts, 4 * features, features),
        "embedding": (1024, features),
    }

    def build() -> Parameters:
        draw = lambda shape: 0.02 * jax.random.normal(keys, shape)
        return Parameters({name: draw(x) for name, x in shapes.items()}, apply)

    def apply(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        layers = {name: params[name] for name in ("router", "up", "down")}
        x = looped(routed, layers, params["embedding"][tokens])
        return x @ params["embedding"].T

    batch = tokens(64, 64 * scale)
    return {"build": build, "loss_fn": next_tokens, "batch": batch, "remat": "none"}


def resnet50(width: int) -> dict[str, Any]:
    """Returns the problem of ResNet-50."""
    build = lambda: resnet.ResNet50(width=width, rngs=nnx.Rngs(0))
    problem = {"build": build, "loss_fn": classes, "batch": images(512, 64, 64, 3)}
    return {**problem, "remat": "none"}


PROBLEMS: dict[str, Callable[[], dict[str, Any]]] = {
    "MLP": lambda: perceptron(16),
    "mixture of 8 experts": lambda: experts(4, 8, 8),
    "GPT, large vocabulary": lambda: scanned(4, 4, 32768),
    "transformer of 24 layers": lambda: scanned(24, 4, 1024),
    "transformer of 8 layers": lambda: transformers(8, 4),
    "ResNet-50": lambda: resnet50(64),
}


SMALL: dict[str, Callable[[], dict[str, Any]]] = {
    "MLP": lambda: perceptron(2),
    "transformer of 2 layers": lambda: {**transformers(2, 1), "precision": "float32"},
    "mixture of 8 experts": lambda: experts(2, 8, 1),
}


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns Spearman's rank correlation."""
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def estimated_s(row: Row) -> float:
    """Returns the seconds that were estimated before compiling."""
    return sum(row.estimate.seconds.values()) if row.estimate else math.nan


def compiled_line(name: str, topology: str, problem: dict[str, Any]) -> str:
    """Returns a line of the table: what plan chooses, and all candidates compiled."""
    chosen = ml.plan(**problem, topology=topology).best
    every = ml.plan(**problem, topology=topology, budget_s=ENOUGH_S).rows
    rows = [row for row in every if row.source == "compiled" and not row.error]
    best = min(row.step_s for row in rows)
    ratios = [x.estimate.peak_bytes / x.peak_bytes for x in rows if x.estimate]
    within = sum(0.9 <= ratio <= 1.1 for ratio in ratios)
    rho = correlation(*zip(*((estimated_s(x), x.step_s) for x in rows), strict=True))
    shape = ", ".join(f"{axis}={size}" for axis, size in chosen.mesh.shape.items())
    cells = [name, topology, f"{len(rows)} of {len(every)}", f"{chosen} on ({shape})"]
    cells += [f"{estimated_s(chosen) * 1e3:.3g}", f"{chosen.step_s * 1e3:.3g}"]
    cells += [f"{best * 1e3:.3g}", f"{chosen.step_s / best - 1:.1%}", f"{rho:.2f}"]
    cells += [f"{min(ratios):.2f} to {max(ratios):.2f}"]
    cells += [f"{statistics.median(ratios):.2f}", f"{within} of {len(ratios)}"]
    return f"| {' | '.join(cells)} |"


def measured_s(
    rows: Sequence[Row], problem: dict[str, Any], steps: int
) -> list[list[float]]:
    """Returns the seconds of steps that run here, one of each row in turn.

    So other programs disturb all rows alike.
    """
    random = np.random.default_rng(0)

    def array(x: Any) -> Any:
        if x.dtype == np.int32:
            return random.integers(0, 64, x.shape, "int32")
        return random.normal(size=x.shape).astype(x.dtype)

    batch = jax.tree.map(array, problem["batch"])
    given = {k: x for k, x in problem.items() if k in ("precision", "remat")}
    runs: list[list[Any]] = []
    for row in rows:
        options = {**given, "layouts": row.activations, **row.step_options}
        state = ml.TrainState.create(problem["build"], optax.adamw(3e-4), row.layouts)
        runs.append([ml.make_train_step(problem["loss_fn"], **options), state])
    taken: list[list[float]] = [[] for _ in rows]
    for _ in range(steps + 2):
        for seconds, run in zip(taken, runs, strict=True):
            start = time.perf_counter()
            run[1], metrics = run[0](run[1], batch)
            jax.block_until_ready((run[1].params, metrics))
            seconds.append(time.perf_counter() - start)
    return [seconds[2:] for seconds in taken]


def measured_line(name: str, problem: dict[str, Any], steps: int) -> str:
    """Returns a line of the table of candidates that are estimated and run."""
    rows = ml.plan(**problem, topology=ml.create_mesh(), budget_s=0).rows
    rows = [row for row in rows if not row.error]
    every = measured_s(rows, problem, steps)
    taken, *halves = (
        [min(x[i::n]) for x in every] for i, n in ((0, 1), (0, 2), (1, 2))
    )
    fastest = int(np.argmin(taken))
    cells = [name, f"{len(rows)}"]
    cells += [f"{correlation([row.step_s for row in rows], taken):.2f}"]
    cells += [f"{correlation(*halves):.2f}"]
    cells += [f"{row} {dict(row.mesh.shape)}" for row in (rows[0], rows[fastest])]
    cells += [f"{x * 1e3:.1f}" for x in (taken[0], taken[fastest], max(taken))]
    return f"| {' | '.join(cells)} |"


def large_line(cache: str | None) -> str:
    """Returns what it takes to plan a model of 7.2 billion parameters for 256 chips."""
    problem = {"optimizer": optax.adamw(3e-4), **seven_billion(), "cache": cache}
    problem |= {"topology": "v5e:16x16", "progress": False}
    times = [time.monotonic()]
    every = ml.plan(**problem, budget_s=0).rows
    times.append(time.monotonic())
    problem["candidates"] = {every[0].name: every[0].layouts}
    for budget_s in (0, 1):  # the one candidate traced, and then compiled, too
        row = ml.plan(**problem, budget_s=budget_s).rows[0]
        times.append(time.monotonic())
    estimating, tracing, all_s = np.diff(times)
    cells = [f"{len(every)}", f"{estimating:.1f}", f"{row} on {dict(row.mesh.shape)}"]
    cells += [f"{every[0].step_s * 1e3:.0f}", f"{row.step_s * 1e3:.0f}"]
    host_bytes = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    sizes = every[0].peak_bytes, row.peak_bytes, host_bytes
    cells += [f"{x / 2**30:.2f}" for x in sizes]
    return f"| {' | '.join([*cells, f'{all_s - tracing:.0f}', row.error])} |"


def main() -> None:
    """Compiles or measures, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", nargs="*")
    parser.add_argument("--topologies", nargs="*", default=["v5e:2x4", "v5e:4x4"])
    parser.add_argument("--measure", action="store_true", help="on eight CPU devices")
    parser.add_argument("--large", action="store_true", help="7.2 billion parameters")
    parser.add_argument("--steps", type=int, default=10, help="that are measured")
    parser.add_argument("--workers", type=int, help="compilations at once")
    parser.add_argument("--cache", help="of compilations; by default plan's own")
    options = parser.parse_args()
    problems, heads = PROBLEMS, ["problem", "slice", "compiled", "chosen"]
    heads += ["estimated (ms)", "its step (ms)", "best of all (ms)", "slower by"]
    heads += ["rank correlation", "memory, estimated / compiled", "median"]
    heads += ["within 10%"]
    if options.large:
        print(large_line(options.cache))
        return
    if options.measure:
        ml.virtual_devices(8)
        problems, heads = SMALL, ["problem", "candidates", "rank correlation"]
        heads += ["of half the rounds with the others"]
        heads += ["planned", "fastest", "planned (ms)", "fastest (ms)", "slowest (ms)"]
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for name in options.problems or problems:
        problem: dict[str, Any] = {"optimizer": optax.adamw(3e-4), **problems[name]()}
        if options.measure:
            print(measured_line(name, problem, options.steps), flush=True)
            continue
        problem |= {"workers": options.workers, "cache": options.cache}
        for topology in options.topologies:
            print(compiled_line(name, topology, problem), flush=True)


if __name__ == "__main__":
    main()
