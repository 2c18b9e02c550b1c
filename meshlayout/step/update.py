"""One update of a state: the gradients of a global batch, and their effect.

Microbatches are a plain scan, whose carry is `grads + grad(loss)(...)`. Under Auto axes
that means the same on every mesh, whatever the loss function does with the rows: the
compiler is the partitioner. It would add up the devices' gradients in every
microbatch, but XLA's compilers for TPU and GPU recognize a carry that is only added to
(while-loop-all-reduce-code-motion) and move the all-reduce out of the loop. So nothing
may read the carry, or the sum of a microbatch's losses, inside the loop: losses leave
it one per example, and are added up after it (`test_tpu_programs` counts). Replicas
run by hand in shard_map were tried: losses in which examples meet depend on the mesh.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshlayout import _jax, _paths
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout._batches import num_examples, without_nan_padding
from meshlayout.errors import StepError
from meshlayout.layout import Layout
from meshlayout.layout_map.optimizer_slots import find_slots
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.step.objective import Loss


OnNonfinite: TypeAlias = Literal["skip", "ignore"]

# Names in `TrainState.extra`.
EMA, SKIPPED, LOSS_SCALE = "ema", "skipped", "loss_scale"


class Gradients(NamedTuple):
    """The gradients of one global batch, and what else was computed with them."""

    grads: PyTree
    parts: dict[str, jax.Array]  # of the objective; their sum is the loss
    model_state: PyTree  # the model's other arrays, after
    measured: Metrics  # the user's


@dataclass(frozen=True)
class Microbatches:
    """How a global batch is cut."""

    count: int
    rows: NamedSharding | None = None  # how rows are sharded; None if on no axis
    params: tuple[Any, ...] = ()  # the parameters' shardings
    slots: tuple[Any, ...] = ()  # those of the optimizer's state


def row_sharding(batch: Batch, dim: int = 0) -> NamedSharding | None:
    """Returns the sharding of a batch's rows alone, in a dim; None if on no axis."""
    for leaf in jax.tree.leaves(batch):
        sharding = _jax.sharding_of(leaf)
        if isinstance(sharding, NamedSharding) and any(sharding.spec[dim : dim + 1]):
            return NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[dim]))
    return None


def gradients_of(
    loss: Loss,
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    scale: jax.Array | None,
    microbatches: Microbatches,
) -> Gradients:
    """Returns the gradients of a global batch, times a scale of the loss, if any."""
    params, before, weights = state.params, state.model_state, loss.weights_of(batch)
    if not all(map(_is_float, jax.tree.leaves(params))):
        leaves = _paths.flatten(params).leaves
        path = next(leaf.path for leaf in leaves if not _is_float(leaf.value))
        raise StepError(f"parameter {path} is not a float: make it an nnx.Variable.")
    # The sum of the weights takes the devices a round of communication. The gradients
    # need not wait for it if they are divided by the number of losses, and corrected.
    provisional, denominator = loss.denominators(batch)
    batch = without_nan_padding(batch, weights)
    fraction = 1 / microbatches.count

    def total(parts: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        value: Any = sum(part.sum() for part in parts.values())
        # JAX would sort the keys of a plain dict; metrics keep the parts' order.
        return value if scale is None else value * scale, OrderedDict(parts)

    def backward(model_state: PyTree, batch: Batch, key: jax.Array) -> Any:
        def objective(params: PyTree) -> tuple[jax.Array, Any]:
            moved = replace(state, params=params, model_state=model_state)
            parts, rest = loss.parts(moved, batch, key, provisional, fraction)
            value, parts = total(parts)
            return value, (parts, *rest)

        grads, aux = jax.grad(objective, has_aux=True)(params)
        parts, after, values, outputs = aux
        return grads, (parts, after, loss.measured(values, outputs, batch))

    if microbatches.count == 1:
        results = backward(before, batch, key)
    else:
        results = _scanned(backward, state, batch, key, weights, microbatches)
    grads, (parts, after, measured) = results
    parts = {name: part.sum() for name, part in parts.items()}
    if weights is not None:
        # A batch of padding alone teaches nothing.
        after = select((weights != 0).any(), after, before)
        factor = provisional / denominator
        grads = jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)
        parts = {name: part * factor for name, part in parts.items()}
    grads = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, params)
    if loss.regularizers:
        slopes, penalties = jax.grad(
            lambda params: total({k: f(params) for k, f in loss.regularizers.items()}),
            has_aux=True,
        )(params)
        grads = jax.tree.map(jnp.add, grads, slopes)
        parts |= penalties
    return Gradients(grads, parts, after, measured)


