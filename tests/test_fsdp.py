"""`data_parallel`, `fsdp` and `compose`: what they decide, and states that follow."""

import copy
import functools
import pickle
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.sharding import AxisType

import meshlayout as ml
from models import mlp
from tests.bad_values import refusal
from tests.small_states import assert_close


EIGHT = ml.create_mesh({"batch": 8})
HYBRID = ml.create_mesh({"replica": 2, "fsdp": 4})
GRID = ml.create_mesh({"batch": 2, "model": 4})


def abstract(shapes, dtype="float32"):
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def specs(layouts, tree):
    """Returns the entries of every leaf's layout by path."""
    return {x.path: x.layout.specs for x in layouts.resolve(tree).resolutions}


def decide(layouts, path, shape, dtype="float32"):
    """Returns the resolution of one leaf."""
    return layouts.resolve({path: jax.ShapeDtypeStruct(shape, dtype)})[path]


def test_a_jax_mesh_of_explicit_axes_trains_too():
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Explicit,))
    layouts = ml.parallel.fsdp(mesh, min_bytes=0)
    assert layouts.mesh == EIGHT
    build = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    state = ml.TrainState.create(build, optax.sgd(0.1), layouts)
    data, step = np.ones((8, 8)), ml.make_train_step(lambda m, x: m(x).sum(1))
    for batch in ml.distribute_dataset(data, mesh, global_batch_size=8):
        assert np.isfinite(step(state, batch)[1]["loss"])


refused = functools.partial(refusal, ml.MeshLayoutError)


WHOLE = {
    "small": "whole: smaller than min_bytes=8192",
    "kernel": "whole: no dim divides over 'batch'",
    # By features, the program would send ten times as much.
    "wte_odd": "whole: dim 0, of size 8191, does not divide over 'batch'; sharded by "
    "another, a lookup table shards every activation",
}


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        ("dense/kernel", (4096, 128), (None, "batch")),  # by outputs
        ("dense/kernel", (4096, 10), ("batch", None)),  # which do not divide
        ("up/kernel", (256, 1024), ("batch", None)),  # by its smaller dim
        ("head/kernel", (256, 8192), (None, "batch")),  # by its vocabulary
        ("w", (256, 1024), ("batch", None)),
        ("conv/kernel", (3, 3, 64, 128), (None, None, None, "batch")),
        ("conv/kernel", (3, 3, 64, 64), (None, None, "batch", None)),
        ("embed/embedding", (8192, 256), ("batch", None)),
        ("embed/embedding", (64, 1024), ("batch", None)),  # few rows, and yet by rows
        ("wte", (64, 1024), ("batch", None)),
        ("model/embed_tokens/weight", (64, 1024), ("batch", None)),
        ("head", (256, 8192), (None, "batch")),
        ("w", (8192, 256), ("batch", None)),
        ("stacked/kernel", (80, 256, 1024), (None, None, "batch")),
        ("stacked/scale", (80, 1024), (None, "batch")),
        ("bias", (4096,), ("batch",)),
        ("scalar", (), ()),
        ("small", (1024,), (None,)),
        ("kernel", (999, 33), (None, None)),
        ("wte_odd", (8191, 256), (None, None)),
    ],
)
def test_the_dim_that_is_sharded_and_why_what_stays_whole_does(path, shape, expected):
    resolution = decide(ml.parallel.fsdp(EIGHT), path, shape)
    assert resolution.layout.specs == expected
    assert resolution.note == WHOLE.get(path)


def test_arrays_are_sharded_from_min_bytes_on():
    layouts = ml.parallel.fsdp(EIGHT, min_bytes=512)
    for dtype, size in {"float32": 128, "bfloat16": 256}.items():
        assert decide(layouts, "bias", (size,), dtype).layout.specs == ("batch",)
        assert decide(layouts, "bias", (size - 8,), dtype).layout.specs == (None,)


def test_the_axes_are_fsdp_or_else_those_of_the_batch():
    def axes(mesh):
        return decide(ml.parallel.fsdp(mesh), "w", (1024, 64)).layout.specs[0]

    assert axes(EIGHT) == axes(GRID) == "batch"
    assert axes(HYBRID) == "fsdp"
    assert axes(ml.create_mesh({"data": 2, "fsdp": 4})) == "fsdp"
    assert axes(ml.create_mesh({"batch": 2, "data": 4})) == ("batch", "data")
    both = ml.parallel.fsdp(HYBRID, axes=["replica", "fsdp"])
    assert decide(both, "w", (1024, 64)).layout.specs[0] == ("replica", "fsdp")
    assert ml.parallel.fsdp(HYBRID, axes="fsdp") == ml.parallel.fsdp(HYBRID)


