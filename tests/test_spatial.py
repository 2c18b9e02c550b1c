"""Images sharded over height and width: one device's numbers, and halos alone are sent.

Each layer lies between two convolutions, so that what it is given and what it returns
are sharded by the compiler. Where XLA would be wrong the step is refused.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from models import convnet
from tests.error_messages import message_of
from tests.small_states import assert_close, create, mesh_of
from tests.tpu import abstract, create_slice_mesh


MESHES = {
    "rows, height, width": ({"batch": 2, "height": 2, "width": 2}, convnet.SPATIAL[:3]),
    "height": ({"height": 8}, (None, "height")),
    "height, width": ({"height": 4, "width": 2}, (None, "height", "width")),
    "height by two axes": ({"y": 4, "z": 2}, (None, ("y", "z"))),
}
PADDINGS = ("SAME", "VALID", ((1, 2), (0, 1)), ((3, 3), (3, 3)))


def convolution(x, kernel, strides=1, padding="SAME", dilation=1, groups=1):
    names, dilations = ("NHWC", "HWIO", "NHWC"), (dilation, dilation)
    options = {"feature_group_count": groups, "dimension_numbers": names}
    return jax.lax.conv_general_dilated(
        x, kernel, (strides, strides), padding, rhs_dilation=dilations, **options
    )


def conv(size, *options, groups=1):
    """A layer, and its kernel's shape."""
    layer = lambda x, kernel: convolution(x, kernel, *options, groups=groups)
    return layer, (size, size, 8 // groups, 8)


def upsample(size, strides, padding):
    layer = lambda x, k: jax.lax.conv_transpose(x, k, (strides, strides), padding)
    return layer, (size, size, 8, 8)


def pool(kind, size, strides, padding="VALID"):
    start, reduce = {"max": (-np.inf, jax.lax.max), "mean": (0.0, jax.lax.add)}[kind]
    padding = padding if isinstance(padding, str) else ((0, 0), *padding, (0, 0))
    window, steps = (1, size, size, 1), (1, strides, strides, 1)
    layer = lambda x, _: jax.lax.reduce_window(x, start, reduce, window, steps, padding)
    return layer, (1,)


def shifted(x, _):
    """Max pooling of 3x3 with stride 1, by slices."""
    x = functools.reduce(jnp.maximum, [x[:, i : i + 30] for i in range(3)])
    return functools.reduce(jnp.maximum, [x[:, :, i : i + 30] for i in range(3)])


def padded(x, kernel):
    x = jnp.pad(x, ((0, 0), (3, 3), (3, 3), (0, 0)))
    return convolution(x, kernel, 2, "VALID")


def table(kind, make, *options):
    return {f"{kind} {x}": make(*x) for x in itertools.product(*options)}


# Strides of 1 and 2 with SAME and VALID, of which nothing is gathered.
COMMON = {
    **table("conv", conv, (1, 2, 3, 5), (1, 2), PADDINGS[:2]),
    **table("conv", conv, (3,), (1,), PADDINGS[:2], (2,)),
    **table("depthwise", functools.partial(conv, groups=8), (3,), (1, 2), PADDINGS[:2]),
    **table("max", functools.partial(pool, "max"), (2, 3), (2,), PADDINGS[:2]),
    **table("mean", functools.partial(pool, "mean"), (2, 3), (1, 2), PADDINGS[:2]),
}
# Right or refused; some of them are gathered.
OTHERS = {
    **table("conv", conv, (1, 2, 3, 4, 5, 7), (1, 2, 3), PADDINGS, (1, 2)),
    **table("max", functools.partial(pool, "max"), (2, 3, 4), (1, 2, 3), PADDINGS[:3]),
    **table("mean", functools.partial(pool, "mean"), (3, 4), (2, 3), PADDINGS[:3]),
    **table("upsample", upsample, (2, 3, 4), (2, 3), PADDINGS[:2]),
}
WAYS_OUT = {"shifted": (shifted, (1,)), "padded": (padded, (3, 3, 8, 8))}
LAYERS = COMMON | OTHERS | WAYS_OUT
SOME = ["conv (3, 1, 'SAME')", "conv (3, 2, 'VALID')", "depthwise (3, 2, 'SAME')"]


def network(name):
    """A step around a layer, with all gradients, and its arguments."""
    layer, shape = LAYERS[name]

    def loss(state, x):
        x = jnp.tanh(convolution(x, state["first"]))
        x = jnp.tanh(layer(x, state["kernel"]))
        return jnp.square(convolution(x, state["last"])).mean()

    def step(state, x):
        value, (grads, x_grad) = jax.value_and_grad(loss, (0, 1))(state, x)
        # Relative to the loss, so that one tolerance serves all.
        return jax.tree.map(lambda p, g: p - g / value, state, grads), x_grad / value

    random = np.random.default_rng(0)
    shapes = {"first": (3, 3, 4, 8), "kernel": shape, "last": (3, 3, 8, 4)}
    state = {k: random.normal(size=s).astype("float32") / 3 for k, s in shapes.items()}
    return step, state, random.normal(size=(4, 32, 32, 4)).astype("float32")


def on_mesh(mesh, spec, state, images):
    return ml.relayout(state, mesh.layout(...)), ml.relayout(
        images, mesh.layout(*spec, ...)
    )


def slow_but(quick, cases):
    marks = {True: [], False: [pytest.mark.slow]}
    return [pytest.param(*x, marks=marks[x in quick]) for x in cases]


QUICK = [
    *zip(MESHES, [*SOME, "max (3, 2, 'SAME')"], strict=True),
    ("height", "shifted"),
]
EVERY = [*itertools.product(MESHES, COMMON | WAYS_OUT)]
EVERY += itertools.product([*MESHES][:2], [x for x in OTHERS if x not in COMMON])


@pytest.mark.parametrize(("mesh", "layer"), slow_but(QUICK, EVERY))
def test_a_layer_computes_what_it_does_on_one_device_or_is_refused(mesh, layer):
    step, state, images = network(layer)
    axes, spec = MESHES[mesh]
    try:
        result = ml.compile_step(step)(*on_mesh(mesh_of(**axes), spec, state, images))
    except ml.errors.StepError as error:
        assert "XLA would compute" in str(error)  # noqa: PT017
        assert layer not in COMMON | WAYS_OUT
        return
    assert_close(result, jax.jit(step)(state, images), rtol=1e-4, atol=1e-4)


MESSAGE = (
    "XLA would compute {} wrongly for images in space: windows of {} with stride {} and "
    "padding {} slide over 32 rows in 8 shards of dim 1, and {}."
)
REFUSED = {
    "conv (5, 2, 'VALID', 2)": (
        *("conv_general_dilated", 9, 2, (0, 0)),
        "reach past a neighbor's 4. Shard this dim over fewer devices, to 8 rows on "
        "each",
    ),
    "conv (3, 3, 'SAME', 1)": (
        *("conv_general_dilated", 3, 3, (0, 1)),
        "give outputs to 6 devices alone. Shard this dim over 6 or fewer",
    ),
    "conv (2, 1, ((3, 3), (3, 3)), 1)": (
        *("conv_general_dilated", 2, 1, (3, 3)),
        "some are padding alone. Pad the images by jnp.pad before",
    ),
    "max (3, 1, 'VALID')": (
        *("select_and_scatter_add", 3, 1, (0, 0)),
        "overlap by half or more. Take the maximum of shifted slices of the images "
        "instead, or make the stride more than half of the window",
    ),
}


@pytest.mark.parametrize("layer", REFUSED)
def test_windows_that_xla_computes_wrongly_are_refused_with_a_way_out(layer):
    step, *arguments = network(layer)
    placed = on_mesh(mesh_of(height=8), (None, "height"), *arguments)
    said = message_of(lambda: ml.compile_step(step).lower(*placed))
    assert said == MESSAGE.format(*REFUSED[layer])


# libtpu takes some seconds for each.
PROGRAMS = [*itertools.product(["cpu"], MESHES, COMMON)]
PROGRAMS += itertools.product(
    ["v5e"], MESHES, [*SOME, "conv (3, 2, 'SAME')", "conv (3, 1, 'VALID')"]
)
QUICK_PROGRAMS = [("cpu", "height", SOME[1]), ("v5e", next(iter(MESHES)), SOME[1])]


@pytest.mark.parametrize(
    ("target", "mesh", "layer"), slow_but(QUICK_PROGRAMS, PROGRAMS)
)
def test_halos_are_permuted_and_nothing_is_gathered(target, mesh, layer):
    axes, spec = MESHES[mesh]
    if target == "v5e":
        pytest.importorskip("libtpu")
    mesh = mesh_of(**axes) if target == "cpu" else create_slice_mesh(**axes)
    step, *arguments = network(layer)
    state, images = jax.tree.map(
        lambda x: abstract(x.shape, x.dtype, mesh.layout(...).with_rank(x.ndim)),
        arguments,
    )
    images = images.update(sharding=mesh.layout(*spec, ...).with_rank(4).sharding)
    sent = ml.compile_step(step).communication(state, images).by("kind")
    assert {*sent} == {"all_reduce", "collective_permute"}
    # Nothing as large as a quarter of the images; and gradients and the loss.
    quarter = math.prod(images.shape[:3]) * 8 * 4 // 4
    assert all(x.nbytes < quarter for x in sent["collective_permute"].collectives)
    kernels = sum(x.size for x in state.values())
    assert sum(x.nbytes for x in sent["all_reduce"].collectives) <= 12 * kernels


def test_what_is_gathered_is_reported():
    """Pairs of rows that a reshape pools lie across the edge of two shards."""

    def step(state, x):
        y = lambda state: convolution(x, state, 1, "VALID").reshape(8, 5, 2, 5, 2, 8)
        value, grads = jax.value_and_grad(lambda s: y(s).max((2, 4)).mean())(state)
        return state - grads, value

    random, mesh = np.random.default_rng(0), mesh_of(height=2)
    arguments = random.normal(size=(3, 3, 4, 8)), random.normal(size=(8, 12, 12, 4))
    placed = on_mesh(mesh, (None, "height"), *arguments)
    train_step = ml.compile_step(step)
    gathered = train_step.communication(*placed).by("kind")["all_gather"]
    assert [x.axes for x in gathered.collectives] == [("height",)]
    assert_close(train_step(*placed), jax.jit(step)(*arguments), rtol=1e-5)


@pytest.mark.slow
def test_fit_takes_images_that_are_sharded_in_space():
    def loss_fn(model, batch):
        return optax.losses.softmax_cross_entropy_with_integer_labels(
            model(batch["image"]), batch["label"]
        )

    def losses(**axes):
        random, mesh = np.random.default_rng(0), mesh_of(**axes)
        images = random.normal(size=(48, 28, 28, 1)).astype("float32")
        data = {"image": images, "label": random.integers(0, 10, 48).astype("int32")}
        layout = mesh.layout(*(a if a in axes else None for a in convnet.SPATIAL))
        batches = ml.distribute_dataset(data, layout, global_batch_size=32)
        build = lambda: convnet.ConvNet(rngs=nnx.Rngs(0))
        trainer = ml.Trainer(create(mesh, build, optax.adam(1e-3)), loss_fn)
        return trainer.fit(batches, epochs=2, progress=False)["loss"]

    found = losses(batch=2, height=2, width=2)
    np.testing.assert_allclose(found, losses(batch=1), rtol=1e-4)
