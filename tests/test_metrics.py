"""Metrics say what NumPy says of the real examples, and refuse what does not fit."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

import meshlayout as ml
from meshlayout import metrics
from tests.error_messages import message_of
from tests.small_states import MeanEach


RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(16, 5)).astype(np.float32)
LABELS = RNG.integers(0, 5, 16).astype(np.int32)
SCORES = RNG.normal(size=16).astype(np.float32)
TRUE = RNG.integers(0, 2, 16).astype(np.int32)
MASK = np.arange(16) % 3 != 0

BY_CLASS = (LOGITS, LABELS)
BY_SCORE = (SCORES, TRUE)
EVERY = [
    (metrics.Mean(), (SCORES,)),
    (metrics.Sum(), (SCORES,)),
    (metrics.Last(), (SCORES,)),
    (metrics.Perplexity(), BY_CLASS),
    (metrics.Accuracy(), BY_CLASS),
    (metrics.Accuracy(top_k=2), BY_CLASS),
    (metrics.Accuracy(threshold=0.0), BY_SCORE),
    (metrics.ConfusionMatrix(5), BY_CLASS),
    (metrics.Precision(threshold=0.0), BY_SCORE),
    (metrics.Recall(num_classes=5), BY_CLASS),
    (metrics.F1(num_classes=5, average=None), BY_CLASS),
]
each_metric = pytest.mark.parametrize(
    ("metric", "inputs"), EVERY, ids=[repr(one[0]) for one in EVERY]
)
SOME = [EVERY[at] for at in (0, 2, 5, 7, 10)]


def types(tree):
    return [jax.typeof(jnp.asarray(x)) for x in jax.tree.leaves(tree)]


def values(metric):
    return np.asarray(metric.compute())


def close(found, wanted, rtol=2e-6):
    # Sums in another order differ in the last bits of float32.
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=1e-6)


@jax.jit
def updated(metric, inputs, weights):
    return metric.update(*inputs, weights)


@each_metric
def test_padded_rows_count_for_nothing_even_if_they_are_nan(metric, inputs):
    kept = updated(metric, [x[MASK] for x in inputs], None)
    spoilt = [
        np.where(MASK.reshape(-1, *[1] * (x.ndim - 1)), x, np.nan)
        if x.dtype == np.float32
        else np.where(MASK, x, 7)
        for x in inputs
    ]
    spoilt = [x.astype(old.dtype) for x, old in zip(spoilt, inputs, strict=True)]
    for weights in (MASK, MASK.astype(np.float32)):
        close(values(updated(metric, spoilt, weights)), values(kept))


@each_metric
def test_a_metric_is_frozen_and_keeps_its_types_whatever_is_added(metric, inputs):
    one = updated(metric, inputs, None)
    assert jax.tree.structure(one) == jax.tree.structure(metric)
    for other in (one, metric.update(*inputs), one.merge(metric), one.empty()):
        assert types(other) == types(metric)
        assert not any(x.weak_type for x in types(other))
        assert repr(other) == repr(metric)
    for merged in (one.merge(metric), metric.merge(one), one.merge(one.empty())):
        np.testing.assert_array_equal(values(merged), values(one))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.anything = 1


@pytest.mark.parametrize(("metric", "inputs"), SOME)
def test_parts_in_vmap_and_shard_map_make_one_update_with_all(metric, inputs):
    whole = values(updated(metric, inputs, MASK))
    parts = [x.reshape(4, 4, *x.shape[1:]) for x in (*inputs, MASK)]
    rows = jax.jit(jax.vmap(metric.update))(*parts)
    first, *others = (jax.tree.map(lambda x, i=i: x[i], rows) for i in range(4))
    close(values(functools.reduce(lambda a, b: a.merge(b), others, first)), whole)
    if isinstance(metric, metrics.Last):
        return  # not a sum

    def shard(*inputs):
        return jax.lax.psum(metric.update(*inputs), ("batch", "model")).compute()

    mesh, rows = ml.create_mesh({"batch": 4, "model": 2}), P(("batch", "model"))
    specs = {"mesh": mesh.jax_mesh, "in_specs": rows, "out_specs": P()}
    close(jax.jit(jax.shard_map(shard, **specs))(*inputs, MASK), whole)


class Scaled(metrics.Mean):
    factor: float = 1.0

    def compute(self):
        return super().compute() * self.factor


def test_a_subclass_is_a_metric_with_settings_of_its_own():
    own = Scaled("error", factor=100.0)
    assert repr(own) == "Scaled(values='error', factor=100.0)"
    one = updated(own, (SCORES,), MASK)
    for made in (one, one.merge(one), one.empty()):
        assert (type(made), made.factor) == (Scaled, 100.0)
    close(values(one.merge(one)), 100 * SCORES[MASK].mean())
    with pytest.raises(ml.errors.MetricError, match="same class and settings"):
        one.merge(Scaled("error", factor=1.0))


def test_metrics_of_other_classes_have_other_structures_and_do_not_merge():
    """Else jit, whose caches compare structures, may call another metric's program."""
    kinds = "Mean", "Sum", "Precision", "Recall", "F1"
    every = [getattr(metrics, kind)() for kind in kinds]
    structures = [jax.tree.structure(metric) for metric in every]
    for metric, other in itertools.permutations(every, 2):
        with pytest.raises(ml.MeshLayoutError, match="both must have the same class"):
            metric.merge(other)
    assert all(a != b for a, b in itertools.combinations(structures, 2))