TABLES = {
    # shape, how tokens are looked up in it, the dim by which it is sharded
    "few rows": ((64, 512), lambda table, t: table[t], 0),
    "rows of a transposed table": ((512, 64), lambda table, t: table.T[t], 1),
    "columns": ((512, 64), lambda table, t: jnp.moveaxis(table[:, t], 0, -1), 1),
    "a table of a stack": ((4, 64, 512), lambda table, t: table[2, t], 1),
    "a product": ((512, 64), lambda table, t: jax.nn.one_hot(t, 512) @ table, 1),
}


@pytest.mark.parametrize("name", TABLES)
def test_with_the_program_tables_are_sharded_by_what_is_looked_up(name):
    shape, look_up, dim = TABLES[name]
    params = abstract({"table": shape})
    call = lambda params, tokens: look_up(params["table"], tokens)
    tokens = jax.ShapeDtypeStruct((16, 32), "int32")
    layouts = ml.parallel.fsdp(EIGHT, params, tokens, call=call)
    entries = tuple("batch" if d == dim else None for d in range(len(shape)))
    # Wherever the parameters are, as in a state.
    assert specs(layouts, {"model": params}) == {"model/table": entries}


@pytest.mark.parametrize("constrained", [False, True])
def test_with_the_program_a_loop_that_nothing_constrains_is_warned_of(constrained):
    def call(params, x):
        def layer(x, w):
            x = ml.constrain(x, "carry") if constrained else x
            return x + jnp.tanh(x @ w), None

        return jax.lax.scan(layer, x, params["b"])[0]

    params, x = abstract({"b": (4, 512, 512)}), abstract((16, 32, 512))
    with warnings.catch_warnings(record=True, action="always") as caught:
        layouts = ml.parallel.fsdp(EIGHT, params, x, call=call)
    assert specs(layouts, params) == {"b": (None, "batch", None)}
    text = (
        "fsdp: a loop reads 'b', which is sharded, and carries an activation of shape "
        "(16, 32, 512), which nothing constrains: XLA may shard that like the weights "
        "and move every activation. Write x = ml.constrain(x, 'carry') as the first "
        "line of the loop's body, and give the step "
        "layouts=ml.LayoutMap(mesh, {'carry': ('batch', ...)})."
    )
    found = [(str(each.message), each.filename) for each in caught]
    assert found == ([] if constrained else [(text, __file__)])


def test_a_map_prints_compares_copies_and_pickles():
    layouts = ml.parallel.fsdp(HYBRID, min_bytes=64)
    assert repr(layouts) == (
        "LayoutMap(Mesh(replica=2, fsdp=4), {}, "
        "default=FsdpRule(axes=('fsdp',), min_bytes=64))"
    )
    for again in (layouts | {}, copy.deepcopy(layouts), pickle.dumps(layouts)):
        again = pickle.loads(again) if isinstance(again, bytes) else again
        assert again == layouts
    assert layouts != ml.parallel.fsdp(HYBRID)
    composed = ml.parallel.compose(layouts, ml.LayoutMap(HYBRID, {"b": ("replica",)}))
    assert pickle.loads(pickle.dumps(composed)) == composed


class Annotated(nn.Module):
    """A dense layer whose kernel has names for its axes."""

    annotate: Any
    names: tuple[str | None, ...]

    @nn.compact
    def __call__(self, x):
        init = self.annotate(nn.initializers.lecun_normal(), self.names)
        return nn.Dense(64, use_bias=False, kernel_init=init)(x)


@pytest.mark.parametrize(
    ("annotate", "names", "expected"),
    [
        (nn.with_logical_partitioning, ("batch", None), (None, "batch")),
        (nn.with_partitioning, ("embed", "mlp"), (None, "batch")),
        (nn.with_partitioning, ("model", None), ("model", None)),
        (nn.with_partitioning, (None, None), (None, None)),
    ],
)
def test_axis_names_without_a_meaning_on_the_mesh_do_not_keep_arrays_whole(
    annotate, names, expected
):
    plain = ml.parallel.fsdp(GRID, min_bytes=0)
    layouts = ml.parallel.compose(ml.parallel.data_parallel(GRID), plain)
    module = Annotated(annotate, names)
    x = jnp.ones((4, 64))
    tree = jax.eval_shape(lambda: module.init(jax.random.key(0), x))
    assert list(specs(layouts, tree).values()) == [expected]
    assert specs(plain, tree) == specs(layouts, tree)
    code = eval(layouts.to_code(tree), {"ml": ml, "mesh": GRID})
    assert specs(code, tree) == specs(layouts, tree)


