"""From gradients to the next state: clipping, optimizer, averages, skipped steps.

A step that is not finite is known only when it has run, and waiting for it would stall
the host. So the program itself keeps the old state where asked to, and reports what
was not finite; the reports are read later, when they are there.
"""

import itertools
import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshlayout import _jax, _paths, _render
from meshlayout._annotations import PyTree
from meshlayout.errors import StepError
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.state.precision import LossScale


OnNonfinite: TypeAlias = Literal["error", "skip", "ignore"]

# Names in `TrainState.extra`.
EMA = "ema"
SKIPPED = "skipped"
LOSS_SCALE = "loss_scale"

# What Python says of an optimizer that a step cannot call, and what to say instead.
# Should another library change its words, users see them; test_step_inputs.py notices.
_REFUSALS = (
    (
        r"missing \d+ required keyword-only arguments?: (.*)",
        "the optimizer's update needs {}: a step passes value=, the loss, and nothing "
        "else besides gradients and parameters. A line search, which calls the loss "
        "again, cannot run inside a step; give a learning rate instead, as "
        "optax.lbfgs(learning_rate=0.1, linesearch=None).",
    ),
    (
        "unexpected keyword argument 'value'",
        "the optimizer's update refuses value=, the loss, which a step passes. "
        "optax.contrib.sam, which computes gradients at several points for one "
        "update, cannot run inside a step; write one with ml.compile_step.",
    ),
    (
        "no attribute 'fast'",
        "optax.lookahead keeps two copies of the parameters, as "
        "optax.LookaheadParams, and a model has one. It cannot run inside a step; "
        "write one with ml.compile_step, or average with make_train_step(ema=).",
    ),
)


@dataclass(frozen=True)
class Gradients:
    """The gradients of one global batch, and what else was computed with them.

    Attributes:
        grads: The leaves of the trained parameters.
        parts: The objective's parts by name, scalars; their sum is the loss.
        model_state: The model's other arrays, after.
        metrics: The metrics, with this batch added.
    """

    grads: list[jax.Array]
    parts: dict[str, jax.Array]
    model_state: PyTree
    metrics: Metrics


class Trainable:
    """Which parameters a step trains.

    Args:
        params: All parameters.
        matches: Returns whether the parameter of a path is trained.
    """

    def __init__(self, params: PyTree, matches: Callable[[str], bool]) -> None:
        leaves = _paths.flatten(params).leaves
        self._treedef = jax.tree.structure(params)
        self.mask = [matches(leaf.path) for leaf in leaves]
        self.paths = [leaf.path for leaf in self.chosen(leaves)]
        for leaf in self.chosen(leaves):
            if not is_float(leaf.value):
                text = _render.array_text(leaf.value.dtype, leaf.value.shape)
                msg = (
                    f"the parameter {leaf.path} {text} cannot be trained: there is no "
                    "gradient for integers. Make it another kind of variable than "
                    "nnx.Param, or leave it out with trainable=."
                )
                raise StepError(msg)

    def chosen(self, leaves: Iterable[Any]) -> list[Any]:
        """Returns those of all leaves that are trained."""
        return list(itertools.compress(leaves, self.mask))

    def filled(self, chosen: Iterable[Any], others: PyTree) -> PyTree:
        """Returns a tree of the trained leaves, with the other leaves of `others`."""
        new = iter(chosen)
        pairs = zip(jax.tree.leaves(others), self.mask, strict=True)
        return self._treedef.unflatten(
            [next(new) if is_trained else x for x, is_trained in pairs]
        )


