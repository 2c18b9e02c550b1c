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


def state_on(mesh, rules=None):
    return ml.TrainState.create(
        lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)),
        optax.sgd(0.1),
        ml.LayoutMap(mesh, rules or {}),
    )


@pytest.fixture
def mesh():
    return ml.create_mesh({"rows": 8})


def refused(call):
    with pytest.raises(ml.errors.StepError) as caught:
        call()
    return str(caught.value)


MESSAGE = (
    "all 8 devices of Mesh(rows=8) would compute the same: no array of the batch, and "
    "none of the state, is sharded over an axis. Shard the rows: "
    "ml.distribute_dataset(source, mesh) does over axes called 'batch', 'data', "
    "'replica', 'fsdp', 'dp', 'ddp', 'data_parallel', or ml.relayout(batch, "
    "mesh.layout('rows', ...)) over any. Or shard the state, with a LayoutMap's rules; "
    "or make a mesh of one device."
)


@pytest.mark.parametrize("calls", [1, 2])
def test_a_step_whose_devices_all_compute_the_same_is_an_error(mesh, calls):
    (batch,) = ml.distribute_dataset(DATA, mesh, global_batch_size=16)
    train_step = ml.make_train_step(loss_fn)
    for _ in range(calls):  # not only the first
        assert refused(lambda: train_step(state_on(mesh), batch)) == MESSAGE


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_fit_whose_devices_all_compute_the_same_is_an_error(mesh, steps_per_call):
    trainer = ml.Trainer(state_on(mesh), loss_fn, steps_per_call=steps_per_call)
    said = refused(lambda: trainer.fit(DATA, batch_size=8, progress=False))
    assert said == MESSAGE


def test_a_batch_replicated_by_hand_is_an_error():
    mesh = ml.create_mesh({"batch": 8})
    batch = ml.relayout(DATA, mesh.layout(...))
    message = refused(lambda: ml.make_train_step(loss_fn)(state_on(mesh), batch))
    assert message.startswith("all 8 devices of Mesh(batch=8) would compute the same")


def test_a_layout_shards_rows_over_an_axis_of_any_name(mesh):
    layout = mesh.layout("rows", ...)
    (batch,) = ml.distribute_dataset(DATA, layout, global_batch_size=16)
    ml.make_train_step(loss_fn)(state_on(mesh), batch)
    trainer = ml.Trainer(state_on(mesh), loss_fn, data_layout=layout)
    trainer.fit(DATA, batch_size=8, progress=False)


@pytest.mark.parametrize("axis", ["model", "stage"])
def test_a_mesh_that_shards_the_state_alone_is_right(axis):
    mesh = ml.create_mesh({axis: 8})
    state = state_on(mesh, {"kernel": (None, axis)})
    (batch,) = ml.distribute_dataset(DATA, mesh, global_batch_size=16)
    state, metrics = ml.make_train_step(loss_fn)(state, batch)
    assert float(metrics.to_host()["loss"]) >= 0
    ml.Trainer(state, loss_fn).fit(DATA, batch_size=8, progress=False)


def test_a_mesh_that_shards_a_sequence_alone_is_right():
    mesh = ml.create_mesh({"seq": 4}, devices=jax.devices()[:4])
    layout = mesh.layout(None, "seq")
    batches = ml.distribute_dataset({"x": X}, layout, global_batch_size=16)

    def over_tokens(model, batch):
        return (model(batch["x"]) ** 2).mean(-1)

    for batch in batches:
        ml.make_train_step(over_tokens)(state_on(mesh), batch)


def test_a_step_that_shards_inside_itself_is_right():
    mesh = ml.create_mesh({"seq": 4}, devices=jax.devices()[:4])
    sharding = NamedSharding(mesh.jax_mesh, PartitionSpec(None, "seq"))

    def over_tokens(model, batch):
        x = jax.lax.with_sharding_constraint(batch["x"], sharding)
        return (model(x) ** 2).mean(-1)

    (batch,) = ml.distribute_dataset({"x": X}, mesh, global_batch_size=16)
    ml.make_train_step(over_tokens)(state_on(mesh), batch)


def test_one_device_and_no_mesh_are_right():
    one = ml.create_mesh({"rows": 1}, devices=jax.devices()[:1])
    (batch,) = ml.distribute_dataset(DATA, one, global_batch_size=16)
    ml.make_train_step(loss_fn)(state_on(one), batch)
    plain = ml.TrainState.create(
        lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)), optax.sgd(0.1)
    )
    ml.make_train_step(loss_fn)(plain, jax.tree.map(jnp.asarray, DATA))


def test_rows_that_do_not_divide_are_computed_by_all(caplog):
    mesh = ml.create_mesh({"batch": 8})
    trainer = ml.Trainer(state_on(mesh), lambda m, b: loss_fn(m, b).mean())
    five = jax.tree.map(lambda leaf: leaf[:5], DATA)
    history = trainer.fit([five], progress=False)
    assert len(history["loss"]) == 1
    assert "does not divide" in caplog.text


@pytest.mark.parametrize(
    "axis",
    [
        pytest.param(axis, marks=[pytest.mark.slow] * (axis not in ("data", "fsdp")))
        for axis in _batches.BATCH_AXES
    ],
)
def test_every_name_of_a_batch_axis_shards_rows(axis, caplog):
    mesh = ml.create_mesh({axis: 8})
    data = ml.distribute_dataset(DATA, mesh, global_batch_size=16)
    (batch,) = data
    assert batch["x"].sharding.spec[0] in (axis, (axis,))
    trainer = ml.Trainer(state_on(mesh), loss_fn)
    trainer.fit(DATA, batch_size=8, progress=False)
    assert ml.data.process_rows(mesh, 16).size == 16
    assert ml.data.per_replica_batch_size(16, mesh) == 2
    kernel = jax.ShapeDtypeStruct((784, 128), "float32")
    assert (
        not ml.parallel.fsdp(mesh)
        .resolve({"kernel": kernel})["kernel"]
        .layout.is_fully_replicated
    )
    assert not caplog.records


@pytest.mark.parametrize("said", [ml.create_mesh, ml.distribute_dataset, ml.Trainer])
def test_all_places_that_list_batch_axes_list_the_same(said):
    assert all(axis in said.__doc__ for axis in _batches.BATCH_AXES)


def test_all_rows_on_every_device_is_logged_once(mesh, caplog):
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
    list(ml.distribute_dataset(DATA, mesh.layout(...), global_batch_size=8))
    assert not caplog.records
