"""The programs of tf.distribute's documentation, in TensorFlow and here, side by side.

Each is written twice, and both must give the same numbers. Where TensorFlow is not
installed there is nothing to compare with.
"""

import functools
import inspect
import pathlib
import re

import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout import distribute
from meshlayout.losses import compute_average_loss


tf = pytest.importorskip("tensorflow")


@pytest.fixture(scope="module", autouse=True)
def four_devices():
    (cpu,) = tf.config.list_physical_devices("CPU")
    four = [tf.config.LogicalDeviceConfiguration() for _ in range(4)]
    tf.config.set_logical_device_configuration(cpu, four)


def strategies(count):
    """Returns TensorFlow's strategy and ours on as many devices."""
    devices = [f"CPU:{index}" for index in range(count)]
    return tf.distribute.MirroredStrategy(devices), ml.distribute.MirroredStrategy(
        devices
    )


def local(strategy, value):
    """Returns the value on each replica, as lists of numbers."""
    results = getattr(strategy, "experimental_local_results", None)
    values = (results or strategy.local_results)(value)
    if len(values) == 1:  # the same on all
        values *= strategy.num_replicas_in_sync
    return [np.asarray(x).tolist() for x in values]


def batches_of(theirs, ours, data, size):
    """Returns both strategies, each with the batches of a dataset."""
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(size)
    return [
        (theirs, theirs.experimental_distribute_dataset(dataset)),
        (ours, ours.distribute_dataset(data, size)),
    ]


def public_names(module):
    """Returns the names of a module's classes and functions, and of its submodules'."""
    names = set()
    for name in filter(lambda name: not name.startswith("_"), dir(module)):
        value = getattr(module, name)
        names |= public_names(value) if inspect.ismodule(value) else {name}
    return names


def test_every_public_name_has_its_row():
    page = pathlib.Path(__file__).parents[1] / "docs/coming_from/tf_distribute.md"
    rows = [x for x in page.read_text().splitlines() if x.startswith("| ")]
    known = re.findall(r"\w+", " ".join(row.split("|")[1] for row in rows))
    assert public_names(tf.distribute) <= {*known}


def test_a_distributed_dataset_is_doubled():
    data = np.arange(4, dtype="int32")
    found = [
        [local(s, s.run(lambda x: x * 2, args=(batch,))) for batch in batches]
        for s, batches in batches_of(*strategies(2), data, 2)
    ]
    assert found[0] == found[1] == [[[0], [2]], [[4], [6]]]


VALUES = {
    "a constant": lambda context: np.float32(1),
    "by replica": lambda c: np.float32([3, 2, 1])[c.replica_id_in_sync_group],
    "the number of replicas": lambda c: np.int32(c.num_replicas_in_sync),
    "a column": lambda context: np.int32([[1], [2]]),
    "a block": lambda context: np.arange(6, dtype="int32").reshape(1, 2, 3),
}


def values_of(strategy, name):
    make = getattr(strategy, "experimental_distribute_values_from_function", None)
    return (make or strategy.distribute_values_from_function)(VALUES[name])


@pytest.mark.parametrize("name", VALUES)
def test_values_from_a_function(name):
    theirs, ours = strategies(2)
    values = [values_of(s, name) for s in (theirs, ours)]
    assert local(theirs, values[0]) == local(ours, values[1])


