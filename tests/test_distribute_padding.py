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
from meshlayout.errors import StrategyError
from tests.error_messages import message_of
from tests.replicas import mirrored, split, total


ROWS = 10
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 3)).astype("float32")
Y = RNG.integers(0, 3, ROWS).astype("int32")


@pytest.fixture(scope="module")
def strategy():
    return mirrored(4)


def batches(strategy, *arrays):
    """Batches of 8 rows; the last one has 2, so two or more replicas have none."""
    return strategy.distribute_dataset(arrays, global_batch_size=8)


def test_six_rows_on_two_replicas_of_four_are_three_and_three():
    two = mirrored(2)
    *_, last = two.distribute_dataset(np.arange(14, dtype="f"), 8)
    assert [x.tolist() for x in two.local_results(last)] == [[8, 9, 10], [11, 12, 13]]

    def means(x):  # nothing is padded, so a function needs no mask
        assert get_replica_context().example_mask is None
        return x.mean(), ml.losses.compute_average_loss(x)

    shares, loss = two.run(means, (last,))
    assert [float(x) for x in two.local_results(shares)] == [9, 12]
    assert total(two, loss) == pytest.approx(10.5)


def test_64_rows_on_three_replicas_count_as_64():
    three, rows = mirrored(3), np.arange(64, dtype="f")
    (batch,) = three.distribute_dataset(rows, 64)
    assert sum(len(x) for x in three.local_results(batch)) == 64
    loss = three.run(lambda x: ml.losses.compute_average_loss(x), (batch,))
    assert total(three, loss) == pytest.approx(rows.mean())
    assert three.gather(batch, axis=0).tolist() == rows.tolist()


def test_five_rows_carry_a_mask_that_a_function_must_ask_for():
    two = mirrored(2)
    (short,) = two.distribute_dataset(np.arange(1, 6, dtype="f"), 8)
    assert sum(len(x) for x in two.local_results(short)) == 5
    assert total(two, two.run(lambda x: x**2, (short,)), axis=0) == 55
    assert message_of(two.run, lambda x: x.mean(), (short,)) == (
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
def test_results_with_more_rows_than_a_short_batch_get_a_sentence(fn):
    two = mirrored(2)
    two.run(fn, (split(two, np.ones((4, 4), "f")),))
    (short,) = two.distribute_dataset(np.ones((3, 4), "f"), 4)
    assert message_of(two.run, fn, (short,), error=StrategyError).endswith(".")


def test_a_head_of_zeros_trains_on_a_short_batch_as_on_one_device(strategy):
    def made():
        model = nnx.Linear(
            3, 3, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0)
        )  # with which padding cannot be seen at the first step
        return model, nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)

    def step(model, optimizer, x, y):
        def loss_fn(model):
            logits = model(x)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return ml.losses.compute_average_loss(loss + (logits**2).sum(-1))

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    with strategy.scope():
        own = made()
    plain = made()
    for _ in range(2):
        (batch,) = strategy.distribute_dataset((X[:3], Y[:3]), 8)
        loss = total(strategy, strategy.run(step, (*own, *batch)))
        assert loss == pytest.approx(float(step(*plain, X[:3], Y[:3])), rel=1e-5)


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
    [(nnx.metrics.Average, 3), (nnx.metrics.Welford, 3), (RootMeanSquare, 4)],
)
def test_metrics_of_flax_and_of_users_agree_with_one_device(make, last):
    two = mirrored(2)
    with two.scope():
        metric = make()
    plain = make()
    update = lambda values: metric.update(values=values)  # noqa: E731
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


def test_metrics_count_the_examples_of_short_batches_once(strategy):
    before = nnx.BatchNorm.__call__, nnx.metrics.Average.update
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
    assert before == (nnx.BatchNorm.__call__, nnx.metrics.Average.update)
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


def test_batch_statistics_are_those_of_each_replicas_real_rows(strategy):
    with strategy.scope():
        model = Normed(nnx.Rngs(0))
    plain = copy.deepcopy(Normed(nnx.Rngs(0)))

    def forward(x):
        loss_fn = lambda m: (m(x).sum(), m(x))  # noqa: E731
        return nnx.value_and_grad(loss_fn, has_aux=True)(model)[0][1]

    for batch in batches(strategy, X):
        outputs = strategy.local_results(strategy.run(forward, args=batch))
        rows = strategy.local_results(batch[0])
        states = []
        for row, output in zip(rows, outputs, strict=True):
            own = nnx.clone(plain)
            if len(row):
                for _ in range(2):
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
