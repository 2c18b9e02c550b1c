"""What is planned: a model, its loss and a batch, traced once for all candidates."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from meshlayout import _paths
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import leaf_layout, num_examples
from meshlayout.exchange.axes import asked_axes
from meshlayout.layout_map import LayoutMap
from meshlayout.planning.candidates import Traits, bfloat16_state
from meshlayout.planning.estimate import StepTrace
from meshlayout.planning.rows import Row
from meshlayout.state import TrainState
from meshlayout.state.creation import place
from meshlayout.state.train_state import Optimizer
from meshlayout.step import make_train_step
from meshlayout.step.interception import Remat, _block_paths


class Problem:
    """What `plan` was given, and what tracing it shows."""

    def __init__(
        self,
        build: Callable[[], Any],
        loss_fn: Callable[..., Any],
        batch: Batch,
        optimizer: Optimizer,
        module: nn.Module | None,
        options: Mapping[str, Any],
    ) -> None:
        self.build, self.loss_fn, self.module = build, loss_fn, module
        # Arrays abstract, and of the dtypes that steps take them in.
        self.batch, self.optimizer = jax.eval_shape(lambda x: x, batch), optimizer
        self.options, self.traits = options, Traits()
        leaves, integer = jax.tree.leaves(self.batch), jnp.integer
        texts = [x for x in leaves if x.ndim == 2 and jnp.issubdtype(x.dtype, integer)]
        tokens = max((x.size for x in texts), default=0)
        self.facts: dict[str, Any] = {
            "rows": num_examples(self.batch),
            "tokens": tokens,
        }
        # What the code of candidates takes, with what is called first.
        self.values: dict[str, object] = (
            {"module": module} if module else {"build": build}
        )
        self.values |= {"batch": self.batch, "loss_fn": loss_fn}
        if module:
            self.facts["create"] = "build, optimizer, layouts, module=module"
        self.described = functools.cache(self._described)
        self.trace = functools.cache(self._trace)

    def options_of(self, row: Row) -> dict[str, Any]:
        """Returns the options of the step for a candidate."""
        default = {"remat": "none", "accumulate": 1, "layouts": row.activations}
        return {**default, **self.options, **row.step_options}

    @property
    def flops(self) -> float:
        """The FLOPs of a step, without what candidates compute again."""
        trace = self.trace(self.options.get("remat", "none"))
        return trace.flops if trace else math.nan

    def _described(self, is_bfloat16: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Returns the state on one device."""
        one = LayoutMap(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("batch",)))
        tx = bfloat16_state(self.optimizer) if is_bfloat16 else self.optimizer
        return TrainState.describe(self.build, tx, one, module=self.module)

    def _trace(self, remat: Remat) -> StepTrace | None:
        """Returns the traced step; None if there are no blocks to recompute."""
        state = self.described().abstract
        is_given = remat != "blocks" or "remat" in self.options
        if not is_given and not _block_paths(state.params):
            return None
        noted = LayoutMap(state.step.sharding.mesh, {".": self._note})
        options = {"layouts": noted, **self.options, "remat": remat, "accumulate": 1}
        step = make_train_step(self.loss_fn, **options)
        state = step._plan.update.prepared(state)
        token = asked_axes.set(self.traits.axes)
        try:
            traced = step.trace(state, self.batch)
        finally:
            asked_axes.reset(token)
        trace = StepTrace(traced, state, self.batch)
        if trace.convolves and {x.ndim for x in jax.tree.leaves(self.batch)} <= {1, 4}:
            self.traits.axes["height"] = "convolution", 1
        paths = [leaf.path for leaf in _paths.flatten(state.params).leaves]
        looped = [paths[index] for index, use in trace.uses.items() if use.turns > 1]
        names = dict.fromkeys(path.split("/")[0] for path in looped)
        self.traits.stacks = f"^(params/)?({'|'.join(names)})/"
        return trace

    def _note(self, name: str, shape: tuple[int, ...], _: object) -> tuple[None, ...]:
        self.traits.names.add(name)
        return (None,) * len(shape)

    def state(self, row: Row) -> TrainState[Any]:
        """Returns the abstract state in the layouts of a candidate."""
        traced = self.described(row.is_bfloat16)._traced
        return place(traced, row.layouts, row.layouts.resolve).abstract

    def lower(self, row: Row) -> jax.stages.Lowered:
        """Returns the step of a candidate, to compile."""
        step, batch = make_train_step(self.loss_fn, **self.options_of(row)), self.batch
        if row.batch_dims is not None:
            layout = row.mesh.layout(*row.batch_dims)
            layouts = jax.tree.map(lambda x: leaf_layout(layout, x.ndim), batch)
            batch: PyTree = jax.tree.map(
                lambda x, y: x.update(sharding=y.sharding), batch, layouts
            )
        return step.lower(row.state, batch)
