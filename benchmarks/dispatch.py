"""Host time of one call: hand-written jit, compile_step, nnx.split + jit, nnx.jit.

`python benchmarks/dispatch.py --devices 8` prints microseconds a call and ratios to
the hand-written call on the same pytree. The programs do next to nothing, so that
what is measured is the call. All are run in turn, window by window, in one process;
the figures are medians over the windows, and ratios are medians of the ratios within
a round.

`python benchmarks/dispatch.py --train-step --devices 2` prints CPU microseconds of the
calling thread for a call of `make_train_step`, of `compile_step` and of `jax.jit` of
the same function on the same pytrees (a TrainState with its PRNG key, a batch,
metrics), in many short windows in turn; and of loops that read the loss at each step.
The times are the best of the windows, and ratios are medians of those within a round.
On several CPU devices, steps wait for every eighth call themselves, and `jax.jit` is
waited for as often.
"""

import argparse
import functools
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import __version__ as flax_version, nnx

import meshlayout as ml
from meshlayout.step import compiled_step


CALLS = 48


class Model(nnx.Module):
    """Thirteen small parameters, as many leaves as an MLP with Adam has."""

    def __init__(self) -> None:
        for at in range(13):
            setattr(self, f"p{at}", nnx.Param(jnp.zeros(())))


def plus_one(state: Any) -> Any:
    """The whole of the work."""
    return jax.tree.map(lambda leaf: leaf + 1, state)


def window(call: Callable[[], Any], *, wait: bool) -> float:
    """Returns microseconds a call; `wait` bounds what is in flight, as on CPU."""
    start = time.perf_counter()
    for at in range(CALLS):
        result = call()
        if wait and at % 8 == 7:
            jax.block_until_ready(result)
    return (time.perf_counter() - start) / CALLS * 1e6


def contestants(mesh: ml.Mesh) -> dict[str, tuple[Callable[[], Any], bool]]:
    """Returns, for each way, a call and whether it has to be waited for."""
    batch = ml.arrays.zeros(8, mesh.layout("batch"))
    whole = mesh.layout()
    bounded = mesh.size > 1

    def fresh() -> dict[str, jax.Array]:
        return {f"p{at}": ml.arrays.zeros((), whole) for at in range(13)}

    def chained(step: Callable[..., Any]) -> Callable[[], Any]:
        held = [fresh()]

        def call() -> Any:
            held[0], _ = step(held[0], batch)
            return held[0]

        return call

    def step(state: Any, batch: Any) -> Any:
        return plus_one(state), None

    hand = functools.partial(jax.jit, donate_argnums=0)(step)
    module = ml.create(Model, ml.LayoutMap(mesh))
    split_module = ml.create(Model, ml.LayoutMap(mesh))
    graphdef, _ = nnx.split(split_module)

    @jax.jit
    def on_state(state: Any) -> Any:
        model = nnx.merge(graphdef, state)
        return plus_one(nnx.state(model))

    def split_each_call() -> Any:
        state = on_state(nnx.split(split_module)[1])
        nnx.update(split_module, state)
        return state

    @nnx.jit
    def on_module(model: Model) -> None:
        nnx.update(model, plus_one(nnx.state(model)))

    def nnx_jit() -> Any:
        on_module(module)
        return module.p0[...]

    return {
        "hand-written jax.jit": (chained(hand), bounded),
        "ml.compile_step": (chained(ml.compile_step(step)), False),
        "nnx.split + jax.jit": (split_each_call, bounded),
        "nnx.jit": (nnx_jit, bounded),
    }


