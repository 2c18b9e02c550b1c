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
from tests.small_states import create, mesh_of, squares


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


def layers(state, x, *, groups=1, names=NHWC, stride=1, spec=None):
    """The layers whose parameters there are; `first` and `second` are grouped."""

    def convolution(x, name, strides=1, groups=groups):
        options = {"feature_group_count": groups, "dimension_numbers": names}
        kernel = state[name]
        return jax.lax.conv_general_dilated(x, kernel, [strides] * 2, "SAME", **options)

    if "stem" in state:  # the images of the others are not the step's argument
        x = jnp.tanh(convolution(x, "stem", stride, groups=1))
    x = jnp.tanh(convolution(x, "first"))
    if spec is not None:  # the model itself shards images
        x = jax.lax.with_sharding_constraint(x, P(*spec))
    if "positions" in state:
        x = x + state["positions"][None]
    x = convolution(x, "second")
    if "head" in state:
        x = x.reshape(len(x), -1) @ state["head"]
    if "up" in state:  # as of a vision transformer: nothing is flattened
        x = jnp.tanh(x) @ state["up"] @ state["down"]
    return jnp.square(x).mean()


def in_a_scan(state, x, **options):
    stacked = {name: x[None] for name, x in state.items()}
    scanned = jax.lax.scan(lambda n, w: (n + layers(w, x, **options), 0), 0.0, stacked)
    return scanned[0]


def recomputed(state, x, **options):
    return jax.checkpoint(functools.partial(layers, **options))(state, x)


# Shapes of images and of more parameters, and options of the layers.
MODELS = {
    "two": ((8, 8, 8, 8), {}, {}),
    "three": ((8, 8, 8, 3), {"stem": (3, 3, 3, 8)}, {}),
    "channels kept whole": (
        *((8, 8, 8, 3), {"stem": (3, 3, 3, 8)}),
        {"spec": ["batch"]},
    ),
    "space": (*((8, 8, 8, 3), {"stem": (3, 3, 3, 8)}), {"spec": ["batch", "h"]}),
    "channels first": ((8, 3, 8, 8), {"stem": (8, 3, 3, 3)}, {"names": NCHW}),
    "positions": ((8, 8, 8, 8), {"positions": (8, 8, 8)}, {}),
    "flattened": ((8, 8, 8, 8), {"head": (512, 6)}, {}),
    "flattened, of 6 x 6": ((8, 6, 6, 8), {"head": (288, 6)}, {}),
    "patches": (
        (8, 16, 16, 3),
        {"stem": (4, 4, 3, 8), "up": (8, 32), "down": (32, 8)},
        {"stride": 4},
    ),
}