def _scanned(
    backward: Callable[..., Any],
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    weights: jax.Array | None,
    microbatches: Microbatches,
) -> Any:
    """Returns what `backward` does, added up over microbatches; no row moves."""
    num_rows, sharding = num_examples(batch), microbatches.rows
    shards = 1 if sharding is None else Layout.of(sharding, 1).num_shards(0)
    if num_rows % (microbatches.count * shards):
        raise StepError(
            f"a global batch of {num_rows} examples does not divide into "
            f"{microbatches.count} microbatches over {shards} shards. Take a multiple "
            f"of {microbatches.count * shards}."
        )
    rows = jax.tree.map(functools.partial(_split, microbatches), batch)
    has_examples = None
    if weights is not None:
        # Here, once: in the loop it would be a round of communication in each.
        split = _split(microbatches, weights)
        has_examples = (split != 0).any(axis=tuple(range(1, split.ndim)))

    def part(model_state: PyTree, rows: Batch, index: jax.Array) -> Any:
        return backward(model_state, rows, jax.random.fold_in(key, index))

    # Traced once, for the shapes of the metrics and for the loop.
    first = state.model_state, jax.tree.map(lambda x: x[0], rows), jnp.int32(0)
    jaxpr, shapes = jax.make_jaxpr(part, return_shape=True)(*first)
    traced = jaxpr_as_fun(jaxpr)

    def add(carry: PyTree, xs: PyTree) -> tuple[Any, Any]:
        sums, before, metrics = carry
        rows, index, has_examples = xs
        results = traced(*jax.tree.leaves((before, rows, index)))
        grads, (parts, after, measured) = jax.tree.structure(shapes).unflatten(results)
        if has_examples is not None:
            # Padding draws random numbers and is counted, but nothing is learned.
            after = jax.tree.map(
                lambda a, b: select(has_examples, a, b) if _is_float(b) else a,
                *(after, before),
            )
        sums = jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums, grads)
        return (sums, after, metrics.merge(measured)), parts

    def zeros(x: jax.Array) -> jax.Array:
        # Many small gradients would vanish in a sum in bfloat16.
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, "float32"))

    start = jax.tree.map(zeros, state.params), state.model_state, shapes[1][2].empty()
    xs = rows, jnp.arange(microbatches.count), has_examples
    (sums, after, metrics), parts = jax.lax.scan(add, start, xs)
    return _like_updates(sums, state.opt_state, microbatches), (parts, after, metrics)


def _like_updates(sums: PyTree, opt_state: PyTree, microbatches: Microbatches) -> Any:
    """Shards sums of gradients as parameters first, and then as their updates."""
    # Otherwise the compiler would scatter them in the loop, or not at all.
    params, slots = _paths.flatten(sums), _paths.flatten(opt_state).leaves
    arrays, updates = [leaf.value for leaf in params.leaves], [*microbatches.params]
    places = find_slots(slots, params.leaves)
    for place, slot, sharding in zip(places, slots, microbatches.slots, strict=True):
        if place is not None and slot.value.shape == arrays[place.param].shape:
            updates[place.param] = sharding
    placed = map(_constrained, arrays, microbatches.params)
    return params.unflatten([*map(_constrained, placed, updates)])


