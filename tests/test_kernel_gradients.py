"""A convolution's kernel learns the same on every mesh, however images are sharded."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import meshlayout as ml


AXES = {"batch": 2, "h": 2, "w": 2}


@pytest.fixture(scope="module")
def mesh():
    return ml.create_mesh(AXES)


def images(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def gradient_step(loss):
    """Gradient descent on a tree of kernels, which returns the gradients."""

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda x, g: x - 0.1 * g, state, grads), (value, grads)

    return step


def convolution(x, kernel, *, strides=1, padding="SAME", groups=1, names=None):
    rank = x.ndim - 2
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (strides,) * rank,
        padding,
        feature_group_count=groups,
        dimension_numbers=names or {1: ("NWC", "WIO", "NWC")}.get(rank, NHWC),
    )


NHWC = ("NHWC", "HWIO", "NHWC")
NCHW = ("NCHW", "OIHW", "NCHW")


def two_layers(state, x, **options):
    hidden = jnp.tanh(convolution(x, state["first"], **options))
    return jnp.square(convolution(hidden, state["second"], **options)).mean()


def kernels(*shape):
    return {"first": images(*shape, seed=1), "second": images(*shape, seed=2)}


def assert_same_gradients(
    loss, state, batch, layout, state_layout=None, reference=None
):
    """Compares a compiled step on a mesh with plain JAX on one device."""
    plain = gradient_step(reference or loss)
    _, (value, expected) = jax.jit(plain)(state, batch)
    mesh = layout.mesh
    step = ml.compile_step(gradient_step(loss))
    layouts = state_layout or mesh.layout(...)
    if not isinstance(layouts, dict):
        layouts = dict.fromkeys(state, layouts)
    placed = {name: ml.relayout(x, layouts[name]) for name, x in state.items()}
    new, (found, grads) = step(placed, ml.relayout(batch, layout))
    np.testing.assert_allclose(found, value, rtol=1e-5)
    for name, kernel in expected.items():
        scale = np.abs(kernel).max()
        np.testing.assert_allclose(grads[name] / scale, kernel / scale, atol=1e-5)
        np.testing.assert_allclose(
            new[name], state[name] - 0.1 * np.asarray(kernel), atol=1e-5 * scale
        )


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(("batch", "h"), marks=pytest.mark.slow),
        (None, "h"),
        pytest.param((None, ("h", "w")), marks=pytest.mark.slow),
        ("batch", "h", "w"),
    ],
    ids=str,
)
def test_gradients_of_kernels_are_those_of_one_device(mesh, spec):
    layout = mesh.layout(*spec, ...)
    assert_same_gradients(two_layers, kernels(3, 3, 4, 4), images(8, 8, 8, 4), layout)


@pytest.mark.parametrize(
    ("kernel", "batch", "options", "spec"),
    [
        ((3, 3, 4, 4), (8, 8, 8, 4), {"strides": 2}, ("batch", "h")),
        pytest.param(
            *((2, 2, 4, 4), (8, 8, 8, 4), {"strides": 2, "padding": "VALID"}),
            (None, "h"),
            marks=pytest.mark.slow,
        ),
        ((3, 3, 1, 4), (8, 8, 8, 4), {"groups": 4}, ("batch", "h")),
        pytest.param(
            *((3, 4, 4), (8, 16, 4), {}, ("batch", "h")), marks=pytest.mark.slow
        ),
        ((4, 4, 3, 3), (8, 4, 8, 8), {"names": NCHW}, ("batch", None, "h")),
        # A batch that does not divide over the axes of the image.
        ((3, 3, 4, 4), (6, 8, 8, 4), {}, ("batch", "h")),
    ],
    ids=["strides", "patches", "depthwise", "1d", "channels first", "small batch"],
)
def test_gradients_of_convolutions_of_every_kind_are_right(
    mesh, kernel, batch, options, spec
):
    loss = functools.partial(two_layers, **options)
    layout = mesh.layout(*spec, ...)
    assert_same_gradients(loss, kernels(*kernel), images(*batch), layout)


@pytest.mark.parametrize(
    ("groups", "rows", "spec", "rule"),
    [
        pytest.param(4, 8, ("batch",), (...,), marks=pytest.mark.slow),
        (2, 8, ("batch",), (..., "w")),
        pytest.param(2, 6, ("batch",), (...,), marks=pytest.mark.slow),
        (4, 8, (None, "h"), (...,)),
    ],
)
def test_gradients_of_grouped_convolutions_are_right(mesh, groups, rows, spec, rule):
    assert_same_gradients(
        functools.partial(two_layers, groups=groups),
        kernels(3, 3, 4 // groups, 4),
        images(rows, 8, 8, 4),
        mesh.layout(*spec, ...),
        mesh.layout(*rule),
    )


def test_depthwise_convolutions_leave_other_activations_where_they_are():
    mesh = ml.create_mesh({"batch": 2, "w": 4})

    def loss(state, x):
        for _ in range(2):
            x = x + jnp.tanh(convolution(x, state["conv"], groups=8))
            x = x + jnp.tanh(x @ state["up"]) @ state["down"]
        return jnp.square(x).mean()

    state = {
        "conv": images(3, 1, 8, seed=1),
        "up": images(8, 16, seed=2),
        "down": images(16, 8, seed=3),
    }
    rules = {"conv": (...,), "up": (None, "w"), "down": ("w", None)}
    layouts = {name: mesh.layout(*rule) for name, rule in rules.items()}
    layout, x = mesh.layout("batch", ...), images(8, 12, 8)
    assert_same_gradients(loss, state, x, layout, layouts)
    placed = {name: ml.relayout(x, layouts[name]) for name, x in state.items()}
    step = ml.compile_step(gradient_step(loss))
    sent = step.communication(placed, ml.relayout(x, layout))
    assert {kind for kind, count in sent.items() if count} == {"all_reduce"}


def test_features_may_be_sharded_over_the_other_axis(mesh):
    layout = mesh.layout("batch", "h", ...)
    for rule in ((..., "w"), (None, None, "w", None)):
        assert_same_gradients(
            two_layers,
            kernels(3, 3, 4, 4),
            images(8, 8, 8, 4),
            layout,
            mesh.layout(*rule),
        )


def in_a_scan(state, x):
    stacked = jnp.stack([state["first"], state["second"]])

    def layer(x, kernel):
        return jnp.tanh(convolution(x, kernel)), None

    return jnp.square(jax.lax.scan(layer, x, stacked)[0]).mean()


def recomputed(state, x):
    return jax.checkpoint(two_layers)(state, x)


def in_another_jit(state, x):
    return jax.jit(two_layers)(state, x)


@pytest.mark.parametrize("loss", [in_a_scan, recomputed, in_another_jit])
def test_gradients_of_convolutions_inside_other_transformations_are_right(mesh, loss):
    layout = mesh.layout("batch", "h", ...)
    assert_same_gradients(loss, kernels(3, 3, 4, 4), images(8, 8, 8, 4), layout)


def test_gradients_are_right_where_the_model_itself_shards_images(mesh):
    sharding = mesh.layout("batch", "h", None, None).sharding

    def three_layers(state, x, cut=lambda x: x):
        hidden = cut(jnp.tanh(convolution(x, state["first"])))
        hidden = jnp.tanh(convolution(hidden, state["second"]))
        return jnp.square(convolution(hidden, state["second"])).mean()

    def cut(x):
        return jax.lax.with_sharding_constraint(x, sharding)

    assert_same_gradients(
        functools.partial(three_layers, cut=cut),
        kernels(3, 3, 4, 4),
        images(8, 8, 8, 4),
        mesh.layout("batch", ...),
        reference=three_layers,
    )


def with_positions(state, x):
    hidden = jnp.tanh(convolution(x, state["first"])) + state["other"][None]
    return jnp.square(convolution(hidden, state["second"])).mean()


def flattened(state, x):
    hidden = jnp.tanh(convolution(x, state["first"]))
    hidden = jnp.tanh(convolution(hidden, state["second"]))
    return jnp.square(hidden.reshape(len(x), -1) @ state["other"]).mean()


def decoded(state, x):
    pixels = x.reshape(len(x), -1) @ state["other"]
    return two_layers(state, pixels.reshape(x.shape))


@pytest.mark.parametrize("spec", [("batch",), pytest.param((), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("loss", "shape", "rule"),
    [
        (with_positions, (8, 8, 4), ("h", None, None)),
        (flattened, (256, 6), ("h", None)),
        (decoded, (256, 256), (None, "h")),
    ],
)
def test_gradients_are_right_where_a_parameter_shards_images(
    mesh, loss, shape, rule, spec
):
    state = {**kernels(3, 3, 4, 4), "other": 0.1 * images(*shape, seed=3)}
    layouts = {name: mesh.layout(...) for name in state} | {"other": mesh.layout(*rule)}
    layout = mesh.layout(*spec, ...)
    assert_same_gradients(loss, state, images(8, 8, 8, 4), layout, layouts)


@pytest.mark.parametrize(
    ("groups", "rows", "spec", "axis_types"),
    [
        (1, 8, ("batch", "h"), "explicit"),
        (1, 6, ("batch", "h"), ["explicit", "auto", "auto"]),
        (4, 8, ("batch",), "explicit"),
    ],
)
def test_gradients_on_explicit_axes_are_right(groups, rows, spec, axis_types):
    mesh = ml.create_mesh(AXES, axis_types=axis_types)
    assert_same_gradients(
        functools.partial(two_layers, groups=groups),
        kernels(3, 3, 4 // groups, 4),
        images(rows, 8, 8, 4),
        mesh.layout(*spec, ...),
    )


@pytest.mark.parametrize(
    ("groups", "spec"), [(1, ("batch", "h")), (4, ("batch",))], ids=str
)
def test_a_shard_map_that_leaves_axes_to_the_compiler_is_refused(mesh, groups, spec):
    def loss(state, x, axes):
        def per_device(state, x):
            return jax.lax.pmean(two_layers(state, x, groups=groups), tuple(axes))

        return jax.shard_map(
            per_device,
            mesh=mesh.jax_mesh,
            in_specs=(P(), P(tuple(axes))),
            out_specs=P(),
            axis_names=axes,
        )(state, x)

    state = ml.relayout(kernels(3, 3, 4 // groups, 4), mesh.layout(...))
    batch = ml.relayout(images(8, 8, 8, 4), mesh.layout(*spec, ...))
    step = ml.compile_step(gradient_step(functools.partial(loss, axes={"batch"})))
    with pytest.raises(ml.errors.StepError) as info:
        step(state, batch)
    assert str(info.value) == (
        "a convolution inside jax.shard_map leaves the mesh axes 'h', 'w' to the "
        "compiler, which would add up its kernel's gradient over too many devices. "
        "Name all axes of the mesh in axis_names=, or call the convolution outside of "
        "jax.shard_map."
    )
    whole = functools.partial(loss, axes=set(AXES))
    reference = functools.partial(two_layers, groups=groups)
    assert_same_gradients(
        whole,
        ml.to_numpy(state),
        ml.to_numpy(batch),
        mesh.layout(...),
        reference=reference,
    )


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))[..., 0]


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3))(x))
        return nn.Dense(1)(nn.Conv(4, (3, 3))(x).mean((1, 2)))[..., 0]


def losses_of_three_steps(build, module, axes, spec, **options):
    devices = jax.devices()[: int(np.prod([*axes.values()]))]
    mesh = ml.create_mesh(axes, devices=devices)
    layouts = ml.LayoutMap(mesh, {})
    state = ml.TrainState.create(build, optax.sgd(0.1), layouts, module=module)
    step = ml.make_train_step(lambda m, b: jnp.square(m(b["x"]) - b["y"]), **options)
    rows = ml.relayout(images(8), mesh.layout(spec[0]))
    batch = {"x": ml.relayout(images(8, 8, 8, 3), mesh.layout(*spec, ...)), "y": rows}
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


LINEN = LinenNet()
BUILDERS = {
    "nnx": (lambda: Net(nnx.Rngs(0)), None),
    "linen": (lambda: LINEN.init(jax.random.key(0), jnp.zeros((1, 8, 8, 3))), LINEN),
}


@pytest.mark.parametrize(
    ("kind", "spec", "options"),
    [
        pytest.param("nnx", (None, "h"), {}, marks=pytest.mark.slow),
        ("nnx", ("batch", "h"), {"accumulate": 2}),
        ("linen", ("batch", "h"), {}),
    ],
)
def test_train_steps_with_sharded_images_are_right(kind, spec, options):
    build = BUILDERS[kind]
    alone = losses_of_three_steps(*build, {"batch": 1}, ("batch",), **options)
    found = losses_of_three_steps(*build, AXES, spec, **options)
    np.testing.assert_allclose(found, alone, rtol=1e-5)


@pytest.mark.slow
def test_several_steps_in_one_dispatch_are_right(mesh):
    layouts = ml.LayoutMap(mesh, {})
    build = BUILDERS["nnx"][0]
    batches = [
        {"x": images(8, 8, 8, 3, seed=seed), "y": images(8, seed=seed)}
        for seed in range(2)
    ]

    def loss_fn(model, batch):
        return jnp.square(model(batch["x"]) - batch["y"])

    params: Any = {}
    for spec in (("batch",), ("batch", "h")):
        state = ml.TrainState.create(build, optax.sgd(0.1), layouts)
        step = ml.make_train_step(loss_fn, steps_per_call=2)
        placed = [
            {
                "x": ml.relayout(batch["x"], mesh.layout(*spec, ...)),
                "y": ml.relayout(batch["y"], mesh.layout("batch")),
            }
            for batch in batches
        ]
        state, _ = step(state, placed)
        params[spec] = jax.tree.map(np.asarray, state.params)
    # Two programs that add in another order.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *params.values()
    )


def test_the_state_is_donated_and_nothing_is_traced_again(mesh):
    traces = []

    def loss(state, x):
        traces.append(1)
        return two_layers(state, x)

    step = ml.compile_step(gradient_step(loss), on_recompile="error")
    state = ml.relayout(kernels(3, 3, 4, 4), mesh.layout(...))
    batch = ml.relayout(images(8, 8, 8, 4), mesh.layout("batch", "h", ...))
    first = state["first"]
    for _ in range(3):
        state, _ = step(state, batch)
    assert first.is_deleted()
    assert len(traces) == 2  # to find the convolutions, and to mend them
    plain = ml.compile_step(gradient_step(loss), on_recompile="error")
    whole = ml.relayout(images(8, 8, 8, 4), mesh.layout("batch", ...))
    traces.clear()
    state, _ = plain(state, whole)
    plain(state, whole)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("groups", "spec", "factor"), [(1, P("batch", "h"), 2), (4, P("batch"), 4)]
)
def test_what_plain_jax_makes_of_it_is_wrong(mesh, groups, spec, factor):
    """Notices the day on which XLA adds over the right devices."""
    state, batch = kernels(3, 3, 4 // groups, 4), images(8, 8, 8, 4)
    grad = jax.jit(jax.grad(functools.partial(two_layers, groups=groups)))
    whole = NamedSharding(mesh.jax_mesh, P())
    cut = NamedSharding(mesh.jax_mesh, spec)
    found = grad(jax.device_put(state, whole), jax.device_put(batch, cut))
    ratio = np.asarray(found["second"]) / np.asarray(grad(state, batch)["second"])
    np.testing.assert_allclose(np.median(ratio), factor, rtol=1e-3)


def test_whole_images_get_the_program_of_plain_jax(mesh):
    state = ml.relayout(kernels(3, 3, 4, 4), mesh.layout(...))
    batch = ml.relayout(images(8, 8, 8, 4), mesh.layout("batch", ...))
    step = ml.compile_step(gradient_step(two_layers))
    text = step.lower(state, batch).as_text()
    assert not re.search(r"sharding_constraint|custom_call @Sharding", text)
