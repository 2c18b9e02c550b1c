"""What eight virtual CPU devices do at most, each while all others do the same.

`python -m benchmarks.cpu_figures` measures the figures by which `ml.plan` ranks layouts
for CPU devices: products of matrices, an optimizer's update for the rate of memory, and
collectives of 1 KB and 8 MB for the latency of a hop and the rate of a ring. Devices
share the cores, so that the figures of one are a share of the machine's. Each is the
least of many rounds in turn, so that other programs disturb all alike.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import meshlayout as ml


REPEATS = 8  # in one program, to drown the call of it
SMALL, LARGE = 2**10, 2**23  # bytes of what collectives result in
WHOLE = PartitionSpec(("batch", "group"))


def devices_of(size: int) -> jax.sharding.Mesh:
    """Returns all eight devices in groups of a size."""
    return ml.create_mesh({"batch": 8 // size, "group": size}).jax_mesh


def mapped(
    body: Callable[[Any], Any], mesh: jax.sharding.Mesh, x: Any
) -> Callable[[], Any]:
    """Returns a call that repeats a function of arrays on every device by itself."""

    def repeated(x: Any) -> Any:
        for _ in range(REPEATS):
            x = body(x)
        return x

    sharded = jax.device_put(x, NamedSharding(mesh, WHOLE))
    specs: Any = {"in_specs": WHOLE, "out_specs": WHOLE, "check_vma": False}
    compiled = jax.jit(jax.shard_map(repeated, mesh=mesh, **specs))
    return lambda: jax.block_until_ready(compiled(sharded))


def product(side: int) -> Callable[[], Any]:
    """Returns a call that multiplies square matrices."""
    return mapped(lambda x: x @ x * 1e-3, devices_of(8), np.ones((8 * side, side), "f"))


def update(nbytes: int) -> Callable[[], Any]:
    """Returns a call that updates parameters with AdamW."""
    tx = optax.adamw(1e-3)

    def body(x: tuple[Any, Any]) -> tuple[Any, Any]:
        params, state = x
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    params = np.ones((8, nbytes // 4), "float32")
    state = jax.tree.map(
        lambda x: jnp.zeros((8, *x.shape[1:]), x.dtype), tx.init(params)
    )
    return mapped(body, devices_of(8), (params, state))


def collective(kind: str, size: int, nbytes: int) -> Callable[[], Any]:
    """Returns a call of collectives in groups of a size."""

    def body(x: jax.Array) -> jax.Array:
        if kind == "all_reduce":
            return jax.lax.psum(x, "group") * 0.1
        return jax.lax.all_gather(x[: x.size // size], "group", tiled=True) * 0.1

    return mapped(body, devices_of(size), np.ones(2 * nbytes, "float32"))


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    ml.virtual_devices(8)
    ways = [(kind, n) for kind in ("all_reduce", "all_gather") for n in (2, 4, 8)]
    calls: dict[Any, Callable[[], Any]] = {"product": product(512)}
    calls["update"] = update(LARGE)
    for way in ways:
        calls |= {(*way, size): collective(*way, size) for size in (SMALL, LARGE)}
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    for _ in range(options.rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append((time.perf_counter() - start) / REPEATS)
    least = {name: min(taken[1:]) for name, taken in seconds.items()}
    lines = [("product of matrices of 512", "", 2 * 512**3 / least["product"] / 1e9)]
    # Parameters, gradients and two averages are read, and all but gradients written.
    lines += [("update by AdamW of 8 MB", "", 7 * LARGE / least["update"] / 1e9)]
    for kind, n in ways:
        passes = 2 if kind == "all_reduce" else 1
        small, large = least[kind, n, SMALL], least[kind, n, LARGE]
        rate = passes * (n - 1) / n * LARGE / (large - small)
        hop = small / (passes * (n - 1)) * 1e6
        lines += [(f"{kind} of {n} devices", f"{hop:.0f}", rate / 1e9)]
    print("| what | a hop (us) | GFLOP/s or GB/s of a device |\n|---|---|---|")
    for name, hop, rate in lines:
        print(f"| {name} | {hop} | {rate:.2f} |")


if __name__ == "__main__":
    main()
