"""A decoder-only language model of experts in NNX and in Linen.

The `Transformer` with a mixture of experts in place of each MLP: a router sends every
token to the `choices` experts of the highest probability, and adds what they return,
weighted. Without a `capacity_factor` no token is dropped, however many an expert gets;
with it, each expert takes at most that many tokens of a sequence.

Both variants are written for one device, where `ml.parallel.dispatch` only sorts tokens
by expert. On a mesh with the axis `expert`, over which the layouts at the foot of this
file spread the experts, it sends tokens to them and back.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import meshlayout as ml
from models.transformer import (
    Attention,
    LinenAttention,
    TransformerConfig,
    default_positions,
    module_list,
    next_token_losses,
)


@dataclass(frozen=True)
class MoEConfig(TransformerConfig):
    """The sizes of a `MoE`; `mlp_features` are those of one expert.

    Attributes:
        num_experts: Experts in each block.
        choices: How many of them each token is sent to.
        capacity_factor: The capacity of an expert, as a multiple of its even share of a
            sequence's tokens; None for no limit.
        balance_weight: The factor of the loss for an uneven load.
        z_weight: The factor of the loss for large router logits.
        expert_axis: The mesh axis that shards experts, if the mesh has it.
    """

    num_experts: int = 8
    choices: int = 2
    capacity_factor: float | None = None
    balance_weight: float = 1e-2
    z_weight: float = 1e-3
    expert_axis: str = "expert"

    def __post_init__(self) -> None:
        super().__post_init__()
        problem = ""
        if not 1 <= self.choices <= self.num_experts:
            problem = f"a token is sent to 1 to num_experts={self.num_experts} experts"
            problem = f"choices={self.choices}: {problem}"
        elif self.is_scanned or self.dropout_rate:
            problem = (
                "is_scanned and dropout_rate are of the Transformer; experts have "
            )
            problem += "neither: leave them out"
        elif not (self.capacity_factor is None or 0 < self.capacity_factor < math.inf):
            problem = f"capacity_factor={self.capacity_factor}: it is positive, or None"
        if problem:
            raise ValueError(f"{problem}.")

    def capacity(self, length: int) -> int | None:
        """Returns how many of so many tokens an expert takes; None for all.

        Examples:
            >>> MoEConfig(num_experts=8, choices=2, capacity_factor=1.5).capacity(16)
            6
        """
        factor = self.capacity_factor
        share = self.choices * length / self.num_experts
        return None if factor is None else math.ceil(factor * share)

    @property
    def expert_shapes(self) -> dict[str, tuple[int, int, int]]:
        """The shapes of the experts' matrices, stacked."""
        count, features, hidden = self.num_experts, self.features, self.mlp_features
        return {"up": (count, features, hidden), "down": (count, hidden, features)}


class Routing(NamedTuple):
    """How many tokens each router sent where.

    Attributes:
        load: Those of each sequence to each expert, int32 (batch, layers, experts).
        dropped: The share of them that was dropped, (batch, layers).
    """

    load: jax.Array
    dropped: jax.Array


def choose(logits: jax.Array, choices: int) -> tuple[jax.Array, jax.Array]:
    """Returns the weights of each token's experts, and their numbers.

    Those of several experts add up to 1 (GShard, Lepikhin et al. 2020); a single one
    has its probability, from which the router learns (Switch Transformer, Fedus et al.
    2021).

    For logits of shape (..., num_experts), float32 and int32 of shape (..., choices).

    Examples:
        >>> weights, experts = choose(jnp.log(jnp.array([0.2, 0.5, 0.3])), 2)
        >>> weights.tolist(), experts.tolist()
        ([0.625, 0.375], [1, 2])
    """
    probabilities = jax.nn.softmax(logits.astype("float32"))
    # Not `lax.top_k`, for which the compiler for CPUs gathers all tokens.
    experts = jnp.argsort(-probabilities)[..., :choices].astype("int32")
    is_choice = jax.nn.one_hot(experts, logits.shape[-1])
    weights = (is_choice * probabilities[..., None, :]).sum(-1)
    if choices > 1:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights, experts


