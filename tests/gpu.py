"""A mesh for programs of the CUDA compiler, for eight GPUs that nobody has here."""

from jax.experimental import topologies  # noqa: TID251

import meshlayout as ml


# An H100 as NVIDIA's data sheet and CUDA's device query describe it. The compiler asks
# for no more than this of a device that is not there.
H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 8 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000
  device_memory_size: 84978434048
  l2_cache_size: 52428800
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""


def create_gpu_mesh(axes: dict[str, int]) -> ml.Mesh:
    """Returns a mesh over the eight GPUs of one host.

    Args:
        axes: The size of each mesh axis.
    """
    gpus = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology="1x1x8", target_config=H100
    )
    return ml.create_mesh(axes, devices=gpus.devices)
