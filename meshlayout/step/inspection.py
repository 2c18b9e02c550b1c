"""Reports of compiled steps on their programs; nothing is run or donated for them."""

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding, Sharding

import meshlayout
from meshlayout import _checks, _jax, _paths, _render
from meshlayout.layout import AnyMesh
from meshlayout.mesh import sizes_text
from meshlayout.state import TrainState


# The dtype and shape (or text), and the layout, of every argument of a call, by name.
Kinds: TypeAlias = dict[str, tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes on each device while a step runs; text if printed, a table in notebooks.

    Measured numbers come from the compiled program. Numbers by layout are arithmetic:
    shapes of shards times sizes of dtypes, without the padding that TPUs add to small
    arrays. Neither includes arguments that the program does not use.
    """

    parameter_bytes: int  # this and the next five by the layouts
    optimizer_bytes: int
    other_state_bytes: int  # or a state that is no `TrainState`
    batch_bytes: int  # and the metrics, and other arguments
    host_bytes: int  # arguments in the host's memory, which are in none of the above
    gradient_bytes: int  # if all are held at once; part of the temporary bytes
    argument_bytes: int  # this and the next ones measured
    output_bytes: int  # the donated state's memory included
    donated_bytes: int  # how much of the output takes the memory of arguments
    temporary_bytes: int  # gradients, activations and the like
    code_bytes: int  # the program itself; 0 where it is in the host's memory

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once, and must fit: all that is measured."""
        new = self.output_bytes - self.donated_bytes
        return self.argument_bytes + new + self.temporary_bytes + self.code_bytes

    def __repr__(self) -> str:
        return _render.text_table(["", "per device"], self._rows(), "lr")

    def _repr_html_(self) -> str:
        return _render.html_table(["", "per device"], self._rows(), "lr")

    def _rows(self) -> list[list[str]]:
        sizes = {**dataclasses.asdict(self), "peak_bytes": self.peak_bytes}
        return [
            [name.removesuffix("_bytes").replace("_", " "), _render.bytes_text(size)]
            for name, size in sizes.items()
            if size or name not in ("host_bytes", "code_bytes")
        ]


@_checks.user_call
class StepInspection:
    """Reports on the program of a step, for the arguments of a call.

    Arguments are those of a call, but nothing is run or used up. They may be abstract:
    `jax.ShapeDtypeStruct` with shardings, even on devices that are only described. A
    program that was or will be called is not compiled twice.
    """

    _state_name = "state"  # the step's first parameter
    _options: Any  # layouts= and on_recompile=
    executable: Any = None  # from a file
    trace: Any  # as of `jax.jit`

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers the step for these arguments, as `jax.jit(...).lower` does."""
        return self.trace(*args, **kwargs).lower()

    def cost(self, *args: Any, **kwargs: Any) -> "meshlayout.hlo.Cost":
        """Returns the FLOPs of all devices together, loops counted in full."""
        return meshlayout.hlo.read_cost(self.trace(*args, **kwargs))

    def communication(
        self, *args: Any, **kwargs: Any
    ) -> "meshlayout.hlo.Communication":
        """Returns every collective of the compiled program, with bytes and mesh axes.

        Use this to see what layouts cost, and `to_lock` to fix that in a test.
        """
        compiled: Any = self.lower(*args, **kwargs).compile()
        state = compiled.args_info[0][0]
        leaves = _paths.flatten(state).leaves
        paths = [leaf.path.removeprefix("params/") for leaf in leaves]
        entries = jax.tree_util.tree_flatten_with_path(state)[0]
        names = [self._state_name + jax.tree_util.keystr(keys) for keys, _ in entries]
        names = map(meshlayout.hlo.leaf_name, names)  # of arguments, in JAX's words
        return meshlayout.hlo.read_communication(
            compiled,
            arguments=dict(zip(names, paths, strict=True)),
            results=paths if any(leaf.value.donated for leaf in leaves) else (),
        )

    def memory(self, *args: Any, **kwargs: Any) -> StepMemory:
        """Returns the bytes that the compiled step takes on each device.

        Use this to see whether a step fits, and what takes the memory.
        """
        compiled: Any = self.lower(*args, **kwargs).compile()
        infos, treedef = jax.tree.flatten(compiled.args_info)
        # None for what the program does not use.
        shardings = treedef.flatten_up_to(compiled.input_shardings)
        pairs = list(zip(infos, shardings, strict=True))
        # A program takes a state's arrays in the order of its fields.
        state = compiled.args_info[0][0]
        is_state = isinstance(state, TrainState)
        fields = [state.params, state.opt_state] if is_state else [(), ()]
        params, slots, whole = (len(jax.tree.leaves(x)) for x in (*fields, state))
        parts = itertools.pairwise([0, params, params + slots, whole, None])
        by_part = [_shard_bytes(pairs[slice(*part)], on_host=False) for part in parts]
        analysis = compiled.memory_analysis()
        return StepMemory(
            *by_part,
            host_bytes=_shard_bytes(pairs, on_host=True),
            gradient_bytes=by_part[0] if is_state and infos[0].donated else 0,
            argument_bytes=analysis.argument_size_in_bytes,
            output_bytes=analysis.output_size_in_bytes,
            donated_bytes=analysis.alias_size_in_bytes,
            temporary_bytes=analysis.temp_size_in_bytes,
            code_bytes=analysis.generated_code_size_in_bytes,
        )

    def compile_for(
        self, target: str | AnyMesh, *args: Any, **kwargs: Any
    ) -> "meshlayout.planning.CompiledProgram":
        """Compiles for devices that need not exist here; see `planning.compile_for`."""
        return meshlayout.planning.compile_for(self, target, *args, **kwargs)

    def save_compiled(self, path: str | os.PathLike[str]) -> None:
        """Saves the program compiled last to a file; see `planning.save_compiled`."""
        meshlayout.planning.save_compiled(self, path)

    def load_compiled(self, path: str | os.PathLike[str]) -> None:
        """Loads the first program from a file; see `planning.load_compiled`."""
        meshlayout.planning.load_compiled(self, path)


def _shard_bytes(pairs: Iterable[tuple[Any, Any]], *, on_host: bool) -> int:
    return sum(
        math.prod(sharding.shard_shape(x.shape)) * _jax.itemsize(x.dtype)
        for x, sharding in pairs
        if sharding and _jax.is_in_other_memory(sharding) == on_host
    )


def _layout_text(layout: Any) -> str:
    if isinstance(layout, NamedSharding):
        return f"{tuple(layout.spec)} on ({sizes_text(layout.mesh.shape)})"
    return str(layout or "no layout of its own")


def changes_of(before: Kinds, now: Kinds) -> list[str]:
    """Returns what changed between two calls, one phrase each; large layouts first."""
    changes, layouts, nothing = [], [], ("nothing", "")
    for name in dict.fromkeys([*now, *before]):
        (old, here), (new, there) = (x.get(name, nothing) for x in (before, now))
        if old != new and name == "the optimizer":
            changes.append("the optimizer changed to a new one")
        elif old != new:
            text = _render.array_text
            old, new = (x if isinstance(x, str) else text(*x) for x in (old, new))
            changes.append(f"{name} changed from {old} to {new}")
        elif (start := _layout_text(here)) != (end := _layout_text(there)):
            shape = () if isinstance(new, str) else new[1]
            both = isinstance(here, Sharding) and isinstance(there, Sharding)
            if not (both and here.is_equivalent_to(there, len(shape))):
                text = f"the layout of {name} changed from {start} to {end}"
                layouts.append((math.prod(shape), text))
    return changes + [text for _, text in sorted(layouts, key=lambda x: -x[0])]
