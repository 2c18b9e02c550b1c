"""Whole training steps from host batches: ours beside hand-written JAX and the peers.

`python benchmarks/step.py --model mlp --devices 8` prints steps per second and ratios
to a hand-written `jax.jit` with NamedShardings, on the same batches; with `--placed`,
of calls alone, with batches that lie on the devices; and the compiled programs' figures
beside each other. Every way measures loss and accuracy. All ways are run in turn,
window by window, in one process; the figures are medians over the windows, and ratios
are medians of the ratios within a round. scalax and Keras take part where they are
installed (`pip install scalax keras`).
"""

import argparse
import importlib
import importlib.util
import os
import platform
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import __version__ as flax_version, nnx
from jax.sharding import NamedSharding, PartitionSpec

import meshlayout as ml
from models.convnet import ConvNet
from models.mlp import MLP
from models.transformer import Transformer, TransformerConfig, next_token_losses


# A hand-written loop on several virtual CPU devices has to wait now and then: more
# steps in flight than this can dead-lock XLA's thread pool.
IN_FLIGHT = 8
PER_CALL = 8

Batch = dict[str, np.ndarray]
Window = Callable[[], None]


@dataclass(frozen=True)
class Work:
    """A model, its loss and its batches."""

    build: Callable[[], nnx.Module]
    loss_fn: Callable[[Any, Any], Any]
    make_batch: Callable[[np.random.Generator], Batch]
    steps: int


def classify(model: Any, batch: Any) -> Any:
    """Returns cross entropies and logits."""
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses, {"logits": logits}


def predict_next(model: Any, batch: Any) -> Any:
    """Returns cross entropies of the next tokens, and logits."""
    logits = model(batch["tokens"])
    outputs = {"logits": logits[:, :-1], "label": batch["tokens"][:, 1:]}
    return next_token_losses(logits, batch["tokens"]), outputs


def images(size: int) -> Callable[[np.random.Generator], Batch]:
    """Returns a maker of batches of images."""

    def make(rng: np.random.Generator) -> Batch:
        return {
            "image": rng.random((size, 28, 28, 1), "float32"),
            "label": rng.integers(0, 10, size, "int32"),
        }

    return make


def tokens(rng: np.random.Generator) -> Batch:
    """Returns a batch of token sequences."""
    return {"tokens": rng.integers(0, 256, (32, 64), "int32")}


WORKS = {
    "mlp": Work(lambda: MLP(rngs=nnx.Rngs(0)), classify, images(128), 240),
    "convnet": Work(lambda: ConvNet(rngs=nnx.Rngs(0)), classify, images(128), 8),
    "transformer": Work(
        lambda: Transformer(TransformerConfig(), rngs=nnx.Rngs(0)),
        predict_next,
        tokens,
        8,
    ),
}


def accuracy_sums(outputs: Any, batch: Any) -> Any:
    """Returns how many predictions are right, and how many there are."""
    labels = outputs.get("label", batch.get("label"))
    right = outputs["logits"].argmax(-1) == labels
    return right.sum().astype("float32"), jnp.float32(labels.size)


