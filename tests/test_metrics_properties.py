"""Metrics agree with references under any mask, split, order and sharding."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import meshlayout as ml
from meshlayout import metrics


N, CLASSES = 16, 4
SETTINGS = settings(max_examples=15, deadline=None, derandomize=True)
updated = jax.jit(lambda metric, *inputs: metric.update(*inputs))
merged = jax.jit(lambda one, other: one.merge(other))
merges = st.permutations(range(4))
seeds = st.integers(0, 2**32 - 1)


def drawn(seed):
    """Returns logits, labels and weights, of which some are 0."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(N, CLASSES)).astype(np.float32)
    labels = rng.integers(0, CLASSES, N).astype(np.int32)
    weights = (rng.integers(0, 4, N) * 0.5).astype(np.float32)
    weights[rng.integers(N)] = 1.5
    return logits, labels, weights


def in_parts(metric, inputs, order):
    """Returns the metric of four parts, merged in an order."""
    parts = [updated(metric, *(x[4 * at : 4 * at + 4] for x in inputs)) for at in order]
    left = merged(parts[0], parts[1])
    return merged(left, merged(parts[2], parts[3]))


def spoilt(scores, weights):
    kept = (weights != 0).reshape(-1, *[1] * (scores.ndim - 1))
    return np.where(kept, scores, np.nan).astype(np.float32)


def close(found, wanted):
    # Weights are halves, so that sums are exact but for the shares themselves.
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)


def confusion(predicted, labels, weights):
    cells = np.zeros((CLASSES, CLASSES))
    np.add.at(cells, (labels, predicted), weights)
    return cells


@SETTINGS
@given(seeds, merges)
def test_class_metrics_are_those_of_the_confusion_matrix(seed, order):
    logits, labels, weights = drawn(seed)
    cells = confusion(logits.argmax(1), labels, weights)
    inputs = (spoilt(logits, weights), labels, weights)
    close(in_parts(metrics.ConfusionMatrix(CLASSES), inputs, order).compute(), cells)
    hits, rows, columns = np.diag(cells), cells.sum(1), cells.sum(0)
    close(
        in_parts(metrics.Accuracy(), inputs, order).compute(), hits.sum() / cells.sum()
    )
    occurs = (rows + columns) > 0
    for kind, whole in (
        (metrics.Precision, columns),
        (metrics.Recall, rows),
        (metrics.F1, (rows + columns) / 2),
    ):
        shares = np.where(whole > 0, hits / np.where(whole > 0, whole, 1), 0)
        macro = in_parts(kind(num_classes=CLASSES), inputs, order)
        close(macro.compute(), shares[occurs].mean())
        each = in_parts(kind(num_classes=CLASSES, average=None), inputs, order)
        close(each.compute(), np.where(occurs, shares, np.nan))


@SETTINGS
@given(seeds, merges)
def test_means_are_weighted_averages(seed, order):
    logits, _, weights = drawn(seed)
    values = logits[:, 0]
    inputs = (spoilt(values, weights), weights)
    close(
        in_parts(metrics.Mean(), inputs, order).compute(),
        np.average(values, weights=weights),
    )
    close(in_parts(metrics.Sum(), inputs, order).compute(), (values * weights).sum())


@SETTINGS
@given(seeds)
def test_top_k_is_that_of_a_stable_sort(seed):
    logits, labels, weights = drawn(seed)
    logits = np.round(logits)  # many are equal
    best = np.argsort(-logits, axis=1, kind="stable")[:, :2]
    right = (best == labels[:, None]).any(1)
    top = updated(metrics.Accuracy(top_k=2), logits, labels, weights)
    close(top.compute(), np.average(right, weights=weights))


@SETTINGS
@given(seeds, st.sampled_from([{"batch": 8}, {"batch": 2, "seq": 4}]))
def test_sharding_changes_nothing(seed, shape):
    logits, labels, weights = drawn(seed)
    mesh = ml.create_mesh(shape)
    axes = "batch" if len(shape) == 1 else ("batch", "seq")
    rows = mesh.layout(axes).sharding
    inputs = (
        jax.device_put(spoilt(logits, weights), mesh.layout(axes, None).sharding),
        jax.device_put(labels, rows),
        jax.device_put(weights, rows),
    )
    for metric in (metrics.Accuracy(), metrics.ConfusionMatrix(CLASSES)):
        found = updated(metric, *inputs).compute()
        close(found, metric.update(logits, labels, weights).compute())


def test_scikit_learn_agrees():
    sklearn = pytest.importorskip("sklearn.metrics")
    for seed in range(5):
        logits, labels, weights = drawn(seed)
        predicted = logits.argmax(1)
        inputs = (spoilt(logits, weights), labels, weights)
        real = weights > 0
        f1 = updated(metrics.F1(num_classes=CLASSES), *inputs)
        options = {"average": "macro", "zero_division": 0}
        given = labels[real], predicted[real]
        wanted = sklearn.f1_score(*given, sample_weight=weights[real], **options)
        close(f1.compute(), wanted)
        scores, true = logits[:, 0], (labels > 1).astype(int)
        scores = np.round(scores, 0)  # some are the threshold
        f1 = updated(metrics.F1(), scores, true, weights)
        wanted = sklearn.f1_score(true, scores > 0, sample_weight=weights)
        close(f1.compute(), wanted)
