"""Images sharded over height and width: one device's numbers, and halos alone are sent.

Each layer lies between two convolutions, so that what it is given and what it returns
are sharded by the compiler.
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
from tests.small_states import assert_close, create, mesh_of
from tests.tpu import abstract, create_slice_mesh


MESHES = {
    "rows, height, width": ({"batch": 2, "height": 2, "width": 2}, convnet.SPATIAL[:3]),
    "height": ({"height": 8}, (None, "height")),
    "height, width": ({"height": 4, "width": 2}, (None, "height", "width")),
    "height by two axes": ({"y": 4, "z": 2}, (None, ("y", "z"))),
}
PADDINGS = ("SAME", "VALID")


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


def pool(kind, size, strides, padding):
    start, reduce = {"max": (-np.inf, jax.lax.max), "mean": (0.0, jax.lax.add)}[kind]
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
    **table("conv", conv, (1, 2, 3, 5), (1, 2), PADDINGS),
    **table("conv", conv, (3,), (1,), PADDINGS, (2,)),
    **table("depthwise", functools.partial(conv, groups=8), (3,), (1, 2), PADDINGS),
    **table("max", functools.partial(pool, "max"), (2, 3), (2,), PADDINGS),
    **table("mean", functools.partial(pool, "mean"), (2, 3), (1, 2), PADDINGS),
}
OTHERS = {
    **table("conv", conv, (3,), (3,), ("SAME",)),  # which is gathered
    "shifted": (shifted, (1,)),
    "padded": (padded, (3, 3, 8, 8)),
}
LAYERS = COMMON | OTHERS
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
    images = ml.relayout(images, mesh.layout(*spec, ...))
    return ml.relayout(state, mesh.layout(...)), images


def slow_but(quick, cases):
    marks = {True: [], False: [pytest.mark.slow]}
    return [pytest.param(*x, marks=marks[x in quick]) for x in cases]


QUICK = [
    *zip(MESHES, [*SOME, "max (3, 2, 'SAME')"], strict=True),
    ("height", "shifted"),
]


@pytest.mark.parametrize(
    ("mesh", "layer"), slow_but(QUICK, itertools.product(MESHES, LAYERS))
)
def test_a_layer_computes_what_it_does_on_one_device(mesh, layer):
    step, state, images = network(layer)
    axes, spec = MESHES[mesh]
    result = ml.compile_step(step)(*on_mesh(mesh_of(**axes), spec, state, images))
    assert_close(result, jax.jit(step)(state, images), rtol=1e-4, atol=1e-4)


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
    """Images for strides of 3, which XLA alone computes wrongly."""
    step, *arguments = network("conv (3, 3, 'SAME')")
    placed = on_mesh(mesh_of(height=8), (None, "height"), *arguments)
    sent = ml.compile_step(step).communication(*placed).by("kind")["all_gather"]
    assert {x.axes for x in sent.collectives} == {("height",)}
    assert max(x.nbytes for x in sent.collectives) >= arguments[1].nbytes // 8


def random_window(draw, axes, num_dims):
    """A random layer in so many dims, its kernel's shape, and what it needs in space."""
    sizes = [draw(*range(1, 8 if num_dims < 3 else 5)) for _ in range(num_dims)]
    strides = tuple(draw(1, 1, 2, 2, 3, 4) for _ in sizes)
    kind = draw("conv", "conv", "transposed", "max", "mean")
    dilation = draw(1, 1, 2) if kind == "conv" else 1
    padding = draw("SAME", "VALID", [(draw(*range(n)), draw(*range(n))) for n in sizes])
    channels, needed = draw(4, 8), [(n - 1) * dilation + 1 for n in sizes]
    groups = draw(1, 2, channels) if kind == "conv" else 1
    numbers = "N" + "DHW"[-num_dims:] + "C", "DHW"[-num_dims:] + "IO"
    options = {"dimension_numbers": (*numbers, numbers[0])}

    def around(x, kernel):
        ones = (1,) * num_dims
        return jax.lax.conv_general_dilated(x, kernel, ones, "SAME", **options)

    def layer(x, kernel):
        if kind == "conv":
            more = {"rhs_dilation": (dilation,) * num_dims} | options
            more["feature_group_count"] = groups
            return jax.lax.conv_general_dilated(x, kernel, strides, padding, **more)
        if kind == "transposed":
            name = padding if isinstance(padding, str) else "SAME"
            return jax.lax.conv_transpose(x, kernel, strides, name, **options)
        pads = padding if isinstance(padding, str) else ((0, 0), *padding, (0, 0))
        start, reduce = (-np.inf, jax.lax.max) if kind == "max" else (0.0, jax.lax.add)
        window, steps = (1, *sizes, 1), (1, *strides, 1)
        return jax.lax.reduce_window(x, start, reduce, window, steps, pads)

    def forward(state, x):
        x = jnp.tanh(around(x, state["first"]))
        return around(jnp.tanh(layer(x, state["kernel"])), state["last"])

    three = (3,) * num_dims
    shapes = {"first": (*three, 4, channels), "last": (*three, channels, 4)}
    return forward, shapes | {"kernel": (*sizes, channels // groups, channels)}, needed


def random_program(seed):
    """A network around a random window, its arguments, and their random layouts."""
    random = np.random.default_rng(seed)
    draw = lambda *choices: choices[random.integers(len(choices))]
    names, left = ["space0", "space1", "space2"][: draw(1, 2, 2, 2, 3)], 8
    axes = dict.fromkeys((*names, "batch", "model"), 1)
    for name in ("space0", *random.permutation([*axes][1:])):
        axes[name] = draw(*(n for n in (1, 2, 4) if (name == "space0") < n <= left))
        left //= axes[name]
    axes["space0"] *= left
    forward, shapes, needed = random_window(draw, axes, len(names))
    normal = lambda *shape: random.normal(size=shape).astype("float32") / 3
    space = [
        axes[name] * draw(*range(-(-size // axes[name]), 24 // axes[name] + 2))
        for name, size in zip(names, needed, strict=True)
    ]
    images = normal(axes["batch"] * draw(1, 2, 3), *space, 4)
    mesh = mesh_of(**axes)
    layouts = {name: mesh.layout(...) for name in shapes}
    for name, shape in shapes.items():
        dims = [d for d in (-1, -2) if shape[d] % axes["model"] == 0]
        if name == "first" or draw(True, False):
            layouts[name] = mesh.layout(..., "model", *[None] * (-draw(*dims) - 1))
    state = {name: normal(*shape) for name, shape in shapes.items()}
    return forward, state, images, layouts, mesh.layout("batch", *names, None)


@pytest.mark.parametrize("seed", slow_but([(0,), (1,)], [(x,) for x in range(150)]))
def test_random_windows_on_random_meshes_compute_what_they_do_on_one_device(seed):
    forward, state, images, layouts, layout = random_program(seed)

    def train_step(state, x):
        loss = lambda *args: jnp.square(forward(*args)).mean()
        value, (grads, x_grad) = jax.value_and_grad(loss, (0, 1))(state, x)
        return jax.tree.map(lambda p, g: p - g / value, state, grads), x_grad / value

    for step in (train_step, lambda state, x: (state, forward(state, x))):
        placed = jax.tree.map(ml.relayout, state, layouts), ml.relayout(images, layout)
        expected = jax.jit(step)(state, images)
        assert_close(ml.compile_step(step)(*placed), expected, rtol=2e-4, atol=2e-4)


class Strided(nnx.Module):
    """Strides of 3, which XLA alone computes wrongly over 4 shards."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(1, 8, (5, 5), strides=3, rngs=rngs)
        self.out = nnx.Conv(8, 1, (3, 3), rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.gelu(self.conv(x))).mean((1, 2, 3))


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"height": 4, "model": 2}, {"remat": "full"}),
        pytest.param(
            *({"batch": 2, "height": 4}, {"accumulate": 2}),
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    not hasattr(jax, "reshard"),
                    reason="jax 0.7 cannot read the layouts of results of such a program",
                ),
            ],
        ),
    ],
)
def test_all_steps_compute_what_they_do_on_one_device(axes, options):
    loss_fn = lambda model, x: jnp.square(model(x) - 1)

    def outcome(rules, **axes):
        mesh = mesh_of(**axes)
        images = np.random.default_rng(0).normal(size=(4, 24, 24, 1)).astype("float32")
        spec = [name if name in axes else None for name in ("batch", "height")]
        x = ml.relayout(images, mesh.layout(*spec, ...))
        state = create(mesh, Strided, optax.sgd(0.1), rules)
        state, trained = ml.make_train_step(loss_fn, **options)(state, x)
        measured = ml.make_eval_step(loss_fn)(state, x)
        predicted = ml.make_predict_step(lambda model, x: model(x))(state, x)
        return trained["loss"], measured["loss"], predicted

    rules = {"conv/kernel": (..., "model")} if "model" in axes else {}
    assert_close(outcome(rules, **axes), outcome({}, batch=1), rtol=1e-4, atol=1e-5)
