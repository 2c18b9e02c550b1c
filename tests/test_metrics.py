"""Metrics say what NumPy says of the real examples, and refuse what does not fit."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshlayout as ml
from meshlayout import metrics


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
    (metrics.MeanSquaredError(), BY_SCORE),
    (metrics.MeanAbsoluteError(), BY_SCORE),
    (metrics.CrossEntropy(), BY_CLASS),
    (metrics.Perplexity(), BY_CLASS),
    (metrics.Accuracy(), BY_CLASS),
    (metrics.Accuracy(top_k=2), BY_CLASS),
    (metrics.Accuracy(threshold=0.0), BY_SCORE),
    (metrics.ConfusionMatrix(5), BY_CLASS),
    (metrics.Precision(threshold=0.0), BY_SCORE),
    (metrics.Recall(num_classes=5, average="macro"), BY_CLASS),
    (metrics.F1(num_classes=5, average="micro"), BY_CLASS),
    (metrics.F1(num_classes=5, average=None), BY_CLASS),
    (metrics.AUC(num_thresholds=32), BY_SCORE),
    (metrics.AUC(num_thresholds=32, curve="PR"), BY_SCORE),
    (metrics.Histogram(-2, 2, 8), (SCORES,)),
    (metrics.Quantile(0.5, -3, 3), (SCORES,)),
]
each_metric = pytest.mark.parametrize(
    ("metric", "inputs"), EVERY, ids=[repr(metric) for metric, _ in EVERY]
)

some_metrics = pytest.mark.parametrize(
    ("metric", "inputs"), [EVERY[at] for at in (0, 2, 8, 10, 12, 15)]
)


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


# Properties of all of them.


@each_metric
def test_padded_rows_count_for_nothing_even_if_they_are_nan(metric, inputs):
    kept = metric.update(*(x[MASK] for x in inputs))
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
def test_state_never_changes_its_structure_shapes_or_dtypes(metric, inputs):
    one = updated(metric, inputs, None)
    assert jax.tree.structure(one) == jax.tree.structure(metric)
    for other in (one, metric.update(*inputs), one.merge(metric), one.reset()):
        assert types(other) == types(metric)
        assert not any(x.weak_type for x in types(other))


@each_metric
def test_merging_the_empty_metric_changes_nothing(metric, inputs):
    one = updated(metric, inputs, None)
    for merged in (one.merge(metric), metric.merge(one), one.merge(one.reset())):
        np.testing.assert_array_equal(values(merged), values(one))


@some_metrics
def test_scan_over_batches_equals_one_update_with_all(metric, inputs):
    batches = [x.reshape(4, 4, *x.shape[1:]) for x in inputs]

    def step(metric, batch):
        return metric.update(*batch[0], batch[1]), None

    scan = jax.jit(lambda m, b: jax.lax.scan(step, m, b)[0])
    scanned = scan(metric, (batches, MASK.reshape(4, 4)))
    close(values(scanned), values(updated(metric, inputs, MASK)))


@some_metrics
def test_all_reduce_of_shards_equals_one_update_with_all(metric, inputs):
    mesh = ml.create_mesh({"batch": 4, "model": 2}).jax_mesh

    def shard(inputs, weights):
        return metric.update(*inputs, weights).all_reduce(("batch", "model")).compute()

    rows = P(("batch", "model"))
    both = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=rows, out_specs=P()))
    close(np.asarray(both(inputs, MASK)), values(updated(metric, inputs, MASK)))


@each_metric
def test_metrics_are_frozen_and_reset_to_the_same_configuration(metric, inputs):
    one = updated(metric, inputs, None)
    assert repr(one) == repr(metric) == repr(one.reset())
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.anything = 1


@some_metrics
def test_vmap_gives_one_metric_per_row(metric, inputs):
    rows = [x.reshape(2, 8, *x.shape[1:]) for x in inputs]
    computed = jax.vmap(lambda *row: metric.update(*row).compute())(*rows)
    for at in range(2):
        close(computed[at], values(metric.update(*(x[at] for x in rows))))


@pytest.mark.parametrize("metric", [metrics.Sum(), metrics.Mean()])
def test_low_precision_inputs_are_summed_in_float32(metric):
    for dtype in (jnp.bfloat16, jnp.float16, jnp.int8, jnp.bool_):
        one = metric.update(jnp.ones(3000, dtype))
        assert values(one) == (3000 if isinstance(metric, metrics.Sum) else 1)


# Sums.


def test_twenty_million_increments_of_one_are_counted():
    def step(total, _):
        return total.update(jnp.ones(())), None

    @jax.jit
    def thousand(total):
        return jax.lax.scan(step, total, length=1000)[0]

    near = metrics.Sum().update(jnp.float32(2**24 - 500))
    assert values(thousand(near)) == 2**24 + 500
    total = thousand(metrics.Sum())
    for _ in range(4):
        total = total.merge(total)  # 16 thousand
    many = total
    for _ in range(1249):
        many = many.merge(total)
    assert values(many) == 20_000_000
    one_more = many.update(1.0).merge(many.update(1.0))
    assert values(one_more) == 40_000_002
    difference = one_more.update(-40_000_000.0)
    assert values(difference) == 2


def test_infinite_values_stay_infinite():
    assert (
        values(metrics.Mean().update(jnp.array([jnp.inf, 1.0])).update(2.0)) == np.inf
    )
    assert np.isnan(values(metrics.Mean().update(jnp.array([jnp.nan, 1.0]))))


def test_fractional_weights_weigh():
    weights = np.array([0.5, 2.0, 0.0])
    mean = metrics.Mean().update(np.array([4.0, 1.0, 9.0]), weights)
    assert values(mean) == pytest.approx(4 / 2.5)


def test_weights_per_example_apply_to_every_token():
    tokens = RNG.normal(size=(16, 3)).astype(np.float32)
    mean = metrics.Mean().update(tokens, MASK)
    close(values(mean), tokens[MASK].mean())
    both = RNG.uniform(size=(16, 3)).astype(np.float32)
    close(values(metrics.Mean().update(tokens, both)), np.average(tokens, weights=both))


def test_a_number_per_step_counts_once_unless_nothing_counts():
    mean = metrics.Mean().update(2.0, np.array([1, 1, 0])).update(4.0, np.ones(9))
    assert values(mean.update(np.nan, np.zeros(3))) == 3


def test_last_keeps_the_last_counted_value():
    last = metrics.Last().update(np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert values(last) == 4
    assert (
        values(last.update(np.array([[7.0, 8.0], [9.0, 1.0]]), np.array([1, 0]))) == 8
    )
    assert values(last.update(np.array([5.0, np.nan]), np.zeros(2))) == 4


def test_what_is_empty_computes_to_nan():
    assert np.isnan(values(metrics.Mean()))
    assert np.isnan(values(metrics.Accuracy()))
    assert np.isnan(values(metrics.Perplexity()))
    assert np.isnan(values(metrics.Last()))
    assert np.isnan(values(metrics.AUC()))
    assert np.isnan(values(metrics.AUC(curve="PR")))
    assert np.isnan(values(metrics.F1(num_classes=2, average="macro")))
    assert np.isnan(values(metrics.Quantile(0.5, 0, 1)))
    assert values(metrics.Sum()) == 0
    assert values(metrics.ConfusionMatrix(2)).tolist() == [[0, 0], [0, 0]]


# Losses and classes.


def test_cross_entropy_and_perplexity_are_those_of_numpy():
    chances = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
    wanted = -np.log(chances[np.arange(16), LABELS]).mean()
    one_hot = np.eye(5, dtype=np.float32)[LABELS]
    close(values(metrics.CrossEntropy().update(LOGITS, LABELS)), wanted)
    close(values(metrics.CrossEntropy().update(LOGITS, one_hot)), wanted)
    given = metrics.CrossEntropy(from_logits=False).update(chances, LABELS)
    close(values(given), wanted)
    close(values(metrics.Perplexity().update(LOGITS, LABELS)), np.exp(wanted))


def test_a_label_that_is_no_class_is_nan_in_losses_and_wrong_in_accuracy():
    labels = np.array([1, -1])
    logits = np.array([[0.0, 1.0], [0.0, 1.0]], np.float32)
    assert np.isnan(values(metrics.CrossEntropy().update(logits, labels)))
    assert values(metrics.Accuracy().update(logits, labels)) == 0.5
    ignored = metrics.CrossEntropy().update(logits, labels, labels >= 0)
    assert values(ignored) == pytest.approx(np.log1p(np.exp(-1)))


def test_accuracy_takes_sparse_one_hot_and_predicted_classes():
    wanted = (LOGITS.argmax(1) == LABELS).mean()
    one_hot = np.eye(5)[LABELS]
    assert values(metrics.Accuracy().update(LOGITS, LABELS)) == wanted
    assert values(metrics.Accuracy().update(LOGITS, one_hot)) == wanted
    assert values(metrics.Accuracy().update(LOGITS.argmax(1), LABELS)) == wanted
    tokens = metrics.Accuracy().update(LOGITS.reshape(4, 4, 5), LABELS.reshape(4, 4))
    assert values(tokens) == wanted


def test_equal_scores_predict_the_first_class_only():
    flat = np.zeros((4, 4), np.float32)
    for label, wanted in ((0, 1), (1, 0), (3, 0)):
        assert values(metrics.Accuracy().update(flat, np.full(4, label))) == wanted
    assert values(metrics.Accuracy(top_k=3).update(flat, np.arange(4))) == 0.75


def test_nan_scores_are_never_right():
    nan = np.full((3, 4), np.nan, np.float32)
    assert values(metrics.Accuracy(top_k=2).update(nan, np.arange(3))) == 0
    wrong = metrics.Accuracy(threshold=0.0).update(nan[:, 0], np.zeros(3, int))
    assert values(wrong) == 0


def test_a_class_that_nobody_predicts_has_precision_zero_and_a_missing_one_none():
    precision = metrics.Precision(num_classes=4, average=None)
    found = values(precision.update(np.array([0, 0, 1]), np.array([0, 2, 1])))
    np.testing.assert_array_equal(found, [0.5, 1, 0, np.nan])
    macro = metrics.Precision(num_classes=4, average="macro")
    assert values(macro.update(np.array([0, 0, 1]), np.array([0, 2, 1]))) == 0.5


# Curves and histograms.


def test_auc_is_the_share_of_pairs_in_order():
    scores = (np.arange(40) + 0.5) / 40
    labels = RNG.integers(0, 2, 40)
    pairs = [a > b for a in scores[labels == 1] for b in scores[labels == 0]]
    auc = metrics.AUC(num_thresholds=40, from_logits=False).update(scores, labels)
    close(values(auc), np.mean(pairs))
    assert float(auc.error_bound()) == 0


def test_average_precision_is_the_sum_over_recall_steps():
    scores = (np.arange(40) + 0.5) / 40
    labels = RNG.integers(0, 2, 40)
    order = labels[::-1]
    precision = np.cumsum(order) / np.arange(1, 41)
    auc = metrics.AUC(num_thresholds=40, curve="PR", from_logits=False)
    close(values(auc.update(scores, labels)), precision[order == 1].mean())


def test_nan_scores_that_count_make_the_area_nan():
    assert np.isnan(values(metrics.AUC().update(np.array([np.nan, 1.0]), TRUE[:2])))


def test_histogram_counts_what_lies_outside_apart():
    histogram = metrics.Histogram(0, 1, 4).update(np.array([-1, 0, 0.3, 1, 2, 3.0]))
    assert values(histogram).tolist() == [1, 1, 0, 1]
    assert (float(histogram.below), float(histogram.above)) == (1, 2)
    assert histogram.edges.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert float(histogram.quantile(0.0)) == -np.inf
    assert float(histogram.quantile(1.0)) == np.inf


def test_quantile_is_off_by_a_bin_at_most():
    sample = RNG.uniform(0, 10, 1000)
    for q in (0.0, 0.1, 0.5, 0.99, 1.0):
        one = metrics.Quantile(q, 0, 10, num_bins=500).update(sample)
        wanted = np.quantile(sample, q, method="inverted_cdf")
        assert abs(values(one) - wanted) <= 10 / 500 + 1e-5


# Shards.


@pytest.mark.parametrize("explicit", [False, True])
@some_metrics
def test_sharded_inputs_give_what_whole_ones_give(metric, inputs, explicit, mesh_2x4):
    mesh = mesh_2x4
    if explicit:
        kinds = (jax.sharding.AxisType.Explicit,) * 2
        mesh = ml.create_mesh({"batch": 2, "model": 4}, axis_types=kinds)
    rows = [
        jax.device_put(x, mesh.layout("batch", *[None] * (x.ndim - 1)).sharding)
        for x in inputs
    ]
    mask = jax.device_put(MASK, mesh.layout("batch").sharding)
    close(values(updated(metric, rows, mask)), values(updated(metric, inputs, MASK)))


@pytest.mark.parametrize("shape", [{"batch": 1, "seq": 8}, {"batch": 2, "seq": 4}])
def test_tokens_sharded_on_two_dims_give_what_whole_ones_give(shape):
    mesh = ml.create_mesh(shape)
    logits = RNG.normal(size=(4, 8, 8)).astype(np.float32)
    labels = RNG.integers(0, 8, (4, 8))
    mask = RNG.integers(0, 2, (4, 8))
    for metric in (
        metrics.Accuracy(top_k=3),
        metrics.CrossEntropy(),
        metrics.ConfusionMatrix(8),
        metrics.F1(num_classes=8, average="macro"),
    ):
        whole = values(metric.update(logits, labels, mask))
        tokens = mesh.layout("batch", "seq").sharding
        for specs in (("batch", "seq", None), ("batch", None, "seq")):
            cut = jax.device_put(logits, mesh.layout(*specs).sharding)
            given = (cut, jax.device_put(labels, tokens))
            found = updated(metric, given, jax.device_put(mask, tokens))
            close(values(found), whole)


# Throughput.


def test_throughput_counts_real_examples_per_second(monkeypatch):
    clock = iter([10.0, 14.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    speed = metrics.Throughput()
    batch = {"image": np.zeros((6, 2))}
    for weights in (None, np.array([1, 1, 0, 0, 0, 0])):
        speed = jax.jit(lambda m, b, w: m.update(b, w))(speed, batch, weights)
    assert float(speed.compute()) == 2  # 8 examples in 4 seconds


def test_throughput_made_inside_jit_takes_the_start_of_what_it_is_merged_with(
    monkeypatch,
):
    clock = iter([10.0, 12.0, 12.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    started = metrics.Throughput("steps")
    inside = jax.jit(lambda: metrics.Throughput("steps").update({}))()
    assert float(started.merge(inside).compute()) == 0.5
    assert np.isnan(float(inside.compute()))


# Feeding.


BATCH = {"label": LABELS, "image": np.zeros((16, 2))}


def test_arguments_are_found_in_outputs_then_batch():
    metric = metrics.update_from(
        metrics.Accuracy(), outputs={"logits": LOGITS}, batch=BATCH, weights=MASK
    )
    assert values(metric) == np.float32((LOGITS.argmax(1) == LABELS)[MASK].mean())
    both = {"logits": LOGITS, "label": LOGITS.argmax(1)}
    assert (
        values(metrics.update_from(metrics.Accuracy(), outputs=both, batch=BATCH)) == 1
    )
    pair = metrics.Accuracy(labels=1)
    pair = metrics.update_from(pair, outputs={"logits": LOGITS}, batch=(None, LABELS))
    assert values(pair) == np.float32((LOGITS.argmax(1) == LABELS).mean())


def test_mean_takes_the_losses_by_default():
    metric = metrics.update_from(
        metrics.Mean(), outputs=None, batch=BATCH, losses=SCORES, weights=MASK
    )
    close(values(metric), SCORES[MASK].mean())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Own:
    total: jax.Array

    def update(self, logits, label, weights, losses, missing=3, **rest):
        assert missing == 3
        assert {*rest} == {"image"}
        return Own(self.total + jnp.sum(losses * weights))

    def merge(self, other):
        return Own(self.total + other.total)

    def compute(self):
        return self.total


def test_a_users_own_metric_gets_what_its_parameters_name():
    metric = metrics.update_from(
        Own(jnp.zeros(())),
        outputs={"logits": LOGITS},
        batch=BATCH,
        losses=SCORES,
        weights=MASK,
    )
    close(values(metric), SCORES[MASK].sum())


# The collection.


def collection():
    return metrics.Metrics({"loss": metrics.Mean(), "accuracy": metrics.Accuracy()})


def fed(all_metrics, weights=None):
    return all_metrics.update_from(
        outputs={"logits": LOGITS}, batch=BATCH, losses=SCORES, weights=weights
    )


def test_a_collection_is_a_mapping_of_values_that_jit_takes_and_returns():
    empty = collection()
    found = jax.jit(fed)(empty, MASK)
    assert list(found) == ["loss", "accuracy"]
    assert jax.tree.structure(found) == jax.tree.structure(empty)
    assert isinstance(found["loss"], jax.Array)
    assert isinstance(found.metric("accuracy"), metrics.Accuracy)
    host = found.to_host()
    assert list(host) == ["loss", "accuracy"]
    assert host["loss"] == pytest.approx(SCORES[MASK].mean())
    twice = found.merge(fed(found.reset(), ~MASK))
    assert twice.to_host()["loss"] == pytest.approx(SCORES.mean())


def test_a_collection_can_be_copied_and_not_changed():
    found = fed(collection(), MASK)
    for copied in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert copied.to_host() == found.to_host()
    with pytest.raises(AttributeError) as error:
        found.loss = 3
    wanted = "Metrics cannot be changed: make new ones instead of setting 'loss'."
    assert str(error.value) == wanted


def test_a_collection_shows_its_values():
    shown = metrics.Metrics({"z": metrics.Sum(), "matrix": metrics.ConfusionMatrix(2)})
    assert repr(shown).split() == [
        "metric",
        "value",
        "──────",
        "────────────────────",
        "z",
        "0",
        "matrix",
        "[[0.,",
        "0.],",
        "[0.,",
        "0.]]",
    ]
    assert "<td" in shown._repr_html_()
    jax.jit(lambda m: repr(m) and m)(shown)


# Metrics of others.


def test_nnx_metrics_leave_out_what_has_weight_zero_and_merge_exactly():
    multi = nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
    )
    adapted = metrics.adapt(multi, labels="label")
    welford = metrics.adapt(nnx.metrics.Welford("loss"))
    loss = np.where(MASK, SCORES, np.nan)
    both = metrics.Metrics({"multi": adapted, "welford": welford})

    @jax.jit
    def step(both, loss, weights):
        outputs = {"logits": LOGITS, "loss": loss}
        return both.update_from(outputs=outputs, batch=BATCH, weights=weights)

    once = step(both, loss, MASK)
    assert types(once) == types(both)
    close(once["multi"]["loss"], SCORES[MASK].mean())
    close(once["multi"]["accuracy"], (LOGITS.argmax(1) == LABELS)[MASK].mean())
    merged = once.merge(step(both, SCORES, ~MASK))
    close(merged["multi"]["loss"], SCORES.mean())
    close(merged["welford"].standard_deviation, SCORES.std())
    close(merged["welford"].mean, SCORES.mean())
    close(once.reset().merge(once)["welford"].standard_deviation, SCORES[MASK].std())


class Largest(nnx.metrics.Metric):
    def __init__(self):
        self.value = nnx.metrics.MetricState(jnp.float32(-jnp.inf))

    def reset(self):
        self.value[...] = jnp.float32(-jnp.inf)

    def update(self, *, loss, **_):
        self.value[...] = jnp.maximum(self.value[...], loss.max())

    def compute(self):
        return self.value[...]


def test_adapting_an_nnx_metric_leaves_it_and_its_results_alone():
    average = nnx.metrics.Average()
    adapted = metrics.adapt(average)
    once = metrics.update_from(adapted, outputs={"values": SCORES}, batch={})
    once.reset()
    average.update(values=jnp.full(3, 7.0))
    assert np.isnan(values(adapted))
    close(values(once), SCORES.mean())


def test_what_is_adapted_already_stays_as_it_is():
    for adapted in (
        metrics.adapt(nnx.metrics.Average()),
        metrics.adapt(nnx.MultiMetric(loss=nnx.metrics.Average())),
        metrics.adapt(Duck, values="loss"),
        metrics.Accuracy(),
    ):
        assert metrics.adapt(adapted) is adapted


def test_an_own_nnx_metric_is_updated_and_not_merged():
    largest = metrics.adapt(Largest())
    largest = metrics.update_from(largest, outputs={"loss": SCORES}, batch={})
    assert values(largest) == SCORES.max()
    with pytest.raises(ml.errors.MetricError) as error:
        largest.merge(largest)
    assert str(error.value) == (
        "nnx's Largest cannot be merged: flax does not say how. Average, Accuracy, "
        "Welford and MultiMetric of them can."
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Duck:
    total: jax.Array
    count: jax.Array

    @classmethod
    def empty(cls):
        return cls(jnp.zeros(()), jnp.zeros(()))

    @classmethod
    def from_model_output(cls, values, sample_weights=None):
        if sample_weights is None:
            sample_weights = jnp.ones(values.shape)
        return cls(jnp.sum(values * sample_weights), jnp.sum(sample_weights))

    def merge(self, other):
        return Duck(self.total + other.total, self.count + other.count)

    def compute(self):
        return self.total / self.count


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unmasked(Duck):
    @classmethod
    def from_model_output(cls, values):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().from_model_output(values)


def test_model_output_metrics_take_weights_and_blanked_rows():
    loss = np.where(MASK, SCORES, np.nan)
    duck = metrics.adapt(Duck, values="loss")
    duck = metrics.update_from(duck, outputs={"loss": loss}, batch={}, weights=MASK)
    close(values(duck), SCORES[MASK].mean())
    rest = metrics.update_from(
        duck.reset(), outputs={"loss": SCORES}, batch={}, weights=~MASK
    )
    close(values(duck.merge(rest)), SCORES.mean())


def test_a_metric_that_cannot_leave_out_padding_is_refused():
    duck = metrics.adapt(Unmasked, values="loss")
    metrics.update_from(duck, outputs={"loss": SCORES}, batch={})
    with pytest.raises(ml.errors.MetricError) as error:
        metrics.update_from(duck, outputs={"loss": SCORES}, batch={}, weights=MASK)
    assert str(error.value).endswith(
        "'s Unmasked takes neither 'mask' nor 'sample_weights', so it cannot leave out "
        "what has weight 0. Use a metric of meshlayout.metrics, or batches without "
        "padding and weights."
    )


def test_clu_and_metrax_agree_with_numpy():
    clu = pytest.importorskip("clu.metrics")
    metrax = pytest.importorskip("metrax")
    wanted = (LOGITS.argmax(1) == LABELS)[MASK].mean()
    average = metrics.adapt(clu.Average.from_output("loss"))
    loss = np.where(MASK, SCORES, np.nan)
    step = {"logits": LOGITS, "loss": loss, "classes": LOGITS.argmax(1)}
    average = metrics.update_from(average, outputs=step, batch=BATCH, weights=MASK)
    close(values(average), SCORES[MASK].mean())
    ours = metrics.adapt(clu.Accuracy, labels="label")
    close(
        values(metrics.update_from(ours, outputs=step, batch=BATCH, weights=MASK)),
        wanted,
    )
    theirs = metrics.adapt(metrax.Accuracy, predictions="classes", labels="label")
    close(
        values(metrics.update_from(theirs, outputs=step, batch=BATCH, weights=MASK)),
        wanted,
    )


# Refusals.


ONE_SCORE = (
    "have no dim of two or more classes. For two classes and one score per example"
)
REFUSED = [
    (
        lambda: metrics.Accuracy(top_k=0),
        "Accuracy: top_k=0 has to be a whole number from 1 on.",
    ),
    (
        lambda: metrics.Accuracy(top_k=2, threshold=0.5),
        "Accuracy: top_k=2 is for one score per class, and threshold=0.5 for one score per label. Give one of them.",
    ),
    (
        lambda: metrics.Accuracy(threshold="a"),
        "Accuracy: threshold='a' has to be a number.",
    ),
    (
        lambda: metrics.ConfusionMatrix(),
        "ConfusionMatrix: num_classes=None has to be a whole number from 2 on.",
    ),
    (
        lambda: metrics.F1(),
        "F1: threshold=None has to be a number: 0.0 where predictions are logits, 0.5 where they are probabilities. For more than two classes, give num_classes and average.",
    ),
    (
        lambda: metrics.Recall(average="macro"),
        "Recall: num_classes=None has to be a whole number from 2 on.",
    ),
    (
        lambda: metrics.Recall(num_classes=3),
        "Recall: with num_classes=3, average has to be 'macro', 'micro' or None.",
    ),
    (
        lambda: metrics.Precision(average="marco", num_classes=3),
        "Precision: average='marco' is not one of 'binary', 'macro', 'micro', None. Did you mean 'macro'?",
    ),
    (
        lambda: metrics.Precision(average="micro", num_classes=3, threshold=0.5),
        "Precision: threshold=0.5 is for average='binary'; with average='micro', the class with the highest score is predicted.",
    ),
    (
        lambda: metrics.AUC(num_thresholds=1),
        "AUC: num_thresholds=1 has to be a whole number from 2 on.",
    ),
    (
        lambda: metrics.AUC(curve="pr"),
        "AUC: curve='pr' is not one of 'ROC', 'PR'. Did you mean 'PR'?",
    ),
    (
        lambda: metrics.Histogram(1, 1),
        "Histogram: low=1 has to be less than high=1, and both finite numbers.",
    ),
    (
        lambda: metrics.Histogram(0, 1, 0),
        "Histogram: num_bins=0 has to be a whole number from 1 on.",
    ),
    (
        lambda: metrics.Quantile(2, 0, 1),
        "Quantile: q=2 has to be a number from 0 to 1.",
    ),
    (
        lambda: metrics.Throughput("example"),
        "Throughput: unit='example' is not 'examples' or 'steps'. Did you mean 'examples'?",
    ),
    (
        lambda: metrics.CrossEntropy(from_logits=1),
        "CrossEntropy: from_logits=1 has to be True or False.",
    ),
    (
        lambda: metrics.Mean().update(SCORES, np.ones(4)),
        "Mean: weights f32[4] does not fit values f32[16]. Weights have the shape of the elements or of their first dims, such as (16,).",
    ),
    (
        lambda: metrics.Mean().update("a"),
        "Mean: values is a str, and has to be an array.",
    ),
    (
        lambda: metrics.Accuracy().update(LOGITS, SCORES),
        "Accuracy: labels f32[16] has to hold class numbers, which are integers.",
    ),
    (
        lambda: metrics.Accuracy().update(LOGITS, LABELS[:4]),
        "Accuracy: predictions f32[16, 5] and labels i32[4] do not fit. Predictions have one more dim than class numbers, for the classes, and the shape of one-hot labels.",
    ),
    (
        lambda: metrics.Accuracy().update(*BY_SCORE),
        f"Accuracy: predictions f32[16] and labels i32[16] {ONE_SCORE} give threshold=: 0.0 where predictions are logits, 0.5 where they are probabilities.",
    ),
    (
        lambda: metrics.Accuracy().update(SCORES[:, None], TRUE),
        f"Accuracy: predictions f32[16, 1] and labels i32[16] {ONE_SCORE} give threshold=: 0.0 where predictions are logits, 0.5 where they are probabilities.",
    ),
    (
        lambda: metrics.Accuracy().update(SCORES[:, None], TRUE[:, None]),
        f"Accuracy: predictions f32[16, 1] and labels i32[16, 1] {ONE_SCORE} give threshold=: 0.0 where predictions are logits, 0.5 where they are probabilities.",
    ),
    (
        lambda: metrics.CrossEntropy().update(SCORES[:, None], TRUE),
        f"CrossEntropy: predictions f32[16, 1] and labels i32[16] {ONE_SCORE} give the losses of optax.sigmoid_binary_cross_entropy to Mean.",
    ),
    (
        lambda: metrics.Perplexity().update(*BY_SCORE),
        f"Perplexity: predictions f32[16] and labels i32[16] {ONE_SCORE} give the losses of optax.sigmoid_binary_cross_entropy to Mean.",
    ),
    (
        lambda: metrics.F1(num_classes=2, average="macro").update(*BY_SCORE),
        f"F1: predictions f32[16] and labels i32[16] {ONE_SCORE} give class numbers as predictions, as (logits > 0).astype(int).",
    ),
    (
        lambda: metrics.Accuracy(top_k=9).update(*BY_CLASS),
        "Accuracy: top_k=9 is more than the 5 classes of predictions f32[16, 5].",
    ),
    (
        lambda: metrics.MeanSquaredError().update(LOGITS, TRUE),
        "MeanSquaredError: predictions f32[16, 5] and labels i32[16] differ in shape; there has to be one prediction per label.",
    ),
    (
        lambda: metrics.ConfusionMatrix(3).update(*BY_CLASS),
        "ConfusionMatrix: num_classes=3, and predictions f32[16, 5] has 5 classes in its last dim.",
    ),
    (
        lambda: metrics.Mean().merge(metrics.Mean("x")),
        "Mean(values='losses') does not merge with Mean(values='x'): both have to be of one class and configuration.",
    ),
    (
        lambda: metrics.Metrics({"a": metrics.Mean()}).merge(
            metrics.Metrics({"b": metrics.Mean()})
        ),
        "two Metrics of different names do not merge: the second lack 'a' and the first lack 'b'.",
    ),
    (
        lambda: metrics.Metrics({"a": 3}),
        "Metrics: 'a' is 3, and has to be an object with update, merge and compute. For metrics of clu, metrax or flax.nnx, use metrics.adapt.",
    ),
    (
        lambda: metrics.Metrics([metrics.Mean()]),
        "Metrics takes a dict from names to metrics, and got a list.",
    ),
    (
        lambda: collection().update_from(
            outputs={"logit": LOGITS}, batch=BATCH, losses=SCORES
        ),
        "metric 'accuracy': Accuracy: 'logits' is neither among the outputs ('logit') nor in the batch ('label', 'image'). Did you mean 'logit'?",
    ),
    (
        lambda: metrics.update_from(metrics.Mean(), outputs=LOGITS, batch={}),
        "outputs is a ndarray; metrics find them by name, so it has to be a dict, such as {'logits': logits}.",
    ),
    (
        lambda: metrics.adapt(3),
        "3 cannot be adapted: it has to be a metric of flax.nnx, or have from_model_output, merge, compute, empty, as those of clu and metrax.",
    ),
    (
        lambda: metrics.adapt(metrics.Accuracy),
        "Accuracy is a class, and a metric is one of its objects: call Accuracy().",
    ),
    (
        lambda: jax.jit(lambda m: m.compute())(metrics.Throughput()),
        "Throughput.compute() reads the host's clock, which does not run inside jit. Return the metric from the step, and compute it outside.",
    ),
    (
        lambda: metrics.Throughput().update({}),
        "Throughput: the batch holds no array with rows to count, and no weights.",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_what_does_not_fit_is_refused_in_words(call, message):
    with pytest.raises(ml.errors.MetricError) as error:
        call()
    assert str(error.value) == message
