"""Short batches: what a replica counts is what one device counts without padding."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import meshlayout as ml
from meshlayout.distribute import get_replica_context


ROWS = 10
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 3)).astype("float32")
Y = RNG.integers(0, 3, ROWS).astype("int32")


@pytest.fixture(scope="module")
def strategy():
    return ml.distribute.MirroredStrategy(jax.devices()[:4])


def batches(strategy, *arrays):
    """Batches of 8 rows; the last one has 2, so two or more replicas have none."""
    return strategy.distribute_dataset(arrays, global_batch_size=8)


def test_metrics_count_the_examples_of_short_batches_once(strategy):
    with strategy.scope():
        metrics = nnx.MultiMetric(
            accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
        )
        per_token = nnx.metrics.Average()

    def test_step(logits, labels):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        metrics.update(logits=logits, labels=labels, loss=losses)
        per_token.update(values=logits.at[:, 1].set(jnp.nan)[:, ::2])

    for batch in batches(strategy, X, Y):
        strategy.run(test_step, args=batch)
    results = metrics.compute()
    losses = optax.softmax_cross_entropy_with_integer_labels(X, Y)
    np.testing.assert_allclose(results["accuracy"], (X.argmax(-1) == Y).mean())
    np.testing.assert_allclose(results["loss"], losses.mean(), rtol=1e-6)
    assert metrics.accuracy.count[...] == ROWS
    assert per_token.count[...] == 2 * ROWS
    np.testing.assert_allclose(per_token.compute(), X[:, ::2].mean(), rtol=1e-5)


def test_a_metric_with_a_mask_of_its_own_leaves_out_padding_as_well(strategy):
    if "mask" not in nnx.metrics.Average.update.__annotations__:
        pytest.skip("this Flax has no masks")
    with strategy.scope():
        average = nnx.metrics.Average()
        flat = nnx.metrics.Average()

    def test_step(x):
        mask = get_replica_context().example_mask
        is_real = jnp.ones(x.size) if mask is None else jnp.repeat(mask, x.shape[1])
        average.update(values=x, mask=x > 0)
        flat.update(values=x.ravel(), mask=is_real)

    for batch in batches(strategy, X):
        strategy.run(test_step, args=batch)
    np.testing.assert_allclose(average.compute(), X[X > 0].mean(), rtol=1e-5)
    assert average.count[...] == (X > 0).sum()
    np.testing.assert_allclose(flat.compute(), X.mean(), rtol=1e-4)


def test_values_that_are_not_of_rows_of_a_padded_batch_are_refused(strategy):
    with strategy.scope():
        average = nnx.metrics.Average()

    def test_step(x):
        average.update(values=x.ravel())

    full, short = batches(strategy, X)
    strategy.run(test_step, args=full)
    with pytest.raises(ml.errors.StrategyError) as error:
        strategy.run(test_step, args=short)
    assert str(error.value) == (
        "Average.update: values of shape (12,) are not one per row of this replica's "
        "batch of 4 rows, some of which may be padding. Give one value, or one array, "
        "per row."
    )
    assert "with twice its rows" in "".join(error.value.__notes__)
    assert average.count[...] == 24


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.out = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(x=x))


@pytest.mark.parametrize(
    "is_differentiated", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_batch_statistics_are_those_of_each_replicas_real_rows(
    strategy, is_differentiated
):
    with strategy.scope():
        model = Normed(nnx.Rngs(0))
    plain = copy.deepcopy(Normed(nnx.Rngs(0)))

    def forward(x):
        if is_differentiated:
            return nnx.value_and_grad(lambda m: (m(x).sum(), m(x)), has_aux=True)(
                model
            )[0][1]
        return model(x)

    for batch in batches(strategy, X):
        outputs = strategy.local_results(strategy.run(forward, args=batch))
        rows = strategy.local_results(batch[0])
        states = []
        for row, output in zip(rows, outputs, strict=True):
            own = nnx.clone(plain)
            if len(row):
                for _ in range(1 + is_differentiated):
                    expected = own(jnp.asarray(np.asarray(row)))
                np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
                states.append(nnx.state(own, nnx.BatchStat))
            else:
                assert output.shape == (0, 3)
        mean = jax.tree.map(lambda *values: sum(values) / len(values), *states)
        nnx.update(plain, mean)
        for name in ("mean", "var"):
            value, reference = (getattr(m.norm, name)[...] for m in (model, plain))
            np.testing.assert_allclose(value, reference, rtol=1e-4, atol=1e-5)


def test_batch_statistics_of_all_replicas_are_those_of_one_device(strategy):
    with strategy.scope():
        model = nnx.BatchNorm(3, axis_name="batch", rngs=nnx.Rngs(0))
    plain = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    linen = nn.BatchNorm(use_running_average=False, axis_name="batch")
    variables = linen.init(jax.random.key(0), X)

    def forward(x):
        return model(x), linen.apply(variables, x, mutable=["batch_stats"])[0]

    full, short = batches(strategy, X)
    expected = plain(jnp.asarray(X[:8]))
    for result in strategy.run(forward, args=full):
        np.testing.assert_allclose(
            strategy.gather(result, axis=0), expected, rtol=1e-4, atol=1e-5
        )
    np.testing.assert_allclose(model.mean[...], plain.mean[...], rtol=1e-4)
    # Of a short batch, the mean of the replicas' means.
    for result in strategy.run(forward, args=short):
        assert jnp.isfinite(strategy.gather(result, axis=0)).all()
    assert jnp.isfinite(model.mean[...]).all()


def test_a_batch_norm_of_linen_leaves_out_padding(strategy):
    norm = nn.BatchNorm(use_running_average=False)
    variables = norm.init(jax.random.key(0), X)

    def forward(x):
        return norm.apply(variables, x, mutable=["batch_stats"])[0]

    *_, batch = batches(strategy, X)
    outputs = strategy.local_results(strategy.run(forward, args=batch))
    for row, output in zip(strategy.local_results(batch[0]), outputs, strict=True):
        if len(row):
            row = np.asarray(row)
            expected = norm.apply(variables, row, mutable=["batch_stats"])[0]
            np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


def test_flax_is_as_it_was_outside_of_a_run(strategy):
    before = (nnx.BatchNorm.__call__, nnx.metrics.Average.update)
    for batch in batches(strategy, X):
        strategy.run(lambda x: x, args=batch)
    assert before == (nnx.BatchNorm.__call__, nnx.metrics.Average.update)
