"""`TrainState`: everything that a training step carries forward.

The arrays are plain nested dicts, split off the model once when the state is created:
`nnx.jit`, which takes modules, traverses them again at every call. The model's
structure and the optimizer travel along as static code. `state.model` puts a module
together when a user asks for one.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, Self, TypeAlias, TypeVar

import jax
import numpy as np
import optax
from flax import linen as nn, nnx
from jax.core import Tracer

from meshlayout import _jax, _paths, _render
from meshlayout._annotations import Leaf, PyTree
from meshlayout._checks import shown
from meshlayout.errors import StateError, did_you_mean
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap, Resolved
from meshlayout.state.creation import (
    StateDescription,
    T,
    check_builder,
    describe_state,
    eager_sharding,
    eager_sharding_off,
    has_layout,
    marked,
)
from meshlayout.state.state_parts import (
    as_transformation,
    check_rng,
    split_model,
)


Model = TypeVar("Model", bound=nnx.Module | nn.Module)
Optimizer: TypeAlias = optax.GradientTransformation | optax.MultiSteps


@dataclasses.dataclass(eq=False)
class ModelCode:
    """The part of a train state that is code: the model's structure and the optimizer.

    It is static in a compiled step, so every call compares it: by identity first. Two
    states that were built separately are equal if their structures and optimizers are.

    Attributes:
        graphdef: The structure of an NNX module; None for Linen.
        module: The Linen module; None for NNX.
        boxed: The structure of Linen's parameters with their metadata.
        tx: The optimizer.
    """

    graphdef: Any
    module: Any
    boxed: Any
    tx: Any

    def __post_init__(self) -> None:
        # Cheap, the same in every process, and equal for whatever may be equal: the
        # hash of a graphdef would visit the whole model.
        kinds = (type(self.graphdef), type(self.module), type(self.tx))
        self._hash = hash(tuple(kind.__qualname__ for kind in kinds))

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, ModelCode):
            return self is other
        mine = (self.graphdef, self.module, self.tx)
        return mine == (other.graphdef, other.module, other.tx)

    def __hash__(self) -> int:
        return self._hash


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class TrainState(Generic[T]):
    """Everything that a training step carries forward, as one pytree.

    Make one with `TrainState.create`. It is a frozen dataclass whose array fields are
    plain nested dicts (an Optax state for `opt_state`), so that `jax.tree`, `jax.jit`
    and `jax.grad` take it and its parts directly. To a type checker it is generic over
    its model: `TrainState[MLP]`.

    Attributes:
        params: The trainable parameters.
        opt_state: The optimizer's state.
        model_state: The model's other arrays: batch statistics, RNG streams.
        step: The number of updates that were applied, int32.
        rng: A PRNG key for the step's own randomness.
        extra: Further arrays of a train step, by name: the moving average of the
            parameters (`ema`), a loss scale, the number of skipped steps.
        program: The model's structure and the optimizer; no arrays.
    """

    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    step: jax.Array
    rng: jax.Array
    extra: dict[str, Any]
    program: ModelCode = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        build: Callable[[], Model | Mapping[str, Any]],
        optimizer: Optimizer,
        layouts: LayoutMap | None = None,
        *,
        module: Model | None = None,
        rng: jax.Array | int = 0,
    ) -> "TrainState[Model]":
        """Creates a sharded state: parameters by the map, optimizer slots like them.

        Use this to start training. Nothing is ever materialized unsharded, and the
        values are those of building on one device, to the bit.

        Args:
            build: Makes the NNX module; or Linen's variables, together with `module`.
            optimizer: An Optax transformation, or `optax.MultiSteps`. Its state
                follows the parameters' layouts.
            layouts: The layouts of the parameters. Without, as for `ml.create`: every
                device holds all of them.
            module: For Linen: the module whose variables `build` returns.
            rng: A PRNG key or a seed, for `state.rng`.

        Raises:
            StateError: If the builder returns anything else or a model without
                parameters, or cannot be traced.
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
        where = "TrainState.create"
        return cls._describe(where, build, optimizer, layouts, module, rng).create()

    @classmethod
    def describe(
        cls,
        build: Callable[[], Model | Mapping[str, Any]],
        optimizer: Optimizer,
        layouts: LayoutMap | None = None,
        *,
        module: Model | None = None,
        rng: jax.Array | int = 0,
    ) -> "StateDescription[TrainState[Model]]":
        """Describes the state that `create` would make, without making it.

        Use this for shapes, layouts and memory, or to give `Checkpointer.restore` the
        state to restore into; see `ml.describe`. Arguments and errors: as for `create`.
        """
        where = "TrainState.describe"
        return cls._describe(where, build, optimizer, layouts, module, rng)

    @classmethod
    def _describe(
        cls,
        where: str,
        build: Callable[[], Any],
        optimizer: Optimizer,
        layouts: LayoutMap | None,
        module: object,
        rng: jax.Array | int,
    ) -> "StateDescription[Any]":
        check_builder(build, where)
        transformation = as_transformation(optimizer, where)
        is_eager = eager_sharding()
        check_rng(rng, where)

        # The optimizer's state is built in the same trace as the model, so that slots
        # are created sharded as well, and from parameters that are still abstract.
        def state() -> TrainState[Any]:
            key = rng if isinstance(rng, jax.Array) else jax.random.key(int(rng))
            built = build()
            if isinstance(built, nnx.Module):
                built = marked(built, is_eager=is_eager)
            parts = split_model(built, module, where)
            code = ModelCode(parts.graphdef, module, parts.boxed, transformation)
            opt_state = transformation.init(parts.params)
            step = jax.numpy.zeros((), "int32")
            model_state = parts.model_state
            return cls(parts.params, opt_state, model_state, step, key, {}, code)

        return describe_state(state, layouts, where)

    @property
    def model(self) -> T:
        """The model with these parameters: an NNX module, or a bound Linen module.

        Use this to call the model outside of a step. Each access makes a new one around
        the same arrays. A Linen module is bound with its other collections mutable;
        read them back with `model_state_of`.

        Raises:
            StateError: If a step has donated this state's memory.
        """
        _check_alive(self.params)
        if self.program.graphdef is not None:
            with eager_sharding_off():
                return nnx.merge(self.program.graphdef, self.params, self.model_state)
        variables = {"params": self.params, **self.model_state}
        return self.program.module.bind(variables, mutable=list(self.model_state))

    def model_state_of(self, model: nnx.Module | nn.Module) -> PyTree:
        """Returns the arrays of a model that are not parameters, for `model_state`.

        Use this in your own step to keep batch statistics and RNG counts.

        Args:
            model: The model from `state.model`, after it was called.

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
            "model_state_of takes the model that state.model returned, got "
            f"{shown(model)}."
        )
        raise StateError(msg)

    @property
    def tx(self) -> optax.GradientTransformation:
        """The optimizer."""
        return self.program.tx

    def replace(self, **changes: Any) -> Self:
        """Returns this state with new values for some fields.

        Args:
            **changes: New values, by field.

        Raises:
            StateError: If there is no such field.
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

    def apply_gradients(
        self, grads: PyTree, *, model: nnx.Module | nn.Module | None = None
    ) -> Self:
        """Returns the state after one update.

        Use this in your own step, under `compile_step`; `make_train_step` does it all.

        Args:
            grads: Gradients, in the structure of `params`; or the result of `nnx.grad`.
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
            new = self.model_state_of(model)
            _check_like("the model's state", new, "state.model_state", self.model_state)
            changes["model_state"] = new
        return self.replace(
            params=optax.apply_updates(self.params, updates),
            opt_state=opt_state,
            step=self.step + 1,
            **changes,
        )

    @property
    def layouts(self) -> "TrainState[Any]":
        """The layout of every array, in the structure of the state."""
        return jax.tree.map(Layout.of, self)

    def resolve_layouts(self, layouts: LayoutMap) -> Resolved:
        """Returns the layouts of all arrays; `LayoutMap.resolve` calls this."""
        boxed_params, boxed_rest = self._boxed()
        params = layouts.resolve(boxed_params)
        rest = layouts.resolve(boxed_rest)
        # A rule for `kernel` means the parameter wherever it is used, so parameters are
        # resolved without the prefix of their field. Slots have it: a rule can then
        # name `opt_state/...` to override what they take from their parameters.
        with_slots = {"opt_state": self.opt_state, "extra": self.extra}
        slots = layouts._resolve_slots(with_slots, self.params, params.resolutions)
        own = layouts.resolve({"step": self.step, "rng": self.rng})
        tree = self.replace(
            params=_like(self.params, params.layouts),
            opt_state=slots.layouts["opt_state"],
            model_state=_like(self.model_state, rest.layouts),
            step=own.layouts["step"],
            rng=own.layouts["rng"],
            extra=slots.layouts["extra"],
        )
        parts = (params, slots, rest, own)
        return Resolved(tree, tuple(r for part in parts for r in part.resolutions))

    def _boxed(self) -> tuple[PyTree, PyTree]:
        """Returns parameters and the rest with the metadata that their layers set."""
        code = self.program
        if code.graphdef is None:
            params = code.boxed.unflatten(jax.tree.leaves(self.params))
            return {"params": params}, self.model_state
        with eager_sharding_off():
            model = nnx.merge(code.graphdef, self.params, self.model_state)
        return nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))

    def __copy__(self) -> Self:
        return self.replace()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return jax.tree.map(lambda leaf: copy.deepcopy(leaf, memo), self)

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        """Returns a heading, the column names, and a row per leaf."""
        leaves = _paths.flatten(self).leaves
        if leaves and all(isinstance(leaf.value, Layout) for leaf in leaves):
            rows = [[leaf.path, str(leaf.value)] for leaf in leaves]
            return "TrainState of layouts", ["path", "layout"], rows
        num_params = sum(getattr(p, "size", 0) for p in jax.tree.leaves(self.params))
        # Inside jit the step is a tracer, and after a step that donated it deleted.
        step = self.step
        is_known = isinstance(step, jax.Array) and not isinstance(step, Tracer)
        step = str(int(step)) if is_known and not step.is_deleted() else "?"
        rows = [[leaf.path, *_leaf_texts(leaf.value)] for leaf in leaves]
        head = f"TrainState(step={step}, {num_params:,} parameters)"
        return head, ["path", "array", "layout"], rows

    def __repr__(self) -> str:
        head, columns, rows = self._table()
        return f"{head}\n{_render.text_table(columns, rows)}"

    def _repr_html_(self) -> str:
        head, columns, rows = self._table()
        return _render.html_table(columns, rows, caption=head)


def _check_alive(params: PyTree) -> None:
    """Raises StateError if a step has donated the state's memory.

    A step donates all arrays or none, so the first one shows it.
    """
    arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    if any(not isinstance(x, Tracer) and x.is_deleted() for x in arrays[:1]):
        msg = (
            "a step has used up this state: it reused its memory. Continue with the "
            "state that the step returned, or pass the step a copy: "
            "jax.tree.map(jnp.copy, state)."
        )
        raise StateError(msg)


def _check_like(what: str, tree: PyTree, name: str, like: PyTree) -> None:
    """Raises StateError unless a tree has the structure and shapes of another.

    Optax would not: it broadcasts a gradient of another shape, and silently updates
    with it.
    """
    shapes = {leaf.path: np.shape(leaf.value) for leaf in _paths.flatten(tree).leaves}
    expected = {leaf.path: np.shape(leaf.value) for leaf in _paths.flatten(like).leaves}
    missing = sorted(expected.keys() - shapes)
    extra = sorted(shapes.keys() - expected)
    unlike = [
        f"{path} is {list(shapes[path])} and not {list(shape)}"
        for path, shape in expected.items()
        if path in shapes and shapes[path] != shape
    ]
    facts = [
        f"missing: {', '.join(missing)}" * bool(missing),
        f"not in it: {', '.join(extra)}" * bool(extra),
        "; ".join(unlike[:3]),
    ]
    text = "; ".join(filter(None, facts)) or "the containers are of other types"
    if any(facts) or jax.tree.structure(tree) != jax.tree.structure(like):
        msg = (
            f"{what} and {name} differ in structure or shapes; {text}. Pass what was "
            f"derived from {name}, unchanged."
        )
        raise StateError(msg)


def _like(tree: PyTree, layouts: PyTree) -> PyTree:
    """Returns layouts in the structure of a tree that has the same leaves.

    They come in the structure of the boxed tree, whose containers may differ.
    """
    remaining = iter(jax.tree.leaves(layouts))
    return jax.tree.map(
        lambda leaf: next(remaining) if has_layout(leaf) else None, tree
    )


def _leaf_texts(value: Leaf) -> tuple[str, str]:
    """Returns the array's type and its layout."""
    if isinstance(value, Layout):
        return repr(value), str(value)
    array = repr(value)
    if hasattr(value, "shape"):
        array = _render.array_text(value.dtype, value.shape)
    return array, "?" if _jax.sharding_of(value) is None else str(Layout.of(value))
