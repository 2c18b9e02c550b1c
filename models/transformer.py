"""A decoder-only language model in NNX and in Linen.

Token and position embeddings, blocks of causal self-attention and an MLP with layer
normalization before each, a last normalization, and one logit per token of the
vocabulary. Sequences may be packed: tokens then attend only to their own segment.

Both variants are written for one device. The layout maps at the foot of this file
shard their parameters over a mesh; the rules are regular expressions on the
parameters' paths, which are the same in both variants. The blocks are the modules
`blocks/0`, `blocks/1` and so on, or, if they are scanned, one whose parameters are
stacked: `blocks/mlp/up/kernel` has a first dim of layers, which may be pipeline stages.
Maps that shard activations, too, know the features between the halves of blocks as
`residual`, and those that a loop over blocks carries as `carry`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import meshlayout as ml


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Returns attention of each token to itself and the tokens before it.

    Args:
        query: Shape (batch, length, heads, features of a head).
        key: The same shape.
        value: The same shape.
        segment_ids: Shape (batch, length), int32, or None: tokens attend only to those
            of the same segment.

    Returns:
        An array of the shape of `query`; the softmax is in float32.
    """
    mask = None
    if segment_ids is not None:
        # One mask for all heads: (batch, 1, length, length).
        mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True)


@dataclass(frozen=True)
class TransformerConfig:
    """The sizes of a `Transformer`.

    Attributes:
        vocab_size: Number of tokens in the vocabulary.
        max_length: The largest number of tokens in a sequence.
        features: Features of each token between the blocks.
        num_heads: Attention heads; they share the features evenly.
        num_layers: Number of blocks.
        mlp_features: Hidden features of each block's MLP.
        dropout_rate: Fraction of the features that training drops after the embeddings
            and after each half of a block.
        is_scanned: Whether the blocks' parameters are stacked, and the blocks are one
            loop: `ml.parallel.pipeline`, over a mesh axis `stage` if there is one.
        microbatches: Into how many the rows are divided for the stages.
        attention: What attends, a function as `causal_attention`; for long sequences
            `functools.partial(ml.parallel.ring_attention, axis="seq", causal=True)`.
    """

    vocab_size: int = 256
    max_length: int = 128
    features: int = 64
    num_heads: int = 4
    num_layers: int = 2
    mlp_features: int = 256
    dropout_rate: float = 0.0
    is_scanned: bool = False
    microbatches: int = 1
    attention: Callable[..., jax.Array] = causal_attention

    def __post_init__(self) -> None:
        if self.is_scanned and self.dropout_rate:
            msg = (
                f"dropout_rate={self.dropout_rate}: scanned blocks would drop the same "
                "features in every layer. Leave it at 0, or set is_scanned=False."
            )
            raise ValueError(msg)
        if self.features % self.num_heads:
            msg = (
                f"features={self.features} does not divide by "
                f"num_heads={self.num_heads}: all heads have the same number of "
                "features. Change one of them."
            )
            raise ValueError(msg)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    config: TransformerConfig,
    segment_ids: jax.Array | None,
) -> jax.Array:
    """Returns the attention of all heads, each with its share of the features.

    Args:
        query: Shape (batch, length, features).
        key: Shape (batch, length, features).
        value: Shape (batch, length, features).
        config: The model's sizes, and its attention.
        segment_ids: Shape (batch, length), int32, or None.

    Returns:
        An array of shape (batch, length, features).
    """
    num_heads = config.num_heads
    heads = (*query.shape[:2], num_heads, query.shape[-1] // num_heads)
    parts = (x.reshape(heads) for x in (query, key, value))
    return config.attention(*parts, segment_ids=segment_ids).reshape(query.shape)


def default_positions(tokens: jax.Array, config: TransformerConfig) -> jax.Array:
    """Returns 0, 1, 2 ... for every token of a sequence, in the shape (1, length).

    Args:
        tokens: Shape (batch, length).
        config: The model's sizes.

    Raises:
        ValueError: If the sequences are longer than the model's `max_length`.

    Examples:
        >>> default_positions(jnp.zeros((2, 4), "int32"), TransformerConfig()).tolist()
        [[0, 1, 2, 3]]
    """
    length = tokens.shape[1]
    if length > config.max_length:
        msg = (
            f"the tokens have the shape {tokens.shape}, and the model has positions "
            f"for {config.max_length} tokens. Give shorter sequences, or make the "
            f"model with max_length={length}."
        )
        raise ValueError(msg)
    return jnp.arange(length, dtype="int32")[None]


class Attention(nnx.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.query = nnx.Linear(config.features, config.features, rngs=rngs)
        self.key = nnx.Linear(config.features, config.features, rngs=rngs)
        self.value = nnx.Linear(config.features, config.features, rngs=rngs)
        self.output = nnx.Linear(config.features, config.features, rngs=rngs)

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """Returns features of shape (batch, length, features)."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        return self.output(attend(query, key, value, self.config, segment_ids))


class MLP(nnx.Module):
    """Two layers with a GELU between them, applied to each token separately."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(config.features, config.mlp_features, rngs=rngs)
        self.down = nnx.Linear(config.mlp_features, config.features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns features of shape (batch, length, features)."""
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    """Attention and an MLP, each after layer normalization and added to its input."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(config.features, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(config.features, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout_rate, rngs=rngs)

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """Returns features of shape (batch, length, features)."""
        y = self.attention(self.attention_norm(x), segment_ids)
        x = ml.constrain(x + self.dropout(y), "residual")
        y = self.mlp(self.mlp_norm(x))
        return ml.constrain(x + self.dropout(y), "residual")


def run_stack(
    block: Callable[..., Any],
    params: Any,
    x: jax.Array,
    segment_ids: jax.Array | None,
    config: TransformerConfig,
) -> jax.Array:
    """Returns the features after all blocks, whose parameters are stacked.

    Args:
        block: Takes the parameters of one block, features and segments.
        params: A tree of arrays with a first dim of layers.
        x: Shape (batch, length, features).
        segment_ids: As for `attend`.
        config: The model's sizes.
    """

    def layer(
        params: Any, rows: tuple[jax.Array, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array | None]:
        x, segment_ids = rows
        return block(params, ml.constrain(x, "carry"), segment_ids), segment_ids

    rows, count = (x, segment_ids), config.microbatches
    return ml.parallel.pipeline(layer, params, rows, axis="stage", microbatches=count)[
        0
    ]


def stack_of_blocks(config: TransformerConfig, rngs: nnx.Rngs) -> Block:
    """Returns a block with the parameters of all, each from random keys of its own.

    Not of blocks made before: on a mesh, no device need ever hold the layers of all.
    """

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap
    def create(rngs: nnx.Rngs) -> Block:
        block = Block(config, rngs=rngs)
        block.dropout.rngs = None  # nothing is dropped
        return block

    return create(rngs)


# Since 0.12 Flax wraps lists of modules; before, a plain list held them.
module_list: Callable[[list[Block]], list[Block]] = getattr(nnx, "List", list)


class Transformer(nnx.Module):
    """The language model; it starts in training mode, `model.eval()` ends dropout."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.features, rngs=rngs)
        self.positions = nnx.Embed(config.max_length, config.features, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout_rate, rngs=rngs)
        self.blocks = (
            stack_of_blocks(config, rngs)
            if config.is_scanned
            else module_list(
                [Block(config, rngs=rngs) for _ in range(config.num_layers)]
            )
        )
        self.norm = nnx.LayerNorm(config.features, rngs=rngs)
        self.output = nnx.Linear(
            config.features, config.vocab_size, use_bias=False, rngs=rngs
        )

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Returns logits for the token after each one.

        Args:
            tokens: Shape (batch, length), int32.
            segment_ids: For packed rows, the number of the sequence that each token
                belongs to: shape (batch, length), int32.
            positions: The index of each token in its sequence: shape (batch, length),
                int32, less than `max_length`. By default, tokens are counted from the
                start of their row, packed or not.

        Returns:
            An array of shape (batch, length, vocab_size).

        Raises:
            ValueError: If positions are left out and the rows are longer than
                `max_length`.
        """
        x = self.embed(tokens)
        if positions is None:
            # A slice rather than a lookup: the gradient of a lookup is a scatter, which
            # keeps the compiler from summing microbatches' gradients after the loop.
            length = default_positions(tokens, self.config).shape[1]
            table = self.positions.embedding[...][None, :length]
            x = self.dropout(x + table.astype(x.dtype))
        else:
            x = self.dropout(x + self.positions(positions))
        x = ml.constrain(x, "residual")
        if isinstance(self.blocks, Block):
            graph, params = nnx.split(self.blocks)
            x = run_stack(
                lambda params, *args: nnx.merge(graph, params)(*args),
                *(params, x, segment_ids, self.config),
            )
        else:
            for block in self.blocks:
                x = block(x, segment_ids)
        return self.output(self.norm(x))


class LinenAttention(nn.Module):
    """`Attention` in Linen, with the same parameter paths."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """Returns features of shape (batch, length, features)."""
        features = self.config.features
        query = nn.Dense(features, name="query")(x)
        key = nn.Dense(features, name="key")(x)
        value = nn.Dense(features, name="value")(x)
        read = attend(query, key, value, self.config, segment_ids)
        return nn.Dense(features, name="output")(read)


class LinenMLP(nn.Module):
    """`MLP` in Linen, with the same parameter paths."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns features of shape (batch, length, features)."""
        x = nn.Dense(self.config.mlp_features, name="up")(x)
        return nn.Dense(self.config.features, name="down")(nn.gelu(x))


class LinenBlock(nn.Module):
    """`Block` in Linen, with the same parameter paths."""

    config: TransformerConfig
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """Returns features of shape (batch, length, features)."""
        dropout = nn.Dropout(self.config.dropout_rate, deterministic=not self.train)
        y = nn.LayerNorm(name="attention_norm")(x)
        y = LinenAttention(self.config, name="attention")(y, segment_ids)
        x = ml.constrain(x + dropout(y), "residual")
        y = nn.LayerNorm(name="mlp_norm")(x)
        y = LinenMLP(self.config, name="mlp")(y)
        return ml.constrain(x + dropout(y), "residual")


class LinenBlocks(nn.Module):
    """All blocks, named `0`, `1` and so on."""

    config: TransformerConfig
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """Returns features of shape (batch, length, features)."""
        for layer in range(self.config.num_layers):
            x = LinenBlock(self.config, self.train, name=str(layer))(x, segment_ids)
        return x


class LinenTransformer(nn.Module):
    """`Transformer` in Linen, with the same parameter paths."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        train: bool = False,
    ) -> jax.Array:
        """Returns logits for the token after each one.

        Args:
            tokens: As for `Transformer`.
            segment_ids: As for `Transformer`.
            positions: As for `Transformer`.
            train: Whether to drop features, with keys of the stream `dropout`.

        Returns:
            An array of shape (batch, length, vocab_size).

        Raises:
            ValueError: As for `Transformer`.
        """
        config = self.config
        x = nn.Embed(config.vocab_size, config.features, name="embed")(tokens)
        table = nn.Embed(config.max_length, config.features, name="positions")
        if positions is None:  # as in `Transformer`
            length = default_positions(tokens, config).shape[1]
            x = x + table.embedding[None, :length].astype(x.dtype)
        else:
            x = x + table(positions)
        x = nn.Dropout(config.dropout_rate, deterministic=not train)(x)
        x = ml.constrain(x, "residual")
        if config.is_scanned:
            block = LinenBlock(config, train=False, parent=None)

            def init_stack(key: jax.Array) -> Any:
                keys = jax.random.split(key, config.num_layers)
                return jax.vmap(lambda key: block.init(key, x, None)["params"])(keys)

            x = run_stack(
                lambda params, *args: block.apply({"params": params}, *args),
                *(self.param("blocks", init_stack), x, segment_ids, config),
            )
        else:
            x = LinenBlocks(config, train, name="blocks")(x, segment_ids)
        x = nn.LayerNorm(name="norm")(x)
        return nn.Dense(config.vocab_size, use_bias=False, name="output")(x)


def next_token_losses(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the cross entropy of each token given those before it, in float32.

    The first token of a row is not predicted, and the last predicts nothing. In packed
    rows the first token of a segment should get weight 0 for the same reason.

    Args:
        logits: The model's logits for `tokens`: shape (batch, length, vocab_size).
        tokens: Shape (batch, length), int32.

    Returns:
        An array of shape (batch, length - 1), in nats.

    Examples:
        >>> losses = next_token_losses(jnp.zeros((2, 5, 4)), jnp.ones((2, 5), "int32"))
        >>> losses.shape, round(float(losses[0, 0]), 4)
        ((2, 4), 1.3863)
    """
    logits = logits.astype("float32")
    # A mask rather than a lookup, and cut at the end: over a sharded vocabulary this is
    # two sums, and the whole is short enough for XLA to gather the weights of the last
    # MLP once for both passes (`benchmarks/results/parallel.md`).
    shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    labels = jnp.roll(tokens, -1, axis=1)
    is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
    label_logits = jnp.where(is_label, shifted, 0).sum(-1)
    return (jnp.log(jnp.exp(shifted).sum(-1)) - label_logits)[:, :-1]


# Every device holds all parameters; only the batch is sharded.
DATA_PARALLEL = {}

# Heads and hidden features are sharded over `model`: the first matrices by columns, the
# second by rows, so that each half of a block sends one all-reduce. The embedding is
# sharded over the vocabulary, for one more all-reduce that leaves each token's features
# whole; sharded over the features, every normalization would communicate. The logits
# stay sharded.
MODEL_PARALLEL = {
    r"(query|key|value|up)/kernel": (None, "model"),
    r"(query|key|value|up)/bias": ("model",),
    r"(attention/output|down)/kernel": ("model", None),
    r"embed/embedding": ("model", None),
    r"^output/kernel": (None, "model"),
}

# The matrices are sharded over the axis that also shards the batch. A few numbers per
# feature stay whole: biases, and those of the normalization.
FSDP = {
    r"kernel": ("batch", None),
    r"embedding": ("batch", None),
}

# Both: where one of them leaves a dim of a matrix whole, the other shards it.
FSDP_MODEL_PARALLEL = {
    r"(query|key|value|up)/kernel": ("batch", "model"),
    r"(query|key|value|up)/bias": ("model",),
    r"(attention/output|down)/kernel": ("model", "batch"),
    r"embed/embedding": (("batch", "model"), None),
    r"positions/embedding": ("batch", None),
    r"^output/kernel": ("batch", "model"),
}

# Long sequences: the tokens of each row are sharded over `seq`, for a config whose
# attention is `ml.parallel.ring_attention`; batches in `mesh.layout("batch", "seq")`,
# the matrices over both axes. Give this map to the step, too.
FSDP_CONTEXT = {
    r"kernel": (("batch", "seq"), None),
    r"embedding": (("batch", "seq"), None),
    r"^residual$": ("batch", "seq", None),
}
