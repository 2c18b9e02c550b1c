"""From gradients to the next state: clipping, optimizer, averages, skipped steps.

A step that is not finite is known only when it has run, and waiting for it would stall
the host. So the program itself keeps the old state where asked to.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax

from meshlayout import _jax
from meshlayout._annotations import PyTree
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.state.precision import LossScale


OnNonfinite: TypeAlias = Literal["skip", "ignore"]

# Names in `TrainState.extra`.
EMA = "ema"
SKIPPED = "skipped"
LOSS_SCALE = "loss_scale"


@dataclass(frozen=True)
class Gradients:
    """The gradients of one global batch, and what else was computed with them.

    Attributes:
        grads: The gradients, in the structure of the parameters.
        parts: The objective's parts by name, scalars; their sum is the loss.
        model_state: The model's other arrays, after.
        metrics: The metrics, with this batch added.
    """

    grads: PyTree
    parts: dict[str, jax.Array]
    model_state: PyTree
    metrics: Metrics


@dataclass(frozen=True)
class Update:
    """How gradients change the state.

    Attributes:
        clip_norm: The largest global norm of the gradients; None for any.
        on_nonfinite: What happens to a step whose loss or gradients are not finite.
        ema: The decay of the parameters' moving average; None for none.
        has_loss_scale: Whether the loss is scaled, and the step skipped on overflow.
    """

    clip_norm: float | None
    on_nonfinite: OnNonfinite
    ema: float | None
    has_loss_scale: bool

    def names(self) -> tuple[str, ...]:
        """Returns the names of the extra arrays that the state must have."""
        is_needed = {
            EMA: self.ema is not None,
            SKIPPED: self.may_skip,
            LOSS_SCALE: self.has_loss_scale,
        }
        return tuple(name for name, needed in is_needed.items() if needed)

    @property
    def may_skip(self) -> bool:
        """Whether a step may leave the state as it was."""
        return self.on_nonfinite != "ignore" or self.has_loss_scale

    def extra(self, state: TrainState) -> dict[str, Any]:
        """Returns the initial extra arrays of a state; abstract if the state is.

        Those of the parameters' shapes are where the parameters are; the others are
        not placed yet.
        """

        def extra(params: PyTree) -> dict[str, Any]:
            makers = {
                EMA: lambda: jax.tree.map(_average, params),
                SKIPPED: lambda: jnp.int32(0),
                LOSS_SCALE: LossScale.create,
            }
            return {name: makers[name]() for name in self.names()}

        if not isinstance(state.step, jax.ShapeDtypeStruct):
            return extra(state.params)
        abstract = jax.eval_shape(extra, state.params)
        if EMA in abstract:
            abstract[EMA] = jax.tree.map(
                lambda average, param: average.update(sharding=param.sharding),
                abstract[EMA],
                state.params,
            )
        return abstract

    def scale(self, state: TrainState) -> Any:
        """Returns the factor of the loss, or None."""
        return state.extra[LOSS_SCALE].scale if self.has_loss_scale else None

    def apply(
        self, state: TrainState, gradients: Gradients
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Returns the next state, and notes about the gradients.

        Args:
            state: The state before.
            gradients: The gradients, times the loss scale if there is one.
        """
        grads, notes = gradients.grads, {}
        losses = list(gradients.parts.values())
        if self.has_loss_scale:
            scale = self.scale(state)
            grads = jax.tree.map(lambda g: (g / scale).astype(g.dtype), grads)
            notes["loss_scale"] = scale
        is_finite = None
        if self.may_skip:
            arrays = (*losses, *jax.tree.leaves(grads))
            is_finite = jnp.stack([jnp.isfinite(x).all() for x in arrays]).all()
        if self.clip_norm is not None:
            leaves = jax.tree.leaves(grads)
            squares = [jnp.square(g.astype("float32")).sum() for g in leaves]
            notes["grad_norm"] = jnp.sqrt(jnp.stack(squares).sum())
            # At most 1: smaller gradients stay exactly as they are.
            factor = self.clip_norm / jnp.maximum(notes["grad_norm"], self.clip_norm)
            grads = jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)
        state = in_device_memory(state)
        new = self._updated(state, grads, sum(losses))
        new = new.replace(model_state=gradients.model_state)
        if is_finite is not None:
            new = self._unless(is_finite, state, new)
            notes["skipped"] = 1 - is_finite.astype("float32")
        return new, notes

    def _updated(self, state: TrainState, grads: PyTree, value: Any) -> TrainState:
        """Returns the state after the optimizer's update, which may read the loss."""
        tx = optax.with_extra_args_support(state.tx)
        updates, opt_state = tx.update(
            grads, state.opt_state, state.params, value=value
        )
        params = optax.apply_updates(state.params, updates)
        extra = dict(state.extra)
        if (decay := self.ema) is not None:
            extra[EMA] = jax.tree.map(
                lambda old, new: (decay * old + (1 - decay) * new).astype(old.dtype),
                extra[EMA],
                params,
            )
        return state.replace(
            params=params, opt_state=opt_state, step=state.step + 1, extra=extra
        )

    def _unless(
        self, is_finite: jax.Array, old: TrainState, new: TrainState
    ) -> TrainState:
        """Returns the new state if the step was finite, and else the old one."""
        state = select(is_finite, new, old)
        extra = dict(state.extra)
        extra[SKIPPED] = old.extra[SKIPPED] + (1 - is_finite.astype("int32"))
        if self.has_loss_scale:
            extra[LOSS_SCALE] = old.extra[LOSS_SCALE].after(is_finite)
        return state.replace(extra=extra)


def in_device_memory(state: TrainState) -> TrainState:
    """Returns a state, inside jit, with its optimizer state on the device.

    Between steps that may be in the host's memory, to which jit moves the new one.
    """
    opt_state = jax.tree.map(_jax.in_device_memory, state.opt_state)
    return state.replace(opt_state=opt_state)


def _average(param: jax.Array) -> jax.Array:
    """Returns the initial average of a parameter; in float32, or small steps vanish."""
    if jnp.issubdtype(param.dtype, jnp.floating):
        return jnp.array(param, jnp.promote_types(param.dtype, "float32"))
    return jnp.copy(param)


def learning_rate(opt_state: optax.OptState) -> Any:
    """Returns the learning rate that an optimizer's state shows, or None.

    `optax.inject_hyperparams` keeps it there, also for a schedule.
    """
    for node in jax.tree.leaves(opt_state, is_leaf=_has_hyperparams):
        if _has_hyperparams(node) and "learning_rate" in node.hyperparams:
            return node.hyperparams["learning_rate"]
    return None


def _has_hyperparams(node: Any) -> bool:
    return hasattr(node, "hyperparams") and hasattr(node, "inner_state")


def is_float(leaf: jax.Array) -> bool:
    """Returns whether an array has gradients."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def select(condition: jax.Array, ours: PyTree, theirs: PyTree) -> PyTree:
    """Returns one of two trees; leaves that are the same object stay unchanged."""
    return jax.tree.map(
        lambda a, b: a if a is b else jnp.where(condition, a, b), ours, theirs
    )