TOKENS = RNG.normal(size=(16, 3)).astype(np.float32)
BOTH = RNG.uniform(size=(16, 3)).astype(np.float32)
ONE_HOT = np.eye(5, dtype=np.float32)[LABELS]
CHANCES = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
PERPLEXITY = np.exp(-np.log(CHANCES[np.arange(16), LABELS]).mean())
ACCURACY = np.float32((LOGITS.argmax(1) == LABELS).mean())
FLAT, NAN = np.zeros((4, 4), np.float32), np.full((3, 4), np.nan, np.float32)
TWICE_UP = np.array([[0.0, 1.0], [0.0, 1.0]], np.float32)
NO_CLASS = np.array([1, -1])
GUESSES, TRUTH = np.array([0, 0, 1]), np.array([0, 2, 1])
LAST = np.array([[1.0, 2.0], [3.0, 4.0]])
VALUES = [
    # Of any numbers and weights.
    (metrics.Sum(), [(jnp.ones(3000, jnp.bfloat16),)], 3000),
    (metrics.Mean(), [(np.array([2**40, 1]),)], (2**40 + 1) / 2),
    (metrics.Sum(), [(2**33,)], 2**33),
    (metrics.Mean(), [(jnp.array([jnp.inf, 1.0]),), (2.0,)], np.inf),
    (metrics.Mean(), [(jnp.array([jnp.nan, 1.0]),)], np.nan),
    (metrics.Mean(), [([4.0, 1.0, 9.0], np.array([0.5, 2.0, 0.0]))], 4 / 2.5),
    (metrics.Mean(), [(TOKENS, MASK)], TOKENS[MASK].mean()),
    (metrics.Mean(), [(TOKENS, BOTH)], np.average(TOKENS, weights=BOTH)),
    # A number per step counts once, unless nothing counts.
    (metrics.Mean(), [(2.0, [1, 1, 0]), (4.0, [1, 1]), (np.nan, [0, 0])], 3),
    (metrics.Mean(), [([2.0, np.nan, 4.0], [[0.1, 0], [0, 0], [3, 2]])], 3),  # of rows
    (metrics.Last(), [(LAST,)], 4),
    (metrics.Last(), [(LAST,), (2 * LAST, np.array([0, 1]))], 8),
    (metrics.Last(), [(LAST,), (np.array([5.0, np.nan]), np.zeros(2))], 4),
    # Of nothing.
    (metrics.Mean(), [], np.nan),
    (metrics.Last(), [], np.nan),
    (metrics.Perplexity(), [], np.nan),
    (metrics.F1(), [], np.nan),
    (metrics.Sum(), [], 0),
    (metrics.ConfusionMatrix(2), [], np.zeros((2, 2))),
    # Of classes: numbers or one-hot, with dims before.
    (metrics.Perplexity(), [BY_CLASS], PERPLEXITY),
    (metrics.Perplexity(), [(LOGITS, ONE_HOT)], PERPLEXITY),
    (metrics.Accuracy(), [(LOGITS, ONE_HOT)], ACCURACY),
    (metrics.Accuracy(), [(LOGITS.argmax(1), LABELS)], ACCURACY),
    (metrics.Accuracy(), [(LOGITS.reshape(4, 4, 5), LABELS.reshape(4, 4))], ACCURACY),
    # A label that is not a class.
    (metrics.Perplexity(), [(TWICE_UP, NO_CLASS)], np.nan),
    (metrics.Perplexity(), [(TWICE_UP, NO_CLASS, NO_CLASS >= 0)], 1 + np.exp(-1)),
    (metrics.Accuracy(), [(TWICE_UP, NO_CLASS)], 0.5),
    (metrics.Accuracy(top_k=2), [(TWICE_UP, NO_CLASS)], 0.5),
    # Of equal scores, the first class is predicted.
    (metrics.Accuracy(), [(FLAT, np.array([0, 1, 3, 3]))], 0.25),
    (metrics.Accuracy(top_k=3), [(FLAT, np.arange(4))], 0.75),
    # NaN is never right.
    (metrics.Accuracy(), [(NAN, np.arange(3))], 0),
    (metrics.Recall(num_classes=4), [(NAN, np.arange(3))], 0),
    (metrics.Accuracy(threshold=0.0), [(NAN[:, 0], np.zeros(3, int))], 0),
    # A class that is never predicted, and one that is missing.
    (
        metrics.Precision(num_classes=4, average=None),
        [(GUESSES, TRUTH)],
        [0.5, 1, 0, np.nan],
    ),
    (metrics.Precision(num_classes=4), [(GUESSES, TRUTH)], 0.5),
    # A score at the threshold is negative.
    *(
        (
            kind(threshold=0.0),
            [(jnp.array([0, 1, 0, 1], dtype), np.array([0, 1, 1, 1]))],
            x,
        )
        for kind, x in (
            (metrics.Accuracy, 3 / 4),
            (metrics.Precision, 1),
            (metrics.Recall, 2 / 3),
            (metrics.F1, 4 / 5),
        )
        for dtype in ("float32", "bfloat16", "int8", "bool")
    ),
]


