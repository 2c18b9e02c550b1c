"""How good the choices of `ml.plan` are: every candidate compiled, or measured.

`python -m benchmarks.plan` compiles every candidate of each problem for slices of TPU
v5e, which needs libtpu and no TPU, and compares: the best of the candidates that plan
would compile (the first four by its estimate) with the best of all, by the time that
their schedules are replayed to; estimated and compiled memory; the rank correlation of
estimated and replayed times. What compilers said is kept in plan's cache.

`--measure` runs every candidate on eight virtual CPU devices instead. They are no TPUs,
and share their cores; what shows is the order of FLOPs and bytes.
"""

import argparse
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
from meshlayout.planning import Ranking, Row
from models import gpt, mlp, resnet, transformer


ENOUGH_S = 1e6
NUM_CHOSEN = 4  # that plan compiles without a budget
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

    def apply(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        x = looped(gpt.apply_layer, params["layers"], params["embed"][tokens])
        return gpt.rms_norm(x, params["norm"]) @ params["output"]

    init = lambda: Parameters(gpt.init(config, jax.random.key(0)), apply)
    batch = tokens(64, 64 * scale)
    return {"build": init, "loss_fn": next_tokens, "batch": batch, "remat": "none"}


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


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns Spearman's rank correlation."""
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def compiled_line(name: str, topology: str, ranking: Ranking) -> str:
    """Returns a line of the table, of a ranking in which all is compiled."""
    rows = [
        x for x in ranking.rows if x.source == "compiled" and x.estimate and x.step_s
    ]
    # What fits as it is is compiled before what recomputes.
    by_estimate = sorted(rows, key=lambda x: (bool(x.step_options), estimated_s(x)))
    best = min(row.step_s for row in rows)
    first = [row.step_s for row in by_estimate[:NUM_CHOSEN]]
    ratios = [row.estimate.peak_bytes / row.peak_bytes for row in rows if row.estimate]
    within = sum(0.9 <= ratio <= 1.1 for ratio in ratios)
    rho = correlation(*zip(*((estimated_s(x), x.step_s) for x in rows), strict=True))
    chosen = min(by_estimate[:NUM_CHOSEN], key=lambda row: row.step_s)
    cells = [
        *(
            name,
            topology,
            f"{len(rows)}",
            f"{chosen.variant} on {dict(chosen.mesh.shape)}",
        ),
        *(
            f"{min(first) * 1e3:.3f}",
            f"{best * 1e3:.3f}",
            f"{min(first) / best - 1:.1%}",
        ),
        *(
            f"{rho:.2f}",
            f"{statistics.median(ratios):.2f}",
            f"{within} of {len(ratios)}",
        ),
        f"{sum(row.compile_s for row in rows):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def estimated_s(row: Row) -> float:
    """Returns the seconds that were estimated before compiling."""
    assert row.estimate is not None
    return row.estimate.total_s


def measured_s(row: Row, problem: dict[str, Any], steps: int) -> float:
    """Returns the median seconds of a step that runs here."""
    random = np.random.default_rng(0)

    def array(x: Any) -> Any:
        shape = x.shape
        if x.dtype == np.int32:
            return random.integers(0, 64, shape, "int32")
        return random.normal(size=shape).astype(x.dtype)

    batch = jax.tree.map(array, problem["batch"])
    options = {k: x for k, x in problem.items() if k in ("precision", "remat")}
    state = ml.TrainState.create(problem["build"], optax.adamw(3e-4), row.layouts)
    step = ml.make_train_step(problem["loss_fn"], **{**options, **row.step_options})
    taken: list[float] = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state.params, metrics))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


def main() -> None:
    """Compiles or measures, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", nargs="*", default=[*PROBLEMS])
    parser.add_argument("--topologies", nargs="*", default=["v5e:2x4", "v5e:4x4"])
    parser.add_argument("--measure", action="store_true", help="on eight CPU devices")
    parser.add_argument("--steps", type=int, default=10, help="that are measured")
    options = parser.parse_args()
    if options.measure:
        ml.virtual_devices(8)
        print("| problem | candidates | rank correlation | planned | fastest |")
        print("|---" * 5 + "|")
    else:
        heads = ["problem", "slice", "candidates", "chosen", "its step (ms)"]
        heads += ["best of all (ms)", "slower by", "rank correlation"]
        heads += ["memory, estimated / compiled", "within 10%", "compiling (s)"]
        print(f"| {' | '.join(heads)} |")
        print("|---" * 11 + "|")
    for name in options.problems:
        problem = PROBLEMS[name]()
        planned: dict[str, Any] = {"optimizer": optax.adamw(3e-4), **problem}
        if options.measure:
            ranking = ml.plan(**planned, topology=ml.create_mesh(), budget_s=0)
            rows = [row for row in ranking.rows if not row.error]
            taken = [measured_s(row, problem, options.steps) for row in rows]
            rho = correlation([row.step_s for row in rows], taken)
            fastest = rows[int(np.argmin(taken))]
            cells = [name, f"{len(rows)}", f"{rho:.2f}", repr(rows[0]), repr(fastest)]
            print(f"| {' | '.join(cells)} |", flush=True)
            continue
        for topology in options.topologies:
            ranking = ml.plan(**planned, topology=topology, budget_s=ENOUGH_S)
            print(compiled_line(name, topology, ranking), flush=True)


if __name__ == "__main__":
    main()
