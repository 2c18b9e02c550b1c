"""What a step takes: rows shared by the devices, weights in their place, right options.

Several devices that would all compute the same are an error; parts of anything are not.
"""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout import _batches
from tests.bad_values import assert_refused
from tests.error_messages import message_of
from tests.small_states import (
    DATA,
    X,
    assert_close,
    create,
    linear,
    mesh_of,
    on,
    squares,
)


@pytest.fixture
def mesh():
    return ml.create_mesh({"batch": 4, "model": 2})


def predictions(model, batch):
    return model(batch["x"])


STEPS = {
    "eval": lambda: ml.make_eval_step(squares),
    "predict": lambda: ml.make_predict_step(predictions),
    "train": lambda: ml.make_train_step(squares),
}


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}])
def test_a_batch_from_the_host_is_sharded_over_the_batch_axes(mesh, options):
    shards = []

    def loss_fn(model, batch):
        note = lambda sharding: shards.append(sharding.shard_shape((16, 4)))
        jax.debug.inspect_array_sharding(batch["x"], callback=note)
        return squares(model, batch)

    adam = optax.adam(0.1)
    train_step = ml.make_train_step(squares, **options)
    expected, _ = train_step(create(mesh, tx=adam), on(mesh, DATA))
    state, _ = ml.make_train_step(squares, **options)(create(mesh, tx=adam), DATA)
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)
    if not options:
        ml.make_train_step(loss_fn)(create(mesh), DATA)
        assert set(shards) == {(4, 4)}


UNEVEN = (
    "the batch has 10 rows, which do not divide into 4 shards over 'batch' of "
    "Mesh(batch=4, model=2). Pad or drop rows: ml.distribute_dataset(source, mesh) pads "
    "with rows of weight 0. To predict, Trainer.predict pads and cuts."
)
EMPTY = "the batch has no examples, and there is nothing to learn from it."


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [(name, 10, UNEVEN) for name in STEPS]
    + [(name, 0, EMPTY) for name in ("eval", "train")],
)
def test_rows_from_the_host_that_no_step_can_take_are_refused(
    mesh, name, rows, message
):
    state = create(mesh, rules={"kernel": (None, "model")})
    batch = jax.tree.map(lambda x: x[:rows], DATA)
    assert message_of(STEPS[name](), state, batch) == message


MESSAGE = (
    "all 8 devices of Mesh(rows=8) would compute the same: no array of the batch or the "
    "state is sharded. Shard rows, by ml.relayout(batch, mesh.layout('rows', ...)) or by "
    "axes called 'batch', 'data', 'replica', 'fsdp', 'dp', 'ddp', 'data_parallel'; or "
    "the state, by a LayoutMap."
)


def trainer_of(state, loss_fn=squares, **options):
    return ml.Trainer(state, loss_fn, predict_fn=predictions, **options)


# Of a trainer, and steps.
CALLS = {
    "fit": lambda x, *_: trainer_of(x).fit(DATA, batch_size=8, progress=False),
    "fit, 2 steps": lambda x, *_: trainer_of(x, steps_per_call=2).fit(
        DATA, batch_size=8, progress=False
    ),
    "evaluate": lambda x, *_: trainer_of(x).evaluate(DATA, batch_size=8),
    "evaluate batches": lambda x, *_: trainer_of(x).evaluate([DATA]),
    "predict": lambda x, *_: trainer_of(x).predict(DATA, batch_size=8),
    **{name: lambda x, step, batch: step(x, batch) for name in STEPS},
}


@pytest.mark.parametrize("name", CALLS)
def test_devices_that_would_all_compute_the_same_are_an_error(name):
    mesh, step = mesh_of(rows=8), STEPS[name]() if name in STEPS else None
    (placed,) = ml.distribute_dataset(DATA, mesh, global_batch_size=16)
    for batch in (DATA, DATA, placed) if step else (DATA,):  # not only the first call
        assert message_of(CALLS[name], create(mesh), step, batch) == MESSAGE


