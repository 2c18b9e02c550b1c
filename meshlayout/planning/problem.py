"""What is planned: a step, traced once, and what it costs on candidates' meshes."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from meshlayout import _paths
from meshlayout._annotations import Batch
from meshlayout._batches import leaf_layout, num_examples
from meshlayout.errors import MeshLayoutError
from meshlayout.exchange.axes import asked_axes
from meshlayout.hlo import read_communication
from meshlayout.layout_map import LayoutMap
from meshlayout.planning.candidates import Traits, bfloat16_state
from meshlayout.planning.chips import Chip
from meshlayout.planning.compilation import Outcome
from meshlayout.planning.estimate import StepTrace, estimate, seconds_of
from meshlayout.planning.rows import Row
from meshlayout.planning.schedule import replay
from meshlayout.state import TrainState
from meshlayout.state.creation import place
from meshlayout.state.train_state import Optimizer
from meshlayout.step import make_train_step
from meshlayout.step.model_call import Remat, _block_paths
from meshlayout.step.placement import stacked


@dataclass(eq=False)
class Problem:
    """What `plan` was given, and what tracing it shows."""

    build: Callable[[], Any]
    loss_fn: Callable[..., Any]
    batch: Batch
    optimizer: Optimizer
    module: nn.Module | None
    options: Mapping[str, Any]  # of the step
    hop_s: float

    def __post_init__(self) -> None:
        given = {k: x for k, x in self.options.items() if k != "layouts"}
        options, batch = dict(self.options), self.batch
        if (count := options.pop("steps_per_call", 1)) > 1:  # costs are of one step
            first = functools.partial(jax.tree.map, lambda x: x[0])
            batch = jax.eval_shape(first, stacked(batch, count))
        self.options, self.traits = options, Traits()
        # Arrays abstract, and of the dtypes that steps take them in.
        self.batch = jax.eval_shape(lambda x: x, batch)
        texts = [x for x in jax.tree.leaves(self.batch) if x.ndim == 2]
        texts = [x for x in texts if jnp.issubdtype(x.dtype, jnp.integer)]
        self.num_tokens = max((x.size for x in texts), default=0)
        # What the code of candidates takes, with what is called first.
        self.values: dict[str, object] = {"build": self.build}
        self.facts: dict[str, Any] = {"given": given}
        if self.module:
            self.values = {"module": self.module}
            self.facts["create"] = "build, optimizer, layouts, module=module"
        self.values |= {"batch": self.batch, "loss_fn": self.loss_fn}
        self.described = functools.cache(self._described)
        self.trace = functools.cache(self._trace)

    def options_of(self, row: Row) -> dict[str, Any]:
        """Returns the options of the step for a candidate."""
        default = {"remat": "none", "accumulate": 1, "layouts": row.activations}
        return {**default, **self.options, **row.step_options}

    def _described(self, is_bfloat16: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Returns the state on one device."""
        one = LayoutMap(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("batch",)))
        tx = bfloat16_state(self.optimizer) if is_bfloat16 else self.optimizer
        return TrainState.describe(self.build, tx, one, module=self.module)

    @property
    def has_blocks(self) -> bool:
        """Whether the model has blocks to recompute."""
        return bool(_block_paths(self.described().abstract.params))

    def _trace(self, remat: Remat) -> StepTrace:
        state = self.described().abstract
        noted = LayoutMap(state.step.sharding.mesh, {".": self._note})
        options = {"layouts": noted, **self.options, "remat": remat, "accumulate": 1}
        step = make_train_step(self.loss_fn, **options)
        state, token = step.prepare(state), asked_axes.set(self.traits.axes)
        try:
            traced = step.trace(state, self.batch)
        finally:
            asked_axes.reset(token)
        trace = StepTrace(traced, state, self.batch)
        if trace.convolves and {x.ndim for x in jax.tree.leaves(self.batch)} <= {1, 4}:
            self.traits.axes["height"] = "convolution", 1
        pairs = zip(_paths.flatten(state.params).leaves, trace.params, strict=False)
        names = {leaf.path.split("/")[0] for leaf, x in pairs if trace.use(x)[0] > 1}
        self.traits.stacks = f"^(params/)?({'|'.join(sorted(names))})/"
        return trace

    def _note(self, name: str, shape: tuple[int, ...], _: object) -> tuple[None, ...]:
        self.traits.names.add(name)
        return (None,) * len(shape)

    def estimate(self, row: Row, chip: Chip) -> Row:
        """Returns a candidate with its estimate, or why it cannot be estimated."""
        memory = min(row.memory_bytes, chip.memory_bytes)
        row, options = (
            replace(row, memory_bytes=memory, **self.facts),
            self.options_of(row),
        )
        if row.error:
            return row
        trace, count = self.trace(options["remat"]), options["accumulate"]
        num_rows, axes = num_examples(self.batch), row.batch[0]
        if num_rows % (row.mesh.axis_size(axes) * count):
            line = f"{num_rows} examples do not divide over {', '.join(axes)}"
            return replace(row, error=f"{line} and {count} microbatches.")
        traced = self.described(row.is_bfloat16)._traced
        try:
            state = place(traced, row.layouts, row.layouts.resolve).abstract
        except MeshLayoutError as error:
            return replace(row, error=str(error).splitlines()[0])
        row = replace(row, state=state)
        cost = estimate(trace, row, chip, self.hop_s, count, options["remat"])
        facts = {"sent": cost.sent, "peak_bytes": cost.peak_bytes, "estimate": cost}
        return self._timed(replace(row, **facts), cost.parts, chip)

    def measure(self, row: Row, outcome: Outcome, chip: Chip) -> Row:
        """Returns an estimated candidate with what the compiler said."""
        names = "error", "peak_bytes", "memory_bytes"
        facts = {name: getattr(outcome, name) or getattr(row, name) for name in names}
        row = replace(row, source="compiled", **facts)
        if outcome.error:
            unknown: Any = {"bound": "", "sent": {}, "parts": {}}
            rates = "step_s", "utilization", "examples_per_s", "tokens_per_s"
            return replace(row, **unknown, **dict.fromkeys(rates, math.nan))
        communication = read_communication(outcome.text, row.mesh)
        sent = {k: float(x.wire_bytes) for k, x in communication.by("axes").items()}
        parts = replay(outcome.text, chip, hop_s=self.hop_s).parts
        # No compiler estimates the time of copies between the host and the device.
        parts["wait: host memory"] = row.parts["wait: host memory"]
        if chip.clock_hz is None:
            row = replace(row, source="roofline")
            parts |= {k: x for k, x in row.parts.items() if not k.startswith("wait: ")}
        return self._timed(replace(row, sent=sent), parts, chip)

    def _timed(self, row: Row, parts: Mapping[str, float], chip: Chip) -> Row:
        """Returns a row with the parts of its time, and what bounds it."""
        step_s = sum(parts.values())
        seconds = seconds_of(parts, row.estimate.seconds["compute"])
        # Without what candidates compute again.
        flops = self.trace(self.options.get("remat", "none")).flops
        return replace(
            row,
            parts=parts,
            step_s=step_s,
            bound=max(seconds, key=seconds.__getitem__),
            utilization=flops / (step_s * row.mesh.size * chip.flops_per_s),
            examples_per_s=num_examples(self.batch) / step_s,
            tokens_per_s=self.num_tokens / step_s,
        )

    def lower(self, row: Row) -> jax.stages.Lowered:
        """Returns the step of a candidate, to compile."""
        step, batch = make_train_step(self.loss_fn, **self.options_of(row)), self.batch
        if row.batch_dims:
            layout = row.mesh.layout(*row.batch_dims)
            batch: Batch = jax.tree.map(
                lambda x: x.update(sharding=leaf_layout(layout, x.ndim).sharding), batch
            )
        return step.lower(row.state, batch)
