"""A convolution's kernel learns the same on every mesh, or the step is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshlayout as ml
from tests.error_messages import message_of
from tests.small_states import create, mesh_of


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


NHWC = ("NHWC", "HWIO", "NHWC")
NCHW = ("NCHW", "OIHW", "NCHW")


def convolution(x, kernel, *, strides=1, groups=1, names=NHWC):
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (strides,) * (x.ndim - 2),
        "SAME",
        feature_group_count=groups,
        dimension_numbers=names,
    )


def two_layers(state, x, **options):
    hidden = jnp.tanh(convolution(x, state["first"], **options))
    return jnp.square(convolution(hidden, state["second"], **options)).mean()


def three_layers(state, x, **options):
    """Only the inner ones are grouped: their images are not the step's argument."""
    return two_layers(state, jnp.tanh(convolution(x, state["stem"])), **options)


def in_a_scan(state, x, **options):
    stacked = jnp.stack([state["first"], state["second"]])

    def layer(x, kernel):
        return jnp.tanh(convolution(x, kernel, **options)), None

    return jnp.square(jax.lax.scan(layer, x, stacked)[0]).mean()


def recomputed(state, x, **options):
    return jax.checkpoint(functools.partial(two_layers, **options))(state, x)


def constrained(state, x, *, spec, **options):
    """The model itself shards images."""
    x = jnp.tanh(convolution(x, state["stem"]))
    x = jnp.tanh(convolution(x, state["first"], **options))
    x = jax.lax.with_sharding_constraint(x, P(*spec))
    return jnp.square(convolution(x, state["second"], **options)).mean()


channels_kept_whole = functools.partial(constrained, spec=["batch"])
sharded_in_space = functools.partial(constrained, spec=["batch", "h"])


def kernels(*shape, **more):
    return {"first": images(*shape, seed=1), "second": images(*shape, seed=2), **more}


