"""Resolving 100,000 leaves against 100 rules, beside the loop one would write.

`python benchmarks/layout_map.py` prints the processor seconds of `LayoutMap.resolve`
and of trying every pattern on every path, in turn in one process: medians over the
rounds, and the median of the ratios within a round. The loop finds one spec per leaf;
it does not look for rules that disagree, check shapes or say why.
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
    block = lambda: {p: {f"w_{n}": shape for n in "abcdefghij"} for p in PARTS}  # noqa: E731
    return {"layers": {str(at): block() for at in range(leaves // 100)}}


def make_rules(rules: int) -> dict[str, Any]:
    """Returns rules that each match their own part of every block."""
    names = [(part, letter) for part in PARTS for letter in "abcdefghij"]
    specs = [(None, "model"), ("model", None), ("batch", "model"), (None, None)]
    return {
        rf"layers/\d+/{part}/w_{letter}$": specs[at % len(specs)]
        for at, (part, letter) in enumerate(names[:rules])
    }


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
    parser.add_argument("--rules", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    ml.virtual_devices(8)
    mesh = ml.create_mesh({"batch": 2, "model": 4})
    tree, rules = make_tree(options.leaves), make_rules(options.rules)
    layouts = ml.LayoutMap(mesh, rules)
    rounds = [
        (
            seconds(lambda: layouts.resolve(tree)),
            seconds(lambda: by_hand(mesh.jax_mesh, tree, rules)),
        )
        for _ in range(options.rounds)
    ]
    ours, hand = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(one / other for one, other in rounds)
    print(
        f"{len(jax.tree.leaves(tree)):,} leaves, {len(rules)} rules, jax "
        f"{jax.__version__}, Python {platform.python_version()}; "
        f"{options.rounds} rounds\n"
    )
    print("| way | processor s | ratio |\n|---|---|---|")
    print(f"| every pattern on every path | {hand:.2f} | 1.00 |")
    print(f"| LayoutMap.resolve | {ours:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
