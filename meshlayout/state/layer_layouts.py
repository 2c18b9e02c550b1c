"""Layouts given layer by layer: `with_layouts`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from flax import linen as nn, nnx

from meshlayout.errors import StateError, did_you_mean
from meshlayout.layout_map import OWN_LAYOUT, LayoutBox


def with_layouts(layer: Any, **layouts: Any) -> Callable[..., Any]:
    """Returns a layer class whose parameters carry layouts of their own.

    A parameter's own layout wins over the patterns of the layout map that the model
    is created with, and the map's report names it as the reason.

    Args:
        layer: An NNX or Linen layer class, such as `nnx.Linear` or `nn.Dense`.
        **layouts: By parameter name: a `Layout`, or a spec on the mesh of the map.

    Raises:
        StateError: If it is no layer class, no layout is given, or the layer has no
            such parameter (for NNX, when a layer is made).

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
            f"with_layouts takes an NNX or Linen layer class, and got {layer!r}. Write "
            "with_layouts(nnx.Linear, kernel=(None, 'model'))(in_features, ...)."
        )
        raise StateError(msg)
    if not layouts:
        msg = f"with_layouts({layer.__name__}) gives no layouts; name a parameter's."
        raise StateError(msg)
    given = tuple(
        (name, tuple(spec) if isinstance(spec, list) else spec)
        for name, spec in layouts.items()
    )
    if issubclass(layer, nn.Module):
        return _linen_class(layer, given)
    return functools.partial(_make_nnx, layer, given)


def _make_nnx(
    layer: type[Any], given: tuple[tuple[str, Any], ...], *args: Any, **kwargs: Any
) -> Any:
    made = layer(*args, **kwargs)
    for name, spec in given:
        variable = getattr(made, name, None)
        if not isinstance(variable, nnx.Variable):
            names = [k for k, v in vars(made).items() if isinstance(v, nnx.Variable)]
            msg = (
                f"{layer.__name__} has no parameter {name!r}; it has "
                f"{', '.join(map(repr, names))}.{did_you_mean(name, names)}"
            )
            raise StateError(msg)
        variable.set_metadata(**{OWN_LAYOUT: spec})
    return made


@functools.cache
def _linen_class(layer: type[Any], given: tuple[tuple[str, Any], ...]) -> type[Any]:
    """Returns a subclass that boxes the named parameters; the same one each time."""
    specs = dict(given)
    inits = [field.name for field in dataclasses.fields(layer)]
    known = [name.removesuffix("_init") for name in inits if name.endswith("_init")]
    for name in specs:
        if known and name not in known:
            msg = (
                f"{layer.__name__} has no parameter {name!r}; it has "
                f"{', '.join(map(repr, known))}.{did_you_mean(name, known)}"
            )
            raise StateError(msg)

    def param(
        self: Any, name: str, init_fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        parent = super(made, self).param  # type: ignore[misc]
        if name not in specs:
            return parent(name, init_fn, *args, **kwargs)

        def boxed(*init_args: Any, **init_kwargs: Any) -> LayoutBox:
            return LayoutBox(init_fn(*init_args, **init_kwargs), specs[name])

        return parent(name, boxed, *args, **kwargs)

    # The same name, so that Linen's automatic names do not change.
    made = type(layer.__name__, (layer,), {"param": param, "__doc__": layer.__doc__})
    return made
