"""A replica's step on variables in host memory, which takes scanned ones by slices.

A compiler that is asked to move an array from the host's memory to the device's holds
the whole of it there. So the traced step is rewritten. A variable whose dim 0 is
scanned over (the stacked blocks of a model) stays on the host; the body of each scan
moves one slice to the device, in the forward pass and again in the backward pass, which
sends its gradients to the host slice by slice. What the optimizer computes of them
element by element is put off until one last loop over the slices, which updates the
host's arrays in place.

The jaxpr is rewritten after differentiation. Patching `jax.lax.scan` while the step is
traced would need derivatives of its own for every transfer; in a jaxpr, the backward
pass is one more scan. Models and optimizers need no change.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Literal

from meshlayout import _jax, _jaxprs
from meshlayout._annotations import Equation, PyTree
from meshlayout.distribute.host_variables import HostVariable
from meshlayout.distribute.slice_operations import (
    filled_slice,
    has_slices,
    is_elementwise,
    part_of_slices,
    slice_operation,
    split_reduction,
    streamed,
)


@dataclass
class Transfers:
    """What a step moves to the devices, by the index of its input.

    Attributes:
        sliced: Variables of which a device holds one slice at a time.
        whole: Variables that a device holds whole, and the first operation that needs
            that.
        gradients: Operations that need the gradients of all slices.
    """

    sliced: set[int] = field(default_factory=set)
    whole: dict[int, str] = field(default_factory=dict)
    gradients: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _HostStack:
    """An array in host memory, to be read by slices: a variable, or gradients.

    Attributes:
        array: The array, or this replica's shard.
        variable: Its whole shape, and the dim that is sharded.
        inputs: The inputs of the step that it holds values of.
    """

    array: jax.Array
    variable: HostVariable
    inputs: frozenset[int] = frozenset()

    @property
    def length(self) -> int:
        return self.variable.shape[0]


@dataclass(frozen=True, eq=False)
class _ComputedStack:
    """Slices that are computed of other slices where they are needed.

    Attributes:
        length: How many there are.
        compute: A function of a slice of each operand, or the operand if it is a
            scalar; if it is elementwise, of shards of slices as well.
        operands: Stacks, arrays and scalars.
    """

    length: int
    compute: Callable[..., Any]
    operands: tuple[Any, ...]
    is_elementwise: bool = False

    @property
    def inputs(self) -> frozenset[int]:
        stacks = (x for x in self.operands if isinstance(x, _Stack))
        return frozenset().union(*(stack.inputs for stack in stacks))


_Stack: TypeAlias = _HostStack | _ComputedStack


class _Slices:
    """The slices at one index on the device, each computed once.

    Args:
        index: The index, inside a loop.
        arrays: The present arrays of stacks that the loop itself updates.
    """

    def __init__(
        self, index: jax.Array, arrays: dict[_HostStack, jax.Array] | None = None
    ) -> None:
        self._index = index
        self._arrays = arrays or {}
        self._cache: dict[Any, jax.Array] = {}

    def get(self, stack: _Stack, target: HostVariable | None = None) -> jax.Array:
        """Returns a slice, or this replica's shard of it as `target` is sharded."""
        key = (stack, target and target.dim)
        if key not in self._cache:
            self._cache[key] = self._compute(stack, target)
        return self._cache[key]

    def _compute(self, stack: _Stack, target: HostVariable | None) -> jax.Array:
        dim = target.dim if target else None
        if isinstance(stack, _HostStack):
            array = self._arrays.get(stack, stack.array)
            x = jax.device_put(self._at_index(array), jax.memory.Space.Device)
            storage = stack.variable.slices
            if storage.dim == dim:
                return x
            x = storage.gather(x)
        elif stack.is_elementwise:
            return stack.compute(*(self._operand(x, target) for x in stack.operands))
        else:
            x = stack.compute(*(self._operand(x, None) for x in stack.operands))
        return target.shard(x) if target else x

    def _operand(self, x: Any, target: HostVariable | None) -> Any:
        if isinstance(x, _Stack):
            return self.get(x, target)
        if not jnp.ndim(x):
            return x
        return target.shard(self._at_index(x)) if target else self._at_index(x)

    def _at_index(self, x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x, self._index, keepdims=False)


