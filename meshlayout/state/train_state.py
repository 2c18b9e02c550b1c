"""`TrainState`: everything that a training step carries forward."""

import copy
import dataclasses
import uuid
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import cloudpickle
import jax
import numpy as np
import optax
from flax import linen as nn, nnx
from flax.core import meta
from jax.core import Tracer

from meshlayout import _jax, _paths, _render
from meshlayout.errors import StateError, did_you_mean
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap, Resolved
from meshlayout.state.create import (
    check_builder,
    describe,
    eager_sharding,
    eager_sharding_off,
    has_layout,
    marked,
)


class _Program:
    """What of a train state is code: the model's structure and the optimiser.

    Compared by identity first, because every call of a compiled step compares it. A
    copy that was pickled equals the original by its token.
    """

    def __init__(
        self, graphdef: Any, module: Any, boxed: Any, tx: Any, token: str | None = None
    ) -> None:
        self.graphdef = graphdef
        self.module = module
        self.boxed = boxed
        self.tx = tx
        self.token = token or uuid.uuid4().hex
        kinds = (type(graphdef), type(module), type(tx))
        self._hash = hash(tuple(kind.__qualname__ for kind in kinds))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, _Program)
            and (
                self.token == other.token
                or (
                    self.graphdef == other.graphdef
                    and self.module == other.module
                    and self.tx == other.tx
                )
            )
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # An optimiser is made of local functions, which pickle alone cannot hold.
        code = (self.graphdef, self.module, self.boxed, self.tx)
        return _load_program, (cloudpickle.dumps(code), self.token)


