"""`pipeline`: equal to the layers one by one, and what its programs send and hold."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshlayout as ml
from meshlayout.hlo import read_communication
from tests.bad_values import refusal


LAYERS, FEATURES, HIDDEN, ROWS = 8, 16, 32, 24
SHAPES = {
    "up": (LAYERS, FEATURES, HIDDEN),
    "bias": (LAYERS, HIDDEN),
    "down": (LAYERS, HIDDEN, FEATURES),
}
run = functools.partial(ml.parallel.pipeline, axis="stage")


def block(params, x):
    """A layer that also reads a number of each row; of rows of zeros it makes NaN."""
    x, scale = x
    norm = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    hidden = jax.nn.gelu(norm @ params["up"] + params["bias"][None])
    return x + hidden @ params["down"] * scale[:, None], scale


def one_by_one(params, x):
    for i in range(LAYERS):
        x = block({name: p[i] for name, p in params.items()}, x)
    return x


def with_gradients(function):
    """Returns values, and gradients by parameters and inputs, of a loss of all rows."""

    def loss(params, x):
        y, scale = function(params["blocks"], x)
        return jnp.sum(jnp.sin(y) * scale[:, None]), (y, scale)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def make_params(rounds=None):
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape) * 0.2 for name, shape in SHAPES.items()}
    lead = (LAYERS,) if rounds is None else (rounds, LAYERS // rounds)
    return {
        "blocks": {
            name: jnp.asarray(p.reshape(*lead, *p.shape[1:]), "float32")
            for name, p in params.items()
        }
    }


def make_layouts(mesh, schedule="gpipe"):
    """Stages, and what else the mesh has axes for."""
    layouts = ml.parallel.stages(mesh, schedule=schedule)
    if "model" in mesh:
        columns = {"up|bias": (..., "model"), "down": (..., "model", None)}
        layouts = ml.parallel.compose(layouts, ml.LayoutMap(mesh, columns))
    if "fsdp" in mesh:
        layouts = ml.parallel.compose(layouts, ml.parallel.fsdp(mesh, min_bytes=0))
    return layouts


def create_mesh(axes):
    return ml.create_mesh(axes, devices=jax.devices()[: math.prod(axes.values())])


@pytest.mark.parametrize(
    ("axes", "count", "rounds", "trips"),
    [
        # rounds: None for gpipe, 0 for circular ones of one layer in a flat stack
        ({"stage": 4}, 4, None, 7),
        ({"stage": 4, "batch": 2}, 6, None, 9),
        ({"batch": 2, "stage": 2, "model": 2}, 4, None, 5),
        ({"stage": 4, "fsdp": 2}, 12, None, 15),
        ({"stage": 4}, 4, 0, 11),
        ({"stage": 2, "batch": 4}, 6, 2, 13),
        ({"stage": 2, "fsdp": 2}, 3, 4, 16),  # a last group of one microbatch
        ({"stage": 4}, 1, 0, 8),
    ],
)
def test_stages_compute_what_layers_do_in_as_many_steps_as_published(
    axes, count, rounds, trips
):
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(ROWS, FEATURES)), rng.normal(size=ROWS))
    x = jax.tree.map(lambda leaf: jnp.asarray(leaf, "float32"), x)
    expected, (by_params, by_x) = with_gradients(one_by_one)(make_params(), x)
    mesh = create_mesh(axes)
    schedule = "gpipe" if rounds is None else "circular"
    layouts = make_layouts(mesh, schedule if rounds else "gpipe")
    params = ml.create(lambda: make_params(rounds or None), layouts)
    rows = [name for name in ("batch", "fsdp") if name in mesh]
    x = ml.relayout(x, mesh.layout(rows[0] if rows else None, ...))
    options = {"microbatches": count, "schedule": schedule, "rounds": rounds or None}
    with jax.set_mesh(mesh.jax_mesh):
        program = with_gradients(functools.partial(run, block, **options))
        program = program.lower(params, x).compile()
    got, (got_by_params, got_by_x) = program(params, x)
    got_by_params = jax.tree.map(
        lambda g, w: g.reshape(w.shape), got_by_params, by_params
    )
    # Sums of other orders: float32 rounds at 1e-7 of numbers up to 30.
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        (got, got_by_params, got_by_x),
        (expected, by_params, by_x),
    )
    sent = read_communication(program, mesh).collectives
    turns = [x for x in sent if x.axes == ("stage",) and x.in_loop]
    assert {(x.kind, x.times) for x in turns} == {("collective_permute", trips)}
    # Layers move only if they lie otherwise; microbatches if the last ones are few.
    gathers = [x for x in sent if x.kind == "all_gather" and "stage" in x.axes]
    assert not gathers or rounds == 0 or count % axes["stage"]


def grown(**changes):
    """A call of `pipeline` on 8 layers and 24 rows over 4 stages, with other arguments."""
    mesh = create_mesh({"stage": 4})
    arguments = {"x": jnp.ones((ROWS, FEATURES)), "microbatches": 4} | changes
    params = arguments.pop("params", jnp.ones((LAYERS, FEATURES, FEATURES)))
    function = arguments.pop("block", lambda params, x: x @ params)
    return run(function, params, mesh=mesh, **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"params": jnp.ones((6, FEATURES, FEATURES))},
            "6 layers do not divide into 4 stages over 'stage'; nearest that do: 4 and 8.",
        ),
        (
            {"params": jnp.ones((3, FEATURES, FEATURES))},
            "3 layers do not divide into 4 stages over 'stage'; nearest that do: 4.",
        ),
        (
            {"microbatches": 5},
            "24 rows do not divide into microbatches=5; nearest that do: 4 and 6.",
        ),
        (
            {"microbatches": 25},
            "24 rows do not divide into microbatches=25; nearest that do: 24.",
        ),
        ({"microbatches": 0}, "microbatches must be a positive integer, got 0."),
        (
            {"schedule": "gpip"},
            "schedule must be 'gpipe' or 'circular', got 'gpip'. Did you mean 'gpipe'?",
        ),
        ({"rounds": 8}, "rounds=8 is for schedule='circular': leave it out."),
        (
            {"rounds": 2, "schedule": "circular"},
            "rounds=2, but the leading dims of stacked_params are (8, 16), not (rounds, "
            "layers of a round).",
        ),
        (
            {"block": lambda params, x: (x @ params).astype("bfloat16")},
            "the block got float32[6,16] and returned bfloat16[6,16]. A layer returns "
            "what the next one takes: cast or reshape it.",
        ),
        (
            {"x": (jnp.ones((4, 2)), jnp.ones((2, 2)))},
            "x must hold arrays that all have the same leading dims, 1 at least; they "
            "are (2,), (4,).",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_could(changes, message):
    assert refusal(ml.MeshLayoutError, grown, **changes) == f"pipeline: {message}"


def test_without_such_an_axis_layers_are_scanned():
    params, x = make_params()["blocks"], (jnp.ones((5, FEATURES)), jnp.ones(5))
    expected = one_by_one(params, x)
    for axes in ({"batch": 8}, {"batch": 8, "stage": 1}):
        with jax.set_mesh(create_mesh(axes).jax_mesh):
            got = jax.jit(functools.partial(run, block, microbatches=3))(params, x)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5), got, expected
        )
