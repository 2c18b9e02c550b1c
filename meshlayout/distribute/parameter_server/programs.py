"""A closure on a worker: unpickled once, and compiled once per signature."""

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from meshlayout._annotations import PyTree
from meshlayout.distribute.nnx_graph import iter_graph
from meshlayout.distribute.parameter_server.batches import (
    BatchSource,
    NotEnough,
    WorkerIterator,
)
from meshlayout.distribute.parameter_server.closures import (
    ClosureInput,
    HostKey,
    VariableReference,
    is_key,
    number_of,
)
from meshlayout.distribute.parameter_server.servers import Arrays
from meshlayout.distribute.parameter_server.traces import ClosureTrace
from meshlayout.distribute.variables import Variables


@dataclass(frozen=True)
class Outputs:
    """What a run of a program gave.

    Attributes:
        result: What the function returned, as NumPy arrays.
        grads: Gradients by the number of the optimizer and by name.
        added: Changes of variables that are to be added up, by name.
        assigned: New values of variables, by name.
        local: New values that stay on this worker, by name.
    """

    result: PyTree
    grads: dict[int, Arrays]
    added: Arrays
    assigned: Arrays
    local: Arrays


@dataclass
class Executable:
    """A program for one signature.

    Attributes:
        pulled: The variables whose values it needs.
        params: By the number of an optimizer that is updated, the names of its
            parameters in the structure that the optimizer takes.
        added: The variables whose changes are added up.
        assigned: The variables that get new values.
        local: The variables whose new values stay on the worker.
        counts: How many batches it draws from each iterator.
        treedef: The structure of what the function returns.
        run: The compiled program.
    """

    pulled: list[str]
    params: dict[int, PyTree]
    added: list[str]
    assigned: list[str]
    local: list[str]
    counts: dict[int, int]
    treedef: Any
    run: Callable[..., list[jax.Array]]

    @property
    def touched(self) -> list[str]:
        """All variables that it reads or changes, but for optimizers' states."""
        params = [
            name for tree in self.params.values() for name in jax.tree.leaves(tree)
        ]
        return list(dict.fromkeys([*self.pulled, *params, *self.added, *self.assigned]))


