"""Short batches: what a replica counts is what one device counts without padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

from meshlayout.distribute import get_replica_context
from meshlayout.errors import StrategyError
from tests.error_messages import message_of
from tests.replicas import mirrored, parts_of, split, total


ROWS = 10
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 3)).astype("float32")


@pytest.fixture(scope="module")
def strategy():
    return mirrored(4)


def batches(strategy, *arrays):
    """Batches of 8 rows; the last one has 2, so two or more replicas have none."""
    return strategy.distribute_dataset(arrays, global_batch_size=8)


def test_five_rows_carry_a_mask_that_a_function_must_ask_for(two):
    (short,) = two.distribute_dataset(np.arange(1, 6, dtype="f"), 8)
    assert parts_of(two, short) == [[1, 2, 3, 4], [5]]
    assert np.asarray(short.mask).tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert total(two, two.run(lambda x: x**2, (short,)), axis=0) == 55
    with pytest.raises(StrategyError) as error:
        two.run(lambda x: x.mean(), (short,))
    assert not getattr(error.value, "__notes__", ())
    assert str(error.value) == (
        "<lambda> got a short batch, which is padded to the shape of the others, and "
        "did not ask which rows are real: padding would count. Use "
        "losses.compute_average_loss, which asks; or multiply by "
        "get_replica_context().example_mask and divide by its num_examples; or return "
        "one value per row and combine these with reduce(..., axis=0); or leave such "
        "batches out with distribute_dataset(..., remainder='drop')."
    )

    def masked_mean(x):
        context = get_replica_context()
        rows = context.all_reduce("SUM", (x * context.example_mask).sum())
        return rows / context.num_examples

    assert float(two.run(masked_mean, (short,))) == 3


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.concatenate([x, -x]),
        lambda x: get_replica_context().all_gather(x, 0),
        lambda x: x.reshape(-1),
        lambda x: jnp.repeat(x, 2, axis=0),
    ],
)
def test_results_with_more_rows_than_a_short_batch_get_a_sentence(two, fn):
    two.run(fn, (split(two, np.ones((4, 4), "f")),))
    (short,) = two.distribute_dataset(np.ones((3, 4), "f"), 4)
    assert message_of(two.run, fn, (short,), error=StrategyError).endswith(".")


class RootMeanSquare(nnx.Metric):
    """A metric of the user's with sums."""

    def __init__(self):
        self.total = nnx.metrics.MetricState(jnp.zeros(()))
        self.count = nnx.metrics.MetricState(jnp.zeros(()))

    def update(self, *, values, **_):
        self.total[...] += (values**2).sum()
        self.count[...] += values.size

    def compute(self):
        return jnp.sqrt(self.total[...] / self.count[...])

    def reset(self):
        self.total[...] = self.count[...] = jnp.zeros(())


@pytest.mark.parametrize(
    ("make", "last"),
    [
        *[(nnx.metrics.Average, 3), (RootMeanSquare, 4)],
        pytest.param(nnx.metrics.Welford, 3, marks=pytest.mark.slow),
    ],
)
def test_metrics_of_flax_and_of_users_agree_with_one_device(make, last):
    two = mirrored(2)
    with two.scope():
        metric = make()
    plain = make()
    update = lambda values: metric.update(values=values)
    for _ in range(2):
        for rows in (8, 8, last):
            values = (RNG.normal(size=rows) + 3).astype("f")
            (batch,) = two.distribute_dataset(values, 8)
            two.run(update, (batch,))
            plain.update(values=jnp.asarray(values))
        for actual, expected in zip(
            *(jax.tree.leaves(x.compute()) for x in (metric, plain)), strict=True
        ):
            np.testing.assert_allclose(actual, expected, rtol=1e-5)
        metric.reset()
        plain.reset()


def test_random_numbers_do_not_count_padding(strategy):
    with strategy.scope():
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    *_, last = batches(strategy, X)
    (kept,) = strategy.run(lambda batch: (dropout(batch[0]),), (last,))
    found = strategy.gather(kept, axis=0)
    assert found.shape == (2, 3)
    np.testing.assert_allclose(found[found != 0], 2 * X[8:][found != 0], rtol=1e-6)


def test_values_that_are_not_of_rows_of_a_padded_batch_are_refused(strategy):
    with strategy.scope():
        average = nnx.metrics.Average()
    full, short = batches(strategy, X)
    test_step = lambda x: average.update(values=x.ravel())
    strategy.run(test_step, args=full)
    with pytest.raises(StrategyError, match="are not one per row of") as error:
        strategy.run(test_step, args=short)
    assert "with twice its rows" in "".join(error.value.__notes__)
    assert average.count[...] == 24


def test_batch_statistics_are_those_of_each_replicas_real_rows(strategy):
    with strategy.scope():
        model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    plain = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    linen = nn.BatchNorm(use_running_average=False)
    variables = linen.init(jax.random.key(0), X)

    def forward(x):
        loss_fn = lambda m: (m(x).sum(), m(x))
        output = nnx.value_and_grad(loss_fn, has_aux=True)(model)[0][1]
        return output, linen.apply(variables, x, mutable=["batch_stats"])[0]

    for batch in batches(strategy, X):
        parts = strategy.local_results(strategy.run(forward, args=batch))
        states = []
        for rows, outputs in zip(parts_of(strategy, batch[0]), parts, strict=True):
            own = nnx.clone(plain)
            if rows:
                for _ in range(2):
                    expected = own(jnp.asarray(rows))
                for output in outputs:
                    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
                states.append(nnx.state(own, nnx.BatchStat))
            else:
                assert outputs[0].shape == outputs[1].shape == (0, 3)
        mean = jax.tree.map(lambda *values: sum(values) / len(values), *states)
        nnx.update(plain, mean)
        for name in ("mean", "var"):
            value, reference = (getattr(m, name)[...] for m in (model, plain))
            np.testing.assert_allclose(value, reference, rtol=1e-4, atol=1e-5)


def test_batch_statistics_of_all_replicas_are_those_of_one_device(strategy):
    with strategy.scope():
        model = nnx.BatchNorm(3, axis_name="batch", rngs=nnx.Rngs(0))
    plain = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    linen = nn.BatchNorm(use_running_average=False, axis_name="batch")
    variables = linen.init(jax.random.key(0), X)

    def forward(x):
        return model(x), linen.apply(variables, x, mutable=["batch_stats"])[0]

    for rows, batch in zip((X[:8], X[8:]), batches(strategy, X), strict=True):
        expected = plain(jnp.asarray(rows))
        for result in strategy.run(forward, args=batch):
            np.testing.assert_allclose(
                strategy.gather(result, axis=0), expected, rtol=1e-4, atol=1e-5
            )
        for name in ("mean", "var"):
            value, reference = (getattr(m, name)[...] for m in (model, plain))
            np.testing.assert_allclose(value, reference, rtol=1e-4)