@pytest.mark.parametrize(("metric", "batches", "expected"), VALUES)
def test_values_are_those_by_hand(metric, batches, expected):
    for batch in batches:
        metric = metric.update(*batch)
    close(values(metric), expected)


@pytest.mark.parametrize("num_classes", [2, 48, 1000, 4099])
def test_the_predicted_class_is_that_of_argmax_for_any_number_of_classes(num_classes):
    scores = RNG.integers(0, 50, (64, num_classes)).astype(np.float32)
    scores[:8] = -np.inf
    scores[8:12, -1] = np.inf
    labels = scores.argmax(1)  # of equal scores, the first
    assert values(updated(metrics.Accuracy(), (scores, labels), None)) == 1
    assert values(updated(metrics.Accuracy(), (scores, labels + 1), None)) == 0
    if num_classes < 4096:  # else the matrix is what takes long
        matrix = metrics.ConfusionMatrix(num_classes)
        matrix = updated(matrix, (scores[:12], labels[:12]), None)
        assert np.trace(values(matrix)) == 12


N, CLASSES = 16, 4
# Weights are halves, so that sums are exact but for the shares themselves.
roughly = functools.partial(close, rtol=2e-5)
SETTINGS = settings(max_examples=15, deadline=None, derandomize=True)
add = jax.jit(lambda metric, *inputs: metric.update(*inputs))
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
    parts = [add(metric, *(x[4 * at : 4 * at + 4] for x in inputs)) for at in order]
    left = merged(parts[0], parts[1])
    return merged(left, merged(parts[2], parts[3]))