@pytest.mark.parametrize(
    ("axis", "rules", "spec"),
    [
        ("model", {"kernel": (None, "model")}, None),
        ("rows", {}, ("rows", ...)),
        ("seq", {}, (None, "seq")),
        ("inside", {}, None),
    ],
)
def test_a_mesh_that_shards_the_state_or_the_batch_alone_is_right(axis, rules, spec):
    mesh = mesh_of(**{axis: 4})
    layout = mesh if spec is None else mesh.layout(*spec)
    (batch,) = ml.distribute_dataset({"x": X}, layout, global_batch_size=16)

    def loss_fn(model, batch):
        x = batch["x"]
        if axis == "inside":
            x = jax.lax.with_sharding_constraint(x, mesh.layout(None, axis).sharding)
        return (model(x) ** 2).mean(-1)

    state = create(mesh, rules=rules)
    made = ml.make_predict_step(loss_fn)(state, batch)
    assert_close(made, (linear()(X) ** 2).mean(-1))
    metrics = ml.make_eval_step(loss_fn)(state, batch)
    np.testing.assert_allclose(metrics["loss"], np.mean(made), rtol=1e-5)
    ml.make_train_step(loss_fn, accumulate=2)(state, batch)


def test_an_array_that_replaces_one_in_shards_is_warned_of(mesh):
    state = create(mesh, rules={"kernel": ("model", None)})
    state.params["kernel"] = np.asarray(state.params["kernel"])
    text = "state/params/kernel is not on the mesh yet, and goes whole to each device"
    with pytest.warns(ml.errors.LayoutWarning, match=text):
        ml.make_train_step(squares)(state, DATA)
    state = {"k": ml.relayout(X, mesh.layout("batch", None)), "more": X}
    with pytest.warns(ml.errors.LayoutWarning, match="state/more is not on the mesh"):
        ml.compile_step(lambda state: (state, None))(state)


def test_a_batch_from_the_host_in_a_step_of_ones_own_is_warned_of(mesh):
    step = ml.compile_step(lambda state, batch, *others: (state, batch["x"].sum()))
    text = "batch/x is whole on all 8 devices, which all compute the same. Write "
    text += "ml.relayout(batch, mesh.layout('batch', ...))."
    with pytest.warns(ml.errors.LayoutWarning, match=f"^{re.escape(text)}$"):
        params, _ = step(create(mesh).params, DATA)
    with warnings.catch_warnings(action="error"):
        params, _ = step(params, DATA)
        ml.compile_step(step.function)(params, on(mesh, DATA), X)


def test_rows_that_all_devices_compute_are_told_once(caplog):
    mesh = ml.create_mesh({"batch": 4, "model": 2})
    state = create(mesh, rules={"kernel": ("model", None)})
    train_step, batch = ml.make_train_step(squares), ml.relayout(DATA, mesh.layout(...))
    for _ in range(2):
        state, _ = train_step(state, batch)
    assert caplog.messages == [
        "the batch is sharded over no axis, so that all 8 devices compute all of its "
        "16 rows. Place it with ml.relayout(batch, mesh.layout('batch', ...)), or take "
        "ml.distribute_dataset."
    ]
    caplog.clear()
    five = jax.tree.map(lambda leaf: leaf[:5], DATA)
    ml.make_train_step(squares)(create(mesh), ml.relayout(five, mesh.layout(...)))
    assert "so that all 8 devices compute all of its 5 rows" in caplog.text
    for name, options in ("fit", {"progress": False}), ("evaluate", {}):
        caplog.clear()
        trainer = trainer_of(create(mesh), lambda m, b: squares(m, b).mean())
        assert getattr(trainer, name)([five], **options)["loss"]
        (message,) = caplog.messages
        assert "does not divide" in message


@pytest.mark.parametrize("axis", _batches.BATCH_AXES)
def test_every_name_of_a_batch_axis_shards_rows(axis, caplog):
    mesh = mesh_of(**{axis: 8})
    (batch,) = ml.distribute_dataset(DATA, mesh, global_batch_size=16)
    assert batch["x"].sharding.shard_shape((16, 4)) == (2, 4)
    trainer_of(create(mesh)).fit(DATA, batch_size=8, progress=False)
    assert ml.data.process_rows(mesh, 16).size == 16
    assert ml.data.per_replica_batch_size(16, mesh) == 2
    kernel = jax.ShapeDtypeStruct((784, 128), "float32")
    resolved = ml.parallel.fsdp(mesh).resolve({"kernel": kernel})["kernel"]
    assert not resolved.layout.is_fully_replicated
    assert not caplog.records


