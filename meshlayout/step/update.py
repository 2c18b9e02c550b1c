"""From gradients to the next state: clipping, optimizer, averages, skipped steps.

A step that is not finite is known only when it has run, and waiting for it would stall
the host. So the program itself keeps the old state where asked to.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

from meshlayout import _jax
from meshlayout._annotations import Leaf, PyTree
from meshlayout.state import TrainState
from meshlayout.step.gradients import Gradients, select


OnNonfinite: TypeAlias = Literal["skip", "ignore"]

# Names in `TrainState.extra`.
EMA = "ema"
SKIPPED = "skipped"
LOSS_SCALE = "loss_scale"


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

    @property
    def may_skip(self) -> bool:
        """Whether a step may leave the state as it was."""
        return self.on_nonfinite == "skip" or self.has_loss_scale

    @property
    def names(self) -> frozenset[str]:
        """The names of the extra arrays that the state must have."""
        is_needed = {
            EMA: self.ema is not None,
            SKIPPED: self.may_skip,
            LOSS_SCALE: self.has_loss_scale,
        }
        return frozenset(name for name, needed in is_needed.items() if needed)

    def prepared(self, state: TrainState) -> TrainState:
        """Returns the state with the extra arrays that this update needs in it."""
        if self.names <= state.extra.keys():
            return state

        def scalar(value: Any) -> Any:
            if isinstance(state.step, jax.ShapeDtypeStruct):  # an abstract state
                return state.step.update(dtype=value.dtype)
            return _jax.put(value, state.step.sharding)

        makers = {
            EMA: lambda: jax.tree.map(_average, state.params),
            SKIPPED: lambda: scalar(jnp.int32(0)),
            LOSS_SCALE: lambda: jax.tree.map(
                scalar,
                DynamicScale(
                    fin_steps=jnp.int32(0),
                    scale=jnp.float32(2**15),
                    minimum_scale=1.0,
                ),
            ),
        }
        missing = sorted(self.names - state.extra.keys())
        extra = {name: makers[name]() for name in missing}
        return state.replace(extra={**state.extra, **extra})

    def scale(self, state: TrainState) -> Any:
        """Returns the factor of the loss, or None."""
        return state.extra[LOSS_SCALE].scale if self.has_loss_scale else None

    def apply(
        self, state: TrainState, gradients: Gradients
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Returns the next state, and notes about the update, by name.

        Args:
            state: The state before.
            gradients: The gradients, times the loss scale if there is one.
        """
        grads, losses, notes = gradients.grads, list(gradients.parts.values()), {}
        if self.has_loss_scale:
            scale = notes["loss_scale"] = self.scale(state)
            grads = jax.tree.map(lambda g: (g / scale).astype(g.dtype), grads)
        arrays = (*losses, *jax.tree.leaves(grads))
        if self.clip_norm is not None:
            notes["grad_norm"] = optax.tree.norm(grads)
            clip = optax.clip_by_global_norm(self.clip_norm)
            grads, _ = clip.update(grads, clip.init(state.params))
        state = in_device_memory(state)
        tx = optax.with_extra_args_support(state.tx)
        updates, opt_state = tx.update(
            grads, state.opt_state, state.params, value=sum(losses)
        )
        params = optax.apply_updates(state.params, updates)
        extra = dict(state.extra)
        if self.ema is not None:
            latest = jax.tree.map(lambda x, a: x.astype(a.dtype), params, extra[EMA])
            extra[EMA] = optax.incremental_update(latest, extra[EMA], 1 - self.ema)
        new = state.replace(
            params=params,
            opt_state=opt_state,
            model_state=gradients.model_state,
            step=state.step + 1,
            extra=extra,
        )
        if self.may_skip:
            is_finite = jnp.stack([jnp.isfinite(x).all() for x in arrays]).all()
            new = self._unless(is_finite, state, new)
            notes["skipped"] = 1 - is_finite.astype("float32")
        rate = learning_rate(new.opt_state)
        return new, notes if rate is None else {"learning_rate": rate, **notes}

    def _unless(
        self, is_finite: jax.Array, old: TrainState, new: TrainState
    ) -> TrainState:
        """Returns the new state if the step was finite, and else the old one."""
        state = select(is_finite, new, old)
        extra = dict(state.extra)
        extra[SKIPPED] = old.extra[SKIPPED] + (1 - is_finite.astype("int32"))
        if self.has_loss_scale:
            # Flax changes a scale with a gradient, here one that is finite as the
            # step's are: those have been added up over microbatches.
            like_grads = old.extra[LOSS_SCALE].value_and_grad(
                lambda x: x * jnp.where(is_finite, 1.0, jnp.inf)
            )
            extra[LOSS_SCALE] = like_grads(jnp.float32(1)).dynamic_scale
        return state.replace(extra=extra)


def in_device_memory(state: TrainState) -> TrainState:
    """Returns a state, inside jit, with its optimizer state on the device.

    Between steps that may be in the host's memory, to which jit moves the new one.
    """
    opt_state = jax.tree.map(_jax.in_device_memory, state.opt_state)
    return state.replace(opt_state=opt_state)


def _average(param: Leaf) -> Any:
    """Returns the initial average of a parameter; in float32, or small steps vanish."""
    dtype = jnp.promote_types(param.dtype, "float32")
    if isinstance(param, jax.ShapeDtypeStruct):
        return param.update(dtype=dtype)
    return jnp.array(param, dtype)  # a copy: the parameter is donated


def learning_rate(opt_state: optax.OptState) -> Any:
    """Returns the learning rate that an optimizer's state shows, or None.

    `optax.inject_hyperparams` keeps it there, also for a schedule.
    """
    for node in jax.tree.leaves(opt_state, is_leaf=_has_hyperparams):
        if _has_hyperparams(node) and "learning_rate" in node.hyperparams:
            return node.hyperparams["learning_rate"]
    return None


def _has_hyperparams(node: PyTree) -> bool:
    return hasattr(node, "hyperparams") and hasattr(node, "inner_state")