def _split(microbatches: Microbatches, leaf: jax.Array) -> jax.Array:
    """Splits rows into (microbatches, rows of one), of every shard's rows a share each.

    Not to (count, rows) directly: a microbatch would lie on few devices.
    """
    count, rows = microbatches.count, microbatches.rows
    if not jnp.ndim(leaf):
        return jnp.broadcast_to(leaf, (count,))
    split = leaf.reshape(leaf.shape[0] // count, count, *leaf.shape[1:])
    split = jnp.moveaxis(split, 1, 0)
    if rows is None:
        return split
    is_explicit = AxisType.Explicit in rows.mesh.axis_types
    others = None if is_explicit else PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(others, *rows.spec, *[others] * (split.ndim - 2))
    return _jax.constrain(split, NamedSharding(rows.mesh, spec))


def _constrained(x: jax.Array, sharding: object) -> jax.Array:
    if not isinstance(sharding, NamedSharding):
        return x
    return _jax.constrain(x, NamedSharding(sharding.mesh, sharding.spec))


def _is_float(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def select(condition: jax.Array, ours: PyTree, theirs: PyTree) -> PyTree:
    """Returns one of two trees; leaves that are the same object stay unchanged."""
    return jax.tree.map(
        lambda a, b: a if a is b else jnp.where(condition, a, b), ours, theirs
    )


@dataclass(frozen=True)
class Update:
    """How gradients change the state."""

    clip_norm: float | None
    may_skip: bool  # a step whose loss or gradients are not finite
    ema: float | None
    has_loss_scale: bool

    def prepared(self, state: TrainState) -> TrainState:
        """Returns the state with the extra arrays that this update needs in it."""
        starts: dict[str, Any] = {}
        if self.ema is not None:
            starts[EMA] = state.params
        if self.may_skip:
            starts[SKIPPED] = np.int32(0)
        if self.has_loss_scale:
            scalars: Any = {"fin_steps": np.int32(0), "scale": np.float32(2**15)}
            starts[LOSS_SCALE] = DynamicScale(minimum_scale=1.0, **scalars)
        missing = {name: x for name, x in starts.items() if name not in state.extra}
        if not missing:
            return state
        state._refuse_used_up()  # on which jit may crash

        def scalar(value: Leaf) -> Any:
            if isinstance(state.step, jax.ShapeDtypeStruct):  # an abstract state
                return state.step.update(dtype=value.dtype)
            return _jax.put(value, state.step.sharding)

        for name, start in missing.items():
            missing[name] = jax.tree.map(_average if name == EMA else scalar, start)
        return replace(state, extra=state.extra | missing)

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
        new = replace(state, params=params, opt_state=opt_state, extra=extra)
        new = replace(new, model_state=gradients.model_state, step=state.step + 1)
        if self.may_skip:
            is_finite = jnp.stack([jnp.isfinite(x).all() for x in arrays]).all()
            new = self._kept(is_finite, state, new)
            notes["skipped"] = 1 - is_finite.astype("float32")
        # `optax.inject_hyperparams` keeps it, also for a schedule.
        found = optax.tree.get_all_with_path(new.opt_state, "learning_rate")
        key_text = jax.tree_util.keystr
        rates = [x for keys, x in found if ".hyperparams[" in key_text(keys)]
        if len(rates) == 1:  # several, as of `optimizer_by_path`, are not the step's
            notes = {"learning_rate": rates[0], **notes}
        return new, notes

    def _kept(self, is_finite: jax.Array, old: TrainState, new: TrainState) -> Any:
        # In the program: waiting for its numbers would stall the host.
        state = select(is_finite, new, old)
        extra = dict(state.extra)
        extra[SKIPPED] = old.extra[SKIPPED] + (1 - is_finite.astype("int32"))
        if self.has_loss_scale:
            # Flax changes a scale with a gradient, here one that is finite as the
            # step's are: those have been added up over microbatches.
            factor = jnp.where(is_finite, 1.0, jnp.inf)
            like_grads = old.extra[LOSS_SCALE].value_and_grad(lambda x: x * factor)
            extra[LOSS_SCALE] = like_grads(jnp.float32(1)).dynamic_scale
        return replace(state, extra=extra)


def in_device_memory(state: TrainState) -> TrainState:
    """Returns a state, inside jit, with its optimizer state on the device.

    Between steps that may be in the host's memory, to which jit moves the new one.
    """
    opt_state = jax.tree.map(_jax.in_device_memory, state.opt_state)
    return replace(state, opt_state=opt_state)


def _average(param: Leaf) -> Any:
    dtype = jnp.promote_types(param.dtype, "float32")  # in which small steps count
    if isinstance(param, jax.ShapeDtypeStruct):
        return param.update(dtype=dtype)
    return jnp.array(param, dtype)  # a copy: the parameter is donated
