"""`ml.testing` finds what is not the same on a mesh, and lets pass what is."""

import functools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout import testing
from models.mlp import MLP
from tests.error_messages import message_of
from tests.small_states import (
    DATA,
    Convolutions,
    assert_close,
    create,
    image_batch,
    on,
    squares,
)


P = jax.sharding.PartitionSpec

CAUSES = (
    "Usual causes: a mean of per-shard means, a denominator or batch statistics of one "
    "device, a missing sum over shards, a random key made from a device index. If this "
    "is rounding, allow more with rtol= or atol=."
)


@pytest.fixture
def mesh():
    """A mesh that is in force, for steps that ask for it."""
    mesh = ml.create_mesh({"batch": 2, "model": 4})
    with jax.set_mesh(mesh.jax_mesh):
        yield mesh


message = functools.partial(message_of, error=testing.VerificationError)


def rows(mesh, *shape, seed=0):
    values = np.random.default_rng(seed).normal(size=shape).astype("float32")
    return ml.relayout(values, mesh.layout("batch", ...))


RULES = {"kernel": (None, "model")}
# An uneven end, as of a short last batch.
BATCH = {**DATA, "weight": np.float32(np.arange(16) < 11)}


def own_step(state, batch):
    def loss_fn(params):
        losses = squares(state.replace(params=params).model, batch).mean(1)
        return (losses * batch["weight"]).sum() / batch["weight"].sum()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss, "grads": grads}


@pytest.mark.parametrize(
    ("axes", "rules"),
    [({"batch": 2, "model": 4}, RULES), ({"batch": 8, "model": 1}, {})],
)
def test_a_right_step_agrees_on_any_mesh_and_its_state_stays_as_it_was(axes, rules):
    mesh = ml.create_mesh(axes)
    state = create(mesh, tx=optax.sgd(0.1, momentum=0.9), rules=rules)
    step, batch = ml.compile_step(own_step), on(mesh, BATCH)
    before = ml.to_numpy((state, batch))
    found = testing.verify(step, state, batch, num_steps=3)
    paths = [one.path for one in found.differences]
    assert len(paths) == 2 + 2 + 2 + 1 + 2  # params, momentum, step, rng; loss, grads
    assert {"state/params/kernel", "state/rng", "aux/loss"} <= {*paths}
    assert found.num_steps == 3
    assert found.mesh == mesh
    assert all(one.largest <= one.allowed for one in found.differences)
    assert any(one.largest > 0 for one in found.differences)
    assert str(found) == f"9 leaves agree on {mesh!r} and on one device, steps: 3."
    assert_close(ml.to_numpy((state, batch)), before, rtol=0, atol=0)


def test_leaves_of_every_kind_are_copied(mesh):
    state = {
        "w": ml.arrays.ones(8, mesh.layout("model")),
        "numpy": np.ones(2, np.float32),
        "number": 1.5,
        "unplaced": jnp.ones(3),
        "key": jax.random.key(0),
        "keys": ml.relayout(
            jax.random.split(jax.random.key(1), 4), mesh.layout("model")
        ),
        "half": ml.arrays.ones((4, 2), mesh.layout("batch", None), dtype="bfloat16"),
        "weak": jax.device_put(jnp.asarray(1.0), mesh.layout().sharding),
    }

    @ml.compile_step
    def step(state, batch):
        assert jax.typeof(state["weak"]).weak_type
        keys = jax.vmap(lambda key: jax.random.split(key)[0])(state["keys"])
        return {**state, "keys": keys, "w": state["w"] * batch}, None

    testing.verify(step, state, 2.0, num_steps=2)
    assert not any(
        x.is_deleted() for x in jax.tree.leaves(state) if hasattr(x, "devices")
    )
    assert state["numpy"].tolist() == [1, 1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["compiled", "plain", "jitted"])
