"""`with_layouts`: layouts given layer by layer, in the model's own code.

The layer becomes a subclass whose parameters carry their layouts as metadata, so that
nothing has to be remembered beside the model: copies, pickles and Linen's variables
keep them.
"""

import copyreg
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from flax import linen as nn, nnx

from meshlayout import _checks
from meshlayout.errors import StateError, did_you_mean
from meshlayout.layout_map import OWN_LAYOUT, LayoutBox


def with_layouts(layer: Any, **layouts: Any) -> type[Any]:
    """Returns a layer class whose parameters carry their own layouts.

    Use this to write a layout next to the layer rather than as a pattern. A parameter's
    own layout takes precedence over the patterns of the layout map that the model is
    created with, and the map's report names it as the reason.

    Args:
        layer: An NNX or Linen layer class, such as `nnx.Linear` or `nn.Dense`.
        **layouts: By parameter name: a `Layout`, or a spec on the mesh of the map.

    Raises:
        StateError: If it is not a layer class, no layout is given, or the layer has no
            such parameter, which is found out when a layer is made or initialized.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> Linear = ml.with_layouts(nnx.Linear, kernel=(None, "model"))
        >>> layer = ml.create(
        ...     lambda: Linear(4, 8, rngs=nnx.Rngs(0)), ml.LayoutMap(mesh)
        ... )
        >>> ml.Layout.of(layer.kernel[...])
        Layout([unsharded, model], Mesh(batch=2, model=4))
    """
    if not isinstance(layer, type) or not issubclass(layer, (nnx.Module, nn.Module)):
        msg = (
            f"with_layouts takes an NNX or Linen layer class, got {layer!r}. Write "
            "with_layouts(nnx.Linear, kernel=(None, 'model'))(in_features, ...)."
        )
        raise StateError(msg)
    if not layouts:
        msg = f"with_layouts({layer.__name__}) has no layouts; give a parameter's."
        raise StateError(msg)
    # Whether a spec fits is not known before there is a mesh and an array.
    specs = tuple((name, _hashable(spec)) for name, spec in layouts.items())
    for name, spec in specs:
        if not isinstance(spec, Hashable):
            msg = (
                f"with_layouts({layer.__name__}): {name} must be a Layout, or a spec "
                f"as (None, 'model'), got {_checks.shown(spec)}."
            )
            raise StateError(msg)
    return _layer_class(layer, specs)


def _hashable(spec: Any) -> Any:
    """Returns a spec with its lists as tuples, to be part of a cache key."""
    return tuple(map(_hashable, spec)) if isinstance(spec, list) else spec


def _unknown(layer: type[Any], name: str, names: list[str]) -> StateError:
    has = f"it has {', '.join(map(repr, names))}" if names else "it has none"
    return StateError(
        f"{layer.__name__} has no parameter {name!r}; {has}.{did_you_mean(name, names)}"
    )


class _NnxClass(type(nnx.Module)):
    """The metaclass of NNX subclasses made here, which pickle by their arguments.

    Pickle finds a class by its name in a module, where the original layer is.
    """

    made_from: tuple[Any, ...]


class _LinenClass(type(nn.Module)):
    """The metaclass of Linen subclasses made here, likewise."""

    made_from: tuple[Any, ...]


@functools.cache
def _layer_class(layer: type[Any], specs: tuple[tuple[str, Any], ...]) -> type[Any]:
    """Returns a subclass whose parameters carry layouts.

    Always the same class for the same arguments: two models of different classes would
    not have the same structure, and a step would be compiled again.
    """
    make = _nnx_contents if issubclass(layer, nnx.Module) else _linen_contents
    kind = _NnxClass if issubclass(layer, nnx.Module) else _LinenClass
    contents = {"__doc__": layer.__doc__, "made_from": (layer, specs)}
    # The layer's own name, so that Linen's automatic names of submodules stay the same.
    return kind(layer.__name__, (layer,), {**contents, **make(layer, dict(specs))})


copyreg.pickle(_NnxClass, lambda kind: (_layer_class, kind.made_from))
copyreg.pickle(_LinenClass, lambda kind: (_layer_class, kind.made_from))


def _nnx_contents(layer: type[Any], specs: dict[str, Any]) -> dict[str, Any]:
    """Returns an `__init__` that sets the layouts as metadata of the parameters."""

    @functools.wraps(layer.__init__)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        layer.__init__(self, *args, **kwargs)
        for name, spec in specs.items():
            variable = getattr(self, name, None)
            if not isinstance(variable, nnx.Variable):
                names = [
                    n for n, v in vars(self).items() if isinstance(v, nnx.Variable)
                ]
                raise _unknown(layer, name, names)
            if hasattr(nnx.Variable, "set_metadata"):
                variable.set_metadata(**{OWN_LAYOUT: spec})
            else:  # flax 0.11
                setattr(variable, OWN_LAYOUT, spec)

    return {"__init__": init}


def _linen_contents(layer: type[Any], specs: dict[str, Any]) -> dict[str, Any]:
    """Returns methods that put the named parameters into boxes with their layouts."""

    def param(
        self: Any, name: str, init_fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if name not in specs:
            return layer.param(self, name, init_fn, *args, **kwargs)

        def boxed(*init_args: Any, **init_kwargs: Any) -> LayoutBox:
            return LayoutBox(init_fn(*init_args, **init_kwargs), specs[name])

        return layer.param(self, name, boxed, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = layer.__call__(self, *args, **kwargs)
        # Only now are all parameters of the layer known.
        if self.is_initializing():
            own = self.variables.get("params", {})
            names = [name for name in own if not isinstance(own[name], Mapping)]
            for name in specs:
                if name not in names:
                    raise _unknown(layer, name, names)
        return result

    # A layer that is called by other names, such as nn.Embed's attend, has parameters
    # as well, but no moment at which all of them are known.
    has_call = any("__call__" in vars(base) for base in layer.__mro__)
    return {"param": param, **({"__call__": call} if has_call else {})}