def _load_program(code: bytes, token: str) -> _Program:
    graphdef, module, boxed, tx = cloudpickle.loads(code)
    return _Program(graphdef, module, boxed, tx, token)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class TrainState:
    """Everything that a training step carries forward, as one pytree.

    Make one with `TrainState.create`. It is a frozen dataclass whose array fields are
    plain nested dicts (an Optax state for `opt_state`), so that `jax.tree`, `jax.jit`
    and `jax.grad` take it and its parts as they are.

    Attributes:
        params: The trainable parameters.
        opt_state: The optimiser's state.
        model_state: The model's other arrays: batch statistics, RNG streams.
        step: How many updates were applied, int32.
        rng: A PRNG key for the step's own randomness.
        extra: What a train step keeps beside, by name: the moving average of the
            parameters (`ema`), a loss scale, a count of skipped steps.
        program: The model's structure and the optimiser; no arrays.
    """

    params: Any
    opt_state: Any
    model_state: Any
    step: Any
    rng: Any
    extra: dict[str, Any]
    program: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        build: Callable[[], Any],
        optimizer: optax.GradientTransformation,
        layouts: LayoutMap,
        *,
        module: nn.Module | None = None,
        rng: jax.Array | int = 0,
    ) -> "TrainState":
        """Makes a state, born sharded: parameters by the map, slots beside them.

        Args:
            build: Makes the NNX module; or Linen's variables, given `module`.
            optimizer: An Optax transformation, or `optax.MultiSteps`. Its state
                follows the parameters.
            layouts: Where the parameters go.
            module: For Linen: the module whose variables `build` returns.
            rng: A PRNG key or a seed, for `state.rng`.

        Raises:
            StateError: If the builder makes neither, or cannot be traced.
            LayoutMapError: If the rules disagree or do not fit.

        Example:
            >>> import meshlayout as ml
            >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
            >>> layouts = ml.LayoutMap(mesh, {"kernel": (None, "model")})
            >>> state = ml.TrainState.create(
            ...     lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)),
            ...     optax.adam(1e-3),
            ...     layouts,
            ... )
            >>> str(state.layouts.opt_state[0].mu["kernel"])
            '[unsharded, model]'
        """
        return cls.describe(build, optimizer, layouts, module=module, rng=rng).create()

    @classmethod
    def describe(
        cls,
        build: Callable[[], Any],
        optimizer: optax.GradientTransformation,
        layouts: LayoutMap,
        *,
        module: nn.Module | None = None,
        rng: jax.Array | int = 0,
    ) -> Any:
        """Describes what `create` would make, and makes nothing; see `ml.describe`.

        Args:
            build: As for `create`.
            optimizer: As for `create`.
            layouts: As for `create`.
            module: As for `create`.
            rng: As for `create`.
        """
        check_builder(build)
        optimizer = _as_transformation(optimizer)
        flag = eager_sharding()
        _check_rng(rng)

        def state() -> TrainState:
            key = jax.random.key(rng) if isinstance(rng, Integral) else rng
            built = build()
            if isinstance(built, nnx.Module):
                built = marked(built, flag)
            params, model_state, program = _split(built, module, optimizer)
            opt_state = optimizer.init(params)
            step = jax.numpy.zeros((), "int32")
            return cls(params, opt_state, model_state, step, key, {}, program)

        return describe(state, layouts)

    @property
    def model(self) -> Any:
        """The model with these parameters: an NNX module, or a bound Linen module.

        Each access makes a new one, around the same arrays. A Linen module is bound
        with its other collections mutable; read them back with `model_state_of`.
        """
        if self.program.graphdef is not None:
            with eager_sharding_off():
                return nnx.merge(self.program.graphdef, self.params, self.model_state)
        variables = {"params": self.params, **self.model_state}
        return self.program.module.bind(variables, mutable=list(self.model_state))

    def model_state_of(self, model: Any) -> Any:
        """Returns the arrays of a model that are no parameters, for `model_state`.

        Args:
            model: What `model` gave, after it was called.

        Raises:
            StateError: If it is not such a model.
        """
        is_linen = self.program.graphdef is None
        if is_linen and isinstance(model, nn.Module):
            variables = dict(model.variables)
            variables.pop("params", None)
            return variables
        if not is_linen and isinstance(model, nnx.Module):
            return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))
        msg = (
            f"expected the model that state.model gave, and got {model!r} of type "
            f"{type(model).__name__}."
        )
        raise StateError(msg)

    def _state_after(self, model: Any) -> Any:
        """Returns a model's other arrays, if they are those of this state."""
        found = self.model_state_of(model)
        _check_like("the model's state", found, "state.model_state", self.model_state)
        return found

    @property
    def tx(self) -> optax.GradientTransformation:
        """The optimiser."""
        return self.program.tx

    def replace(self, **changes: Any) -> "TrainState":
        """Returns this state with other values for some fields.

        Args:
            **changes: New values, by field.

        Raises:
            StateError: If a field does not exist.
        """
        names = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in names:
                msg = (
                    f"a TrainState has no field {name!r}; it has "
                    f"{', '.join(map(repr, names))}.{did_you_mean(name, names)}"
                )
                raise StateError(msg)
        return dataclasses.replace(self, **changes)

    def apply_gradients(self, grads: Any, *, model: Any = None) -> "TrainState":
        """Returns the state after one update.

        Args:
            grads: Gradients, in the structure of `params`; or what `nnx.grad` gives.
            model: The model after its forward pass, to take `model_state` (batch
                statistics, RNG counts) from.

        Raises:
            StateError: If the gradients have another structure or other shapes than
                `params`, or the model's state than `model_state`.
        """
        if isinstance(grads, nnx.State):
            grads = nnx.to_pure_dict(grads)
        _check_like("the gradients", grads, "state.params", self.params)
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        changes: dict[str, Any] = {}
        if model is not None:
            changes["model_state"] = self._state_after(model)
        return self.replace(
            params=optax.apply_updates(self.params, updates),
            opt_state=opt_state,
            step=self.step + 1,
            **changes,
        )

    @property
    def layouts(self) -> "TrainState":
        """The layout of every array, in the structure of the state."""
        return jax.tree.map(Layout.of, self)

    def resolve_layouts(self, layouts: LayoutMap) -> Resolved:
        """Returns the layouts of all arrays; `LayoutMap.resolve` calls this."""
        boxed_params, boxed_rest = self._boxed()
        params = layouts.resolve(boxed_params)
        rest = layouts.resolve(boxed_rest)
        # The slots' paths begin with their field, the parameters' with no prefix.
        beside = {"opt_state": self.opt_state, "extra": self.extra}
        slots = layouts._resolve_slots(beside, self.params, params.resolutions)
        own = layouts.resolve({"step": self.step, "rng": self.rng})
        tree = self.replace(
            params=_like(self.params, params.layouts),
            opt_state=slots.layouts["opt_state"],
            model_state=_like(self.model_state, rest.layouts),
            step=own.layouts["step"],
            rng=own.layouts["rng"],
            extra=slots.layouts["extra"],
        )
        found = (params, slots, rest, own)
        return Resolved(tree, tuple(r for part in found for r in part.resolutions))

    def _boxed(self) -> tuple[Any, Any]:
        """Returns parameters and the rest with the metadata that their layers gave."""
        code = self.program
        if code.graphdef is None:
            params = code.boxed.unflatten(jax.tree.leaves(self.params))
            return {"params": params}, self.model_state
        with eager_sharding_off():
            model = nnx.merge(code.graphdef, self.params, self.model_state)
        return nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))

    def __reduce__(self) -> tuple[Any, ...]:
        packed = {
            name: jax.tree.map(_Packed.of, getattr(self, name))
            for name in _ARRAY_FIELDS
        }
        return _unpickle, (packed, self.program)

    def __copy__(self) -> "TrainState":
        return self.replace()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrainState":
        return jax.tree.map(lambda leaf: copy.deepcopy(leaf, memo), self)

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        """Returns a heading, and a table of the leaves."""
        leaves = _paths.flatten(self).leaves
        if leaves and all(isinstance(leaf.value, Layout) for leaf in leaves):
            rows = [[leaf.path, str(leaf.value)] for leaf in leaves]
            return "TrainState of layouts", ["path", "layout"], rows
        sizes = (getattr(leaf, "size", 0) for leaf in jax.tree.leaves(self.params))
        head = f"TrainState(step={_scalar(self.step)}, {sum(sizes):,} parameters)"
        rows = [
            [leaf.path, _array_text(leaf.value), _layout_text(leaf.value)]
            for leaf in leaves
        ]
        return head, ["path", "array", "layout"], rows

    def __repr__(self) -> str:
        head, columns, rows = self._table()
        return f"{head}\n{_render.text_table(columns, rows)}"

    def _repr_html_(self) -> str:
        head, columns, rows = self._table()
        return _render.html_table(columns, rows, caption=head)


