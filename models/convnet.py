"""The tutorial's convolutional classifier in NNX and in Linen.

Two 3x3 convolutions of 32 and 64 features, each with ReLU and 2x2 max pooling, a dense
layer of 64 and one logit per class; no padding, so a 28x28 image becomes 5x5x64.

Both variants are written for one device. The layout maps at the foot of this file
shard their parameters over a mesh; the rules are regular expressions on the
parameters' paths, which are the same in both variants.
"""

import flax.linen as nn
import jax
from flax import nnx


def max_pool_2x2(x: jax.Array) -> jax.Array:
    """Returns the maximum of every 2x2 window of (batch, height, width, features).

    An odd last row or column is left out. Written as a reshape because the gradient of
    Flax's windowed pooling is slow on CPUs (a training step takes 2.5 times as long).
    If several values of a window share the maximum, this form splits the gradient
    between them; after a ReLU those are zeros, which pass no gradient.

    Args:
        x: Features of shape (batch, height, width, features).

    Returns:
        An array of shape (batch, height // 2, width // 2, features).

    Examples:
        >>> import jax.numpy as jnp
        >>> max_pool_2x2(jnp.arange(15.0).reshape(1, 3, 5, 1)).squeeze().tolist()
        [6.0, 8.0]
    """
    batch, height, width, features = x.shape
    rows, columns = height // 2, width // 2
    x = x[:, : 2 * rows, : 2 * columns]
    return x.reshape(batch, rows, 2, columns, 2, features).max(axis=(2, 4))


class ConvNet(nnx.Module):
    """Two convolutions with pooling, a dense layer, and one logit per class."""

    def __init__(self, num_classes: int = 10, *, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 32, (3, 3), padding="VALID", rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), padding="VALID", rngs=rngs)
        self.dense = nnx.Linear(5 * 5 * 64, 64, rngs=rngs)
        self.output = nnx.Linear(64, num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits of shape (batch, num_classes)."""
        x = max_pool_2x2(nnx.relu(self.conv1(images)))
        x = max_pool_2x2(nnx.relu(self.conv2(x)))
        x = x.reshape(x.shape[0], -1)
        x = nnx.relu(self.dense(x))
        return self.output(x)


class LinenConvNet(nn.Module):
    """`ConvNet` in Linen, with the same parameter paths."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits of shape (batch, num_classes)."""
        x = nn.Conv(32, (3, 3), padding="VALID", name="conv1")(images)
        x = max_pool_2x2(nn.relu(x))
        x = nn.Conv(64, (3, 3), padding="VALID", name="conv2")(x)
        x = max_pool_2x2(nn.relu(x))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(64, name="dense")(x))
        return nn.Dense(self.num_classes, name="output")(x)


# Every device holds all parameters; only the batch is sharded.
DATA_PARALLEL = {}

# Every layer's features are sharded over `model`, and the last matrix by rows. `...`
# stands for the leading dims: three of a convolution's kernel, one of a dense layer's.
MODEL_PARALLEL = {
    r"(conv\d|dense)/kernel": (..., "model"),
    r"(conv\d|dense)/bias": ("model",),
    r"output/kernel": ("model", None),
}

# The parameters are sharded over the axis that also shards the batch; only the output
# bias, ten numbers, stays whole.
FSDP = {
    r"(conv\d|dense)/kernel": (..., "batch"),
    r"(conv\d|dense)/bias": ("batch",),
    r"output/kernel": ("batch", None),
}

# Of images, where devices share each of them: every device holds all parameters, and
# sends the rows and columns at its shard's edges to its neighbors. Labels and weights
# are sharded by the first of these axes alone.
SPATIAL = ("batch", "height", "width", None)