class HostStep:
    """A replica's step, rewritten to take and return variables in host memory.

    Args:
        step: A function of the values of all variables and of other arguments, for
            whole values in the devices' memory. It returns the new values of those that
            it changes, and a tree.
        hosted: The variables in host memory, by index among the leaves of the values.
        changed: Returns which values the step changes, once it was traced.

    Attributes:
        transfers: What it moves to the devices; known once it was called.
    """

    def __init__(
        self,
        step: Callable[[list[Any], PyTree], tuple[list[Any], PyTree]],
        hosted: dict[int, HostVariable],
        changed: Callable[[], list[int]],
    ) -> None:
        self.transfers = Transfers()
        self._step = step
        self._variables = hosted
        self._changed = changed
        # By index among the outputs, the input whose new value it is.
        self._outputs: dict[int, int] = {}
        self._jaxpr: Any = None
        self._streamed: set[Any] = set()
        # How each slice of a gradient is stored: as a variable of the same shape.
        self._storage = {x.shape: x for x in hosted.values()}
        self._values: dict[Any, Any] = {}
        self._on_device: dict[_Stack, jax.Array] = {}

    def __call__(
        self, values: list[Any], arguments: PyTree
    ) -> tuple[list[Any], PyTree]:
        """Runs the step on one replica, inside `shard_map` if there are several.

        Args:
            values: The values of all variables; of those in host memory, the shards of
                this replica.
            arguments: The other arguments.
        """
        inputs, treedef = jax.tree.flatten((values, arguments))
        whole = [
            jax.ShapeDtypeStruct(
                self._variables[i].shape if i in self._variables else x.shape,
                x.dtype,
                weak_type=x.weak_type,
            )
            for i, x in enumerate(map(jax.typeof, inputs))
        ]
        traced, shapes = jax.make_jaxpr(self._step, return_shape=True)(
            *treedef.unflatten(whole)
        )
        starts = [0]
        for value in values:
            starts.append(starts[-1] + len(jax.tree.leaves(value)))
        sources = [i for c in self._changed() for i in range(starts[c], starts[c + 1])]
        self._outputs = dict(enumerate(sources))
        outputs = self._evaluated(_jaxprs.flat(traced), inputs)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    def _evaluated(self, closed: ClosedJaxpr, inputs: list[Any]) -> list[jax.Array]:
        self._jaxpr = jaxpr = closed.jaxpr
        hosted = (jaxpr.invars[i] for i in self._variables)
        self._streamed = streamed(jaxpr, filter(has_slices, hosted))
        self._values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        for index, (var, x) in enumerate(zip(jaxpr.invars, inputs, strict=True)):
            if index in self._variables:
                if not _jax.is_on_host(x):  # set to something else meanwhile
                    x = jax.device_put(x, jax.memory.Space.Host)
                stack = _HostStack(x, self._variables[index], frozenset({index}))
                self._values[var] = stack
                if var in self._streamed:
                    self.transfers.sliced.add(index)
            else:
                self._values[var] = x
        for eqn in jaxpr.eqns:
            # The sum of a scan's gradients may have a value already: see `_scan`.
            if not any(var in self._values for var in eqn.outvars):
                results = self._evaluate(eqn)
                self._values.update(zip(eqn.outvars, results, strict=True))
        return self._store()

    def _read(self, var: Any) -> Any:
        return var.val if isinstance(var, Literal) else self._values[var]

    def _is_streamed(self, var: Any) -> bool:
        return not isinstance(var, Literal) and var in self._streamed

    def _evaluate(self, eqn: Equation) -> Sequence[Any]:
        """Returns the results of an operation: arrays on the device, and stacks."""
        operands = [self._read(var) for var in eqn.invars]
        for index, (var, x) in enumerate(zip(eqn.invars, operands, strict=True)):
            if isinstance(x, _HostStack) and not has_slices(var):
                operands[index] = self._whole(x, eqn)
        if eqn.primitive.name == "scan":
            results = self._scan(eqn, operands)
        else:
            results = self._by_slices(eqn, operands)
        if results is not None:
            return results
        operands = [self._whole(x, eqn) for x in operands]
        return _jaxprs.apply_operation(eqn, operands, in_mesh=True)

    def _by_slices(self, eqn: Equation, operands: list[Any]) -> Sequence[Any] | None:
        """Returns the result if it, or what it is reduced from, can be left in slices.

        Most are computed later, in the loops that need them.
        """
        if len(eqn.outvars) != 1:
            return None
        shape = eqn.outvars[0].aval.shape
        fill = filled_slice(eqn)
        if fill is not None and self._is_streamed(eqn.outvars[0]):
            value = self._whole(operands[0], eqn)
            return [_ComputedStack(shape[0], lambda: fill(value), ())]
        if not any(
            self._is_streamed(v) and isinstance(x, _Stack)
            for v, x in zip(eqn.invars, operands, strict=True)
        ):
            return None
        reduction = split_reduction(eqn)
        if reduction is not None:
            stack = _ComputedStack(operands[0].length, reduction[0], tuple(operands))
            return [reduction[1](_stacked(stack))]
        compute = slice_operation(eqn)
        if compute is None:
            return None
        stack = _ComputedStack(shape[0], compute, tuple(operands), is_elementwise(eqn))
        return [stack]

    def _scan(self, eqn: Equation, operands: list[Any]) -> list[Any] | None:
        """Returns the results of a scan that reads slices, or whose results are some.

        Returns None for any other.
        """
        num_consts, num_carry = _jax.scan_counts(eqn)
        first = num_consts + num_carry
        body = eqn.params["jaxpr"]
        stacks = {
            i: x for i, x in enumerate(operands) if i >= first and isinstance(x, _Stack)
        }
        operands = [
            x if i in stacks else self._whole(x, eqn) for i, x in enumerate(operands)
        ]
        results: dict[int, Any] = {}
        gradients: dict[int, tuple[Any, HostVariable]] = {}
        for index, var in enumerate(eqn.outvars[num_carry:], num_carry):
            constants = dict(enumerate(operands[:num_consts]))
            part = part_of_slices(body, index, constants, set(stacks))
            if part is not None:
                taken = tuple(stacks[i] for i in part[0])
                results[index] = _ComputedStack(taken[0].length, part[1], taken)
            elif self._is_streamed(var) and has_slices(var):
                gradients[index] = self._gradient_storage(var)
        if not stacks and not gradients:
            return None

        def step(carry: list[Any], x: tuple[jax.Array, list[Any]]) -> Any:
            slices, arrays = _Slices(x[0]), iter(x[1])
            inner = [
                slices.get(stacks[i]) if i in stacks else next(arrays)
                for i in range(first, len(operands))
            ]
            inputs = [*operands[:num_consts], *carry, *inner]
            outputs = eval_jaxpr(body.jaxpr, body.consts, *inputs)
            ys = {
                i: y
                for i, y in enumerate(outputs)
                if i >= num_carry and i not in results
            }
            for i, (total, storage) in gradients.items():
                y = ys[i] if total is None else storage.slices.sum(ys[i])
                ys[i] = jax.device_put(y, jax.memory.Space.Host)
            return outputs[:num_carry], ys

        arrays = [x for i, x in enumerate(operands) if i >= first and i not in stacks]
        carry, ys = jax.lax.scan(
            step,
            operands[num_consts:first],
            (jnp.arange(eqn.params["length"]), arrays),
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        results |= dict(enumerate(carry)) | ys
        for index, (total, storage) in gradients.items():
            results[index] = _HostStack(ys[index], storage)
            if total is not None:
                self._values[total] = results[index]
        return [results[index] for index in range(len(eqn.outvars))]

    def _gradient_storage(self, var: Any) -> tuple[Any, HostVariable]:
        """Returns how a scan's gradients are put into host memory.

        Where they are only added up over the replicas, the scan does it: each replica
        then keeps its shard of the sum, not all of its own gradients.

        Returns:
            The variable of the sum or None, and the storage.
        """
        any_variable = next(iter(self._storage.values()))
        whole = dataclasses.replace(any_variable, shape=var.aval.shape, dim=None)
        uses = [eqn for eqn in self._jaxpr.eqns if var in map(_hashable, eqn.invars)]
        is_result = var in map(_hashable, self._jaxpr.outvars)
        if len(uses) != 1 or is_result or uses[0].primitive.name != "psum":
            return None, whole
        (total,) = uses[0].outvars
        return total, self._storage.get(var.aval.shape, whole)

    def _whole(self, value: Any, eqn: Equation | None) -> Any:
        """Returns a value on the device, whole, and notes which operation needs it."""
        if not isinstance(value, _Stack):
            return value
        if value not in self._on_device:
            operation = "its new value" if eqn is None else _jaxprs.origin(eqn)
            if not value.inputs:
                self.transfers.gradients.append(operation)
            for index in value.inputs:
                self.transfers.whole.setdefault(index, operation)
                self.transfers.sliced.discard(index)
            if isinstance(value, _HostStack):
                x = jax.device_put(value.array, jax.memory.Space.Device)
                self._on_device[value] = value.variable.gather(x)
            else:
                self._on_device[value] = _stacked(value)
        return self._on_device[value]

    def _store(self) -> list[jax.Array]:
        """Returns the outputs, the variables in host memory."""
        results: dict[int, jax.Array] = {}
        loops: dict[int, dict[int, _Stack]] = {}
        for index, var in enumerate(self._jaxpr.outvars):
            value, source = self._read(var), self._outputs.get(index, -1)
            variable = self._variables.get(source)
            if variable is None:
                results[index] = self._whole(value, None)
            elif value is self._values[self._jaxpr.invars[source]]:
                results[index] = value.array
            elif isinstance(value, _Stack) and has_slices(var):
                loops.setdefault(value.length, {})[source] = value
            else:
                shard = variable.shard(self._whole(value, None))
                results[index] = jax.device_put(shard, jax.memory.Space.Host)
        indices = {source: index for index, source in self._outputs.items()}
        for length, stacks in loops.items():
            updated = self._updated(length, stacks)
            results |= {indices[source]: x for source, x in updated.items()}
        return [results[index] for index in range(len(self._jaxpr.outvars))]

    def _updated(self, length: int, stacks: dict[int, _Stack]) -> dict[int, jax.Array]:
        """Returns new values of variables, by input, all computed in one loop.

        The loop carries the arrays, which are updated in place. If it returned their
        slices instead, the host would hold the old and the new ones.
        """
        variables = {i: self._values[self._jaxpr.invars[i]] for i in stacks}
        read = variables.keys() | frozenset().union(
            *(x.inputs for x in stacks.values())
        )
        self.transfers.sliced |= read - self.transfers.whole.keys()

        def update(arrays: dict[int, jax.Array], index: jax.Array) -> Any:
            current = {variables[i]: x for i, x in arrays.items()}
            slices = _Slices(index, current)
            new = {
                i: jax.device_put(
                    slices.get(stack, self._variables[i].slices),
                    jax.memory.Space.Host,
                )
                for i, stack in stacks.items()
            }
            return {
                i: jax.lax.dynamic_update_index_in_dim(x, new[i], index, 0)
                for i, x in arrays.items()
            }, None

        arrays = {i: variable.array for i, variable in variables.items()}
        return jax.lax.scan(update, arrays, jnp.arange(length))[0]


def _stacked(stack: _Stack) -> jax.Array:
    return jax.lax.map(lambda i: _Slices(i).get(stack), jnp.arange(stack.length))


def _hashable(var: Any) -> Any:
    return None if isinstance(var, Literal) else var