def _split(
    built: Any, module: nn.Module | None, optimizer: Any
) -> tuple[Any, Any, _Program]:
    """Returns parameters, the model's other arrays, and the code."""
    if module is not None:
        if not isinstance(module, nn.Module) or not isinstance(built, Mapping):
            msg = (
                "module= is for Linen: a Linen module, beside a builder that returns "
                f"what module.init(key, sample) returns. Got a {type(module).__name__} "
                f"and a builder that returns a {type(built).__name__}."
            )
            raise StateError(msg)
        variables = dict(built)
        if "params" not in variables:
            msg = (
                f"the builder's variables have the collections {sorted(variables)} and "
                "no 'params'. Return what module.init(key, sample) returns."
            )
            raise StateError(msg)
        boxed = variables.pop("params")
        params = meta.unbox(boxed)
        program = _Program(None, module, jax.tree.structure(boxed), optimizer)
        return params, meta.unbox(variables), program
    if isinstance(built, nnx.Module):
        graphdef, params, rest = nnx.split(built, nnx.Param, ...)
        program = _Program(graphdef, None, None, optimizer)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(rest), program
    msg = (
        f"the builder returned a {type(built).__name__}; TrainState.create takes an "
        "NNX module, or Linen's variables together with module=. For any other "
        "pytree use create(build, layouts)."
    )
    raise StateError(msg)