def spoilt(scores, weights):
    kept = (weights != 0).reshape(-1, *[1] * (scores.ndim - 1))
    return np.where(kept, scores, np.nan).astype(np.float32)


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
    roughly(in_parts(metrics.ConfusionMatrix(CLASSES), inputs, order).compute(), cells)
    hits, rows, columns = np.diag(cells), cells.sum(1), cells.sum(0)
    roughly(
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
        roughly(macro.compute(), shares[occurs].mean())
        each = in_parts(kind(num_classes=CLASSES, average=None), inputs, order)
        roughly(each.compute(), np.where(occurs, shares, np.nan))


@SETTINGS
@given(seeds)
def test_top_k_is_that_of_a_stable_sort(seed):
    logits, labels, weights = drawn(seed)
    logits = np.round(logits)  # many are equal
    best = np.argsort(-logits, axis=1, kind="stable")[:, :2]
    right = (best == labels[:, None]).any(1)
    top = add(metrics.Accuracy(top_k=2), logits, labels, weights)
    roughly(top.compute(), np.average(right, weights=weights))


TOKEN_LOGITS = RNG.normal(size=(4, 8, 8)).astype(np.float32)
BY_TOKEN = (TOKEN_LOGITS, RNG.integers(0, 8, (4, 8)))
SHARDED = [
    *((*one, x, MASK) for one in SOME for x in ("auto", "explicit")),
    *(
        (metric, BY_TOKEN, "auto", RNG.integers(0, 2, (4, 8)))
        for metric in (
            metrics.Accuracy(top_k=3),
            metrics.Perplexity(),
            metrics.ConfusionMatrix(8),
            metrics.F1(num_classes=8),
        )
    ),
]


@pytest.mark.parametrize(("metric", "inputs", "types", "mask"), SHARDED)
def test_sharded_inputs_give_what_whole_ones_give(metric, inputs, types, mask):
    mesh = ml.create_mesh({"batch": 2, "model": 4}, axis_types=types)
    dims = ("batch", "model")[: mask.ndim]  # tokens are sharded on two dims
    whole = values(updated(metric, inputs, mask))
    *rest, weights = (ml.relayout(x, mesh.layout(*dims, ...)) for x in (*inputs, mask))
    for specs in [dims, ("batch", None, "model")][: mask.ndim]:  # or by classes
        rest[0] = ml.relayout(inputs[0], mesh.layout(*specs, ...))
        close(values(updated(metric, rest, weights)), whole)


@pytest.mark.parametrize("metric", [metrics.Accuracy(), metrics.F1(3)])
def test_a_share_without_mistakes_is_exactly_1(metric, mesh_2x4):
    share = jax.jit(lambda *arrays: metric.update(*arrays).compute())
    for seed in range(10):
        labels = np.zeros(64, np.int32)
        weights = np.random.default_rng(seed).uniform(0.1, 3, 64).astype(np.float32)
        arrays = np.eye(3, dtype=np.float32)[labels], labels, weights
        arrays = [ml.relayout(x, mesh_2x4.layout("batch", ...)) for x in arrays]
        assert share(*arrays) == 1


BATCH = {"label": LABELS, "image": np.zeros((16, 2))}


def fed_alone(metric, outputs, batch, **inputs):
    one = metrics.Metrics({"it": metric})
    return one.update_from(outputs=outputs, batch=batch, **inputs).metric("it")


def test_arguments_are_found_in_outputs_then_batch():
    both = {"logits": LOGITS, "label": LOGITS.argmax(1)}
    assert values(fed_alone(metrics.Accuracy(), both, BATCH)) == 1
    pair = fed_alone(metrics.Accuracy(labels=1), {"logits": LOGITS}, (None, LABELS))
    assert values(pair) == ACCURACY
    for batch, key in (({"weight": MASK}, {}), ((LABELS, MASK), {"weights": 1})):
        close(
            values(fed_alone(metrics.Mean(), None, batch, losses=SCORES, **key)),
            SCORES[MASK].mean(),
        )


COLLECTION = metrics.Metrics({"loss": metrics.Mean(), "accuracy": metrics.Accuracy()})


@jax.jit
def fed(collection, weights):
    return collection.update_from(
        outputs={"logits": LOGITS}, batch=BATCH, losses=SCORES, weights=weights
    )


def test_a_collection_is_a_mapping_of_values_that_jit_takes_and_returns():
    found = fed(COLLECTION, MASK)
    assert list(found) == list(found.to_host()) == ["loss", "accuracy"]
    assert jax.tree.structure(found) == jax.tree.structure(COLLECTION)
    assert isinstance(found["loss"], jax.Array)
    assert isinstance(found.metric("accuracy"), metrics.Accuracy)
    assert found.to_host()["loss"] == pytest.approx(SCORES[MASK].mean())
    twice = found.merge(fed(found.empty(), ~MASK))
    assert twice.to_host()["loss"] == pytest.approx(SCORES.mean())
    shown = metrics.Metrics({"z": metrics.Sum(), "matrix": metrics.ConfusionMatrix(2)})
    assert " ".join(repr(shown).split()).endswith("z 0 matrix [[0. 0.] [0. 0.]]")
    assert "<td" in shown._repr_html_()
    jax.jit(lambda m: repr(m) and m)(shown)


def test_average_and_accuracy_of_nnx_become_metrics_of_ours():
    average = nnx.metrics.Average("loss")
    average.update(loss=jnp.full(3, 7.0))  # what it has counted stays its own
    theirs = nnx.metrics.Accuracy(threshold=0.5)
    theirs.update(logits=jnp.float32([0.5, 0.4]), labels=jnp.int32([1, 1]))
    outputs = {"logits": LOGITS, "loss": np.where(MASK, SCORES, np.nan)}
    outputs["labels"] = LABELS
    found = metrics.Metrics({"accuracy": nnx.metrics.Accuracy(), "loss": average})
    found = found.update_from(outputs=outputs, batch=BATCH, weights=MASK)
    close(found["loss"], SCORES[MASK].mean())
    close(found["accuracy"], (LOGITS.argmax(1) == LABELS)[MASK].mean())
    outputs = {"logits": np.float32([0.5, 0.4]), "labels": np.int32([1, 1])}
    high = fed_alone(nnx.metrics.Accuracy(threshold=0.5), outputs, None)
    assert values(high) == theirs.compute() == 0.5


class Sampled(MeanEach):
    @classmethod
    def from_model_output(cls, each, sample_weights):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().from_model_output(each, sample_weights)


class Unmasked(MeanEach):
    @classmethod
    def from_model_output(cls, each):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().from_model_output(each, jnp.ones(each.shape))


@pytest.mark.parametrize("kind", [MeanEach, Sampled])
def test_metrics_of_others_take_weights_or_are_refused(kind):
    theirs = fed_alone(kind, {"each": SCORES}, {}, weights=MASK)
    close(values(theirs), SCORES[MASK].mean())
    rest = fed_alone(theirs.empty(), {"each": SCORES}, {}, weights=~MASK)
    close(values(theirs.merge(rest)), SCORES.mean())
    fed_alone(Unmasked, {"each": SCORES}, {})
    with pytest.raises(ml.errors.MetricError, match="cannot leave out what has weight"):
        fed_alone(Unmasked, {"each": SCORES}, {}, weights=MASK)


def test_clu_and_metrax_agree_with_numpy():
    clu = pytest.importorskip("clu.metrics")
    metrax = pytest.importorskip("metrax")
    step = {"logits": LOGITS, "loss": SCORES, "labels": LABELS}
    step["predictions"] = LOGITS.argmax(1)
    theirs = {
        "average": clu.Average.from_output("loss"),
        "clu": clu.Accuracy,
        "metrax": metrax.Accuracy,
    }
    found = metrics.Metrics(theirs).update_from(outputs=step, batch={}, weights=MASK)
    close(found["average"], SCORES[MASK].mean())
    close([found["clu"], found["metrax"]], (LOGITS.argmax(1) == LABELS)[MASK].mean())


def by_hand(logits, labels):
    return jnp.mean(jnp.argmax(logits, axis=-1) == labels)


@pytest.mark.parametrize(
    ("batch", "classes"),
    [(("batch", "model"), None), ("batch", "model"), (("batch", "model"),) * 2],
    ids=["classes whole", "classes cut", "classes cut as the rows are"],
)
def test_accuracy_costs_what_an_argmax_by_hand_costs(batch, classes, mesh_2x4):
    rows, width, num_classes = 512, 32, 4096

    def abstract(shape, *specs, dtype="float32"):
        sharding = mesh_2x4.layout(*specs).sharding
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    params = {
        "in": abstract((width, width), None, None),
        "out": abstract((width, num_classes), None, classes),
    }
    x, labels = abstract((rows, width), batch, None), abstract((rows,), batch)
    labels = labels.update(dtype=jnp.int32)

    def costs(measure):
        def step(params, x, labels):
            def loss(params):
                logits = jnp.tanh(x @ params["in"]) @ params["out"]
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
                return losses.mean(), measure(logits, labels)

            (value, found), grads = jax.value_and_grad(loss, has_aux=True)(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, found

        compiled = jax.jit(step, donate_argnums=0).lower(params, x, labels).compile()
        sent = ml.testing.expect_communication(compiled).collectives
        temp_bytes = compiled.memory_analysis().temp_size_in_bytes
        return np.array([temp_bytes, sum(one.nbytes for one in sent)])

    assert np.all(costs(metrics.Accuracy().update) <= 1.1 * costs(by_hand))


# Refusals.
REFUSED = {
    "Accuracy: give threshold= or top_k=, not both.": (
        lambda: metrics.Accuracy(top_k=2, threshold=0.5)
    ),
    "Precision: average must be 'macro' or None, got 'micro'. Did you mean 'macro'?": (
        lambda: metrics.Precision(average="micro")
    ),
    "Mean: weights f32[4] does not fit elements f32[16]. Give weights of the shape of "
    "the elements or of their first dims, such as (16,).": (
        lambda: metrics.Mean().update(SCORES, np.ones(4))
    ),
    "Accuracy: predictions f32[16, 5] and labels f32[16] do not fit. Labels are class ": (
        lambda: metrics.Accuracy().update(LOGITS, SCORES)
    ),
    "Recall: predictions f32[16, 5] and labels i32[16] do not fit. For several classes, "
    "write Recall(num_classes=5, labels='label').": (
        lambda: metrics.Recall().update(LOGITS, LABELS)
    ),
    "ConfusionMatrix: predictions f32[16, 5] and labels i32[16] do not fit. There are ": (
        lambda: metrics.ConfusionMatrix(3).update(*BY_CLASS)
    ),
    "Metrics of loss, accuracy do not merge with a.": (
        lambda: COLLECTION.merge(metrics.Metrics({"a": metrics.Mean()}))
    ),
    "metrics: 'mae': 'mae' is a name. Write ml.metrics.Accuracy(labels='y'), or "
    "Mean(values='mae') for an output.": lambda: metrics.Metrics({"mae": "mae"}),
    "metrics: 'a': 3 is not a metric such as ml.metrics.Accuracy(labels='y'): it must have empty, ": (
        lambda: metrics.Metrics({"a": 3})
    ),
    "metrics: 'f1': a function is no metric: return its value per example as an output of "
    "the loss function, and write ml.metrics.Mean(values='f1'). For a value of a whole "
    "epoch, write a callback that sets logs['val_f1'].": (
        lambda: metrics.Metrics({"f1": lambda labels, scores: 0})
    ),
    **{
        f"metrics: 'a': the class {call.partition('(')[0]} is a class; give an instance: "
        f"{call}.": (
            lambda kind=kind: ml.make_train_step(lambda m, b: 0, metrics={"a": kind})
        )
        for kind, call in {
            metrics.Accuracy: "Accuracy(labels='y')",
            nnx.metrics.Average: "Average()",
        }.items()
    },
    "metric 'l': Mean: there is no 'loss' among the outputs and the entries of the batch "
    "('losses', 'batch', 'label', 'image'). Did you mean 'losses'? A step reports the "
    "loss itself, as metrics['loss'].": (
        lambda: metrics.Metrics({"l": nnx.metrics.Average("loss")}).update_from(
            outputs=None, batch=BATCH, losses=SCORES
        )
    ),
    "metric 'accuracy': Accuracy: there is no 'logits' among the outputs and the "
    "entries of the batch ('losses', 'batch', 'label', 'image', 'logit'). Did you mean "
    "'logit'? ml.metrics.Accuracy(predictions=...) takes the name or position of yours.": (
        lambda: COLLECTION.update_from(
            outputs={"logit": LOGITS}, batch=BATCH, losses=SCORES
        )
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_in_words(message):
    assert message_of(REFUSED[message], error=ml.errors.MetricError).startswith(message)