@dataclass(frozen=True)
class Update:
    """How gradients change the state.

    Attributes:
        clip_norm: The largest global norm of the gradients; None for any.
        on_nonfinite: What happens to a step whose loss or gradients are not finite.
        ema: The decay of the parameters' moving average; None for none.
        has_loss_scale: Whether the loss is scaled, and the step skipped on overflow.
        trainable: A regular expression for the paths that are trained; None for all.
    """

    clip_norm: float | None
    on_nonfinite: OnNonfinite
    ema: float | None
    has_loss_scale: bool
    trainable: str | None

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

    def trainable_in(self, params: PyTree) -> Trainable:
        """Returns which parameters are trained.

        Raises:
            StepError: If none is.
        """
        pattern = re.compile(self.trainable or "")
        trainable = Trainable(params, lambda path: bool(pattern.search(path)))
        if self.trainable is not None and not trainable.paths:
            paths = [leaf.path for leaf in _paths.flatten(params).leaves]
            msg = (
                f"trainable={self.trainable!r} matches no parameter; there are "
                f"{', '.join(map(repr, paths[:4]))}{', ...' if paths[4:] else ''}."
            )
            raise StepError(msg)
        return trainable

    def scale(self, state: TrainState) -> Any:
        """Returns the factor of the loss, or None."""
        return state.extra[LOSS_SCALE].scale if self.has_loss_scale else None

    def apply(
        self, state: TrainState, trainable: Trainable, gradients: Gradients
    ) -> tuple[TrainState, dict[str, jax.Array], jax.Array | None]:
        """Returns the next state, notes about the gradients, and a report.

        The report is for `on_nonfinite="error"`: the step's number, the number of the
        first part or gradient that is not finite, and whether there is one.

        Args:
            state: The state before.
            trainable: The parameters that the gradients are for.
            gradients: The gradients, times the loss scale if there is one.
        """
        grads, notes = gradients.grads, {}
        losses = list(gradients.parts.values())
        if self.has_loss_scale:
            scale = self.scale(state)
            grads = [(g / scale).astype(g.dtype) for g in grads]
            notes["loss_scale"] = scale
        is_finite, report, is_lost = None, None, None
        if self.may_skip:
            finite = jnp.stack([jnp.isfinite(x).all() for x in (*losses, *grads)])
            is_finite = finite.all()
            if self.on_nonfinite == "error":
                if self.has_loss_scale:
                    # It recovers from gradients that overflow: they are not an error.
                    finite = finite[: len(losses)]
                    is_lost = ~finite.all()
                # argmin finds the first False.
                report = jnp.stack([state.step, jnp.argmin(finite), ~finite.all()])
        if self.clip_norm is not None:
            norm = _global_norm(grads)
            # At most 1: smaller gradients stay exactly as they are.
            factor = self.clip_norm / jnp.maximum(norm, self.clip_norm)
            grads = [(g * factor).astype(g.dtype) for g in grads]
            notes["grad_norm"] = norm
        state = in_device_memory(state)
        new = self._updated(state, trainable, grads, sum(losses))
        new = new.replace(model_state=gradients.model_state)
        if is_finite is not None:
            new = self._unless(is_finite, state, new)
            notes["skipped"] = 1 - is_finite.astype("float32")
        if is_lost is not None:
            notes["nonfinite_loss"] = is_lost.astype("float32")
        return new, notes, report

    def _updated(
        self, state: TrainState, trainable: Trainable, grads: list[Any], value: Any
    ) -> TrainState:
        """Returns the state after the optimizer's update of what is trained."""
        # The optimizer was initialized with all parameters, and wants all gradients.
        others = state.params
        if not all(trainable.mask):
            others = jax.tree.map(jnp.zeros_like, others)
        updates, opt_state = _optimized(state, trainable.filled(grads, others), value)
        params = optax.apply_updates(state.params, updates)
        # The optimizer has moved the others, too, by weight decay and momentum.
        trained = trainable.chosen(jax.tree.leaves(params))
        params = trainable.filled(trained, state.params)
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


def _optimized(state: TrainState, grads: PyTree, value: Any) -> tuple[PyTree, PyTree]:
    """Returns an optimizer's updates and next state.

    Args:
        state: The state before.
        grads: The gradients.
        value: The loss, for the optimizers that take it.

    Raises:
        StepError: If the optimizer needs more than that, or has another state.
    """
    tx = optax.with_extra_args_support(state.tx)
    try:
        return tx.update(grads, state.opt_state, state.params, value=value)
    except (AttributeError, TypeError, ValueError) as error:
        for pattern, reason in _REFUSALS:
            match = re.search(pattern, str(error))
            if match is not None:
                raise StepError(reason.format(*match.groups())) from None
        reason = _other_opt_state(state)
        if reason is None:
            raise
        raise StepError(reason) from None


