"""The programs of tf.distribute's documentation, with the numbers that it prints.

Each runs here, and in TensorFlow where that is installed: both give these numbers.
"""

import inspect
import pathlib
import re

import jax
import numpy as np
import pytest
from flax import nnx

from meshlayout.distribute import Strategy, get_replica_context
from meshlayout.losses import compute_average_loss
from tests.replicas import mirrored


class Here:
    """The names of this library."""

    strategy = staticmethod(mirrored)
    context = staticmethod(get_replica_context)
    average_loss = staticmethod(compute_average_loss)
    distributed = staticmethod(Strategy.distribute_dataset)
    from_function = staticmethod(Strategy.distribute_datasets_from_function)
    values = staticmethod(Strategy.distribute_values_from_function)
    local_results = staticmethod(Strategy.local_results)
    run = staticmethod(lambda strategy, fn, *args: strategy.run(fn, args))

    def variable(self, value, kind=None):
        kind = {"ONLY_FIRST_REPLICA": "first"}.get(kind, kind and kind.lower())
        return nnx.Variable(np.float32(value), aggregation=kind)

    def write(self, variable, how, value):
        value = value.astype("float32")  # flax 0.11 would make it an integer
        variable[...] = value if how == "assign" else variable[...] + value

    def read(self, variable):
        return variable[...]


class InTensorFlow:
    """TensorFlow's names for the same."""

    def __init__(self):
        self.tf = tf = pytest.importorskip("tensorflow")
        (cpu,) = tf.config.list_physical_devices("CPU")
        if not tf.config.get_logical_device_configuration(cpu):
            four = [tf.config.LogicalDeviceConfiguration() for _ in range(4)]
            tf.config.set_logical_device_configuration(cpu, four)
        self.context = tf.distribute.get_replica_context
        self.average_loss = tf.nn.compute_average_loss

    def strategy(self, count):
        devices = [f"CPU:{index}" for index in range(count)]
        return self.tf.distribute.MirroredStrategy(devices)

    def distributed(self, strategy, data, size):
        dataset = self.tf.data.Dataset.from_tensor_slices(data).batch(size)
        return strategy.experimental_distribute_dataset(dataset)

    def from_function(self, strategy, batches_of):
        def dataset_fn(context):
            return self.tf.data.Dataset.from_tensor_slices(batches_of(context))

        return strategy.distribute_datasets_from_function(dataset_fn)

    def values(self, strategy, value_fn):
        return strategy.experimental_distribute_values_from_function(value_fn)

    def local_results(self, strategy, value):
        values = strategy.experimental_local_results(value)
        # One that is the same on all replicas has not been copied.
        return values * (strategy.num_replicas_in_sync // len(values))

    def run(self, strategy, fn, *args):
        return self.tf.function(lambda *args: strategy.run(fn, args=args))(*args)

    def variable(self, value, kind="NONE"):
        return self.tf.Variable(value, aggregation=self.tf.VariableAggregation[kind])

    def write(self, variable, how, value):
        getattr(variable, how)(self.tf.cast(value, "float32"))

    def read(self, variable):
        return variable.read_value()


@pytest.fixture(scope="module", params=[Here, InTensorFlow])
def api(request):
    return request.param()


@pytest.fixture
def two(api):
    return api.strategy(2)


def numbers(api, strategy, value):
    return [np.asarray(x).tolist() for x in api.local_results(strategy, value)]


def test_a_distributed_dataset_is_doubled_and_summed(api, two):
    batches = api.distributed(two, np.arange(4, dtype="int32"), 2)
    doubled = [api.run(two, lambda x: x * 2, x) for x in batches]
    assert [numbers(api, two, x) for x in doubled] == [[[0], [2]], [[4], [6]]]
    sums = [two.reduce("SUM", x, axis=None) for x in doubled]
    assert np.asarray(sum(sums)).tolist() == [12]


def test_each_replica_gets_a_batch_of_an_input_function(api, two):
    def batches_of(context):
        size = context.get_per_replica_batch_size(4)
        return [np.full(size, i, np.int32) for i in range(4)]

    batches = [numbers(api, two, x) for x in api.from_function(two, batches_of)]
    assert batches == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]


