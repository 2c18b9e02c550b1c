"""Creation while `jax.set_mesh` is in force: the layout map decides, bits stay.

What JAX compiled before can hide that an operation does not compile under another
mesh, so that each order of the meshes has a process of its own.
"""

import contextlib
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import meshlayout as ml
from tests.processes import run_processes
from tests.same_bits import assert_same_bits, plain


pytestmark = pytest.mark.multiprocess

RULES = {"kernel": (None, "y")}


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.dense = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        orthogonal = nnx.initializers.orthogonal()
        self.out = nnx.Linear(16, 8, kernel_init=orthogonal, rngs=rngs)


def net():
    return Net(rngs=nnx.Rngs(0))


def mesh(shape, names, kind):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


# What may be set while a state is made.
CONTEXTS = {
    "none": contextlib.nullcontext,
    "auto": lambda: jax.set_mesh(mesh((2, 4), ("x", "y"), AxisType.Auto)),
    "explicit": lambda: jax.set_mesh(mesh((2, 4), ("x", "y"), AxisType.Explicit)),
    "other": lambda: jax.set_mesh(mesh((8,), ("z",), AxisType.Explicit)),
    "other auto": lambda: jax.set_mesh(mesh((8,), ("z",), AxisType.Auto)),
}


def from_outside():
    """A builder that closes over arrays with whatever types the set mesh gives."""
    key, table = jax.random.key(3), jnp.arange(16.0)
    return lambda: {
        "kernel": jax.random.truncated_normal(key, -1, 1, (8, 16)) * table,
        "table": table,
        "scanned": jax.lax.scan(lambda c, x: (c * 2, c * x), 1.0, jnp.arange(3.0))[1],
        "drawn": jax.vmap(lambda k: jax.random.normal(k, (4,)))(
            jax.random.split(key, 4)
        ),
        "chosen": jax.lax.cond(table[1] > 0, lambda: table, lambda: table + 1),
        "order": jax.random.permutation(key, 8),
    }


def constrained():
    """A builder that names axes of the mesh that is set, as its axes allow."""
    axes = jax.sharding.get_abstract_mesh()
    x = jax.random.normal(jax.random.key(0), (8, 16))
    if axes.empty:
        return {"kernel": x * 2}
    is_explicit = AxisType.Explicit in axes.axis_types
    how = "reshard" if is_explicit else "with_sharding_constraint"
    lay_out = getattr(jax.sharding if is_explicit else jax.lax, how)
    return {"kernel": lay_out(x, PartitionSpec(axes.axis_names[0])) * 2}


def made(layouts):
    """Everything that is made, by every way of making it."""
    with ml.scope(layouts):
        scoped = net()
        variables = nn.Dense(16).init(jax.random.key(0), jnp.ones((2, 8)))
    return {
        "created": plain(ml.create(net, layouts)),
        "from outside": ml.create(from_outside(), layouts),
        "constrained": ml.create(constrained, layouts),
        "scoped": plain(scoped),
        "linen": variables,
        "state": ml.TrainState.create(net, optax.adam(1e-3), layouts).params,
    }


def made_without_a_mesh():
    model = net()
    return {
        "created": plain(model),
        "from outside": from_outside()(),
        "constrained": constrained(),
        "scoped": plain(model),
        "linen": nn.Dense(16).init(jax.random.key(0), jnp.ones((2, 8))),
        "state": nnx.to_pure_dict(nnx.state(model, nnx.Param)),
    }


def job(orders):
    expected = None
    for name, kind in orders:
        axes = ml.Mesh(mesh((2, 4), ("x", "y"), AxisType[kind]))  # as it is
        layouts = ml.LayoutMap(axes, RULES)
        with CONTEXTS[name]():
            found = made(layouts)
        for path, leaf in jax.tree.leaves_with_path(found):
            is_kernel = "kernel" in jax.tree_util.keystr(path)
            layout = str(ml.Layout.of(leaf))
            assert ("y" in layout) == is_kernel, (name, kind, path, layout)
        # Last, so that nothing that it compiles helps what is made on a mesh.
        expected = expected or made_without_a_mesh()
        assert_same_bits(found, expected)


@pytest.mark.parametrize(
    "orders",
    [
        [("explicit", "Auto")],
        pytest.param(
            [
                *itertools.product(["other", "none", "auto"], ["Auto", "Explicit"]),
                *[("explicit", "Explicit"), ("other auto", "Explicit")],
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_whatever_mesh_is_set_a_state_has_the_maps_layouts_and_its_own_bits(orders):
    run_processes(1, job, orders, devices_per_process=8)