def balance_losses(logits: jax.Array, experts: jax.Array) -> jax.Array:
    """Returns for each sequence how unevenly its tokens are spread; 1 if evenly.

    The number of experts times the sum over them of the share of tokens whose first
    choice each is, times its mean probability: equation 4 of the Switch Transformer,
    with the sequences as groups (GShard, algorithm 1).

    For logits of shape (batch, length, num_experts) and experts of shape (batch,
    length, choices), float32 of shape (batch,).

    Examples:
        >>> logits = 9 * jax.nn.one_hot(jnp.array([[0, 1, 2, 3], [0, 0, 0, 0]]), 4)
        >>> balance_losses(logits, choose(logits, 1)[1]).round(2).tolist()
        [1.0, 4.0]
    """
    num_experts = logits.shape[-1]
    shares = jax.nn.one_hot(experts[..., 0], num_experts).mean(1)
    means = jax.nn.softmax(logits.astype("float32")).mean(1)
    return num_experts * (shares * means).sum(-1)


def z_losses(logits: jax.Array) -> jax.Array:
    """Returns the router z-loss of each token, which keeps its logits small.

    The square of the logarithm of the sum of their exponentials: equation 5 of ST-MoE
    (Zoph et al. 2022).

    Examples:
        >>> f"{z_losses(jnp.zeros(4)):.4f}"
        '1.9218'
    """
    return jnp.square(jax.nn.logsumexp(logits.astype("float32"), axis=-1))


def apply_experts(
    params: Mapping[str, jax.Array], rows: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """Returns the outputs of experts for the rows of each.

    Those of one expert after those of another, shape (n, features), as `group_sizes`
    counts them, int32 of shape (experts,).
    """
    hidden = jax.lax.ragged_dot(rows, params["up"].astype(rows.dtype), group_sizes)
    down = params["down"].astype(rows.dtype)
    return jax.lax.ragged_dot(jax.nn.gelu(hidden), down, group_sizes)


def mix(
    config: MoEConfig,
    module: nnx.Module | nn.Module,
    x: jax.Array,
    logits: jax.Array,
    params: Mapping[str, jax.Array],
) -> tuple[jax.Array, Routing]:
    """Returns the mixture for tokens (batch, length, features); records two losses."""
    weights, experts = choose(logits, config.choices)
    balance = config.balance_weight * balance_losses(logits, experts)
    ml.losses.record(module, "balance", balance)
    ml.losses.record(module, "router_z", config.z_weight * z_losses(logits))
    capacity = config.capacity(x.shape[1])
    options: dict[str, Any] = {"axis": config.expert_axis, "capacity": capacity}
    y = ml.parallel.dispatch(x, experts, weights, apply_experts, params, **options)
    load = jax.nn.one_hot(experts, config.num_experts, dtype="int32").sum((1, 2))
    excess = 0 * load if capacity is None else jnp.maximum(load - capacity, 0)
    return y, Routing(load, excess.sum(-1) / (config.choices * x.shape[1]))


def join(routings: list[Routing]) -> Routing:
    """Returns the routing of all layers."""
    return Routing(*(jnp.stack(parts, axis=1) for parts in zip(*routings, strict=True)))


# Each expert's matrices have the scale of a dense layer's.
INITIALIZER = jax.nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)


class ExpertBlock(nnx.Module):
    """Attention and experts, each after layer normalization and added to its input."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.attention_norm = nnx.LayerNorm(config.features, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.experts_norm = nnx.LayerNorm(config.features, rngs=rngs)
        self.router = nnx.Linear(
            config.features, config.num_experts, use_bias=False, rngs=rngs
        )
        shapes = config.expert_shapes
        self.up = nnx.Param(INITIALIZER(rngs.params(), shapes["up"]))
        self.down = nnx.Param(INITIALIZER(rngs.params(), shapes["down"]))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:
        """Returns features of shape (batch, length, features), and the routing."""
        x = x + self.attention(self.attention_norm(x), None)
        y = self.experts_norm(x)
        params = {"up": self.up[...], "down": self.down[...]}
        y, routing = mix(self.config, self, y, self.router(y), params)
        return x + y, routing


class MoE(nnx.Module):
    """The language model of experts."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.features, rngs=rngs)
        self.positions = nnx.Embed(config.max_length, config.features, rngs=rngs)
        blocks: Any = [ExpertBlock(config, rngs=rngs) for _ in range(config.num_layers)]
        self.blocks = module_list(blocks)
        self.norm = nnx.LayerNorm(config.features, rngs=rngs)
        self.output = nnx.Linear(
            config.features, config.vocab_size, use_bias=False, rngs=rngs
        )

    def __call__(self, tokens: jax.Array, *, with_routing: bool = False) -> Any:
        """Returns logits for the token after each one.

        Args:
            tokens: Shape (batch, length), int32.
            with_routing: Whether to return a pair of logits and `Routing`.

        Returns:
            An array of shape (batch, length, vocab_size).
        """
        x = self.embed(tokens)
        length = default_positions(tokens, self.config).shape[1]
        x = x + self.positions.embedding[...][None, :length].astype(x.dtype)
        routings: list[Routing] = []
        blocks: Any = self.blocks
        for block in blocks:
            x, routing = block(x)
            routings.append(routing)
        logits = self.output(self.norm(x))
        return (logits, join(routings)) if with_routing else logits