class Contest:
    """The ways to run one work on some devices."""

    def __init__(self, work: Work, num_devices: int, *, placed: bool) -> None:
        self.work, self.is_placed = work, placed
        self.mesh = ml.create_mesh({"batch": num_devices})
        self.layouts = ml.LayoutMap(self.mesh, {}, unused="ignore")
        rng = np.random.default_rng(0)
        self.batches = [work.make_batch(rng) for _ in range(work.steps)]
        self.rows = self.mesh.layout("batch", ...)
        if placed:
            self.batches = [ml.relayout(batch, self.rows) for batch in self.batches]
        self.is_bounded = num_devices > 1

    def state(self) -> ml.TrainState:
        """Returns a fresh state."""
        return ml.TrainState.create(self.work.build, optax.adam(1e-3), self.layouts)

    def placed(self) -> Iterator[Any]:
        """Yields the batches on the mesh."""
        for batch in self.batches:
            yield batch if self.is_placed else ml.relayout(batch, self.rows)

    def ways(self) -> dict[str, Window]:
        """Returns every way's window of steps."""
        found = {
            "hand-written jax.jit": self.by_hand(),
            "make_train_step": self.ours(),
            f"make_train_step, steps_per_call={PER_CALL}": self.ours(
                steps_per_call=PER_CALL
            ),
        }
        if self.mesh.size > 1:
            found["make_train_step, zero=1"] = self.ours(zero=1)
        found["Trainer.fit"] = self.trainer()
        found[f"Trainer.fit, steps_per_call={PER_CALL}"] = self.trainer(
            steps_per_call=PER_CALL
        )
        found["nnx.jit"] = self.nnx_jit()
        if importlib.util.find_spec("scalax"):
            found["scalax sjit"] = self.scalax()
        has_keras = importlib.util.find_spec("keras") and not self.is_placed
        if has_keras and self.work.loss_fn is classify:
            found["Keras 3 fit"] = self.keras()
        return found

    def programs(self) -> dict[str, Any]:
        """Returns the compiled program of the hand-written step, and ours."""
        jitted, state, sums, rows = self.jitted()
        batch = ml.relayout(self.batches[0], self.rows)
        step = ml.make_train_step(
            self.work.loss_fn, metrics={"accuracy": self.accuracy()}
        )
        return {
            "hand-written jax.jit": jitted.lower(
                state, jax.device_put(batch, rows), sums
            ).compile(),
            "make_train_step": step.lower(self.state(), batch).compile(),
        }

    def by_hand(self) -> Window:
        """Plain JAX, Flax and Optax."""
        jitted, state, sums, rows = self.jitted()

        def place(batch: Any) -> Any:
            return batch if self.is_placed else jax.device_put(batch, rows)

        return self.loop(jitted, state, sums, place)

    def jitted(self) -> tuple[Any, Any, Any, NamedSharding]:
        """Returns the hand-written step, its state and sums, and where batches go."""
        mesh = jax.make_mesh(
            (self.mesh.size,),
            ("batch",),
            axis_types=(jax.sharding.AxisType.Auto,),
        )
        whole = NamedSharding(mesh, PartitionSpec())
        rows = NamedSharding(mesh, PartitionSpec("batch"))
        state, step = self.plain()
        jitted = jax.jit(
            step,
            donate_argnums=(0,),
            in_shardings=(whole, rows, whole),
            out_shardings=(whole, whole),
        )
        sums = jax.device_put((jnp.float32(0),) * 3, whole)
        return jitted, jax.device_put(state, whole), sums, rows

    def plain(self) -> tuple[Any, Callable[..., Any]]:
        """Returns a state and a step in JAX, Flax and Optax, without a sharding."""
        graphdef, params, rest = nnx.split(self.work.build(), nnx.Param, ...)
        params, rest = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)
        tx = optax.adam(1e-3)

        def step(state: Any, batch: Any, sums: Any) -> Any:
            params, opt_state = state

            def mean_loss(params: Any) -> Any:
                model = nnx.merge(graphdef, params, rest)
                losses, outputs = self.work.loss_fn(model, batch)
                return losses.mean(), accuracy_sums(outputs, batch)

            (loss, (right, count)), grads = jax.value_and_grad(mean_loss, has_aux=True)(
                params
            )
            updates, opt_state = tx.update(grads, opt_state, params)
            state = optax.apply_updates(params, updates), opt_state
            return state, (sums[0] + loss, sums[1] + right, sums[2] + count)

        return (params, tx.init(params)), step

    def loop(
        self,
        step: Callable[..., Any],
        state: Any,
        sums: Any,
        place: Callable[[Batch], Any],
    ) -> Window:
        """Returns a window of a step that adds to sums."""
        held = [state]

        def window() -> None:
            state, total = held[0], sums
            for at, batch in enumerate(self.batches):
                state, total = step(state, place(batch), total)
                if self.is_bounded and at % IN_FLIGHT == IN_FLIGHT - 1:
                    jax.block_until_ready(total)
            held[0] = jax.block_until_ready(state)

        return window

    def ours(self, **options: Any) -> Window:
        """A loop over `make_train_step`."""
        step = ml.make_train_step(
            self.work.loss_fn,
            metrics={"accuracy": self.accuracy()},
            **options,
        )
        held = [self.state()]
        per_call = options.get("steps_per_call", 1)

        def window() -> None:
            state, metrics, waiting = held[0], None, []
            for batch in self.placed():
                if per_call == 1:
                    state, metrics = step(state, batch, metrics)
                    continue
                waiting.append(batch)
                if len(waiting) == per_call:
                    state, metrics = step(state, waiting, metrics)
                    waiting = []
            held[0] = jax.block_until_ready(state)

        return window

    def accuracy(self) -> ml.metrics.Accuracy:
        """Returns the metric that every way measures."""
        return ml.metrics.Accuracy()

    def trainer(self, **options: Any) -> Window:
        """`Trainer.fit`, an epoch a window, with its summary of the epoch."""
        trainer = ml.Trainer(
            self.state(),
            self.work.loss_fn,
            metrics={"accuracy": self.accuracy()},
            **options,
        )

        def window() -> None:
            trainer.fit(self.batches, epochs=1, progress=False)
            jax.block_until_ready(trainer.state)

        return window

    def nnx_jit(self) -> Window:
        """Flax's own way, the module and the optimizer as arguments."""
        model = ml.create(self.work.build, self.layouts)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any, batch: Any) -> Any:
            def mean_loss(model: Any) -> Any:
                losses, outputs = self.work.loss_fn(model, batch)
                return losses.mean(), accuracy_sums(outputs, batch)

            (loss, sums), grads = nnx.value_and_grad(mean_loss, has_aux=True)(model)
            optimizer.update(model, grads)
            return loss, sums

        def window() -> None:
            for at, batch in enumerate(self.placed()):
                loss, _ = step(model, optimizer, batch)
                if self.is_bounded and at % IN_FLIGHT == IN_FLIGHT - 1:
                    jax.block_until_ready(loss)
            jax.block_until_ready(nnx.state(model))

        return window

    def scalax(self) -> Window:
        """Scalax's `sjit`, a state of arrays and its sharding rules."""
        scalax = importlib.import_module("scalax.sharding")
        mesh = scalax.MeshShardingHelper([self.mesh.size], ["batch"])
        state, step = self.plain()
        whole = scalax.PartitionSpec()
        jitted = mesh.sjit(
            step,
            in_shardings=(whole, scalax.PartitionSpec("batch"), whole),
            out_shardings=whole,
            donate_argnums=(0,),
        )
        return self.loop(jitted, state, (jnp.float32(0),) * 3, lambda batch: batch)

    def keras(self) -> Window:
        """Keras 3 on JAX, `fit` with its data parallelism."""
        os.environ["KERAS_BACKEND"] = "jax"
        keras = importlib.import_module("keras")
        if self.mesh.size > 1:
            parallel = keras.distribution.DataParallel(
                devices=keras.distribution.list_devices()
            )
            keras.distribution.set_distribution(parallel)
        layers = keras.layers
        if self.work is WORKS["mlp"]:
            stack = [layers.Flatten(), layers.Dense(128, "relu"), layers.Dense(10)]
        else:
            stack = [
                layers.Conv2D(32, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(64, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(64, "relu"),
                layers.Dense(10),
            ]
        model = keras.Sequential([layers.Input((28, 28, 1)), *stack])
        model.compile(
            optimizer=keras.optimizers.Adam(1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        x = np.concatenate([batch["image"] for batch in self.batches])
        y = np.concatenate([batch["label"] for batch in self.batches])
        size = len(self.batches[0]["label"])

        def window() -> None:
            model.fit(x, y, batch_size=size, epochs=1, verbose=0, shuffle=False)

        return window


def figures(compiled: Any) -> str:
    """Returns a row of a compiled program's figures per device."""
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    sent = Counter(
        re.findall(
            r" (all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?\(",
            compiled.as_text(),
        )
    )
    collectives = ", ".join(f"{n} {kind}" for kind, n in sent.items()) or "none"
    megabytes = memory.temp_size_in_bytes / 1e6
    return f"{cost['flops'] / 1e6:.2f} | {collectives} | {megabytes:.2f}"


def seconds(window: Window) -> float:
    """Returns how long a window takes."""
    start = time.perf_counter()
    window()
    return time.perf_counter() - start


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=WORKS, default="mlp")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--placed", action="store_true", help="time calls alone")
    options = parser.parse_args()
    ml.virtual_devices(options.devices)
    work = WORKS[options.model]
    contest = Contest(work, options.devices, placed=options.placed)
    ways = contest.ways()
    for window in ways.values():
        window()
        window()
    rounds = [
        {name: seconds(window) for name, window in ways.items()}
        for _ in range(options.rounds)
    ]
    print(
        f"{options.model}, {options.devices} devices, "
        f"{'placed batches, ' if options.placed else ''}{work.steps} steps a window, "
        f"{options.rounds} rounds; jax {jax.__version__}, flax {flax_version}, "
        f"Python {platform.python_version()}"
    )
    print("\n| way | steps/s | ratio |\n|---|---|---|")
    first = next(iter(ways))
    for name in ways:
        rate = statistics.median(work.steps / one[name] for one in rounds)
        ratio = statistics.median(one[first] / one[name] for one in rounds)
        print(f"| {name} | {rate:.1f} | {ratio:.2f} |")
    print("\n| program | MFLOP | collectives | temporary MB |\n|---|---|---|---|")
    for name, compiled in contest.programs().items():
        print(f"| {name} | {figures(compiled)} |")


if __name__ == "__main__":
    main()
