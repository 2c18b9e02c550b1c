"""One way to train, in a process of its own: what `benchmarks/step.py` starts.

`python -m benchmarks.step_ways WAY --model M --devices N` builds the way, warms it up,
says "ready", and then runs one window of steps for each line that it reads, answering
with the seconds it took. A process of its own matters: `virtual_devices` sizes XLA's
thread pool for the process, and a plain JAX program beside it would get the same.
"""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
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
    """The ways to run one work on some devices; each process takes one of them."""

    def __init__(self, work: Work, num_devices: int, *, placed: bool) -> None:
        self.work, self.is_placed = work, placed
        self.num_devices = num_devices
        rng = np.random.default_rng(0)
        self.batches = [work.make_batch(rng) for _ in range(work.steps)]
        self.is_bounded = num_devices > 1

    def ways(self) -> dict[str, Callable[[], Window]]:
        """Returns a maker of each way's window of steps."""
        ways = {
            "hand-written jax.jit": self.by_hand,
            "make_train_step": self.ours,
            f"make_train_step, steps_per_call={PER_CALL}": lambda: self.ours(
                steps_per_call=PER_CALL
            ),
            "Trainer.fit": self.trainer,
            f"Trainer.fit, steps_per_call={PER_CALL}": lambda: self.trainer(
                steps_per_call=PER_CALL
            ),
            "nnx.jit": self.nnx_jit,
            "scalax sjit": self.scalax,
            "Keras 3 fit": self.keras,
        }
        if self.is_placed or self.work.loss_fn is not classify:
            del ways["Keras 3 fit"]
        return ways

    def shardings(self) -> tuple[NamedSharding, NamedSharding]:
        """Returns plain JAX's shardings of a whole array and of a batch's rows."""
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((self.num_devices,), ("batch",), axis_types=auto)
        specs = PartitionSpec(), PartitionSpec("batch")
        whole, rows = (NamedSharding(mesh, spec) for spec in specs)
        return whole, rows

    def layouts(self) -> ml.LayoutMap:
        """Returns our layout map for data parallelism."""
        mesh = ml.create_mesh({"batch": self.num_devices})
        return ml.LayoutMap(mesh, {}, unused="ignore")

    def state(self) -> ml.TrainState:
        """Returns a fresh state of ours."""
        return ml.TrainState.create(self.work.build, optax.adam(1e-3), self.layouts())

    def by_hand(self) -> Window:
        """Plain JAX, Flax and Optax."""
        jitted, state, sums, rows = self.jitted()
        self.put_batches(rows)

        def place(batch: Any) -> Any:
            return batch if self.is_placed else jax.device_put(batch, rows)

        return self.loop(jitted, state, sums, place)

    def put_batches(self, rows: NamedSharding) -> None:
        """Puts the batches on the devices, where calls alone are measured."""
        if self.is_placed:
            self.batches = [jax.device_put(batch, rows) for batch in self.batches]

    def jitted(self) -> tuple[Any, Any, Any, NamedSharding]:
        """Returns the hand-written step, its state and sums, and where batches go."""
        whole, rows = self.shardings()
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
            for index, batch in enumerate(self.batches):
                state, total = step(state, place(batch), total)
                if self.is_bounded and index % IN_FLIGHT == IN_FLIGHT - 1:
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
        self.put_batches(self.shardings()[1])
        per_call = options.get("steps_per_call", 1)

        def window() -> None:
            state, metrics, waiting = held[0], None, []
            for batch in self.batches:  # the step shards those from the host
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

        self.put_batches(self.shardings()[1])

        def window() -> None:
            trainer.fit(self.batches, epochs=1, progress=False)
            jax.block_until_ready(trainer.state)

        return window

    def nnx_jit(self) -> Window:
        """Flax's own way, the module and the optimizer as arguments."""
        whole, rows = self.shardings()
        self.put_batches(rows)
        model = self.work.build()
        nnx.update(model, jax.device_put(nnx.state(model), whole))
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
            for index, host_batch in enumerate(self.batches):
                batch = host_batch
                if not self.is_placed:
                    batch = jax.device_put(host_batch, rows)
                loss, _ = step(model, optimizer, batch)
                if self.is_bounded and index % IN_FLIGHT == IN_FLIGHT - 1:
                    jax.block_until_ready(loss)
            jax.block_until_ready(nnx.state(model))

        return window

    def scalax(self) -> Window:
        """Scalax's `sjit`, a state of arrays and its sharding rules."""
        scalax = importlib.import_module("scalax.sharding")
        mesh = scalax.MeshShardingHelper([self.num_devices], ["batch"])
        self.put_batches(self.shardings()[1])
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
        if self.num_devices > 1:
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


def main() -> None:
    """Runs a window for each line of standard input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("way")
    parser.add_argument("--model", choices=WORKS, default="mlp")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--placed", action="store_true")
    options = parser.parse_args()
    # For all: with JAX's own threads, queued collectives can wait for one another.
    ml.virtual_devices(options.devices)
    contest = Contest(WORKS[options.model], options.devices, placed=options.placed)
    window = contest.ways()[options.way]()
    window()
    window()
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        window()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