VALUES = {
    "a constant": (lambda c: np.float32(1), [1, 1]),
    "by replica": (lambda c: np.float32([3, 2, 1])[c.replica_id_in_sync_group], [3, 2]),
    "the number of replicas": (lambda c: np.int32(c.num_replicas_in_sync), [2, 2]),
    "a column": (lambda c: np.int32([[1], [2]]), [[[1], [2]]] * 2),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_from_a_function(api, two, name):
    value_fn, expected = VALUES[name]
    assert numbers(api, two, api.values(two, value_fn)) == expected


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_gathered_values(api, axis):
    four, block = api.strategy(4), np.arange(6, dtype="int32").reshape(1, 2, 3)
    gathered = four.gather(api.values(four, lambda context: block), axis=axis)
    np.testing.assert_array_equal(gathered, np.concatenate([block] * 4, axis))


def test_replicas_return_and_reduce_their_ids(api, two):
    def replica():
        context = api.context()
        index = context.replica_id_in_sync_group
        return index, context.all_reduce("sum", index)

    own, total = api.run(two, replica)
    assert (numbers(api, two, own), numbers(api, two, total)) == ([0, 1], [1, 1])
    assert int(two.reduce("SUM", own, axis=None)) == 1


def test_constants_and_values_are_arguments(api, two):
    result = api.run(two, lambda x: x * 2.0, np.float32(3))
    assert numbers(api, two, result) == [6, 6]
    assert float(two.reduce("SUM", result, axis=None)) == 12
    count = api.values(two, lambda context: np.int32(context.num_replicas_in_sync))
    result = api.run(two, lambda x: x * 2, count)
    assert numbers(api, two, result) == [4, 4]


@pytest.mark.parametrize(
    ("rows", "how", "axis", "expected"),
    [
        (8, "SUM", None, [4, 6, 8, 10]),
        (8, "SUM", 0, 28),
        (8, "MEAN", 0, 3.5),
        (6, "SUM", 0, 15),
        (6, "MEAN", 0, 2.5),  # and not the mean of two means
        (6, "SUM", None, [3, 5, 7]),  # 6 rows are 3 and 3
    ],
)
def test_reduced_examples(api, two, rows, how, axis, expected):
    (batch,) = api.distributed(two, np.arange(rows, dtype="float32"), 8)
    result = np.asarray(two.reduce(how, batch, axis=axis))
    assert result.tolist() == expected


@pytest.mark.parametrize("reads_before", [False, True])
@pytest.mark.parametrize(
    ("kind", "how", "expected"),
    [
        ("SUM", "assign", 3),
        ("SUM", "assign_add", 13),
        ("MEAN", "assign", 1.5),
        ("MEAN", "assign_add", 11.5),
        ("ONLY_FIRST_REPLICA", "assign", 1),
        ("ONLY_FIRST_REPLICA", "assign_add", 11),
    ],
)
def test_variables_that_replicas_write_to(api, two, kind, how, expected, reads_before):
    """From 10, each replica writes its id plus 1."""
    with two.scope():
        variable = api.variable(10.0, kind)

    def replica():
        if reads_before:
            api.read(variable)
        index = api.context().replica_id_in_sync_group
        api.write(variable, how, index + 1)
        return api.read(variable)

    assert numbers(api, two, api.run(two, replica)) == [expected] * 2
    assert float(api.read(variable)) == expected


def trained(api, strategy, batches, start):
    """Returns losses, and the weights that they lead to."""
    is_here = isinstance(api, Here)
    with strategy.scope():
        kernel = nnx.Param(start) if is_here else api.variable(start)

    def loss_of(kernel, x, y):
        losses = (x @ kernel - y) ** 2
        return api.average_loss(losses[:, 0], global_batch_size=8)

    def step(x, y):
        if is_here:
            loss, gradient = jax.value_and_grad(loss_of)(kernel[...], x, y)
        else:
            with api.tf.GradientTape() as tape:
                loss = loss_of(kernel, x, y)
            gradient = tape.gradient(loss, kernel)
        gradient = api.context().all_reduce("SUM", gradient)
        api.write(kernel, "assign", api.read(kernel) - 0.1 * gradient)
        return loss

    losses = [
        float(strategy.reduce("SUM", api.run(strategy, step, *batch), axis=None))
        for _ in range(3)
        for batch in batches
    ]
    return losses, np.asarray(api.read(kernel))


@pytest.mark.parametrize("rows", [16, 13, 10])
def test_a_training_loop_with_a_short_last_batch(api, two, rows):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3)).astype("float32")
    y = rng.normal(size=(rows, 1)).astype("float32")
    kernel = start = rng.normal(size=(3, 1)).astype("float32")
    expected = []
    for part in [slice(8), slice(8, 16)] * 3:
        error = x[part] @ kernel - y[part]
        expected.append((error**2).sum() / 8)
        kernel = kernel - 0.1 * 2 * x[part].T @ error / 8
    batches = list(api.distributed(two, (x, y), 8))
    losses, weights = trained(api, two, batches, start)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(weights, kernel, rtol=1e-5)


def public_names(module):
    """Returns the names of a module's classes and functions, and of its submodules'."""
    names = set()
    for name in filter(lambda name: not name.startswith("_"), dir(module)):
        value = getattr(module, name)
        names |= public_names(value) if inspect.ismodule(value) else {name}
    return names


def test_every_public_name_has_its_row_in_the_table():
    tf = pytest.importorskip("tensorflow")
    page = pathlib.Path(__file__).parents[1] / "docs/coming_from/tf_distribute.md"
    rows = [x for x in page.read_text().splitlines() if x.startswith("| ")]
    known = re.findall(r"\w+", " ".join(row.split("|")[1] for row in rows))
    assert public_names(tf.distribute) <= {*known}
