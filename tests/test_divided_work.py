"""Several devices that would all compute the same are an error; parts of anything not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import meshlayout as ml
from meshlayout import _batches


X = np.arange(64, dtype=np.float32).reshape(16, 4) / 64
DATA = {"x": X, "y": X.sum(1)}


def loss_fn(model, batch):
    return (model(batch["x"]).sum(-1) - batch["y"]) ** 2


def predict_fn(model, batch):
    return model(batch["x"])


def state_on(mesh, rules=None):
    return ml.TrainState.create(
        lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)),
        optax.sgd(0.1),
        ml.LayoutMap(mesh, rules or {}),
    )


@pytest.fixture
def mesh():
    return ml.create_mesh({"rows": 8})


MESSAGE = (
    "all 8 devices of Mesh(rows=8) would compute the same: no array of the batch, and "
    "none of the state, is sharded over an axis. Shard the rows: "
    "ml.distribute_dataset(source, mesh) does over axes called 'batch', 'data', "
    "'replica', 'fsdp', 'dp', 'ddp', 'data_parallel', or ml.relayout(batch, "
    "mesh.layout('rows', ...)) over any. Or shard the state, with a LayoutMap's rules; "
    "or make a mesh of one device."
)

STEPS = {
    "eval": lambda: ml.make_eval_step(loss_fn),
    "predict": lambda: ml.make_predict_step(predict_fn),
    "train": lambda: ml.make_train_step(loss_fn),
}
CALLS = {
    "fit": lambda trainer: trainer.fit(DATA, batch_size=8, progress=False),
    "evaluate": lambda trainer: trainer.evaluate(DATA, batch_size=8),
    "evaluate batches": lambda trainer: trainer.evaluate([DATA]),
    "predict": lambda trainer: trainer.predict(DATA, batch_size=8),
}


def trainer_of(state, **options):
    return ml.Trainer(state, loss_fn, predict_fn=predict_fn, **options)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("is_placed", [True, False])
def test_a_step_whose_devices_all_compute_the_same_is_an_error(mesh, name, is_placed):
    batch = DATA
    if is_placed:
        (batch,) = ml.distribute_dataset(DATA, mesh, global_batch_size=16)
    step = STEPS[name]()
    for _ in range(2):  # not only at the first call
        with pytest.raises(ml.errors.StepError) as error:
            step(state_on(mesh), batch)
        assert str(error.value) == MESSAGE


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_trainer_whose_devices_all_compute_the_same_is_an_error(
    mesh, name, steps_per_call
):
    trainer = trainer_of(state_on(mesh), steps_per_call=steps_per_call)
    with pytest.raises(ml.errors.StepError) as error:
        CALLS[name](trainer)
    assert str(error.value) == MESSAGE


@pytest.mark.parametrize("name", STEPS)
def test_rows_from_the_host_that_do_not_divide_are_an_error(name):
    mesh = ml.create_mesh({"batch": 4, "model": 2})
    state = state_on(mesh, {"kernel": (None, "model")})
    with pytest.raises(ml.errors.StepError) as error:
        STEPS[name]()(state, jax.tree.map(lambda x: x[:10], DATA))
    assert str(error.value) == (
        "the batch has 10 rows, which do not divide into 4 shards over 'batch' of "
        "Mesh(batch=4, model=2): every device would compute all of them. Pad or drop "
        "rows, or take ml.distribute_dataset(source, "
        "mesh), which pads the last batch and gives the padding weight 0."
    )


def computed(state, batch):
    """The loss and the predictions, before a train step."""
    loss = float(STEPS["eval"]()(state, batch)["loss"])
    predictions = np.asarray(STEPS["predict"]()(state, batch))
    STEPS["train"]()(state, batch)
    return loss, predictions


@pytest.fixture(scope="module")
def alone():
    """What one device computes."""
    one = ml.create_mesh({"rows": 1}, devices=jax.devices()[:1])
    (batch,) = ml.distribute_dataset(DATA, one, global_batch_size=16)
    return computed(state_on(one), batch)


@pytest.mark.parametrize("axis", ["model", "expert", "stage", "rows"])
def test_a_mesh_that_shards_the_state_or_the_rows_alone_is_right(axis, alone):
    mesh = ml.create_mesh({axis: 8})
    rules = {} if axis == "rows" else {"kernel": (None, axis)}
    layout = mesh.layout("rows", ...) if axis == "rows" else mesh
    (batch,) = ml.distribute_dataset(DATA, layout, global_batch_size=16)
    loss, predictions = computed(state_on(mesh, rules), batch)
    close = {"rtol": 1e-5, "atol": 1e-6}  # another order of sums
    np.testing.assert_allclose(loss, alone[0], **close)
    np.testing.assert_allclose(predictions, alone[1], **close)


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_mesh_that_shards_a_sequence_alone_is_right(is_inside):
    mesh = ml.create_mesh({"seq": 4}, devices=jax.devices()[:4])
    sharding = NamedSharding(mesh.jax_mesh, PartitionSpec(None, "seq"))
    layout = mesh if is_inside else mesh.layout(None, "seq")
    (batch,) = ml.distribute_dataset({"x": X}, layout, global_batch_size=16)

    def over_tokens(model, batch):
        x = batch["x"]
        if is_inside:
            x = jax.lax.with_sharding_constraint(x, sharding)
        return (model(x) ** 2).mean(-1)

    for make in (ml.make_train_step, ml.make_eval_step, ml.make_predict_step):
        make(over_tokens)(state_on(mesh), batch)


def test_no_mesh_is_right():
    plain = ml.TrainState.create(
        lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)), optax.sgd(0.1)
    )
    for make in STEPS.values():
        make()(plain, jax.tree.map(jnp.asarray, DATA))


def test_rows_that_do_not_divide_are_computed_by_all(caplog):
    five = jax.tree.map(lambda leaf: leaf[:5], DATA)
    mesh = ml.create_mesh({"batch": 8})
    trainer = ml.Trainer(state_on(mesh), lambda m, b: loss_fn(m, b).mean())
    assert len(trainer.fit([five], progress=False)["loss"]) == 1
    assert "does not divide" in caplog.text


def test_rows_that_do_not_divide_and_are_replicated_by_hand_are_told(caplog):
    mesh = ml.create_mesh({"batch": 8})
    five = jax.tree.map(lambda leaf: leaf[:5], DATA)
    batch = ml.relayout(five, mesh.layout(...))
    ml.make_train_step(loss_fn)(state_on(mesh), batch)
    assert "so that all 8 devices compute all of its 5 rows" in caplog.text


@pytest.mark.parametrize("axis", _batches.BATCH_AXES)
def test_every_name_of_a_batch_axis_shards_rows(axis, caplog):
    mesh = ml.create_mesh({axis: 8})
    data = ml.distribute_dataset(DATA, mesh, global_batch_size=16)
    (batch,) = data
    assert batch["x"].sharding.shard_shape((16, 4)) == (2, 4)
    trainer_of(state_on(mesh)).fit(DATA, batch_size=8, progress=False)
    assert ml.data.process_rows(mesh, 16).size == 16
    assert ml.data.per_replica_batch_size(16, mesh) == 2
    kernel = jax.ShapeDtypeStruct((784, 128), "float32")
    resolved = ml.parallel.fsdp(mesh).resolve({"kernel": kernel})["kernel"]
    assert not resolved.layout.is_fully_replicated
    assert not caplog.records


def test_all_rows_on_every_device_is_logged_once_unless_a_layout_says_so(mesh, caplog):
    data = ml.distribute_dataset(DATA, mesh, global_batch_size=8, epochs=2)
    assert len(list(data)) == 4
    assert [record.getMessage() for record in caplog.records] == [
        "every device of Mesh(rows=8) gets all rows of each batch: none of its axes "
        "has one of the names that shard batches, 'batch', 'data', 'replica', 'fsdp', "
        "'dp', 'ddp', 'data_parallel'. Name the axis so, or give a layout in place of "
        "the mesh, as mesh.layout('rows', ...); if every device is to have all rows, "
        "mesh.layout(...)."
    ]
    caplog.clear()
    for spec, rows in (((...,), 16), (("rows", ...), 2)):
        (batch,) = ml.distribute_dataset(DATA, mesh.layout(*spec), global_batch_size=16)
        assert batch["x"].sharding.shard_shape((16, 4)) == (rows, 4)
    assert not caplog.records
