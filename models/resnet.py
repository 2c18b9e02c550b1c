"""Residual networks with batch normalization: a small one and ResNet-50.

`ResNet` is for small images of any size: a 3x3 convolution, three residual blocks of
16, 32 and 64 features, the second and the third at half the height and width, the mean
over all pixels, and one logit per class.

`ResNet50` is the network of 50 layers for photographs (He et al., "Deep residual
learning for image recognition", 2015), in the form that is usually trained: the
bottlenecks halve the image in their 3x3 convolution, not in the 1x1 before it, and
initial values are as in Goyal et al., "Accurate, large minibatch SGD", 2017. Padding is
symmetric, so that weights published for PyTorch mean the same here.

Each has a variant in NNX and one in Linen, written for one device: batch statistics are
means over the batch that the model sees, which is the global batch on any mesh. The
layout maps at the foot of this file shard the parameters of both networks over a mesh;
the rules are regular expressions on the parameters' paths, which are the same in NNX
and Linen. The running statistics are named after their layer, such as
`block1/norm1/mean`; Linen keeps them in a collection, as
`batch_stats/block1/norm1/mean`.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx


# The fraction of the running statistics that each step keeps.
MOMENTUM = 0.9

# Of ResNet-50. The variance of He et al., so that the gradients of layers behind a ReLU
# keep their size on the way back.
HE_NORMAL = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
OUTPUT_NORMAL = nnx.initializers.normal(0.01)
ZEROS = nnx.initializers.zeros_init()


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
    in_features: int,
    features: int,
    size: int,
    strides: int,
    rngs: nnx.Rngs,
    **options: Any,
) -> nnx.Conv:
    """Returns a convolution without a bias: the normalization after it has one.

    Args:
        in_features: Features of its input.
        features: Features of its output.
        size: Height and width of its window.
        strides: Steps of its window, in pixels.
        rngs: The source of its initial values.
        **options: For `nnx.Conv`, such as `padding`.
    """
    return nnx.Conv(
        in_features,
        features,
        (size, size),
        strides=strides,
        use_bias=False,
        rngs=rngs,
        **options,
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


class Bottleneck(nnx.Module):
    """Convolutions of 1x1, 3x3 and 1x1, and a shortcut, each with normalization.

    Between the 1x1 convolutions there are a quarter of the features. A block begins as
    its shortcut: the scale of the last normalization is zero at first.
    """

    def __init__(
        self, in_features: int, features: int, *, strides: int = 1, rngs: nnx.Rngs
    ) -> None:
        hidden = features // 4
        self.conv1 = conv(in_features, hidden, 1, 1, rngs, **published(1))
        self.norm1 = nnx.BatchNorm(hidden, momentum=MOMENTUM, rngs=rngs)
        self.conv2 = conv(hidden, hidden, 3, strides, rngs, **published(3))
        self.norm2 = nnx.BatchNorm(hidden, momentum=MOMENTUM, rngs=rngs)
        self.conv3 = conv(hidden, features, 1, 1, rngs, **published(1))
        self.norm3 = nnx.BatchNorm(
            features, momentum=MOMENTUM, scale_init=ZEROS, rngs=rngs
        )
        self.has_projection = strides > 1 or in_features != features
        if self.has_projection:
            options = published(1)
            self.projection = conv(in_features, features, 1, strides, rngs, **options)
            self.projection_norm = nnx.BatchNorm(features, momentum=MOMENTUM, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns features of shape (batch, height, width, features)."""
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = nnx.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        if self.has_projection:
            x = self.projection_norm(self.projection(x))
        return nnx.relu(x + y)


def published(size: int) -> dict[str, Any]:
    """Returns how ResNet-50's convolutions begin, and pad their images.

    Args:
        size: Height and width of the window.
    """
    return {"kernel_init": HE_NORMAL, "padding": size // 2}


def max_pool_3x3(x: jax.Array) -> jax.Array:
    """Returns the maximum of 3x3 windows, at half the height and width.

    Args:
        x: Features of shape (batch, height, width, features).
    """
    padding = ((0, 0), (1, 1), (1, 1), (0, 0))
    return jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding
    )


def bottlenecks(depths: tuple[int, ...], width: int) -> list[tuple[int, int]]:
    """Returns the features and the strides of each block of a deep network.

    Args:
        depths: Blocks in each stage. Each stage but the first begins by halving the
            image, and has twice the features of the one before.
        width: Features of the stem.

    Examples:
        >>> bottlenecks((1, 2), 64)
        [(256, 1), (512, 2), (512, 1)]
    """
    return [
        (4 * width * 2**stage, 2 if stage and not block else 1)
        for stage, depth in enumerate(depths)
        for block in range(depth)
    ]


# Since 0.12 Flax wraps lists of modules; before, a plain list held them.
module_list: Callable[[list[Bottleneck]], list[Bottleneck]] = getattr(nnx, "List", list)


