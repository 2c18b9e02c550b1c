"""Resolving 100,000 leaves against 200 rules, and the report on hundreds of dead rules.

`python benchmarks/layout_map.py` prints the processor seconds of `LayoutMap.resolve`,
of JAX's own `tree_flatten_with_path`, which only takes the tree apart, and of trying
every pattern on every path, in turn in one process: medians over the rounds, and the
median of the ratios to JAX within a round. The loop finds one spec per leaf; it does
not look for rules that disagree, check shapes or say why. The last row is `explain` of
8,000 leaves with 190 rules that match nothing.
"""

import argparse
import gc
import platform
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

import meshlayout as ml


PARTS = ("query", "key", "value", "out", "up", "down", "gate", "norm", "scale", "bias")


def make_tree(leaves: int) -> dict[str, Any]:
    """Returns a model of blocks with ten parts of ten parameters each."""
    shape = jax.ShapeDtypeStruct((512, 512), "float32")
    block = lambda: {p: {f"w_{n}": shape for n in "abcdefghij"} for p in PARTS}
    return {"layers": {str(at): block() for at in range(leaves // 100)}}


def make_rules(rules: int) -> dict[str, Any]:
    """Returns rules that each match their own part of every block, then dead ones."""
    names = [(part, letter) for part in PARTS for letter in "abcdefghij"]
    specs = [(None, "model"), ("model", None), ("batch", "model"), (None, None)]
    return {
        rf"layers/\d+/{part}/w_{letter}$": specs[at % len(specs)]
        for at, (part, letter) in enumerate(names[:rules])
    } | {f"nothing_{number}/kernel": specs[0] for number in range(rules - len(names))}


def by_hand(mesh: jax.sharding.Mesh, tree: Any, rules: dict[str, Any]) -> Any:
    """Returns the sharding of the first pattern that matches each leaf."""
    compiled = [
        (re.compile(pattern), NamedSharding(mesh, PartitionSpec(*spec)))
        for pattern, spec in rules.items()
    ]

    def sharding(keys: Any, _: Any) -> NamedSharding:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        for pattern, found in compiled:
            if pattern.search(path):
                return found
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, tree)


def seconds(call: Callable[[], Any]) -> float:
    """Returns the processor seconds of one call."""
    gc.collect()
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    """Runs both in turn and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=100_000)
    parser.add_argument("--rules", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    ml.virtual_devices(8)
    mesh = ml.create_mesh({"batch": 2, "model": 4})
    tree, rules = make_tree(options.leaves), make_rules(options.rules)
    layouts = ml.LayoutMap(mesh, rules)
    small = make_tree(8_000)
    dead = ml.LayoutMap(
        mesh,
        {f"layrs/{number}/qury_{number}": (None, "model") for number in range(190)},
    )
    ways = {
        "tree_flatten_with_path": lambda: jax.tree_util.tree_flatten_with_path(tree),
        "every pattern on every path": lambda: by_hand(mesh.jax_mesh, tree, rules),
        "LayoutMap.resolve": lambda: layouts.resolve(tree),
        "explain with 190 dead rules": lambda: dead.explain(small),
    }
    rounds = [[seconds(way) for way in ways.values()] for _ in range(options.rounds)]
    print(
        f"{len(jax.tree.leaves(tree)):,} leaves, {len(rules)} rules, jax "
        f"{jax.__version__}, Python {platform.python_version()}; "
        f"{options.rounds} rounds\n"
    )
    print("| way | processor s | ratio |\n|---|---|---|")
    for index, name in enumerate(ways):
        median = statistics.median(times[index] for times in rounds)
        ratio = statistics.median(times[index] / times[0] for times in rounds)
        print(f"| {name} | {median:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
