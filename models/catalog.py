"""The example models by the names that `python -m models.train` knows."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

import meshlayout as ml
from models import convnet, gpt, mlp, moe, resnet, transformer


@dataclass(frozen=True)
class Example:
    """A model that can be trained.

    Attributes:
        description: What it is, for `--help`.
        variants: By `"nnx"` and `"linen"`: a function that makes it for a number of
            labels or tokens; an NNX module also takes `rngs=`.
        file: The file with its own layout maps at the foot, if it has any.
        reads_text: Whether it is a language model.
        changes: By `--layouts`, the sizes and functions in its config that differ.
    """

    description: str
    variants: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    file: ModuleType | None = None
    reads_text: bool = False
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def layouts(self) -> dict[str, Mapping[str, Any]]:
        """Its own layout maps by name, such as `"MODEL_PARALLEL"`."""
        found = {name: getattr(self.file, name, None) for name in OWN_LAYOUTS}
        return {name: rules for name, rules in found.items() if rules is not None}


OWN_LAYOUTS = ("DATA_PARALLEL", "MODEL_PARALLEL", "FSDP", "FSDP_MODEL_PARALLEL")


class LinenGPT(nn.Module):
    """The language model of `models/gpt.py`, as a Flax module."""

    config: gpt.GPTConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits of shape (batch, length, vocab_size)."""
        params = self.param("gpt", lambda key: gpt.init(self.config, key))
        return gpt.apply(params, tokens)


# Four layers for up to four stages, with as many microbatches for each.
PIPELINE = {"num_layers": 4, "is_scanned": True, "microbatches": 16}
_CONTEXT = {
    "attention": functools.partial(ml.parallel.ring_attention, axis="seq", causal=True)
}


def _transformer(
    vocab_size: int, rngs: nnx.Rngs, **changes: Any
) -> transformer.Transformer:
    return transformer.Transformer(_config(vocab_size, **changes), rngs=rngs)


def _linen_transformer(vocab_size: int, **changes: Any) -> transformer.LinenTransformer:
    return transformer.LinenTransformer(_config(vocab_size, **changes))


def _config(vocab_size: int, **changes: Any) -> transformer.TransformerConfig:
    return transformer.TransformerConfig(vocab_size=vocab_size, **changes)


def _moe_config(vocab_size: int) -> moe.MoEConfig:
    return moe.MoEConfig(vocab_size=vocab_size, mlp_features=128)


EXAMPLES = {
    "transformer": Example(
        "a language model of bytes",
        {"nnx": _transformer, "linen": _linen_transformer},
        transformer,
        reads_text=True,
        changes={"pipeline": PIPELINE, "fsdp+context": _CONTEXT},
    ),
    "moe": Example(
        "a language model of experts",
        {
            "nnx": lambda labels, rngs: moe.MoE(_moe_config(labels), rngs=rngs),
            "linen": lambda labels: moe.LinenMoE(_moe_config(labels)),
        },
        moe,
        reads_text=True,
    ),
    "gpt": Example(
        "a language model of bytes, written in JAX alone",
        {"linen": lambda labels: LinenGPT(gpt.GPTConfig(vocab_size=labels))},
        reads_text=True,
    ),
    "mlp": Example("784-128-10", {"nnx": mlp.MLP, "linen": mlp.LinenMLP}, mlp),
    "convnet": Example(
        "two convolutions and two dense layers",
        {"nnx": convnet.ConvNet, "linen": convnet.LinenConvNet},
        convnet,
    ),
    "resnet": Example(
        "three residual blocks with batch normalization",
        {"nnx": resnet.ResNet, "linen": resnet.LinenResNet},
        resnet,
    ),
    "resnet50": Example(
        "ResNet-50",
        {
            "nnx": functools.partial(resnet.ResNet50, in_features=1),
            "linen": resnet.LinenResNet50,
        },
        resnet,
    ),
    "gan": Example("a generator of images against a discriminator"),
}
