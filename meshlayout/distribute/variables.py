"""NNX variables as the state of a compiled program, in place.

A replica function calls models and optimizers that it closes over, or gets passed, as
if nothing were compiled. So while it is traced, their Variables hold the traced values,
and the objects themselves belong to the current trace as Flax sees it; afterwards
everything is as it was. `nnx.split` and `nnx.merge`, Flax's own way, make copies, and a
closure would go on to use the originals.

All threads share the objects. One lock is held while any of them are bound, so `get`,
`set` and `bound` of several threads wait for each other. Other reads of a model while
another thread traces a function that uses it see traced values, as with `nnx.jit`.
"""

import contextlib
import itertools
import operator
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding

from meshlayout import _checks, _jax
from meshlayout._annotations import Leaf
from meshlayout.arrays import copy_to_mesh, fetch_layout
from meshlayout.distribute.nnx_graph import (
    NnxAttributes,
    NnxGraph,
    NnxObject,
    raw_value,
    set_raw_value,
)
from meshlayout.errors import StrategyError


Aggregation: TypeAlias = Literal["sum", "mean", "first", "per_replica"]

_AGGREGATIONS: tuple[Aggregation, ...] = ("sum", "mean", "first", "per_replica")

_lock = threading.RLock()


def exclusive() -> contextlib.AbstractContextManager[bool]:
    """Returns a context in which other threads neither read nor set Variables."""
    return _lock


class BoundVariables:
    """What became of Variables in a block of `Variables.bound`.

    Attributes:
        new_values: Their raw values at the end of the block.
        changed: For each, whether it got another value, by identity.
    """

    def __init__(self) -> None:
        self.new_values: list[Any] = []
        self.changed: tuple[bool, ...] = ()


class Variables:
    """The distinct Variables of NNX objects, in an order that does not change.

    Args:
        objects: Models, optimizers, metrics, Rngs and bare Variables, each with the
            name by which the user knows it. What two of them share occurs once, under
            the first name.

    Attributes:
        paths: The path of each Variable, such as `model/encoder/kernel`.
        variables: The Variables.
        aggregations: What to do with each if it differs between replicas; see
            `aggregation`.

    Raises:
        StrategyError: If a Variable holds what a program cannot have as its state.
    """

    def __init__(self, objects: Sequence[tuple[str, NnxObject]]) -> None:
        self._objects = tuple(objects)
        self._graph = graph = NnxGraph.of(self._objects)
        self.paths = tuple(graph.variables)
        self.variables = tuple(graph.variables.values())
        self.aggregations: tuple[Aggregation | None, ...] = tuple(
            aggregation(variable, graph.owners.get(id(variable)), path)
            for path, variable in graph.variables.items()
        )
        for path, variable in graph.variables.items():
            _check_value(path, variable)
        self._attributes = NnxAttributes(graph)

    def is_current(self) -> bool:
        """Returns whether the objects hold the same Variables and other attributes.

        They do not after `model.eval()`, or if a layer was replaced: a program that was
        traced before would compute something else. Takes some microseconds per module.
        """
        if self._attributes.are_current():
            return True
        with _lock:
            graph = NnxGraph.of(self._objects)
            if graph.difference(self._graph) is not None:
                return False
            # Flax's transforms replace containers and bookkeeping by equal ones.
            self._graph, self._attributes = graph, NnxAttributes(graph)
        return True

    def get(self) -> list[Any]:
        """Returns the raw values: arrays, or pytrees of arrays."""
        with _lock:
            return [raw_value(variable) for variable in self.variables]

    def get_for_reuse(self, indices: Iterable[int]) -> list[Any]:
        """Returns the raw values, some of them for a program that reuses their memory.

        A value that something else refers to is copied: another Variable after
        `nnx.clone`, or a state that the user keeps from `nnx.state`. Only Python's
        counter of references knows.

        Args:
            indices: Those whose memory is reused.
        """
        values = self.get()
        for index in indices:
            is_shared = _references(values, index) > _OWN_REFERENCES
            if isinstance(values[index], jax.Array):
                if is_shared:
                    values[index] = _copied(values[index])
                continue
            leaves, treedef = jax.tree.flatten(values[index])
            for i in range(len(leaves)):
                if is_shared or _references(leaves, i) > _OWN_REFERENCES:
                    leaves[i] = _copied(leaves[i])
            values[index] = treedef.unflatten(leaves)
        return values

    def set(self, values: Iterable[Any]) -> None:
        """Puts other raw values in place, for use outside of a trace.

        Metadata stays, hooks do not run, and modules that share a Variable still do.
        """
        with _lock:
            for variable, value in zip(self.variables, values, strict=True):
                set_raw_value(variable, value)

    @contextlib.contextmanager
    def bound(self, values: Sequence[Any]) -> Iterator[BoundVariables]:
        """Gives the Variables traced values, and the objects to the current trace.

        Inside, models, optimizers and Flax's transforms work as always. Afterwards,
        also after an error, every object has its former values and attributes.

        Args:
            values: The raw values, as those of `get`.

        Yields:
            Where the values will be found that they have at the end of the block.

        Raises:
            StrategyError: If Variables were added, removed or replaced in the block, or
                attributes that are not Variables were changed.
        """
        with _lock:
            graph = NnxGraph.of(self._objects)
            # Callers ask `is_current` first: values of other Variables are no use.
            assert tuple(graph.variables) == self.paths, "the objects have changed"
            result = BoundVariables()
            with graph.restored():
                graph.enter_trace()
                self.set(values)
                yield result
                result.new_values = self.get()
                pairs = zip(values, result.new_values, strict=True)
                result.changed = tuple(itertools.starmap(_is_changed, pairs))
                difference = NnxGraph.of(self._objects).difference(graph)
                if difference is not None:
                    raise StrategyError(difference)