class Sum(nnx.Module):
    """Scalars; Adam makes three times as many leaves of them, and four more."""

    def __init__(self, size: int) -> None:
        self.weights = nnx.List([nnx.Param(jnp.zeros(())) for _ in range(size)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the product with the sum of the parameters."""
        return x * sum(weight[...] for weight in self.weights)


def train_step_calls(size: int, devices: int) -> dict[str, Callable[[], Any]]:
    """Returns calls of a train step, and of `jax.jit` on the same pytrees."""
    mesh = ml.create_mesh({"batch": devices}, devices=jax.devices()[:devices])
    batch = ml.arrays.zeros(8, mesh.layout("batch"))
    start = ml.TrainState.create(
        lambda: Sum(size), optax.adam(1e-3), ml.LayoutMap(mesh)
    )
    train_step = ml.make_train_step(lambda model, batch: jnp.square(model(batch)))

    def step(state: Any, batch: Any, metrics: Any) -> Any:
        return train_step(state, batch, metrics)

    def step_and_loss(state: Any, batch: Any) -> Any:
        state, metrics = train_step(state, batch)
        return state, metrics["loss"]

    def chained(step: Callable[..., Any]) -> Callable[[], Any]:
        held = [*train_step(jax.tree.map(jnp.copy, start), batch)]

        def call() -> Any:
            held[:] = step(held[0], batch, held[1])
            return held[1]

        return call

    def reading(step: Callable[..., Any], read: Callable[[Any], Any]) -> Any:
        held = [jax.tree.map(jnp.copy, start)]

        def call() -> Any:
            held[0], result = step(held[0], batch)
            return float(read(result))

        return call

    raw, raw_loss = (jax.jit(x, donate_argnums=0) for x in (step, step_and_loss))
    return {
        "jax.jit": chained(raw),
        "compile_step": chained(ml.compile_step(step)),
        "train step": chained(train_step),
        "jax.jit, loss read": reading(raw_loss, lambda loss: loss),
        "train step, loss read": reading(train_step, lambda metrics: metrics["loss"]),
    }


def compare_train_steps(devices: int) -> None:
    """Measures all ways in turn, and prints a table."""
    print(
        f"{devices} devices, jax {jax.__version__}, Python {platform.python_version()}"
    )
    print("| parameters | way | CPU us a call | ratio |\n|---|---|---|---|")
    for size in (4, 70):
        calls = train_step_calls(size, devices)
        waits = {way: devices == 1 or way.startswith("jax.jit") for way in calls}
        rounds = [
            {way: cpu_window(call, wait=waits[way]) for way, call in calls.items()}
            for _ in range(42)
        ][1:]
        for way in calls:
            raw = "jax.jit, loss read" if "read" in way else "jax.jit"
            best = min(one[way] for one in rounds)
            ratio = statistics.median(one[way] / one[raw] for one in rounds)
            print(f"| {size} | {way} | {best:.1f} | {ratio:.2f} |")


def cpu_window(call: Callable[[], Any], *, wait: bool) -> float:
    """Returns CPU microseconds of this thread a call; waiting takes none."""
    jax.block_until_ready(call())
    start = time.thread_time()
    for index in range(96):
        result = call()
        if wait and index % 8 == 7:
            jax.block_until_ready(result)
    return (time.thread_time() - start) / 96 * 1e6


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--train-step", action="store_true")
    parser.add_argument(
        "--unbounded",
        action="store_true",
        help="without the wait that only virtual CPU devices need",
    )
    options = parser.parse_args()
    if options.unbounded:
        compiled_step._MAX_IN_FLIGHT = 10**9
    ml.virtual_devices(options.devices)
    if options.train_step:
        compare_train_steps(options.devices)
        return
    ways = contestants(ml.create_mesh({"batch": options.devices}))
    for call, wait in ways.values():
        window(call, wait=wait)
    rounds = [
        {name: window(call, wait=wait) for name, (call, wait) in ways.items()}
        for _ in range(options.rounds)
    ]
    print(
        f"{options.devices} devices, jax {jax.__version__}, flax {flax_version}, "
        f"Python {platform.python_version()}; 13 leaves, {options.rounds} rounds"
    )
    print("| way | us a call | ratio |\n|---|---|---|")
    for name in ways:
        mid = statistics.median(one[name] for one in rounds)
        ratio = statistics.median(
            one[name] / one["hand-written jax.jit"] for one in rounds
        )
        print(f"| {name} | {mid:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