def _as_transformation(optimizer: Any) -> optax.GradientTransformation:
    if hasattr(optimizer, "gradient_transformation"):  # optax.MultiSteps
        # Its own gradient_transformation() keeps value= from the optimiser inside.
        return optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)
    if not isinstance(optimizer, optax.GradientTransformation):
        msg = (
            f"expected an Optax optimizer, and got {optimizer!r} of type "
            f"{type(optimizer).__name__}. Write TrainState.create(build, "
            "optax.adam(1e-3), layouts)."
        )
        raise StateError(msg)
    return optimizer


def _check_rng(rng: Any) -> None:
    if not isinstance(rng, (Integral, jax.Array)) or isinstance(rng, bool):
        msg = (
            f"rng is a seed or a PRNG key, and got {rng!r} of type "
            f"{type(rng).__name__}. Write rng=0 or rng=jax.random.key(0)."
        )
        raise StateError(msg)


def _check_like(what: str, tree: Any, name: str, like: Any) -> None:
    """Raises StateError unless a tree has the structure and shapes of another."""
    found = {leaf.path: np.shape(leaf.value) for leaf in _paths.flatten(tree).leaves}
    wanted = {leaf.path: np.shape(leaf.value) for leaf in _paths.flatten(like).leaves}
    missing, extra = sorted(wanted.keys() - found), sorted(found.keys() - wanted)
    unlike = [
        f"{path} is {list(found[path])} and not {list(shape)}"
        for path, shape in wanted.items()
        if path in found and found[path] != shape
    ]
    facts = [
        f"missing: {', '.join(missing)}" * bool(missing),
        f"not in it: {', '.join(extra)}" * bool(extra),
        "; ".join(unlike[:3]),
    ]
    if not any(facts) and jax.tree.structure(tree) == jax.tree.structure(like):
        return
    msg = f"{what} and {name} differ in structure or shapes; " + "; ".join(
        [fact for fact in facts if fact] or ["the containers are of other types"]
    )
    raise StateError(f"{msg}. Pass what was derived from {name}, as it is.")


def _like(tree: Any, layouts: Any) -> Any:
    """Returns layouts in the structure of a tree of the same leaves."""
    found = iter(jax.tree.leaves(layouts))
    return jax.tree.map(lambda leaf: next(found) if has_layout(leaf) else None, tree)


def _scalar(value: Any) -> str:
    is_known = isinstance(value, jax.Array) and not isinstance(value, Tracer)
    return str(int(value)) if is_known and not value.is_deleted() else "?"


def _array_text(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return repr(value) if shape is None else _render.array_text(dtype, shape)


def _layout_text(value: Any) -> str:
    if isinstance(value, Layout):
        return str(value)
    return str(Layout.of(value)) if _jax.sharding_of(value) is not None else "?"


# Pickling by value: what each device holds is gathered to the host, and placed again
# where the same devices are.


@dataclasses.dataclass(frozen=True)
class _Packed:
    """A leaf as it is pickled; `layout` is None for what is no array on devices."""

    value: Any
    layout: Layout | None
    key_impl: str | None

    @classmethod
    def of(cls, leaf: Any) -> "_Packed":
        if not isinstance(leaf, jax.Array):
            return cls(leaf, None, None)
        layout = Layout.of(leaf)
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = _jax.to_host(jax.random.key_data(leaf))
            return cls(data, layout, str(jax.random.key_impl(leaf)))
        return cls(_jax.to_host(leaf), layout, None)

    def unpacked(self) -> Any:
        if self.layout is None:
            return self.value
        value = self.value
        if self.key_impl is not None:
            value = jax.random.wrap_key_data(value, impl=self.key_impl)
        return jax.device_put(value, self.layout.sharding)


_ARRAY_FIELDS = ("params", "opt_state", "model_state", "step", "rng", "extra")


def _unpickle(packed: dict[str, Any], program: Any) -> TrainState:
    return jax.tree.map(_Packed.unpacked, TrainState(**packed, program=program))