def arguments(model, groups):
    """The loss, its parameters and images."""
    loss = {"in a scan": in_a_scan, "recomputed": recomputed}.get(model, layers)
    batch, more, options = MODELS["two" if loss is not layers else model]
    kernel = (8, 8 // groups, 3, 3) if "names" in options else (3, 3, 8 // groups, 8)
    shapes = {"first": kernel, "second": kernel, **more}
    state = {name: images(*x, seed=i) for i, (name, x) in enumerate(shapes.items())}
    loss = functools.partial(loss, groups=groups, **options)
    return loss, state, images(*batch, seed=9)


def run(loss, state, batch, layout, rules=None):
    """Returns the loss and the gradients of a compiled step on a mesh."""
    step = ml.compile_step(gradient_step(loss))
    specs = {**dict.fromkeys(state, (...,)), **(rules or {})}
    layouts = {name: layout.mesh.layout(*spec) for name, spec in specs.items()}
    placed = jax.tree.map(ml.relayout, state, layouts)
    return step(placed, ml.relayout(batch, layout))[1]


def assert_same_gradients(found, loss, state, batch):
    """Compares a loss and gradients with those of plain JAX on one device."""
    _, (value, expected) = jax.jit(gradient_step(loss))(state, batch)
    np.testing.assert_allclose(found[0], value, rtol=1e-5)
    for name, kernel in expected.items():
        scale = np.abs(kernel).max()
        np.testing.assert_allclose(found[1][name] / scale, kernel / scale, atol=1e-5)


REFUSAL = (
    "XLA would multiply the gradient of a convolution's kernel f32[3, 3, {}, 8] along "
    "the mesh axes {}. Two layouts are right, of images that are whole in space: their "
    "rows over all axes, ('batch', 'h', 'w'); or the channels of kernels and images over "
    "the axes without rows{}."
)


def kernels(*spec):
    """Rules for the kernels that may be grouped."""
    return {"first": spec, "second": spec}


CHANNELS = kernels(..., ("h", "w"))
SPARE = "'h', 'w'"
# A model and its groups, how images and parameters are sharded, and the axes along
# which XLA would add.
REFUSED = [
    ("two", 4, ("batch",), {}, SPARE),
    ("two", 2, (None, "h"), {}, "'batch', 'w'"),
    ("in a scan", 4, ("batch",), {}, SPARE),
    ("recomputed", 4, ("batch",), {}, SPARE),
    ("two", 1, ("batch", "h"), {}, "'w'"),
    ("two", 1, (None, ("h", "w")), {}, "'batch'"),
    # Channels that are sharded in another way.
    ("two", 8, ("batch",), CHANNELS, SPARE),  # the step's argument has them whole
    ("three", 8, ("batch",), {"second": (..., ("h", "w"))}, SPARE),
    ("three", 8, ("batch",), kernels(..., "h"), SPARE),  # "w" is still left over
    ("three", 8, ("batch",), kernels(..., ("batch", "h", "w")), SPARE),
    ("three", 2, ("batch",), CHANNELS, SPARE),  # groups that are cut
    ("channels kept whole", 8, ("batch",), CHANNELS, SPARE),
    # The model shards images in space.
    ("space", 1, ("batch",), {}, SPARE),
]
# On Explicit axes, JAX itself wants to be told more than these cases say.
EXPLICIT = [(*case, "explicit") for case in REFUSED[:6]]


@pytest.mark.parametrize(
    ("model", "groups", "spec", "rules", "axes", "types"),
    [(*case, "auto") for case in REFUSED] + EXPLICIT,
)
def test_gradients_that_xla_multiplies_are_refused(
    model, groups, spec, rules, axes, types
):
    layout = ml.create_mesh(AXES, axis_types=types).layout(*spec, ...)
    said = message_of(run, *arguments(model, groups), layout, rules)
    free = tuple(axis for axis in AXES if axis != spec[0])
    need = {k: (*[None] * 3, free) for k in CHANNELS if rules.get(k) != CHANNELS[k]}
    rule = f", as by the rules {need} or ml.parallel.tensor_parallel(...)" * bool(need)
    assert said == REFUSAL.format(8 // groups, axes, rule)


@pytest.mark.parametrize(
    ("model", "name", "spec"),
    [
        ("positions", "positions", ("h", ...)),
        ("flattened", "head", ("h", None)),
        # Six rows take up one of the two axes.
        ("flattened, of 6 x 6", "head", (("h", "w"), None)),
    ],
)
def test_a_parameter_that_may_shard_images_in_space_is_named(mesh, model, name, spec):
    layout = mesh.layout("batch", ...)
    assert message_of(run, *arguments(model, 1), layout, {name: spec}) == (
        "XLA would multiply the gradient of a convolution's kernel f32[3, 3, 8, 8] "
        f"along the mesh axes 'h', 'w', as dim 0 of '{name}' may shard images in space: "
        "shard another dim of it."
    )


@pytest.mark.parametrize(
    ("model", "groups", "spec", "rules"),
    [
        # Rows over all axes.
        ("two", 4, (("batch", "h", "w"),), {}),
        ("in a scan", 4, (("batch", "h", "w"),), CHANNELS),
        # Channels over those without rows.
        ("three", 4, ("batch",), CHANNELS),
        ("three", 8, (None,), CHANNELS),
        ("channels first", 8, ("batch",), kernels(("h", "w"), ...)),
        ("two", 8, ("batch", None, None, ("h", "w")), CHANNELS),
        ("recomputed", 4, ("batch", None, None, ("w", "h")), CHANNELS),
        # Whole images, or all axes, and no groups.
        ("two", 1, ("batch",), {}),
        ("two", 1, ("batch",), kernels(None, None, "w", "h")),
        ("two", 1, ("batch", "h", "w"), {}),
        ("flattened", 1, ("batch",), {"head": (("h", "w"), None)}),
        # Other matrices may be sharded over one of two axes.
        ("patches", 1, ("batch",), {"up": (None, "h"), "down": ("h", None)}),
    ],
)
def test_gradients_in_layouts_that_work_are_those_of_one_device(
    mesh, model, groups, spec, rules
):
    loss, state, batch = arguments(model, groups)
    found = run(loss, state, batch, mesh.layout(*spec, ...), rules)
    assert_same_gradients(found, loss, state, batch)


@pytest.mark.parametrize(
    ("groups", "spec"), [(1, ("batch", "h")), (4, (("batch", "h"),))], ids=str
)
def test_a_shard_map_that_leaves_axes_to_the_compiler_is_refused(mesh, groups, spec):
    reference, state, batch = arguments("two", groups)

    def loss(state, x, axes):
        def per_device(state, x):
            return jax.lax.pmean(reference(state, x), tuple(axes))

        specs = {"in_specs": (P(), P(tuple(axes))), "out_specs": P()}
        mapped = jax.shard_map(per_device, mesh=mesh.jax_mesh, axis_names=axes, **specs)
        return mapped(state, x)

    partial = functools.partial(loss, axes={"batch"})
    with pytest.raises(ml.errors.StepError, match="along the mesh axes"):
        run(partial, state, batch, mesh.layout(*spec, ...))
    found = run(functools.partial(loss, axes={*AXES}), state, batch, mesh.layout(...))
    assert_same_gradients(found, reference, state, batch)


@pytest.mark.parametrize(("groups", "in_a_loop"), [(1, True), (4, False)])
def test_a_step_that_is_first_called_inside_another_jit_is_refused_too(
    mesh, groups, in_a_loop
):
    loss, state, batch = arguments("two", groups)
    step = ml.compile_step(gradient_step(loss))

    @jax.jit
    def function(state, batch):
        if in_a_loop:
            return jax.lax.scan(lambda state, _: step(state, batch), state, None, 2)
        return step(state, batch)

    placed = ml.relayout(state, mesh.layout(...))
    with pytest.raises(ml.errors.StepError, match=r"^XLA would multiply the grad"):
        function(placed, ml.relayout(batch, mesh.layout("batch", "h", ...)))
    rows = mesh.layout(("batch", "h", "w"), ...)
    found, _ = function(placed, ml.relayout(batch, rows))
    expected, _ = function(state, batch)
    for name, kernel in expected.items():
        np.testing.assert_allclose(found[name], kernel, atol=1e-5)


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.conv = nnx.Conv(8, 8, (3, 3), feature_group_count=8, rngs=rngs)

    def __call__(self, x):
        return self.conv(nnx.gelu(self.stem(x))).mean((1, 2, 3))


def losses_of_two_steps(mesh, rules, rows):
    state = create(mesh, Net, optax.adam(0.1), rules)
    options = {"accumulate": 2, "remat": "full", "ema": 0.9}
    step, losses = ml.make_train_step(squares, **options), []
    batch = {"x": images(16, 8, 8, 3), "y": images(16)}
    for _ in range(2):
        state, metrics = step(state, ml.relayout(batch, mesh.layout(rows, ...)))
        losses.append(float(metrics["loss"]))
    return losses


def test_train_steps_of_grouped_convolutions_are_refused_or_right():
    mesh = mesh_of(batch=2, model=4)
    alone = losses_of_two_steps(mesh_of(batch=1), {}, "batch")
    with pytest.raises(ml.errors.StepError, match=r"kernel f32\[3, 3, 1, 8\]"):
        losses_of_two_steps(mesh, {}, "batch")
    rules = {"^conv/kernel": (..., "model")}
    for right in (({}, ("batch", "model")), (rules, "batch")):
        found = losses_of_two_steps(mesh, *right)
        np.testing.assert_allclose(found, alone, rtol=1e-4)


class Gray(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.second = nnx.Conv(8, 8, (3, 3), rngs=rngs)
        self.out = nnx.Linear(512, 1, rngs=rngs)

    def __call__(self, x):
        x = self.second(nnx.relu(self.first(x[..., None])))
        return self.out(x.reshape(len(x), -1))[:, 0]


def test_a_dense_kernel_may_be_sharded_after_images_without_channels():
    """Neither metrics nor a scalar of the batch are images, whose layouts count."""
    losses = []
    for mesh in (mesh_of(batch=1), mesh_of(batch=2, model=4)):
        rules = {"^out/kernel": ("model", None)} if "model" in mesh.axis_names else {}
        state = create(mesh, Gray, optax.sgd(0.1), rules)
        step = ml.make_train_step(squares)
        batch = {"x": images(16, 8, 8), "y": images(16), "t": 1.0}
        for _ in range(2):
            state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.parametrize(
    ("groups", "spec", "factor"), [(1, ("batch", "h"), 2), (4, ("batch",), 4)]
)
def test_what_plain_jax_makes_of_it_is_wrong(mesh, groups, spec, factor):
    """Notices the day on which XLA adds over the right devices."""
    loss, state, batch = arguments("two", groups)
    grad = jax.jit(jax.grad(loss))
    placed = ml.relayout(state, mesh.layout(...))
    found = grad(placed, ml.relayout(batch, mesh.layout(*spec, ...)))
    ratio = np.asarray(found["second"]) / np.asarray(grad(state, batch)["second"])
    np.testing.assert_allclose(np.median(ratio), factor, rtol=1e-3)


def test_no_rule_is_proposed_that_would_not_divide():
    def build():
        return nnx.Conv(2, 2, (3, 3), feature_group_count=2, rngs=nnx.Rngs(0))

    layout = ml.create_mesh(AXES).layout("batch", ...)
    state = ml.TrainState.create(build, optax.sgd(0.1), ml.LayoutMap(layout.mesh))
    batch = ml.relayout(np.ones((8, 8, 8, 2), "float32"), layout)
    step = ml.make_train_step(lambda model, x: (model(x) ** 2).mean(axis=(1, 2, 3)))
    said = message_of(step, state, batch)
    assert said.startswith("XLA would multiply")
    assert said.endswith("over the axes without rows.")