class LinenExpertBlock(nn.Module):
    """`ExpertBlock` in Linen, with the same parameter paths."""

    config: MoEConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:
        """Returns features of shape (batch, length, features), and the routing."""
        y = nn.LayerNorm(name="attention_norm")(x)
        x = x + LinenAttention(self.config, name="attention")(y, None)
        y = nn.LayerNorm(name="experts_norm")(x)
        router = nn.Dense(self.config.num_experts, use_bias=False, name="router")
        shapes = self.config.expert_shapes.items()
        params = {name: self.param(name, INITIALIZER, shape) for name, shape in shapes}
        y, routing = mix(self.config, self, y, router(y), params)
        return x + y, routing


class LinenExpertBlocks(nn.Module):
    """All blocks, named `0`, `1` and so on."""

    config: MoEConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:
        """Returns features of shape (batch, length, features), and the routing."""
        routings: list[Routing] = []
        for layer in range(self.config.num_layers):
            x, routing = LinenExpertBlock(self.config, name=str(layer))(x)
            routings.append(routing)
        return x, join(routings)


class LinenMoE(nn.Module):
    """`MoE` in Linen, with the same parameter paths."""

    config: MoEConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, *, with_routing: bool = False) -> Any:
        """Returns logits of shape (batch, length, vocab_size), as `MoE` does."""
        config = self.config
        x = nn.Embed(config.vocab_size, config.features, name="embed")(tokens)
        table = nn.Embed(config.max_length, config.features, name="positions").embedding
        length = default_positions(tokens, config).shape[1]
        x = x + table[None, :length].astype(x.dtype)
        x, routing = LinenExpertBlocks(config, name="blocks")(x)
        x = nn.LayerNorm(name="norm")(x)
        logits = nn.Dense(config.vocab_size, use_bias=False, name="output")(x)
        return (logits, routing) if with_routing else logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Load:
    """A metric: the share of all tokens that was sent to each expert of each layer.

    Padding, of weight 0, does not count. Its value has the shape (layers, num_experts).

    Examples:
        >>> load = Load(1, 2).from_model_output(jnp.array([[[3, 1]], [[0, 4]]]))
        >>> load.compute().tolist()
        [[0.375, 0.625]]
    """

    num_layers: int = field(metadata={"static": True})
    num_experts: int = field(metadata={"static": True})
    counts: Any = 0.0

    def empty(self) -> "Load":
        """Returns the metric of no tokens."""
        return replace(self, counts=jnp.zeros((self.num_layers, self.num_experts)))

    def from_model_output(
        self, load: jax.Array, weights: jax.Array | None = None
    ) -> "Load":
        """Returns the metric of one batch, whose sequences may have weights."""
        weights = jnp.ones(len(load)) if weights is None else weights
        return replace(self, counts=jnp.einsum("b,ble->le", weights, load * 1.0))

    def merge(self, other: "Load") -> "Load":
        """Returns the metric of all tokens that both counted."""
        return replace(self, counts=self.counts + other.counts)

    def compute(self) -> jax.Array:
        """Returns the shares; even ones are 1 / num_experts."""
        return self.counts / self.counts.sum(-1, keepdims=True)


def metrics(config: MoEConfig) -> dict[str, Any]:
    """Returns the metrics of `token_loss` on a model: its load, and what it drops."""
    load = Load(config.num_layers, config.num_experts)
    return {"load": load, "dropped": ml.metrics.Mean("dropped")}


def token_loss(
    model: Callable[..., Any], batch: Mapping[str, Any]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss function of the model; its outputs are what `metrics` read."""
    logits, routing = model(batch["tokens"], with_routing=True)
    outputs = {"logits": logits[:, :-1], "label": batch["tokens"][:, 1:]}
    return next_token_losses(logits, batch["tokens"]), outputs | routing._asdict()


# Each device has some of the experts; `ml.parallel.expert_parallel` says the same.
EXPERT_PARALLEL = {r"/(up|down)$": ("expert", None, None)}