def test_every_kind_of_step_is_verified_and_nothing_said_of_recompiling(mesh, kind):
    def step(state, batch, train, *, scale):
        assert train is True or kind != "compiled"
        return state + ml.constrain(batch, "rows").sum() * scale, None

    layouts = ml.LayoutMap(mesh, {"rows": ("batch", "model")}, unused="ignore")
    options = {"on_recompile": "error", "layouts": layouts}
    run = {
        "compiled": ml.compile_step(step, static_argnames="train", **options),
        "plain": step,
        "jitted": jax.jit(step, donate_argnums=0),
    }[kind]
    state, batch = ml.arrays.ones(8, mesh.layout("model")), rows(mesh, 8, 4)
    with ml.scope(layouts) if kind != "compiled" else nullcontext():
        assert len(testing.verify(run, state, batch, True, scale=2.0).differences) == 1
    if kind == "compiled":
        state, _ = run(state, batch, True, scale=2.0)
        testing.verify(run, state, batch, train=True, scale=2.0)
        run(state, batch, True, scale=2.0)


@pytest.mark.parametrize("types", ["auto", "explicit"])
def test_a_step_gets_its_mesh_which_need_not_be_set(types):
    mesh = ml.create_mesh({"batch": 2, "model": 4}, axis_types=types)

    def step(state, batch):
        mesh = None if types == "explicit" else jax.sharding.get_abstract_mesh()
        sums = lambda x: jax.lax.psum(x.sum(), "batch")
        specs = {"in_specs": P("batch"), "out_specs": P()}
        total = jax.shard_map(sums, mesh=mesh, **specs)(batch)
        return state + total, total

    with jax.set_mesh(mesh.jax_mesh) if types == "explicit" else nullcontext():
        state, batch = ml.arrays.ones(8, mesh.layout("model")), rows(mesh, 8, 4)
        testing.verify(step, state, batch)


@pytest.mark.parametrize(
    ("dtype", "passes", "fails"),
    [
        ("float32", 1e-5, 1e-4),
        ("bfloat16", 1e-2, 1e-1),
        ("float16", 3e-3, 1e-2),
        ("complex64", 1e-5, 1e-4),
    ],
)
def test_the_tolerance_is_relative_to_the_largest_value(mesh, dtype, passes, fails):
    def step_of(error):
        def step(state, batch):
            wrong = 1000 * error * (jax.sharding.get_abstract_mesh().size > 1)
            special = jnp.array([np.nan, np.inf, -np.inf])  # equal to themselves
            return state, (jnp.array([1000, 1 + wrong], dtype), special)

        return step

    state = ml.arrays.ones(8, mesh.layout("model"))
    testing.verify(step_of(passes), state, None)
    assert "Elements that differ: 1 of 2." in message(
        lambda: testing.verify(step_of(fails), state, None)
    )
    testing.verify(step_of(fails), state, None, rtol=2 * fails)
    testing.verify(step_of(fails), state, None, atol=2000 * fails)


def per_shard(function, out_specs):
    """Runs a function on every shard of rows, on the mesh in force."""
    return jax.shard_map(function, in_specs=P("batch"), out_specs=out_specs)


def mean_of_means(state, batch):
    def mean(x, weights):
        return jax.lax.pmean((x * weights).sum() / weights.sum(), "batch")

    loss = per_shard(mean, P())(batch["x"], batch["weight"])
    return state, {"loss": loss}


def test_a_mean_of_per_shard_means_is_found(mesh):
    batch = on(
        mesh, {"x": np.float32([1, 2, 3, 4]), "weight": np.float32([1, 1, 1, 0])}
    )
    state = {"w": ml.arrays.ones(8, mesh.layout("model"))}
    assert message(testing.verify, mean_of_means, state, batch) == (
        "step 1: aux/loss f32[] differs between Mesh(batch=2, model=4) and one device. "
        "The largest difference is 0.25: 2.25 on the mesh and 2.0 on one device, where "
        "3.1e-05 is allowed. Elements that differ: 1 of 1.\n"
        f"Leaves that differ: 1 of 2.\n{CAUSES}"
    )
    even = {**batch, "weight": ml.arrays.ones(4, mesh.layout("batch"))}
    testing.verify(mean_of_means, state, even)


def batch_statistics_of_one_shard(state, batch):
    def normalize(x):
        mean = x.mean(0)
        return x - mean[None], jax.lax.pmean(mean, "batch")

    x, mean = per_shard(normalize, (P("batch"), P()))(batch)
    return state + 0.1 * mean.sum(), {"x": x}


def key_of_the_device(state, batch):
    def dropout(x):
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("batch"))
        return x * jax.random.bernoulli(key, shape=x.shape)

    return state, {"x": per_shard(dropout, P("batch"))(jnp.ones_like(batch))}


