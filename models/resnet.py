"""A small residual network with batch normalization, in NNX and in Linen.

A 3x3 convolution, three residual blocks of 16, 32 and 64 features, the second and the
third at half the height and width, the mean over all pixels, and one logit per class.
Images may have any size.

Both variants are written for one device: batch statistics are means over the batch that
the model sees, which is the global batch on any mesh. The layout maps at the foot of
this file shard the parameters over a mesh; the rules are regular expressions on the
parameters' paths, which are the same in both variants. The running statistics are named
after their layer, such as `block1/norm1/mean`; Linen keeps them in a collection, as
`batch_stats/block1/norm1/mean`.
"""

import flax.linen as nn
import jax
from flax import nnx


# The fraction of the running statistics that each step keeps.
MOMENTUM = 0.9


class Block(nnx.Module):
    """Two 3x3 convolutions and a shortcut, each followed by batch normalization."""

    def __init__(
        self, in_features: int, features: int, *, strides: int = 1, rngs: nnx.Rngs
    ) -> None:
        self.conv1 = conv(in_features, features, 3, strides, rngs)
        self.norm1 = nnx.BatchNorm(features, momentum=MOMENTUM, rngs=rngs)
        self.conv2 = conv(features, features, 3, 1, rngs)
        self.norm2 = nnx.BatchNorm(features, momentum=MOMENTUM, rngs=rngs)
        self.has_projection = strides > 1 or in_features != features
        if self.has_projection:
            self.projection = conv(in_features, features, 1, strides, rngs)
            self.projection_norm = nnx.BatchNorm(features, momentum=MOMENTUM, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns features of shape (batch, height, width, features)."""
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.has_projection:
            x = self.projection_norm(self.projection(x))
        return nnx.relu(x + y)


def conv(
    in_features: int, features: int, size: int, strides: int, rngs: nnx.Rngs
) -> nnx.Conv:
    """Returns a convolution without a bias: the normalization after it has one.

    Args:
        in_features: Features of its input.
        features: Features of its output.
        size: Height and width of its window.
        strides: Steps of its window, in pixels.
        rngs: Where its initial values come from.
    """
    window = (size, size)
    return nnx.Conv(
        in_features, features, window, strides=strides, use_bias=False, rngs=rngs
    )


class ResNet(nnx.Module):
    """A convolution, three residual blocks, and one logit per class.

    It starts in training mode, in which it normalizes with the statistics of the batch
    and updates the running ones; `model.eval()` and `model.train()` switch.
    """

    def __init__(
        self,
        num_classes: int = 10,
        *,
        width: int = 16,
        in_features: int = 1,
        rngs: nnx.Rngs,
    ) -> None:
        self.stem = conv(in_features, width, 3, 1, rngs)
        self.stem_norm = nnx.BatchNorm(width, momentum=MOMENTUM, rngs=rngs)
        self.block1 = Block(width, width, rngs=rngs)
        self.block2 = Block(width, 2 * width, strides=2, rngs=rngs)
        self.block3 = Block(2 * width, 4 * width, strides=2, rngs=rngs)
        self.output = nnx.Linear(4 * width, num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits of shape (batch, num_classes)."""
        x = nnx.relu(self.stem_norm(self.stem(images)))
        x = self.block3(self.block2(self.block1(x)))
        return self.output(x.mean(axis=(1, 2)))


class LinenBlock(nn.Module):
    """`Block` in Linen, with the same parameter paths."""

    features: int
    strides: int
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns features of shape (batch, height, width, features)."""
        y = linen_conv(self.features, 3, self.strides, "conv1")(x)
        y = nn.relu(linen_norm("norm1", self.train)(y))
        y = linen_conv(self.features, 3, 1, "conv2")(y)
        y = linen_norm("norm2", self.train)(y)
        if self.strides > 1 or x.shape[-1] != self.features:
            x = linen_conv(self.features, 1, self.strides, "projection")(x)
            x = linen_norm("projection_norm", self.train)(x)
        return nn.relu(x + y)


def linen_conv(features: int, size: int, strides: int, name: str) -> nn.Conv:
    """Returns the Linen counterpart of `conv`.

    Args:
        features: Features of its output.
        size: Height and width of its window.
        strides: Steps of its window, in pixels.
        name: Its path.
    """
    window = (size, size)
    return nn.Conv(features, window, strides=strides, use_bias=False, name=name)


def linen_norm(name: str, train: bool) -> nn.BatchNorm:  # noqa: FBT001
    """Returns a batch normalization, of this batch or of the running statistics.

    Args:
        name: Its path.
        train: Whether to use this batch's statistics.
    """
    return nn.BatchNorm(use_running_average=not train, momentum=MOMENTUM, name=name)


class LinenResNet(nn.Module):
    """`ResNet` in Linen, with the same parameter paths.

    With `train=True` it normalizes with the statistics of the batch, and updates the
    running ones if the collection `batch_stats` is mutable.
    """

    num_classes: int = 10
    width: int = 16

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
        """Returns logits of shape (batch, num_classes)."""
        x = linen_conv(self.width, 3, 1, "stem")(images)
        x = nn.relu(linen_norm("stem_norm", train)(x))
        x = LinenBlock(self.width, 1, train, name="block1")(x)
        x = LinenBlock(2 * self.width, 2, train, name="block2")(x)
        x = LinenBlock(4 * self.width, 2, train, name="block3")(x)
        return nn.Dense(self.num_classes, name="output")(x.mean(axis=(1, 2)))


# Every device holds all parameters; only the batch is sharded.
DATA_PARALLEL = {}

# Inside each block the features are sharded over `model`: the first convolution by its
# output features, with their normalization, the second by its input features, so that
# the forward pass needs only one all-reduce per block.
MODEL_PARALLEL = {
    r"conv1/kernel": (..., "model"),
    r"norm1/(scale|bias|mean|var)": ("model",),
    r"conv2/kernel": (..., "model", None),
}

# The kernels are sharded over the axis that also shards the batch. A few numbers per
# feature stay whole: those of the normalization, and the output bias.
FSDP = {
    r"(stem|conv\d|projection)/kernel": (..., "batch"),
    r"output/kernel": ("batch", None),
}