@pytest.mark.parametrize(
    ("name", "axis"), [("a column", 0), ("a block", 0), ("a block", 1), ("a block", 2)]
)
def test_gathered_values(name, axis):
    found = [
        np.asarray(s.gather(values_of(s, name), axis=axis)).tolist()
        for s in strategies(4)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("how", ["SUM", "MEAN"])
@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("rows", [8, 6])
def test_reduced_examples(how, axis, rows):
    """Also of a last batch of 6 rows, which both divide into 3 and 3."""
    data = np.arange(rows, dtype="float32")
    found = []
    for s, batches in batches_of(*strategies(2), data, 8):
        (batch,) = batches
        result = s.run(lambda x: x + 1, args=(batch,))
        found.append(np.asarray(s.reduce(how, result, axis=axis)).tolist())
    assert found[0] == found[1]


def test_a_constant_argument_is_one_value_per_replica():
    found = []
    for s in strategies(2):
        result = s.run(lambda x: x * 2.0, args=(np.float32(3),))
        found.append([local(s, result), float(s.reduce("SUM", result, axis=None))])
    assert found[0] == found[1] == [[6.0, 6.0], 12.0]


def test_replicas_reduce_their_ids():
    def replica(get, convert):
        index = convert(get().replica_id_in_sync_group)
        return index, get().all_reduce("sum", index)

    theirs, ours = strategies(2)
    found = []
    for s, get, convert in (
        (theirs, tf.distribute.get_replica_context, tf.convert_to_tensor),
        (ours, distribute.get_replica_context, lambda x: x),
    ):
        own, total = s.run(functools.partial(replica, get, convert))
        found.append(
            [local(s, own), local(s, total), int(s.reduce("SUM", own, axis=None))]
        )
    assert found[0] == found[1] == [[0, 1], [1, 1], 1]


# Variables with an aggregation. What each replica writes: its id plus 1.
WRITES = ["assign", "assign_add", "assign after a read"]


@pytest.mark.parametrize("kind", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
@pytest.mark.parametrize("write", WRITES)
def test_variables_that_replicas_write_to(kind, write):
    theirs, ours = strategies(2)
    with theirs.scope():
        variable = tf.Variable(10.0, aggregation=tf.VariableAggregation[kind])

    @tf.function
    def their_write():
        context = tf.distribute.get_replica_context()
        value = tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0
        if write == "assign_add":
            variable.assign_add(value)
        else:
            seen = variable.read_value() if write == "assign after a read" else 0.0
            variable.assign(value + 0.0 * seen if write == "assign" else value)
        return variable.read_value()

    read = local(theirs, theirs.run(their_write))
    aggregation = {"ONLY_FIRST_REPLICA": "first"}.get(kind, kind.lower())
    with ours.scope():
        own = nnx.Variable(np.float32(10), aggregation=aggregation)

    def our_write():
        context = distribute.get_replica_context()
        value = context.replica_id_in_sync_group.astype("float32") + 1.0
        if write == "assign_add":
            own[...] += value
        else:
            seen = own[...] + 1 if write == "assign after a read" else 0.0
            own[...] = value
            del seen
        return own[...]

    assert local(ours, ours.run(our_write)) == read
    assert float(own[...]) == float(variable.read_value())


@pytest.mark.parametrize("rows", [16, 13, 10])
def test_a_training_loop_with_a_short_last_batch(rows):
    """The custom training tutorial, on a linear model: losses and weights."""
    theirs, ours = strategies(2)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3)).astype("float32")
    y = rng.normal(size=(rows,)).astype("float32")
    start = rng.normal(size=(3, 1)).astype("float32")
    (_, their_batches), (_, our_batches) = batches_of(theirs, ours, (x, y), 8)

    with theirs.scope():
        kernel = tf.Variable(start)

    @tf.function
    def their_step(x, y):
        def replica(x, y):
            with tf.GradientTape() as tape:
                losses = (tf.squeeze(x @ kernel, 1) - y) ** 2
                loss = tf.nn.compute_average_loss(losses, global_batch_size=8)
            gradient = tape.gradient(loss, kernel)
            context = tf.distribute.get_replica_context()
            kernel.assign_sub(0.1 * context.all_reduce("SUM", gradient))
            return loss

        loss = theirs.run(replica, args=(x, y))
        return theirs.reduce("SUM", loss, axis=None)

    their_losses = [
        float(their_step(*batch)) for _ in range(3) for batch in their_batches
    ]

    with ours.scope():
        model = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))
        model.kernel[...] = start
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def our_step(x, y):
        def loss_of(model):
            losses = (model(x).squeeze(1) - y) ** 2
            return compute_average_loss(losses, global_batch_size=8)

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    our_losses = [
        float(ours.reduce("SUM", ours.run(our_step, args=batch), axis=None))
        for _ in range(3)
        for batch in our_batches
    ]
    np.testing.assert_allclose(our_losses, their_losses, rtol=1e-5)
    np.testing.assert_allclose(model.kernel[...], kernel.numpy(), rtol=1e-5)