def nan_on_the_mesh(state, batch):
    bad = jnp.where(jax.sharding.get_abstract_mesh().size > 1, jnp.nan, 1.0)
    return state, {"x": batch.at[1, 0].set(bad)}


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (batch_statistics_of_one_shard, "Elements that differ: 16 of 16.\n"),
        (key_of_the_device, "The largest difference is 1 at ["),
        (nan_on_the_mesh, "is inf at [1, 0]: nan on the mesh and 1.0 on one device,"),
    ],
)
def test_what_depends_on_the_shards_is_found(mesh, step, said):
    state, batch = ml.arrays.ones((), mesh.layout()), rows(mesh, 8, 2)
    text = message(testing.verify, step, state, batch)
    assert text.startswith("step 1: aux/x f32[8, 2] differs between Mesh(")
    assert said in text
    assert "Leaves that differ: 1 of 2.\n" in text


def test_keys_and_integers_have_to_be_equal(mesh):
    def step(state, batch):
        size = jax.sharding.get_abstract_mesh().size
        key = jax.random.fold_in(state["key"], size)
        return {"key": key, "n": state["n"] + size}, state["n"] > 0

    state = {"key": jax.random.key(0), "n": jnp.int32([2**30] * 2)}
    state = ml.relayout(state, mesh.layout(...))
    text = message(testing.verify, step, state, None, rtol=1, atol=10)
    assert text.startswith("step 1: state/key key<fry>[] differs between")
    assert "where 0 is allowed. Elements that differ: 2 of 2.\n" in text
    assert "\nLeaves that differ: 2 of 3.\n" in text


def test_the_first_step_that_differs_is_named(mesh):
    def step(state, batch):
        is_wrong = (state["n"] >= 2) & (jax.sharding.get_abstract_mesh().size > 1)
        return {**state, "n": state["n"] + 1}, {"loss": batch.mean() + is_wrong}

    state = {"w": ml.arrays.ones(8, mesh.layout("model")), "n": jnp.int32(0)}
    batch, step = rows(mesh, 4), ml.compile_step(step)
    assert testing.verify(step, state, batch, num_steps=2).num_steps == 2
    text = message(lambda: testing.verify(step, state, batch, num_steps=4))
    assert text.startswith("step 3: aux/loss f32[] differs")


def test_shapes_and_leaves_that_depend_on_the_mesh_are_found(mesh):
    def losses(state, batch):
        return state, per_shard(lambda x: x.mean()[None], P("batch"))(batch)

    def named(state, batch):
        size = jax.sharding.get_abstract_mesh().size
        return state, {f"n{size}": batch.sum(), "loss": batch.sum()}

    state, batch = ml.arrays.ones((), mesh.layout()), on(mesh, np.ones(4, "float32"))
    alone = ml.arrays.ones(
        3, ml.create_mesh({"a": 1}, devices=mesh.local_devices[:1]).layout(None)
    )
    text = message(testing.verify, losses, alone, None)
    assert text.startswith("the state is not on a mesh of several devices: there")
    assert message(testing.verify, losses, state, batch) == (
        "step 1: aux f32[2] differs between Mesh(batch=2, model=4) and one device: it is f32[2] on the mesh and f32[1] on one device.\n"
        f"Leaves that differ: 1 of 2.\n{CAUSES}"
    )
    assert message(testing.verify, named, state, batch) == (
        "step 1: the step returns 'aux/n1', 'aux/n8' only on the mesh or only on one "
        "device. Its results must not depend on the number of devices."
    )


def conv_state(mesh, tx=None):
    tx = tx or optax.sgd(0.1, momentum=0.9)
    return create(mesh, Convolutions, tx, {"conv/kernel": (..., "model")})


def conv_loss(model, batch):
    out = model(batch["x"])
    return jnp.square(out - batch["y"]), {"out": out}