def image_loss(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def trained(layouts, optimizer=None, **options):
    """Returns the state after two steps of the MLP, and their losses."""
    build = lambda: mlp.MLP(rngs=nnx.Rngs(0))
    state = ml.TrainState.create(build, optimizer or optax.adamw(1e-3), layouts)
    step = ml.make_train_step(image_loss, **options)
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(2):
        batch = {
            "image": rng.normal(size=(16, 28, 28, 1)).astype("float32"),
            "label": rng.integers(0, 10, 16),
        }
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def test_hybrid_steps_give_the_numbers_of_one_device():
    one = ml.create_mesh({"batch": 1}, devices=jax.devices()[:1])
    optimizer = optax.sgd(0.1, momentum=0.9)
    expected, losses = trained(ml.parallel.data_parallel(one), optimizer)
    state, found = trained(ml.parallel.fsdp(HYBRID), optimizer)
    np.testing.assert_allclose(found, losses, rtol=1e-5)  # sums in another order
    assert_close(state.params, expected.params, rtol=1e-7, atol=1e-5)
    sharded = {leaf.sharding.spec for leaf in jax.tree.leaves(state.params)}
    assert any("fsdp" in str(spec) for spec in sharded)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 8), reason="jax moves arrays to no other memory in jit"
)
def test_optimizer_state_stays_on_the_host_with_the_same_numbers():
    options = {"accumulate": 2, "on_nonfinite": "skip", "clip_norm": 1.0, "ema": 0.9}
    expected, losses = trained(ml.parallel.fsdp(EIGHT), **options)
    on_host = {"^opt_state/": ml.zero_rule(EIGHT, memory_kind="pinned_host")}
    state, found = trained(ml.parallel.fsdp(EIGHT) | on_host, **options)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    slots = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert {x.sharding.memory_kind for x in slots} == {"pinned_host"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {"device"}
    expected_slots = [x for x in jax.tree.leaves(expected.opt_state) if x.ndim]
    # Other operations are fused: the last bits differ.
    assert_close(slots, expected_slots, rtol=1e-5, atol=1e-9)


COLUMNS = {"up/kernel": ml.Rule((None, "model"), note="columns"), "bias": ("model",)}


def test_the_second_part_shards_what_the_first_left():
    layouts = ml.parallel.compose(
        ml.LayoutMap(GRID, COLUMNS), ml.parallel.fsdp(GRID, min_bytes=512)
    )
    tree = abstract(
        {
            "up": {"kernel": (64, 128), "bias": (1024,)},
            "down": {"kernel": (128, 64), "bias": (64,)},
            "odd": {"up": {"kernel": (63, 128)}},
        }
    )
    found = layouts.resolve(tree)
    assert {leaf.path: leaf.layout.specs for leaf in found.resolutions} == {
        "up/kernel": ("batch", "model"),
        "up/bias": (("model", "batch"),),
        "down/kernel": (None, "batch"),
        "down/bias": ("model",),
        "odd/up/kernel": (None, ("model", "batch")),
    }
    fsdp = "FsdpRule(axes=('batch',), min_bytes=512)"
    assert found["up/kernel"].rule == "up/kernel"
    assert found["up/kernel"].note == (
        "[unsharded, model] by part 1, up/kernel: columns; "
        f"[batch, model] by part 2, {fsdp}"
    )
    assert found["down/bias"].note == (
        "[model] by part 1, bias; not sharded further: smaller than min_bytes=512"
    )
    assert layouts.explain(tree).dead_rules == {}
    code = layouts.to_code(tree)
    assert "by part 2" in code
    assert specs(eval(code, {"ml": ml, "mesh": GRID}), tree) == specs(layouts, tree)


def test_three_parts_and_own_rules():
    mesh = ml.create_mesh({"fsdp": 2, "model": 2, "expert": 2})
    layouts = ml.parallel.compose(
        ml.LayoutMap(mesh, {"experts": ("expert", ...)}),
        ml.LayoutMap(mesh, {"up": (..., "model")}),
        ml.parallel.fsdp(mesh, min_bytes=0),
    )
    tree = abstract({"experts": {"up": (8, 64, 128)}, "head": {"up": (64, 128)}})
    assert specs(layouts | {"head/up$": [...]}, tree) == {
        "experts/up": ("expert", "fsdp", "model"),
        "head/up": (None, None),
    }
    assert specs(layouts, tree)["head/up"] == ("fsdp", "model")


def test_a_leaf_that_no_part_names_is_an_error_if_a_part_says_so():
    strict = ml.LayoutMap(GRID, {"up": (..., "model")}, unmatched="error")
    tree = abstract({"up": (64, 128), "down": (128, 64), "step": ()})
    layouts = ml.parallel.compose(strict, ml.parallel.fsdp(GRID, min_bytes=0))
    assert specs(layouts, tree) == {
        "up": ("batch", "model"),
        "down": ("batch", None),
        "step": (),
    }
    layouts = ml.parallel.compose(strict, ml.LayoutMap(GRID, {"bias": ("batch",)}))
    assert refused(layouts.resolve, tree).startswith("down f32[128, 64]: no rule match")


def test_a_part_of_plain_rules_comes_after_on_the_same_dim():
    layouts = ml.parallel.compose(
        ml.LayoutMap(GRID, {"w": ("batch", None)}),
        ml.LayoutMap(GRID, {"w": ("model", None)}),
    )
    assert decide(layouts, "w", (16, 3)).layout.specs == (("batch", "model"), None)
    with pytest.raises(ml.errors.LayoutMapError, match="has size 6, which does not"):
        decide(layouts, "w", (6, 3))
    part = ml.LayoutMap(GRID, {"w": ml.Rule(("model", ...), on_uneven="replicate")})
    layouts = ml.parallel.compose(ml.LayoutMap(GRID, {"w": ("batch", None)}), part)
    assert decide(layouts, "w", (12, 3)).fallback == (
        "dim 0 left unsharded: size 12 does not divide into 8 shards over batch, model"
    )


@pytest.mark.parametrize("unused", ["error", "warn", "ignore"])
def test_unused_rules_of_any_part_are_treated_as_it_says(unused):
    part = ml.LayoutMap(GRID, {"nowhere": ("model",)}, unused=unused)
    layouts = ml.parallel.compose(ml.parallel.fsdp(GRID), part)
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            ml.create(lambda: {"w": jnp.ones(8)}, layouts)
            found = "warn" if caught else "ignore"
        except ml.errors.LayoutMapError:
            found = "error"
    assert found == unused


def test_a_leaf_that_two_parts_shard_over_one_axis_is_refused():
    layouts = ml.parallel.compose(
        ml.LayoutMap(GRID, {"w": ("batch", ...)}),
        ml.LayoutMap(GRID, {"w": lambda *_: (None, "batch")}),
    )
    assert "'batch' is used twice" in refused(decide, layouts, "w", (8, 8))


PROBLEMS = {
    "got {'w': ('model',)}: write LayoutMap(mesh, rules).": {"w": ("model",)},
    "got maps on Mesh(batch=2, model=4) and on Mesh(batch=8).": ml.LayoutMap(EIGHT),
    "got one with logical_axes, which a composed rule does not see.": ml.LayoutMap(
        GRID, logical_axes={"embed": "model"}
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_parts_that_cannot_be_composed_are_refused(problem):
    message = refused(ml.parallel.compose, ml.parallel.fsdp(GRID), PROBLEMS[problem])
    expected = f"compose takes layout maps on one mesh, of patterns; {problem}"
    assert message == expected


def test_a_mesh_without_an_axis_for_batches_needs_axes():
    mesh = ml.create_mesh({"x": 8})
    assert refused(ml.parallel.fsdp, mesh) == (
        "fsdp: Mesh(x=8) has no axis named 'batch', 'data', 'replica', 'fsdp', 'dp', "
        "'ddp', 'data_parallel'. Give the axes to shard over, as fsdp(mesh, axes='x')."
    )
    hybrid = ml.create_mesh({"dp_replicate": 2, "dp_shard": 4})
    assert refused(ml.parallel.fsdp, hybrid).endswith("fsdp(mesh, axes='dp_shard').")
    for axes in (["x", "x"], []):
        fact = "fsdp: axes must be different mesh axes, one at least"
        assert refused(ml.parallel.fsdp, mesh, axes=axes) == f"{fact}, got {axes!r}."