def arguments(loss, groups, channels=8):
    """The kernels and the images of a loss."""
    state = kernels(3, 3, channels // groups, channels)
    if loss in (two_layers, in_a_scan, recomputed):
        return state, images(8, 8, 8, channels)
    return {**state, "stem": images(3, 3, 3, 8, seed=3)}, images(8, 8, 8, 3)


def run(loss, state, batch, layout, layouts=None):
    """Returns the loss and the gradients of a compiled step on a mesh."""
    step = ml.compile_step(gradient_step(loss))
    whole = dict.fromkeys(state, layout.mesh.layout(...))
    placed = jax.tree.map(ml.relayout, state, {**whole, **(layouts or {})})
    return step(placed, ml.relayout(batch, layout))[1]


def assert_same_gradients(loss, state, batch, layout, layouts=None, reference=None):
    """Compares a compiled step on a mesh with plain JAX on one device."""
    _, (value, expected) = jax.jit(gradient_step(reference or loss))(state, batch)
    found, grads = run(loss, state, batch, layout, layouts)
    np.testing.assert_allclose(found, value, rtol=1e-5)
    for name, kernel in expected.items():
        scale = np.abs(kernel).max()
        np.testing.assert_allclose(grads[name] / scale, kernel / scale, atol=1e-5)


REFUSAL = (
    "XLA would multiply the gradient of a convolution's kernel f32[3, 3, {}, 4] along "
    "the mesh axes {}. Two layouts are right, of "
    "images that are whole in space: their rows over all axes, ('batch', 'h', 'w'); or "
    "the channels of kernels and images over the axes without rows."
)


@pytest.mark.parametrize("types", ["auto", "explicit"])
@pytest.mark.parametrize(
    ("loss", "groups", "spec", "axes"),
    [
        (two_layers, 4, ("batch",), "'h', 'w'"),
        (two_layers, 2, (None, "h"), "'batch', 'w'"),
        (in_a_scan, 4, ("batch",), "'h', 'w'"),
        (recomputed, 4, ("batch",), "'h', 'w'"),
        (two_layers, 1, ("batch", "h"), "'w'"),
        (two_layers, 1, (None, ("h", "w")), "'batch'"),
    ],
)
def test_gradients_that_xla_multiplies_are_refused(loss, groups, spec, axes, types):
    mesh = ml.create_mesh(AXES, axis_types=types)
    state, batch = arguments(loss, groups, channels=4)
    function = functools.partial(loss, groups=groups)
    said = message_of(lambda: run(function, state, batch, mesh.layout(*spec, ...)))
    assert said == REFUSAL.format(4 // groups, axes)


CHANNELS = (..., ("h", "w"))


@pytest.mark.parametrize(
    ("loss", "groups", "rule"),
    [
        (two_layers, 8, CHANNELS),  # the step's argument has whole channels
        (three_layers, 8, (..., "h")),  # "w" is still left over
        (three_layers, 8, (..., ("batch", "h", "w"))),
        (three_layers, 2, CHANNELS),  # groups that are cut
        (channels_kept_whole, 8, CHANNELS),
        (sharded_in_space, 1, (...,)),
    ],
)
def test_channels_that_are_sharded_in_another_way_are_refused(mesh, loss, groups, rule):
    state, batch = arguments(loss, groups)
    layouts = dict.fromkeys(("first", "second"), mesh.layout(*rule))
    function = functools.partial(loss, groups=groups)
    with pytest.raises(ml.errors.StepError, match="along the mesh axes"):
        run(function, state, batch, mesh.layout("batch", ...), layouts)


@pytest.mark.parametrize(
    ("loss", "groups", "spec", "rule"),
    [
        # Rows over all axes.
        (two_layers, 4, (("batch", "h", "w"),), (...,)),
        (in_a_scan, 4, (("batch", "h", "w"),), CHANNELS),
        # Channels over those without rows.
        (three_layers, 4, ("batch",), CHANNELS),
        (three_layers, 8, (None,), CHANNELS),
        # Whole images, or all axes, and no groups.
        (two_layers, 1, ("batch",), (...,)),
        (two_layers, 1, ("batch",), (None, None, "w", "h")),
        (two_layers, 1, ("batch", "h", "w"), (...,)),
    ],
)
def test_gradients_in_layouts_that_work_are_those_of_one_device(
    mesh, loss, groups, spec, rule
):
    state, batch = arguments(loss, groups)
    layouts = dict.fromkeys(("first", "second"), mesh.layout(*rule))
    function = functools.partial(loss, groups=groups)
    assert_same_gradients(function, state, batch, mesh.layout(*spec, ...), layouts)


def test_channels_may_be_the_first_dim(mesh):
    def loss(state, x):
        x = jnp.tanh(convolution(x, state["stem"], names=NCHW))
        return two_layers(state, x, groups=8, names=NCHW)

    state = kernels(8, 1, 3, 3, stem=images(8, 3, 3, 3))
    layouts = dict.fromkeys(("first", "second"), mesh.layout(("h", "w"), ...))
    layout = mesh.layout("batch", ...)
    assert_same_gradients(loss, state, images(8, 3, 8, 8), layout, layouts)


def with_positions(state, x):
    hidden = jnp.tanh(convolution(x, state["first"])) + state["other"][None]
    return jnp.square(convolution(hidden, state["second"])).mean()


def flattened(state, x):
    hidden = jnp.tanh(convolution(x, state["first"]))
    return jnp.square(hidden.reshape(len(x), -1) @ state["other"]).mean()


@pytest.mark.parametrize(
    ("loss", "shape", "rule"),
    [(with_positions, (8, 8, 4), ("h", ...)), (flattened, (256, 6), ("h", None))],
)
def test_a_parameter_that_may_shard_images_in_space_is_refused(mesh, loss, shape, rule):
    state = kernels(3, 3, 4, 4, other=images(*shape, seed=3))
    layout, layouts = mesh.layout("batch", ...), {"other": mesh.layout(*rule)}
    with pytest.raises(ml.errors.StepError, match="along the mesh axes 'h', 'w'"):
        run(loss, state, images(8, 8, 8, 4), layout, layouts)


def test_other_matrices_may_be_sharded_over_one_of_two_axes(mesh):
    """As of a vision transformer: no dim of theirs is one of flattened images."""

    def loss(state, x):
        tokens = jnp.tanh(convolution(x, state["first"], strides=4))
        return jnp.square(tokens @ state["up"] @ state["down"]).mean()

    state = {"first": images(4, 4, 3, 8), "up": images(8, 32), "down": images(32, 8)}
    layouts = {"up": mesh.layout(None, "h"), "down": mesh.layout("h", None)}
    layout = mesh.layout("batch", ...)
    assert_same_gradients(loss, state, images(8, 16, 16, 3), layout, layouts)


@pytest.mark.parametrize(
    ("groups", "spec"), [(1, ("batch", "h")), (4, (("batch", "h"),))], ids=str
)
def test_a_shard_map_that_leaves_axes_to_the_compiler_is_refused(mesh, groups, spec):
    def loss(state, x, axes):
        def per_device(state, x):
            return jax.lax.pmean(two_layers(state, x, groups=groups), tuple(axes))

        specs = {"in_specs": (P(), P(tuple(axes))), "out_specs": P()}
        return jax.shard_map(per_device, mesh=mesh.jax_mesh, axis_names=axes, **specs)(
            state, x
        )

    state, batch = arguments(two_layers, groups, channels=4)
    partial = functools.partial(loss, axes={"batch"})
    with pytest.raises(ml.errors.StepError, match="along the mesh axes"):
        run(partial, state, batch, mesh.layout(*spec, ...))
    whole = functools.partial(loss, axes=set(AXES))
    reference = functools.partial(two_layers, groups=groups)
    layout = mesh.layout(...)
    assert_same_gradients(whole, state, batch, layout, reference=reference)


@pytest.mark.parametrize(("groups", "in_a_loop"), [(1, True), (4, False)])
def test_a_step_that_is_first_called_inside_another_jit_is_refused_too(
    mesh, groups, in_a_loop
):
    step = ml.compile_step(gradient_step(functools.partial(two_layers, groups=groups)))

    def function(state, batch):
        if in_a_loop:
            return jax.lax.scan(lambda state, _: step(state, batch), state, None, 2)
        return step(state, batch)

    state, batch = arguments(two_layers, groups, channels=4)
    placed = ml.relayout(state, mesh.layout(...))
    wrong = ml.relayout(batch, mesh.layout("batch", "h", ...))
    with pytest.raises(Exception, match="XLA would multiply the gradient"):
        jax.jit(function)(placed, wrong)
    right = ml.relayout(batch, mesh.layout(("batch", "h", "w"), ...))
    found, _ = jax.jit(function)(placed, right)
    expected, _ = jax.jit(function)(state, batch)
    for name, kernel in expected.items():
        np.testing.assert_allclose(found[name], kernel, atol=1e-5)


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.conv = nnx.Conv(8, 8, (3, 3), feature_group_count=8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        x = self.norm(self.conv(nnx.gelu(self.stem(x))))
        return self.out(nnx.relu(x).mean((1, 2)))[..., 0]


def losses_of_two_steps(mesh, rules, rows, **options):
    state = create(mesh, Net, optax.adam(0.1), rules)
    step = ml.make_train_step(lambda m, b: jnp.square(m(b["x"]) - b["y"]), **options)
    batch = {"x": images(16, 8, 8, 3), "y": images(16)}
    batch, losses = ml.relayout(batch, mesh.layout(rows, ...)), []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2, "remat": "full", "ema": 0.9}]
)
def test_train_steps_of_grouped_convolutions_are_refused_or_right(options):
    mesh = mesh_of(batch=2, model=4)
    alone = losses_of_two_steps(mesh_of(batch=1), {}, "batch", **options)
    with pytest.raises(ml.errors.StepError, match=r"kernel f32\[3, 3, 1, 8\]"):
        losses_of_two_steps(mesh, {}, "batch", **options)
    rules = {"^conv/kernel": (..., "model")}
    for right in (({}, ("batch", "model")), (rules, "batch")):
        found = losses_of_two_steps(mesh, *right, **options)
        np.testing.assert_allclose(found, alone, rtol=1e-4)


@pytest.mark.parametrize(
    ("groups", "spec", "factor"), [(1, ("batch", "h"), 2), (4, ("batch",), 4)]
)
def test_what_plain_jax_makes_of_it_is_wrong(mesh, groups, spec, factor):
    """Notices the day on which XLA adds over the right devices."""
    state, batch = arguments(two_layers, groups, channels=4)
    grad = jax.jit(jax.grad(functools.partial(two_layers, groups=groups)))
    placed = ml.relayout(state, mesh.layout(...))
    found = grad(placed, ml.relayout(batch, mesh.layout(*spec, ...)))
    ratio = np.asarray(found["second"]) / np.asarray(grad(state, batch)["second"])
    np.testing.assert_allclose(np.median(ratio), factor, rtol=1e-3)