def test_units_that_rounding_switches_on_are_let_pass(mesh):
    """In bfloat16 one of them has another sign than on one device."""
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(16, 8)), rng.integers(0, 10, 16)
    batch = {"image": images.astype("float32"), "label": labels}

    def loss_fn(model, batch):
        logits, labels = model(batch["image"]), batch["label"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    def build():
        return MLP(10, hidden_features=16, in_features=8, rngs=nnx.Rngs(0))

    step = ml.make_train_step(loss_fn, precision="bfloat16", accumulate=2)
    testing.verify(step, create(mesh, build, optax.adam(1e-2)), on(mesh, batch))


MISTAKES = {
    "five percent": lambda x: x * 1.05,
    "a wrong denominator": lambda x: x * (16 / 11),
    "the gradient of one shard": lambda x: jnp.where(
        jnp.arange(x.size) < 4, x, jax.lax.stop_gradient(x)
    ),
}


def mistaken(mistake, function):
    """A function that errs where it runs on several devices."""

    def wrong(model, batch):
        result = function(model, batch)
        if jax.sharding.get_abstract_mesh().size == 1:
            return result
        return MISTAKES[mistake](result)

    return wrong


def conv_losses(model, batch):
    return conv_loss(model, batch)[0]


@pytest.mark.parametrize(
    ("mistake", "precision"),
    [
        ("a wrong denominator", "float32"),
        ("the gradient of one shard", "float32"),
        pytest.param("a wrong denominator", "bfloat16", marks=pytest.mark.slow),
        pytest.param("five percent", "float32", marks=pytest.mark.slow),
        pytest.param("the gradient of one shard", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_mistakes_are_found_in_every_precision(mesh, mistake, precision):
    step = ml.make_train_step(mistaken(mistake, conv_losses), precision=precision)
    state = conv_state(mesh, optax.sgd(0.01))
    text = message(lambda: testing.verify(step, state, on(mesh, image_batch())))
    is_in_gradient = "gradient" in mistake
    assert text.startswith("step 1: state/" if is_in_gradient else "step 1: aux/loss")


def test_a_step_is_traced_as_often_for_many_steps_as_for_one(mesh):
    """Also in the runs that measure rounding."""
    traces = []

    def loss_fn(model, batch):
        traces.append(1)
        return squares(model, batch)

    def num_traces(num_steps):
        traces.clear()
        step = ml.make_train_step(loss_fn)
        testing.verify(step, create(mesh), on(mesh, BATCH), num_steps=num_steps)
        return len(traces)

    assert num_traces(1) == num_traces(2) < 5


def predicted(model, batch):
    return model(batch["x"])


@pytest.mark.parametrize(
    ("make", "function", "paths", "mistake", "said"),
    [
        (
            *(functools.partial(ml.make_eval_step, metrics={"m": ml.metrics.Mean()}),),
            *(conv_losses, {"aux/loss", "aux/data_loss", "aux/activity", "aux/m"}),
            *("five percent", "aux/loss f32[]"),
        ),
        (
            *(ml.make_predict_step, predicted, {"state/step", "aux"}),
            *("a wrong denominator", "aux f32[16]"),
        ),
    ],
)
def test_eval_and_predict_steps_agree_with_one_device(
    mesh, make, function, paths, mistake, said
):
    state, batch = conv_state(mesh), on(mesh, image_batch())
    found = testing.verify(make(function), state, batch)
    assert paths <= {leaf.path for leaf in found.differences}
    text = message(testing.verify, make(mistaken(mistake, function)), state, batch)
    assert text.startswith(f"step 1: {said} differs between Mesh(")


def test_a_step_that_names_its_mesh_is_refused():
    mesh = ml.create_mesh({"batch": 2, "model": 4})
    state, batch = ml.arrays.ones(8, mesh.layout("model")), rows(mesh, 8)
    step = jax.shard_map(
        lambda state, x: (state, jax.lax.pmean(x.mean(), "batch")),
        mesh=mesh.jax_mesh,
        in_specs=(P(), P("batch")),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match="should match the mesh") as error:
        testing.verify(step, state, batch)
    assert error.value.__notes__[-1:] == [
        "verify runs the step on one device, too. A mesh that the step names itself "
        "cannot be replaced: take it from jax.sharding.get_abstract_mesh() inside the "
        "step."
    ]


def test_layouts_are_asserted_in_every_form(mesh):
    kernel = ml.arrays.zeros((4, 8), mesh.layout(None, "model"))
    for expected in (
        mesh.layout(..., "model"),
        mesh.layout(None, "model").sharding,
        (None, "model"),
        [..., "model"],
        (ml.MATCH, "model"),
        P(None, "model"),
        ml.LayoutMap(mesh, {"kernel": (None, "model")}),
        ml.create_mesh({"a": 2, "b": 4}).layout(None, "b"),
    ):
        testing.assert_layout({"kernel": kernel}, expected)
    abstract = jax.ShapeDtypeStruct((8, 4), "float32", sharding=kernel.sharding)
    testing.assert_layout(abstract, (None, "model"))
    testing.assert_layout(ml.relayout(kernel, mesh.layout("batch", None)), P("batch"))


def test_a_layout_map_is_asserted_for_whole_states(mesh):
    state = create(mesh, tx=optax.adam(1e-3), rules=RULES)
    other = ml.LayoutMap(mesh, {"kernel": ("model", None)})
    trees = [(state, 3), (state.model, 1), ({"params": state.params}, 1)]
    for tree, num_wrong in trees:
        testing.assert_layout(tree, ml.LayoutMap(mesh, RULES))
        text = message(testing.assert_layout, tree, other)
        assert "kernel f32[4, 4]: the layout is Layout(" in text
        assert len(text.split("\n")) == num_wrong


def test_what_is_not_in_its_layout_or_has_none_is_named(mesh):
    tree = {f"w{i:02}": ml.arrays.zeros(8, mesh.layout("model")) for i in range(12)}
    tree["ok"] = ml.arrays.zeros(8, mesh.layout(("batch", "model")))
    said = functools.partial(message, testing.assert_layout)
    first, *others = said(tree, [("batch", "model")]).split("\n")
    assert first == (
        "w00 f32[8]: the layout is Layout([model], Mesh(batch=2, model=4)), but "
        "Layout([(batch, model)], Mesh(batch=2, model=4)) was expected."
    )
    assert len(others) == 11
    assert said(np.ones(3), (None,)) == (
        "f64[3] is on no mesh, but (None,) was expected."
    )
    assert said({}, (None,)) == ("{} holds no arrays: there is no layout to check.")
    assert message_of(testing.assert_layout, {"w": tree["w00"]}, "model") == (
        "w f32[8]: expected a Layout or a NamedSharding, got 'model'."
    )


@ml.compile_step
def scanned(state, batch):
    def add(total, x):
        mean = (x @ state["w"]).mean()
        return total + mean, None

    total, _ = jax.lax.scan(add, 0.0, batch)
    return state, {"loss": total, "rows": batch.sum((1, 2))}


@pytest.fixture
def scanned_arguments(mesh):
    state = {"w": ml.arrays.ones((8, 4), mesh.layout(...))}
    batch = ml.arrays.ones((3, 4, 8), mesh.layout(None, "batch", None))
    return state, batch


def test_collectives_of_any_program_are_counted_and_loops_separately(scanned_arguments):
    state, batch = scanned_arguments
    expect, plain = testing.expect_communication, scanned.__wrapped__
    expect(scanned, state, batch, all_reduce=2, only=True)
    for step in (plain, jax.jit(plain)):
        expect(step, state, batch, all_reduce=2)
    lowered = scanned.lower(state, batch)
    for program in (lowered, lowered.compile()):
        found = expect(program, all_reduce=2, all_gather=0)
        assert found.in_loops["all_reduce"] == 1
        assert dict(found) == dict.fromkeys(found, 0) | {"all_reduce": 2}
        assert {one.arrays for one in found.collectives} == {("f32[]",), ("f32[3]",)}
        assert {one.nbytes for one in found.collectives} == {4, 12}
    assert not state["w"].is_deleted()


def test_what_is_not_expected_is_listed(scanned_arguments):
    expect = functools.partial(testing.expect_communication, scanned)
    first, *table = message(
        expect, *scanned_arguments, all_reduce=0, all_gather=1
    ).split("\n")
    assert first == (
        "scanned has 2 all_reduce where 0 was expected, and 0 all_gather where 1 was "
        "expected."
    )
    assert sum(line.startswith("all_reduce  batch") for line in table) == 2
    text = message(expect, all_reduces=1)
    assert text.startswith("a kind of collective must be 'all_reduce', 'all_gather', ")
    assert text.endswith(" Did you mean 'all_reduce'?")
