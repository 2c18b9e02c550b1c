"""`TrainState`: everything that a training step carries forward.

The arrays are plain nested dicts, split off the model once, as `nnx.jit` would traverse
modules at every call. The model's code and the optimizer are static.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, Self, TypeAlias, TypeVar

import jax
import numpy as np
import optax
from flax import linen as nn, nnx
from flax.core import meta
from jax.core import Tracer

from meshlayout import _checks, _jax, _paths, _render
from meshlayout._annotations import PyTree
from meshlayout.arrays import copy_to_mesh
from meshlayout.errors import StateError, warn
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap, Resolved
from meshlayout.layout_map.report import nearest_paths
from meshlayout.state import creation
from meshlayout.state.creation import StateDescription, T


_warn_once = functools.cache(logging.getLogger("meshlayout").warning)

Model = TypeVar("Model", bound=nnx.Module | nn.Module)
Optimizer: TypeAlias = optax.GradientTransformation | optax.MultiSteps

_WHERE = "TrainState.create"


@dataclasses.dataclass
class ModelCode:
    """The code of a train state, static in a step: every call compares it."""

    graphdef: Any  # the structure of an NNX module; None for Linen
    module: Any  # the Linen module; None for NNX
    boxed: Any  # the structure of Linen's parameters with their metadata
    tx: Any  # the optimizer

    def __hash__(self) -> int:
        # That of a graphdef would visit the whole model at each call.
        return hash((type(self.module), type(self.tx)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class TrainState(_checks.WithReflexes, Generic[T]):
    """Everything that a training step carries forward, as one pytree.

    Create one with `TrainState.create`. Its array fields are plain nested dicts (an
    Optax state for `opt_state`), which `jax.tree`, `jax.jit` and `jax.grad` take
    directly. For type checkers, it is generic over its model: `TrainState[MLP]`.

    Attributes:
        params: The trainable parameters.
        opt_state: The optimizer's state.
        model_state: The model's other arrays: batch statistics, RNG streams.
        step: The number of updates so far, int32.
        rng: A PRNG key for the step's own randomness.
        extra: Other arrays of a train step, by name: the moving average of the
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
    @_checks.user_call
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

        The values are bit-identical to those of a build on one device.

        Args:
            build: Makes the NNX module; or Linen's variables, together with `module`.
            optimizer: An Optax transformation, or `optax.MultiSteps`.
            layouts: The layouts of the parameters; the default is that of `ml.create`.
            module: For Linen: the module whose variables `build` returns.
            rng: A PRNG key or a seed, for `state.rng`.

        Examples:
            >>> import meshlayout as ml
            >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
            >>> layouts = ml.LayoutMap(mesh, {"kernel": (None, "model")})
            >>> build = lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0))
            >>> state = ml.TrainState.create(build, optax.adam(1e-3), layouts)
            >>> str(state.layouts.opt_state[0].mu["kernel"])
            '[unsharded, model]'
        """
        return cls.describe(build, optimizer, layouts, module=module, rng=rng).create()

    @classmethod
    @_checks.user_call
    def describe(
        cls,
        build: Callable[[], Model | Mapping[str, Any]],
        optimizer: Optimizer,
        layouts: LayoutMap | None = None,
        *,
        module: Model | None = None,
        rng: jax.Array | int = 0,
    ) -> "StateDescription[TrainState[Model]]":
        """Describes the state that `create` would make, without allocating it.

        Use this for shapes and layouts, or to restore; arguments are those of `create`.
        """
        creation.check_builder(build, _WHERE)
        tx, is_eager = _transformation(optimizer), creation.eager_sharding()
        if not isinstance(rng, jax.Array):
            options: Any = {"at_least": None, "where": _WHERE, "error": StateError}
            rng = _checks.count("rng", rng, **options)

        # The optimizer's state is built in the same trace as the model, so that slots
        # are created sharded as well, and from parameters that are still abstract.
        def state() -> TrainState[Any]:
            key = rng if isinstance(rng, jax.Array) else jax.random.key(rng)
            built: Any = build()
            if isinstance(built, nnx.Module):
                built = creation.marked(built, is_eager=is_eager)
            params, model_state, code = _split(built, module, tx)
            step = jax.numpy.zeros((), "int32")
            return cls(params, tx.init(params), model_state, step, key, {}, code)

        return creation.describe_state(state, layouts, _WHERE)

    @property
    def model(self) -> T:
        """The model with these parameters: an NNX module, or a bound Linen module.

        Each access makes a new one, in the mode in which it was built: to predict, call
        its `eval()`, or a Linen module with `train=False`. Changes to it do not change
        the state. The other collections of Linen are mutable: see `model_state_of`.
        """
        self._refuse_used_up()
        code = self.program
        if code.graphdef is None:
            variables = {"params": self.params, **self.model_state}
            return code.module.bind(variables, mutable=list(self.model_state))
        with creation.eager_sharding_off():
            return nnx.merge(code.graphdef, self.params, self.model_state)

    def _is_used_up(self) -> bool:  # a step donates all arrays or none
        return isinstance(self.step, _jax.ArrayImpl) and self.step.is_deleted()

    def _refuse_used_up(self) -> None:
        if self._is_used_up():
            msg = "a step has used up this state. Continue with what the step returned"
            msg += (
                ", or trainer.state, or give it a copy: jax.tree.map(jnp.copy, state)."
            )
            raise StateError(msg)

    def model_state_of(self, model: nnx.Module | nn.Module) -> PyTree:
        """Returns a model's arrays other than its parameters, for `model_state`.

        Use this in your own step, after a call of `state.model`.
        """
        if isinstance(model, nn.Module):
            return {name: x for name, x in model.variables.items() if name != "params"}
        return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

    @property
    def tx(self) -> optax.GradientTransformation:
        """The optimizer."""
        return self.program.tx

    def replace(self, **changes: Any) -> Self:
        """Returns this state with new values of some fields.

        Flax's and Optax's trees, also of NumPy arrays or on another mesh, become plain
        dicts in the old layouts. `model=` stands for `params` and `model_state`.
        """
        known = {"tx", "model", *(field.name for field in dataclasses.fields(self))}
        for name in changes.keys() - known:
            _checks.option("TrainState.replace", name, sorted(known))
        if "model" in changes:
            model = changes.pop("model")
            if not isinstance(model, nnx.Module):
                msg = "replace takes an NNX module as model, got "
                msg += f"{_checks.shown(model)}. Otherwise give params and model_state."
                raise StateError(msg)
            changes["params"] = nnx.state(model, nnx.Param)
            changes["model_state"] = self.model_state_of(model)
        fields = ("params", "opt_state", "model_state", "step")
        likes = {name: getattr(self, name) for name in fields}
        if "tx" in changes:
            tx = _transformation(changes.pop("tx"))
            changes["program"] = dataclasses.replace(self.program, tx=tx)
            likes["opt_state"] = new = jax.eval_shape(tx.init, self.params)
            old = changes.get("opt_state", self.opt_state)
            if jax.tree.structure(new) != jax.tree.structure(old):
                msg = "replace: tx needs another opt_state (a schedule adds a count)."
                way = "Start anew: replace(tx=tx, opt_state=tx.init(state.params))."
                raise StateError(f"{msg} {way}")
        for name in filter(changes.__contains__, fields):  # on all processes in order
            tree = self._adopted(changes[name], likes[name], getattr(self, name))
            _check_like(f"replace: the new {name}", tree, f"state.{name}", likes[name])
            changes[name] = tree
        olds = {"ema": self.params, **self.extra}
        for name, x in changes.get("extra", {}).items():
            new = self._adopted(x, olds.get(name), olds.get(name))
            changes["extra"] = {**changes["extra"], name: new}
        return dataclasses.replace(self, **changes)

    def _adopted(self, tree: PyTree, like: PyTree, old: PyTree) -> PyTree:
        """Returns a tree in plain containers, laid out as the old one, by path."""
        flat, target = _paths.flatten(tree), _paths.flatten(like)
        values = {leaf.path: leaf.value for leaf in flat.leaves}
        if isinstance(self.step, _jax.ArrayImpl) and not _jax.is_tracing():
            mesh, moved, layouts = Layout.of(self.step).mesh, {}, {}
            olds = {leaf.path: leaf.value for leaf in _paths.flatten(old).leaves}
            for path, x in values.items():
                place: Any = olds.get(path)
                is_like = isinstance(place, jax.Array) and place.shape == np.shape(x)
                is_away = isinstance(x, (np.ndarray, np.generic))
                if isinstance(x, jax.Array) and not isinstance(x, Tracer):
                    at, to = x.sharding, (place if is_like else self.step).sharding
                    meshes = (getattr(s, "mesh", s.device_set) for s in (at, to))
                    is_away = next(meshes) != next(meshes)
                    is_away |= is_like and not at.is_equivalent_to(to, x.ndim)
                if is_away:
                    moved[path] = x
                    layouts[path] = Layout.of(place) if is_like else mesh.layout(...)
            values |= copy_to_mesh(moved, layouts)
        if values.keys() != {leaf.path for leaf in target.leaves}:
            target = flat
        return target.unflatten([values[leaf.path] for leaf in target.leaves])

    def apply_gradients(
        self, grads: PyTree, *, model: nnx.Module | nn.Module | None = None
    ) -> Self:
        """Returns the state after one update, for your own step.

        Args:
            grads: Gradients, in the structure of `params`; or the result of `nnx.grad`.
            model: The model after its forward pass, from which `model_state` is taken;
                if omitted, batch statistics and random streams do not change.
        """
        self._refuse_used_up()
        if model is None and jax.tree.leaves(self.model_state):
            _warn_once(
                "apply_gradients without model= leaves batch statistics and random "
                "streams as they were. Give it the model after its forward pass, or "
                "to keep them, model=state.model."
            )
        if isinstance(grads, nnx.State):
            grads = nnx.to_pure_dict(grads)
        _check_like("the gradients", grads, "state.params", self.params)
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        model_state = self.model_state
        if model is not None:
            model_state, what = self.model_state_of(model), "the model's state"
            _check_like(what, model_state, "state.model_state", self.model_state)
        params = optax.apply_updates(self.params, updates)
        new = dataclasses.replace(self, params=params, opt_state=opt_state)
        return dataclasses.replace(new, model_state=model_state, step=self.step + 1)

    @property
    def layouts(self) -> "TrainState[Any]":
        """The layout of every array, in the structure of the state."""
        return jax.tree.map(Layout.of, self)

    def resolve_layouts(self, layouts: LayoutMap) -> Resolved:
        """Returns the layouts of all arrays; `LayoutMap.resolve` calls this."""
        code = self.program
        # With the metadata that their layers have set.
        if code.graphdef is None:
            boxed = code.boxed.unflatten(jax.tree.leaves(self.params))
            parts = {"params": boxed}, self.model_state
        else:
            parts = nnx.state(self.model, nnx.Param, ...)
        params, rest = map(layouts.resolve, parts)
        # A rule for `kernel` means the parameter wherever it is used, so parameters are
        # resolved without the prefix of their field. Slots have it: a rule can then
        # name `opt_state/...` to override what they take from their parameters.
        with_slots = {"opt_state": self.opt_state, "extra": self.extra}
        slots = layouts._resolve_slots(with_slots, self.params, params.resolutions)
        own = layouts.resolve({"step": self.step, "rng": self.rng})
        fields = {**slots.layouts, **own.layouts}
        fields["params"] = _like(self.params, params.layouts)
        fields["model_state"] = _like(self.model_state, rest.layouts)
        every = [r for x in (params, slots, rest, own) for r in x.resolutions]
        return Resolved(dataclasses.replace(self, **fields), tuple(every))

    def __repr__(self) -> str:
        rows = []
        for path, x, _ in _paths.flatten(self).leaves:
            is_array, is_placed = hasattr(x, "dtype"), _jax.sharding_of(x) is not None
            text = _render.array_text(x.dtype, x.shape) if is_array else str(x)
            rows.append([path, text, str(Layout.of(x)) if is_placed else "?"])
        num_params = sum(getattr(p, "size", 0) for p in jax.tree.leaves(self.params))
        size = f"{num_params:,}" if num_params else "?"  # of layouts
        is_abstract = isinstance(self.step, (Tracer, jax.ShapeDtypeStruct, Layout))
        step = "used up by a step"
        if not self._is_used_up():
            step = f"step={'?' if is_abstract else int(self.step)}"
        head = f"TrainState({step}, {size} parameters)"
        return f"{head}\n{_render.text_table(['path', 'array', 'layout'], rows)}"


@_checks.user_call
def optimizer_by_path(
    optimizers: Mapping[str, optax.GradientTransformation | None],
) -> optax.GradientTransformation:
    """Returns `optax.multi_transform` with patterns of paths instead of labels.

    Use this to freeze a part of the model, or to give parts their own learning rates.
    Patterns are searched for in the paths, and the first match wins; every path needs a
    match. None freezes its parameters (not batch statistics), and keeps no state.

    Examples:
        >>> import jax.numpy as jnp
        >>> tx = optimizer_by_path({"head": optax.sgd(1.0), "": None})
        >>> params = {"body": jnp.ones(2), "head": jnp.ones(2)}
        >>> updates, _ = tx.update(params, tx.init(params), params)
        >>> updates["head"].tolist(), updates["body"].tolist()
        ([-1.0, -1.0], [0.0, 0.0])
    """
    kinds = (optax.GradientTransformation, type(None))
    txs = [*optimizers.values()] if isinstance(optimizers, Mapping) else []
    if not txs or not all(isinstance(tx, kinds) for tx in txs):
        raise StateError(
            "optimizer_by_path takes a dict from patterns to Optax optimizers or None, "
            f"got {_checks.shown(optimizers)}."
        )
    context = {"where": "optimizer_by_path", "error": StateError}
    patterns = [_checks.pattern("pattern", text, **context) for text in optimizers]

    # Labeled by index: labels become keys in the optimizer's state, where the `/` of a
    # pattern would separate the keys of a path.
    def labels(params: PyTree) -> PyTree:
        flat, found = _paths.flatten(params), list[str]()
        for path, *_ in flat.leaves:
            matches = [str(i) for i, x in enumerate(patterns) if x.search(path)]
            if not matches:
                msg = f"no pattern of the optimizer matches the parameter {path!r}."
                hint = 'Add a last one for the rest: "": optax.adam(1e-3), or "": None.'
                raise StateError(f"{msg} {hint}")
            found.append(matches[0])
        return flat.unflatten(found)

    zero = optax.set_to_zero()
    every: dict[Hashable, Any] = {str(i): tx or zero for i, tx in enumerate(txs)}
    tx = optax.multi_transform(every, labels)

    def init(params: PyTree) -> Any:
        paths = [leaf.path for leaf in _paths.flatten(params).leaves]
        is_frozen = all(txs[int(x)] is None for x in jax.tree.leaves(labels(params)))
        for text, pattern in zip(optimizers, patterns, strict=True):
            if not any(map(pattern.search, paths)):
                near = ", ".join(nearest_paths(text, paths)) or "none"
                msg = f"optimizer_by_path: {text!r} matches no path. Nearest: {near}."
                if is_frozen:
                    raise StateError(f"{msg} All parameters would be frozen.")
                warn(msg)
        return tx.init(params)

    return tx._replace(init=init)


def start_training(model: nnx.Module) -> bool:
    """Sets training mode where no mode is set; returns whether any layer has it.

    A layer that was built in evaluation mode keeps it.
    """
    is_evaluating: list[bool] = []
    nodes = nnx.iter_graph(model)  # flax 0.11 has no iter_modules
    for module in (x for _, x in nodes if isinstance(x, nnx.Module)):
        for name in {"deterministic", "use_running_average"} & {*vars(module)}:
            if getattr(module, name) is None:
                setattr(module, name, False)
            is_evaluating.append(getattr(module, name))
    return not is_evaluating or not all(is_evaluating)


def _split(built: Any, module: Any, tx: Any) -> tuple[PyTree, PyTree, ModelCode]:
    # Into plain dicts: flattening an nnx.State takes JAX several times as long, and
    # every call of a step flattens its state.
    if module is None and isinstance(built, nnx.Module):
        graphdef, *states = nnx.split(built, nnx.Param, ...)
        params, rest = map(nnx.to_pure_dict, states)
        code = ModelCode(graphdef, None, None, tx)
    elif isinstance(module, nn.Module) and isinstance(built, Mapping):
        # Steps work on plain arrays; the boxes are put back to resolve layouts.
        variables: Any = built
        rest, boxed = dict(meta.unbox(variables)), variables.get("params")
        params = rest.pop("params", None)
        code = ModelCode(None, module, jax.tree.structure(boxed), tx)
    else:
        raise StateError(
            f"{_WHERE}: the builder must return an NNX module; or, with module= the "
            "Linen module, what module.init(key, sample) returns. Got "
            f"{_checks.type_text(built)} and module={_checks.shown(module)}. For any "
            "other pytree use create(build, layouts)."
        )
    if not jax.tree.leaves(params):
        raise StateError(
            f"{_WHERE}: the model has no parameters to train: no nnx.Param, or nothing "
            "in the collection 'params' of what Linen's module.init returns."
        )
    return params, rest, code


def _transformation(optimizer: Any) -> optax.GradientTransformation:
    if isinstance(optimizer, optax.MultiSteps):
        # Its own gradient_transformation() does not pass on arguments such as value=.
        update: Any = optimizer.update
        return optax.GradientTransformationExtraArgs(optimizer.init, update)
    if not isinstance(optimizer, optax.GradientTransformation):
        msg = f"{_WHERE} takes an Optax optimizer, got {_checks.shown(optimizer)}."
        hint = "Write TrainState.create(build, optax.adam(1e-3), layouts)."
        raise StateError(f"{msg} {hint}")
    return optimizer


def _check_like(what: str, tree: PyTree, name: str, like: PyTree) -> None:
    # Optax would broadcast a gradient of another shape, and silently update with it.
    shapes, expected = (
        {leaf.path: np.shape(leaf.value) for leaf in _paths.flatten(x).leaves}
        for x in (tree, like)
    )
    if shapes != expected or jax.tree.structure(tree) != jax.tree.structure(like):
        wrong = sorted(dict(shapes.items() ^ expected.items()))
        places = ", ".join(wrong[:3]) or "in the types of containers"
        msg = f"{what} and {name} differ in structure or shapes: {places}."
        raise StateError(f"{msg} Pass what was derived from {name}, unchanged.")


def _like(tree: PyTree, layouts: PyTree) -> PyTree:
    """Returns layouts, which come in boxes, in the structure of a plain tree."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(creation.layout_per_leaf(leaves, layouts))