def aggregation(
    variable: "nnx.Variable[Any]", owner: object = None, path: str = ""
) -> Aggregation | None:
    """Returns what to do with a Variable that differs between replicas.

    Metadata has the last word: `nnx.Variable(x, aggregation="mean")`. Statistics of
    batches are averaged, and the totals of Flax's `Average` and `Accuracy` added. Other
    metrics, such as `Welford` or a user's own, may hold what cannot be added.

    Args:
        variable: The Variable.
        owner: The NNX object that holds it.
        path: Its path, for messages.

    Returns:
        `"sum"` of the replicas' changes, `"mean"` of their values, the `"first"`
        replica's value, one value `"per_replica"`; or None: it must not differ.

    Raises:
        StrategyError: If the metadata has something else.

    Example:
        >>> aggregation(nnx.BatchStat(np.zeros(2)))
        'mean'
        >>> aggregation(nnx.Param(np.zeros(2))) is None
        True
    """
    choice = variable.get_metadata().get("aggregation")
    if choice is not None:
        return _checks.choice(
            "aggregation", choice, _AGGREGATIONS, where=path, error=StrategyError
        )
    if isinstance(variable, nnx.BatchStat):
        return "mean"
    is_total = isinstance(variable, nnx.metrics.MetricState)
    return "sum" if is_total and isinstance(owner, nnx.metrics.Average) else None


def is_on(x: Leaf, mesh: jax.sharding.Mesh) -> bool | None:
    """Returns whether a value is replicated over the devices of a mesh.

    Returns:
        True if it is; None if it may be moved there freely, as NumPy arrays, numbers
        and JAX arrays that were never placed; False if it was placed elsewhere.

    Example:
        >>> mesh = jax.make_mesh((2,), ("batch",), devices=jax.devices()[:2])
        >>> whole = NamedSharding(mesh, jax.sharding.PartitionSpec())
        >>> is_on(jax.device_put(1.0, whole), mesh)
        True
        >>> is_on(jax.device_put(1.0, jax.devices()[1]), mesh)
        False
        >>> is_on(jax.numpy.ones(2), mesh) is None
        True
    """
    if isinstance(x, Tracer):
        return True  # the program that is traced is for devices of the mesh, or fails
    if not _jax.is_committed(x):
        return None
    sharding = x.sharding
    if not sharding.is_fully_replicated or _jax.is_in_other_memory(sharding):
        return False
    if isinstance(sharding, NamedSharding):
        # In the same order: jit refuses arrays on the same devices in another one.
        devices: Any = sharding.mesh.devices
        return list(mesh.devices.flat) == list(devices.flat)
    return mesh.size == 1 and sharding.device_set == set(mesh.devices.flat)


def _check_value(path: str, variable: "nnx.Variable[Any]") -> None:
    """Refuses a Variable that has no plain value to pass to a program."""
    if type(variable).__name__ == "HijaxVariable":
        msg = (
            f"{path} is a variable with hijax=True, which cannot be the state of a "
            "compiled program. Create it without."
        )
        raise StrategyError(msg)
    for leaf in jax.tree.leaves(raw_value(variable)):
        if _jax.is_ref(leaf):
            msg = (
                f"{path} keeps its value in a jax.Ref (ref=True), which cannot be the "
                "state of a compiled program. Create it without."
            )
            raise StrategyError(msg)
        if not isinstance(
            leaf,
            jax.Array
            | jax.ShapeDtypeStruct
            | (np.ndarray | np.generic | bool | int | float | complex),
        ):
            msg = (
                f"{path} is a variable that holds {_checks.type_text(leaf)}; the state "
                "of a compiled program consists of arrays. Make it a plain attribute."
            )
            raise StrategyError(msg)


def _references(values: list[Any], index: int) -> int:
    """Returns how many references there are to an entry of a list."""
    return sys.getrefcount(values[index])


# To a value that one object holds, besides the list that it is in.
_owner = types.SimpleNamespace(value=object())
_OWN_REFERENCES = _references([_owner.value], 0)


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return leaf
    return copy_to_mesh(leaf, fetch_layout(leaf))


def _is_changed(before: Any, after: Any) -> bool:
    if before is after:
        return False
    old, old_structure = jax.tree.flatten(before)
    new, new_structure = jax.tree.flatten(after)
    return old_structure != new_structure or not all(map(operator.is_, old, new))
