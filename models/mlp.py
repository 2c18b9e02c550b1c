"""The tutorial's classifier, 784-128-10, in NNX and in Linen.

Both variants are written for one device. The layout maps at the foot of this file
shard their parameters over a mesh; the rules are regular expressions on the
parameters' paths, which are the same in both variants.
"""

import flax.linen as nn
import jax
from flax import nnx


class MLP(nnx.Module):
    """Flatten, a hidden layer with ReLU, and one logit per class."""

    def __init__(
        self,
        num_classes: int = 10,
        *,
        hidden_features: int = 128,
        in_features: int = 28 * 28,
        rngs: nnx.Rngs,
    ) -> None:
        self.hidden = nnx.Linear(in_features, hidden_features, rngs=rngs)
        self.output = nnx.Linear(hidden_features, num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits of shape (batch, num_classes)."""
        x = images.reshape(images.shape[0], -1)
        x = nnx.relu(self.hidden(x))
        return self.output(x)


class LinenMLP(nn.Module):
    """`MLP` in Linen, with the same parameter paths."""

    num_classes: int = 10
    hidden_features: int = 128

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits of shape (batch, num_classes)."""
        x = images.reshape(images.shape[0], -1)
        x = nn.relu(nn.Dense(self.hidden_features, name="hidden")(x))
        return nn.Dense(self.num_classes, name="output")(x)


# Every device holds all parameters; only the batch is sharded.
DATA_PARALLEL = {}

# The hidden features are sharded over `model`: the first matrix by columns, the second
# by rows, so that one all-reduce of the logits is all that the forward pass sends.
MODEL_PARALLEL = {
    r"hidden/kernel": (None, "model"),
    r"hidden/bias": ("model",),
    r"output/kernel": ("model", None),
}

# The parameters are sharded over the axis that also shards the batch; only the output
# bias, ten numbers, stays whole.
FSDP = {
    r"hidden/kernel": ("batch", None),
    r"hidden/bias": ("batch",),
    r"output/kernel": ("batch", None),
}