class ResNet50(nnx.Module):
    """A 7x7 convolution and pooling, 16 bottlenecks, and one logit per class.

    It starts in training mode, like `ResNet`. Other `depths` make its siblings:
    (3, 4, 23, 3) is ResNet-101, and (3, 8, 36, 3) ResNet-152.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        *,
        width: int = 64,
        depths: tuple[int, ...] = (3, 4, 6, 3),
        in_features: int = 3,
        rngs: nnx.Rngs,
    ) -> None:
        self.stem = conv(in_features, width, 7, 2, rngs, **published(7))
        self.stem_norm = nnx.BatchNorm(width, momentum=MOMENTUM, rngs=rngs)
        blocks: list[Bottleneck] = []
        in_features = width
        for features, strides in bottlenecks(depths, width):
            blocks.append(Bottleneck(in_features, features, strides=strides, rngs=rngs))
            in_features = features
        self.blocks = module_list(blocks)
        self.output = nnx.Linear(
            in_features, num_classes, kernel_init=OUTPUT_NORMAL, rngs=rngs
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits of shape (batch, num_classes)."""
        x = max_pool_3x3(nnx.relu(self.stem_norm(self.stem(images))))
        for block in self.blocks:
            x = block(x)
        return self.output(x.mean(axis=(1, 2)))


def synchronize_norms(model: nnx.Module, axis_name: str | None = "batch") -> None:
    """Makes a strategy's replicas normalize with the statistics of all of them.

    A function that `Strategy.run` calls sees the images of one replica, and so does
    batch normalization, as in TensorFlow. Use this if each has too few of them, or to
    get the numbers of one device.

    Args:
        model: The model; its layers are changed.
        axis_name: The mesh axis of replicas. None undoes it: outside of `run` a model
            in training mode has no such axis.
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm):
            module.axis_name = axis_name


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


def linen_conv(
    features: int, size: int, strides: int, name: str, **options: Any
) -> nn.Conv:
    """Returns the Linen counterpart of `conv`.

    Args:
        features: Features of its output.
        size: Height and width of its window.
        strides: Steps of its window, in pixels.
        name: Its path.
        **options: For `nn.Conv`, such as `padding`.
    """
    return nn.Conv(
        features, (size, size), strides=strides, use_bias=False, name=name, **options
    )


def linen_norm(name: str, train: bool, **options: Any) -> nn.BatchNorm:  # noqa: FBT001
    """Returns a batch normalization, of this batch or of the running statistics.

    Args:
        name: Its path.
        train: Whether to use this batch's statistics.
        **options: For `nn.BatchNorm`, such as `scale_init`.
    """
    return nn.BatchNorm(
        use_running_average=not train, momentum=MOMENTUM, name=name, **options
    )


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


class LinenBottleneck(nn.Module):
    """`Bottleneck` in Linen, with the same parameter paths."""

    features: int
    strides: int
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns features of shape (batch, height, width, features)."""
        hidden = self.features // 4
        y = linen_conv(hidden, 1, 1, "conv1", **published(1))(x)
        y = nn.relu(linen_norm("norm1", self.train)(y))
        y = linen_conv(hidden, 3, self.strides, "conv2", **published(3))(y)
        y = nn.relu(linen_norm("norm2", self.train)(y))
        y = linen_conv(self.features, 1, 1, "conv3", **published(1))(y)
        y = linen_norm("norm3", self.train, scale_init=ZEROS)(y)
        if self.strides > 1 or x.shape[-1] != self.features:
            options = published(1)
            x = linen_conv(self.features, 1, self.strides, "projection", **options)(x)
            x = linen_norm("projection_norm", self.train)(x)
        return nn.relu(x + y)


class LinenBottlenecks(nn.Module):
    """All blocks, named `0`, `1` and so on."""

    depths: tuple[int, ...]
    width: int
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns features of shape (batch, height, width, features)."""
        for index, sizes in enumerate(bottlenecks(self.depths, self.width)):
            x = LinenBottleneck(*sizes, self.train, name=str(index))(x)
        return x


class LinenResNet50(nn.Module):
    """`ResNet50` in Linen, with the same parameter paths.

    With `train=True` it normalizes with the statistics of the batch, like
    `LinenResNet`.
    """

    num_classes: int = 1000
    width: int = 64
    depths: tuple[int, ...] = (3, 4, 6, 3)

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
        """Returns logits of shape (batch, num_classes)."""
        x = linen_conv(self.width, 7, 2, "stem", **published(7))(images)
        x = max_pool_3x3(nn.relu(linen_norm("stem_norm", train)(x)))
        x = LinenBottlenecks(self.depths, self.width, train, name="blocks")(x)
        output = nn.Dense(self.num_classes, kernel_init=OUTPUT_NORMAL, name="output")
        return output(x.mean(axis=(1, 2)))


# Every device holds all parameters; only the batch is sharded.
DATA_PARALLEL = {}

# Inside each block the features are sharded over `model`: the first convolution by its
# output features, with their normalization, the second by its input features, so that
# the forward pass needs only one all-reduce per block. In a bottleneck these are the
# few features between the 1x1 convolutions: the last of those stays whole on every
# device, because to shard it, too, would take an all-reduce of four times the bytes.
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