class ClosureProgram:
    """A closure's function, with what it needs.

    Args:
        payload: The pickled closure.
        mesh: The worker's own mesh, with one axis, `batch`.
        local: Values of "per_replica" variables, which stay on the worker.

    Attributes:
        variables: Its Variables.
        references: What is known of each of them.
    """

    def __init__(self, payload: bytes, mesh: jax.sharding.Mesh, local: Arrays) -> None:
        loader = _Unpickler(io.BytesIO(payload))
        self._fn, self._args, self._kwargs = loader.load()
        self._objects = loader.load()
        self._mesh = mesh
        self.variables = Variables(self._objects)
        self.references = [
            loader.references[id(variable)] for variable in self.variables.variables
        ]
        self._executables: dict[Any, Executable] = {}
        self._counts: dict[int, int] = {}
        self._local = local

    def call(self, inputs: Sequence[Any]) -> PyTree:
        """Calls the function."""
        args, kwargs = jax.tree.map(
            lambda leaf: inputs[leaf.index] if isinstance(leaf, ClosureInput) else leaf,
            (self._args, self._kwargs),
            is_leaf=lambda leaf: isinstance(
                leaf, (ClosureInput, nnx.Pytree, nnx.Variable)
            ),
        )
        return self._fn(*args, **kwargs)

    def slots_of(self, number: int) -> list[str]:
        """Returns the names of the state of an optimizer."""
        names = {
            id(x): r.name
            for x, r in zip(self.variables.variables, self.references, strict=True)
        }
        return [
            names[id(variable)]
            for _, root in self._objects
            for _, node in iter_graph(root)
            if isinstance(node, nnx.Optimizer) and number_of(node) == number
            for part in (node.opt_state, node.step)
            for variable in jax.tree.leaves(part, is_leaf=_is_variable)
        ]

    def prepare(
        self, inputs: Sequence[Any], sources: Mapping[int, BatchSource]
    ) -> tuple[Executable, dict[int, list[PyTree]]]:
        """Returns the program for arguments and the next batches, compiled.

        Variables are pulled afterwards: a first compilation takes seconds, in which
        they would get old.
        """
        counts = dict(self._counts)
        while True:
            batches = {number: sources[number].peek(n) for number, n in counts.items()}
            ended = {number for number, n in counts.items() if len(batches[number]) < n}
            key = (
                _signature(inputs),
                _signature(batches),
                jax.tree.structure(batches),
                frozenset(ended),
            )
            if key not in self._executables:
                try:
                    self._executables[key] = self._compile(inputs, batches, ended)
                except NotEnough as more:
                    counts[more.number] = counts.get(more.number, 0) + 1
                    continue
            self._counts = counts
            return self._executables[key], batches

    def run(
        self,
        executable: Executable,
        values: Arrays,
        inputs: Sequence[Any],
        batches: Mapping[int, list[PyTree]],
        closure: int,
    ) -> Outputs:
        """Runs a program on pulled values."""
        arrays = [self._local.get(name, values[name]) for name in executable.pulled]
        outputs = executable.run(*self._arguments(arrays, inputs, batches, closure))
        host = iter(map(np.asarray, outputs))
        num_results = executable.treedef.num_leaves
        # Numbers as NumPy's scalars, which can be formatted.
        results = [next(host)[()] for _ in range(num_results)]
        result = executable.treedef.unflatten(results)
        grads = {
            number: {name: next(host) for name in jax.tree.leaves(names)}
            for number, names in executable.params.items()
        }
        added = {name: next(host) for name in executable.added}
        assigned = {name: next(host) for name in executable.assigned}
        local = {name: next(host) for name in executable.local}
        return Outputs(result, grads, added, assigned, local)

    def keep(self, outputs: Outputs) -> None:
        """Keeps the values of variables that are this worker's own."""
        self._local.update(outputs.local)

    def _compile(
        self,
        inputs: Sequence[Any],
        batches: Mapping[int, list[PyTree]],
        ended: set[int],
    ) -> Executable:
        trace = ClosureTrace(self, inputs, batches, ended)
        run = jax.jit(trace.program, out_shardings=self._sharding(PartitionSpec()))
        placed = self._arguments(
            [np.zeros(x.shape, x.dtype) for x in trace.read_values], inputs, batches, 0
        )
        references, taken = self.references, trace.taken
        return Executable(
            pulled=[references[i].name for i in trace.read],
            params=taken.params,
            added=[references[i].name for i in trace.added],
            assigned=[references[i].name for i in trace.assigned],
            local=[references[i].name for i in trace.local],
            counts=trace.counts,
            treedef=trace.treedef,
            run=run.lower(*placed).compile(),
        )

    def _arguments(
        self,
        values: Sequence[Any],
        inputs: Sequence[Any],
        batches: Mapping[int, list[PyTree]],
        closure: int,
    ) -> tuple[Any, ...]:
        """Puts the arguments of a program on the worker's mesh."""
        return (
            [self._put(x) for x in values],
            [self._put(x) for x in inputs],
            [self._put_rows(x) for x in jax.tree.leaves(batches, is_leaf=is_key)],
            self._put(np.uint32(closure)),
        )

    def _put(self, value: Any, spec: PartitionSpec | None = None) -> jax.Array:
        array = value() if isinstance(value, HostKey) else value
        return jax.device_put(array, self._sharding(spec or PartitionSpec()))

    def _put_rows(self, value: Any) -> jax.Array:
        """Divides the rows of a batch over the worker's devices, if they divide."""
        shape = np.shape(value)
        divides = bool(shape) and shape[0] > 0 and shape[0] % self._mesh.size == 0
        return self._put(value, PartitionSpec("batch") if divides else None)

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self._mesh, spec)


class _Unpickler(pickle.Unpickler):
    """Makes a worker's own Variables and iterators for those that were referred to."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.references: dict[int, VariableReference] = {}
        self._variables: dict[str, nnx.Variable[Any]] = {}
        self._iterators: dict[int, WorkerIterator] = {}

    def persistent_load(self, pid: Any) -> Any:
        """Returns what stands for a reference on this worker."""
        if isinstance(pid, int):
            return self._iterators.setdefault(pid, WorkerIterator(pid))
        if pid.name not in self._variables:
            # No memory is taken: values are there only while a program is traced.
            value = np.broadcast_to(np.zeros((), np.uint32), ())
            if pid.constant is None:
                value = np.broadcast_to(np.zeros((), pid.dtype), pid.shape)
            variable = pid.kind.from_metadata(value, pid.metadata)
            self._variables[pid.name] = variable
            self.references[id(variable)] = pid
        return self._variables[pid.name]


def _signature(tree: PyTree) -> Any:
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_key)
    kinds = (
        (type(x), np.shape(getattr(x, "words", x)), str(getattr(x, "dtype", "")))
        for x in leaves
    )
    return treedef, tuple(kinds)


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)
