"""Runs `train.py` with Ray Train's JaxTrainer, on a local Ray or on a cluster.

    python examples/ray_train.py --workers 2 --cpu
    python examples/ray_train.py --workers 2:8 --gpus 1 -- --checkpoints /shared/run

Needs `pip install 'meshlayout[ray]'` on all nodes. `--workers 2:8` is elastic: Ray
starts with what is there, and starts again with more or fewer workers when nodes come
or go; the checkpoint is restored on any number of them. Ray starts the workers and
tells each its number. It could also connect them through JAX, but then nobody would
name a worker that does not come or dies: `ml.initialize()` does it, as everywhere else.
"""

import argparse
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.jax import JaxTrainer
from ray.train.v2.jax.config import JaxConfig


def train_loop(config: dict[str, Any]) -> None:
    """Runs on every worker."""
    context = ray.train.get_context()
    with socket.socket() as probe:
        probe.bind(("", 0))
        address = f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"
    os.environ.update(
        config["environment"],
        JAX_COORDINATOR_ADDRESS=broadcast_from_rank_zero(address),
        JAX_NUM_PROCESSES=str(context.get_world_size()),
        JAX_PROCESS_ID=str(context.get_world_rank()),
    )
    # Imported here, where the worker's environment is set: it imports JAX.
    import train  # noqa: PLC0415

    ray.train.report(train.main(config["arguments"]))


def main(arguments: Sequence[str] | None = None) -> Result:
    """Runs the command line; returns Ray's result."""
    parser = argparse.ArgumentParser(description="Runs train.py with Ray Train.")
    parser.add_argument("--workers", default="2", help="as 4, or 2:8 for elastic")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each worker")
    parser.add_argument("--cpu", action="store_true", help="two CPU devices each")
    parser.add_argument("--max-failures", type=int, default=3)
    parser.add_argument("rest", nargs="*", help="options of train.py, after --")
    options = parser.parse_args(arguments)
    least, _, most = options.workers.partition(":")
    # Workers find train.py in a copy of this folder.
    ray.init(runtime_env={"working_dir": str(Path(__file__).parent)})
    cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    trainer = JaxTrainer(
        train_loop,
        train_loop_config={
            "arguments": options.rest,
            "environment": cpu if options.cpu else {},
        },
        jax_config=JaxConfig(),  # neither TPU nor GPU: Ray does not start JAX
        scaling_config=ScalingConfig(
            num_workers=(int(least), int(most)) if most else int(least),
            use_gpu=options.gpus > 0,
            resources_per_worker={"GPU": options.gpus} if options.gpus else None,
        ),
        run_config=RunConfig(
            failure_config=FailureConfig(max_failures=options.max_failures)
        ),
    )
    return trainer.fit()


if __name__ == "__main__":
    main()
