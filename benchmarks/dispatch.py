"""Host time of one call: hand-written jit, compile_step, nnx.split + jit, nnx.jit.

`python benchmarks/dispatch.py --devices 8` prints microseconds a call and ratios to
the hand-written call on the same pytree. The programs do next to nothing, so that
what is measured is the call. All are run in turn, window by window, in one process;
the figures are medians over the windows, and ratios are medians of the ratios within
a round.
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
from flax import __version__ as flax_version, nnx

import meshlayout as ml


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


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    ml.virtual_devices(options.devices)
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