def test_all_rows_on_every_device_is_logged_once_unless_a_layout_says_so(caplog):
    mesh = mesh_of(rows=8)
    data = ml.distribute_dataset(DATA, mesh, global_batch_size=8, epochs=2)
    assert len(list(data)) == 4
    assert caplog.messages == [
        "every device of Mesh(rows=8) gets all rows of each batch: none of its axes "
        "has one of the names that shard batches, 'batch', 'data', 'replica', 'fsdp', "
        "'dp', 'ddp', 'data_parallel'. Name the axis so, or give a layout in place of "
        "the mesh, with the axes that shard rows: mesh.layout('rows', ...), or a tuple "
        "of them; if all devices are to have all rows, mesh.layout(...)."
    ]
    caplog.clear()
    for spec, rows in (((...,), 16), (("rows", ...), 2)):
        (batch,) = ml.distribute_dataset(DATA, mesh.layout(*spec), global_batch_size=16)
        assert batch["x"].sharding.shard_shape((16, 4)) == (rows, 4)
    assert not caplog.records


def test_a_step_of_ones_own_that_counts_padding_is_warned_of(mesh):
    data = jax.tree.map(lambda x: x[:13], DATA)
    (batch,) = ml.distribute_dataset(data, mesh, global_batch_size=16)

    def means(state, batch):
        return state, batch["x"].mean()

    def weighted(state, batch):
        return state, jax.jit(jnp.dot)(batch["weight"], batch["x"]) / 13

    with pytest.warns(UserWarning, match="^means does not read the batch's weights,"):
        ml.compile_step(means)({"w": jnp.zeros(2)}, batch)
    with warnings.catch_warnings(action="error"):
        ml.compile_step(weighted)({"w": jnp.zeros(2)}, batch)


@pytest.mark.parametrize("value", [np.nan, -1.0, np.inf])
@pytest.mark.parametrize("steps", [1, 2])
def test_weights_that_make_no_sense_are_refused_on_the_host(mesh, value, steps):
    batch = {**DATA, "weight": np.full(16, value, "float32")}
    if steps == 2:
        batch = jax.tree.map(lambda x: np.stack([x, x]), batch)
    step = ml.make_train_step(squares, steps_per_call=steps)
    assert message_of(lambda: step(create(mesh), batch)) == (
        f"weights must be finite and not negative; of 'weight', {16 * steps} of "
        f"{16 * steps} are not, such as {value}."
    )


@pytest.mark.parametrize(
    ("denominator", "accumulate"), [("real", 2), ("global_batch_size", 1)]
)
def test_a_negative_weight_on_devices_shows_in_the_loss(mesh, denominator, accumulate):
    weights = np.tile(np.array([1, -1], "float32"), 8)
    step = ml.make_train_step(squares, denominator=denominator, accumulate=accumulate)
    _, metrics = step(create(mesh), on(mesh, {**DATA, "weight": weights}))
    assert np.isnan(metrics["loss"])


def test_what_weights_a_host_batch_carries_is_said_once(mesh, caplog):
    def loss_fn(model, batch):
        return squares(model, batch)

    batch = {**DATA, "weight": np.ones(16, "float32")}
    step, eval_step = ml.make_train_step(loss_fn), ml.make_eval_step(loss_fn)
    state, _ = step(create(mesh), batch)
    eval_step(state, batch)
    step(state, batch)
    assert caplog.messages == ["examples are weighted by 'weight' of each batch."]


def test_integers_are_not_trained(mesh):
    def build():
        model = linear()
        model.count = nnx.Param(jnp.zeros(3, "int32"))
        return model

    assert message_of(ml.make_train_step(squares), create(mesh, build), DATA) == (
        "parameter count is not a float: make it an nnx.Variable."
    )


# The options, and what works for them among the values of the table.
OPTIONS: dict[str, list[Any]] = {
    **{name: [] for name in ("loss_fn", "accumulate", "on_nonfinite", "precision")},
    **{name: [] for name in ("remat", "steps_per_call", "denominator", "on_recompile")},
    **{name: [None, {}] for name in ("metrics", "regularizers")},
    **{name: [None] for name in ("clip_norm", "layouts")},
    "ema": [None, 0],
    "weights": [-1, 0, "x", ""],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_make_no_sense_are_refused_when_the_step_is_made(name):
    def make(value):
        ml.make_train_step(**{"loss_fn": squares, name: value})

    assert_refused(make, OPTIONS[name])
