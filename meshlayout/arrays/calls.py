"""`call_with_layout`: the results of any function, created in a layout.

`jax.jit` with `out_shardings` does the work. Around it: layouts are resolved from the
abstract results before anything is compiled, arguments without arrays are static, and
results that a backend cannot compile into their place are moved afterwards.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from meshlayout import _checks, _jax
from meshlayout._annotations import PyTree
from meshlayout.arrays.leaf import check_same, is_concrete_array, move, resolve
from meshlayout.arrays.tree import LayoutLike, Tree, Where, device_ids
from meshlayout.errors import LayoutError
from meshlayout.layout import Layout
from meshlayout.mesh import Mesh


def call_with_layout(
    fn: Callable[..., Any], layout: LayoutLike, *args: Any, **kwargs: Any
) -> Any:
    """Calls a function so that its results are created in a layout.

    Use this for arrays that no other function of `ml.arrays` creates, such as
    `jnp.eye`. The function is compiled, and no device ever holds a full result.
    Arguments with arrays are traced; all others (shapes, dtypes, numbers) are compiled
    in, so that a function is compiled once for the same ones.

    Args:
        fn: Any function that `jax.jit` can compile.
        layout: The layout of the result, or a tree of layouts for a pytree.
        *args: Arguments of the function.
        **kwargs: Keyword arguments of the function.

    Returns:
        The results of the function.

    Raises:
        LayoutError: If a layout does not fit a result, or an argument is on other
            devices.

    Example:
        >>> import jax.numpy as jnp
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> eye = ml.arrays.call_with_layout(jnp.eye, mesh.layout("batch", "model"), 8)
        >>> eye.addressable_shards[0].data.shape
        (4, 2)
    """
    if not callable(fn):
        msg = (
            "call_with_layout(fn, layout, ...): fn must be a function, got "
            f"{_checks.shown(fn)}."
        )
        raise LayoutError(msg)
    static, fn, args, kwargs = _split_static(fn, args, kwargs)
    shapes = jax.jit(fn, **static).eval_shape(*args, **kwargs)
    results = Tree(shapes)
    layouts = [
        resolve(leaf, target, where, match=False, what="result")
        for (where, leaf), target in zip(
            results.named("result"), results.broadcast(layout), strict=True
        )
    ]
    for name, argument in [*enumerate(args), *kwargs.items()]:
        for where, leaf in Tree(argument).named(f"argument {name}"):
            if is_concrete_array(leaf) and _jax.is_committed(leaf):
                _check_devices(leaf, {target.mesh for target in layouts}, where)
    # jax 0.7.2 cannot shard results without elements.
    out = results.unflatten(
        None if 0 in leaf.shape else target.with_memory_kind(None).sharding
        for leaf, target in zip(results.leaves, layouts, strict=True)
    )
    created = jax.jit(fn, out_shardings=out, **static)(*args, **kwargs)
    return finish(created, layouts)


def _split_static(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Marks arguments without arrays as static; binds them if they are not hashable.

    Returns:
        The options of `jax.jit`, and the function with its remaining arguments.
    """
    nums = tuple(index for index, arg in enumerate(args) if not _holds_arrays(arg))
    names = tuple(name for name, arg in kwargs.items() if not _holds_arrays(arg))
    constants = tuple(args[index] for index in nums)
    known = {name: kwargs[name] for name in names}
    try:
        hash((constants, *known.values()))
    except TypeError:
        pass
    else:
        return {"static_argnums": nums, "static_argnames": names}, fn, args, kwargs

    def bound(*traced: Any, **traced_kwargs: Any) -> Any:
        values = {True: iter(constants), False: iter(traced)}
        every = [next(values[index in nums]) for index in range(len(args))]
        return fn(*every, **known, **traced_kwargs)

    rest = tuple(arg for index, arg in enumerate(args) if index not in nums)
    return {}, bound, rest, {k: v for k, v in kwargs.items() if k not in names}


def _check_devices(x: jax.Array, meshes: Iterable[Mesh], where: Where) -> None:
    """Raises LayoutError if jit could not use an argument on these meshes."""
    for mesh in meshes:
        if set(x.sharding.device_set) != set(mesh.devices.flat):
            msg = (
                f"{where} is on devices {device_ids(x.sharding.device_set)}, but the "
                f"results are on those of {mesh!r}. Move it there with relayout(x, "
                "layout)."
            )
            raise LayoutError(msg)


def _holds_arrays(tree: PyTree) -> bool:
    return any(
        isinstance(leaf, (jax.Array, np.ndarray, np.generic))
        for leaf in jax.tree.leaves(tree)
    )


def finish(results: PyTree, layouts: list[Layout]) -> Any:
    """Moves results that are not yet where they should be.

    Inside jit, `out_shardings` has no effect on Explicit axes, and not every backend
    can compile results into another kind of memory.
    """
    tree = Tree(results)
    named = list(zip(tree.named(), layouts, strict=True))
    check_same((where, leaf, layout.mesh) for (where, leaf), layout in named)
    return tree.unflatten(
        leaf
        if not _jax.is_staged(leaf) and _jax.sharding_of(leaf) == layout.sharding
        else move(leaf, layout, where)
        for (where, leaf), layout in named
    )
