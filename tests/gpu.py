"""A mesh for programs of the CUDA compiler, for eight GPUs that nobody has here."""

import meshlayout as ml


def create_gpu_mesh(axes: dict[str, int]) -> ml.Mesh:
    """Returns a mesh over the eight GPUs of one host.

    Args:
        axes: The size of each mesh axis.
    """
    return ml.create_mesh(axes, devices=ml.planning.describe_devices("h100:8"))