def _other_opt_state(state: TrainState) -> str | None:
    """Returns what is wrong with the optimizer's state, if it is another's."""
    # Only now, after an error: optimizers fail in many ways for another's state.
    expected = jax.eval_shape(state.tx.init, state.params)
    types = [
        {
            leaf.path: _render.array_text(leaf.value.dtype, leaf.value.shape)
            for leaf in _paths.flatten(tree).leaves
        }
        for tree in (expected, state.opt_state)
    ]
    same = jax.tree.structure(expected) == jax.tree.structure(state.opt_state)
    if types[0] == types[1] and same:
        return None
    differing = sorted(set(types[0].items()) ^ set(types[1].items()))
    where = f", as {differing[0][0]!r} shows" if differing else ""
    return (
        f"state.opt_state is not one of this optimizer for these parameters{where}. "
        "It comes from another optimizer or another model: start with "
        "state.replace(opt_state=state.tx.init(state.params))."
    )


def _average(param: jax.Array) -> jax.Array:
    """Returns the initial average of a parameter; in float32, or small steps vanish."""
    if jnp.issubdtype(param.dtype, jnp.floating):
        return jnp.array(param, jnp.promote_types(param.dtype, "float32"))
    return jnp.copy(param)


def _global_norm(grads: list[jax.Array]) -> jax.Array:
    """Returns the square root of the sum of all squares, in float32."""
    squares = [jnp.square(x.astype("float32")).sum() for x in grads]
    return jnp.sqrt(jnp.stack(squares).sum())


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


# Steps that were not finite.


# How many calls later a report is read on several processes.
_CALLS_LATER = 4


class StepReports:
    """The reports of steps that may still be running, for `on_nonfinite="error"`.

    A report is read once the device has made it, without waiting. Where a device is
    ready earlier than another process's, that process would raise one call earlier, and
    the other would wait for it in a step; so on several processes a report is read a
    fixed number of calls later.

    Attributes:
        waiting: Those that have not been read, the earliest first.
    """

    def __init__(self) -> None:
        self.waiting: deque[CallReport] = deque()
        self._num_steps = 0

    def add(self, report: jax.Array, names: list[str]) -> None:
        """Adds what `Update.apply` reported of the steps of one call.

        Args:
            report: The report, or the stacked reports of several steps.
            names: The names of the parts and gradients, which it gives by index.
        """
        self._num_steps += 1 if report.ndim == 1 else report.shape[0]
        self.waiting.append(CallReport(report, self._num_steps, names))

    def check(self, *, wait: bool) -> None:
        """Raises StepError for a step that was not finite.

        Args:
            wait: Whether to wait for all steps; otherwise those that are done count.
        """
        while self.waiting and (wait or self._is_due()):
            problem = self.waiting.popleft().problem(self._num_steps)
            if problem is not None:
                raise StepError(problem)

    def _is_due(self) -> bool:
        report: Any = self.waiting[0].report
        if report.is_fully_addressable:
            return report.is_ready()
        return len(self.waiting) > _CALLS_LATER


@dataclass(frozen=True)
class CallReport:
    """What `Update.apply` reported of the steps of one call.

    Attributes:
        report: int32, of shape (3,), or (steps, 3).
        num_steps: How many steps there were up to the end of that call.
        names: The names of the parts and gradients, which it gives by index.
    """

    report: jax.Array
    num_steps: int
    names: list[str]

    def problem(self, num_steps: int) -> str | None:
        """Returns a sentence on the first step that was not finite, if there is one.

        Args:
            num_steps: How many steps there are by now.
        """
        steps = np.asarray(self.report).reshape(-1, 3)
        if not steps[:, 2].any():
            return None
        index = int(np.argmax(steps[:, 2]))
        number, leaf, _ = steps[index]
        followed = num_steps - self.num_steps + len(steps) - 1 - index
        later = {0: "", 1: ", and one step followed"}.get(
            followed, f", and {followed} steps followed"
        )
        return (
            f"the loss or a gradient was not finite in step {number}: "
            f"{self.names[leaf]} first. The state is as it was before that "
            f"step{later}. Lower the learning rate, clip with clip_norm=, or use "
            'on_nonfinite="skip".'
        )
