"""From gradients to the next state: clipping, optimizer, averages, skipped steps.

A step that is not finite is known only when it has run, and waiting for it would stall
the host. So the program itself keeps the old state where asked to.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale

from meshlayout import _jax
from meshlayout._annotations import Leaf, PyTree
from meshlayout.state import TrainState
from meshlayout.step.gradients import Gradients, select


OnNonfinite: TypeAlias = Literal["skip", "ignore"]

# Names in `TrainState.extra`, and what is there at first.
EMA, SKIPPED, LOSS_SCALE = "ema", "skipped", "loss_scale"
_COUNT = np.int32(0)
_SCALE = DynamicScale(
    fin_steps=np.int32(0),  # pyright: ignore[reportArgumentType]
    scale=np.float32(2**15),  # pyright: ignore[reportArgumentType]
    minimum_scale=1.0,
)


@dataclass(frozen=True)
class Update:
    """How gradients change the state."""

    clip_norm: float | None
    on_nonfinite: OnNonfinite
    ema: float | None
    has_loss_scale: bool

    def prepared(self, state: TrainState) -> TrainState:
        """Returns the state with the extra arrays that this update needs in it."""
        starts: dict[str, Any] = {}
        if self.ema is not None:
            starts[EMA] = state.params
        if self._may_skip:
            starts[SKIPPED] = _COUNT
        if self.has_loss_scale:
            starts[LOSS_SCALE] = _SCALE
        missing = {name: x for name, x in starts.items() if name not in state.extra}
        if not missing:
            return state

        def scalar(value: Leaf) -> Any:
            if isinstance(state.step, jax.ShapeDtypeStruct):  # an abstract state
                return state.step.update(dtype=value.dtype)
            return _jax.put(value, state.step.sharding)

        extra = {
            name: jax.tree.map(_average if name == EMA else scalar, start)
            for name, start in missing.items()
        }
        return state.replace(extra={**state.extra, **extra})

    @property
    def _may_skip(self) -> bool:
        return self.on_nonfinite == "skip" or self.has_loss_scale

    def scale(self, state: TrainState) -> Any:
        """Returns the factor of the loss, or None."""
        return state.extra[LOSS_SCALE].scale if self.has_loss_scale else None

    def apply(
        self, state: TrainState, gradients: Gradients
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Returns the next state, and notes about the update, by name."""
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
        if self._may_skip:
            is_finite = jnp.stack([jnp.isfinite(x).all() for x in arrays]).all()
            new = self._unless(is_finite, state, new)
            notes["skipped"] = 1 - is_finite.astype("float32")
        nodes = jax.tree.leaves(new.opt_state, is_leaf=_has_rate)
        rates = [x.hyperparams["learning_rate"] for x in nodes if _has_rate(x)]
        return new, {**({"learning_rate": rates[0]} if rates else {}), **notes}

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


def _has_rate(node: PyTree) -> bool:
    # `optax.inject_hyperparams` keeps it there, also for a schedule.
    return "learning_rate" in (getattr(node, "hyperparams", None) or ())
