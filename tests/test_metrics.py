"""Metrics say what NumPy says of the real examples, and refuse what does not fit."""

import copy
import dataclasses
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshlayout as ml
from meshlayout import metrics
from tests.bad_values import BAD, refusal


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
]
# Their state is that of the metric before them, and other tests measure them.
_ALIKE = (4, 7, 11, 12)
each_metric = pytest.mark.parametrize(
    ("metric", "inputs"),
    [
        pytest.param(
            *one, id=repr(one[0]), marks=[pytest.mark.slow] * (number in _ALIKE)
        )
        for number, one in enumerate(EVERY)
    ],
)

some_metrics = pytest.mark.parametrize(
    ("metric", "inputs"), [EVERY[at] for at in (0, 2, 6, 8)]
)


def types(tree):
    return [jax.typeof(jnp.asarray(x)) for x in jax.tree.leaves(tree)]


def values(metric):
    return np.asarray(metric.compute())


def settings_of(metric):
    return {
        field.name: getattr(metric, field.name)
        for field in dataclasses.fields(metric)
        if field.metadata.get("static")
    }


def with_a_field(kind):
    """A user's own subclass of a metric, with a setting of its own."""

    class Own(kind):
        factor: float = dataclasses.field(
            default=1.0, metadata={"static": True}, kw_only=True
        )

        def compute(self):
            return super().compute() * self.factor

    Own.__annotations__ = {"factor": float}
    frozen = dataclasses.dataclass(frozen=True, eq=False)(Own)
    return jax.tree_util.register_dataclass(frozen)


def close(found, wanted, rtol=2e-6):
    # Sums in another order differ in the last bits of float32.
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=1e-6)


@jax.jit
def updated(metric, inputs, weights):
    return metric.update(*inputs, weights)


# Properties of all of them.


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
def test_state_never_changes_its_structure_shapes_or_dtypes(metric, inputs):
    one = updated(metric, inputs, None)
    assert jax.tree.structure(one) == jax.tree.structure(metric)
    for other in (one, metric.update(*inputs), one.merge(metric), one.empty()):
        assert types(other) == types(metric)
        assert not any(x.weak_type for x in types(other))


@each_metric
def test_merging_the_empty_metric_changes_nothing(metric, inputs):
    one = updated(metric, inputs, None)
    for merged in (one.merge(metric), metric.merge(one), one.merge(one.empty())):
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
def test_psum_of_shards_equals_one_update_with_all(metric, inputs):
    if isinstance(metric, metrics.Last):
        return  # not a sum
    mesh = ml.create_mesh({"batch": 4, "model": 2}).jax_mesh

    def shard(inputs, weights):
        one = metric.update(*inputs, weights)
        return jax.lax.psum(one, ("batch", "model")).compute()

    rows = P(("batch", "model"))
    both = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=rows, out_specs=P()))
    close(np.asarray(both(inputs, MASK)), values(updated(metric, inputs, MASK)))


@each_metric
def test_metrics_are_frozen_and_reset_to_the_same_configuration(metric, inputs):
    one = updated(metric, inputs, None)
    assert repr(one) == repr(metric) == repr(one.empty())
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.anything = 1


KINDS = {type(metric): (metric, inputs) for metric, inputs in EVERY}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_subclass_keeps_its_own_fields(kind):
    metric, inputs = KINDS[kind]
    settings = settings_of(metric)
    own = with_a_field(kind)(**settings, factor=100.0)
    updated = own.update(*inputs)
    for made in (updated, own.merge(own), updated.merge(updated), own.empty()):
        assert (type(made), made.factor) == (type(own), 100.0)
    expected = 100 * values(metric.update(*inputs).merge(metric.update(*inputs)))
    close(values(updated.merge(updated)), expected)


def test_metrics_of_other_classes_have_other_structures_and_do_not_merge():
    """Else jit, whose caches compare structures, may call another metric's program."""
    every = [
        metrics.Mean(),
        metrics.Sum(),
        metrics.Precision(),
        metrics.Recall(),
        metrics.F1(),
    ]
    structures = [jax.tree.structure(metric) for metric in every]
    for metric, other in itertools.permutations(every, 2):
        with pytest.raises(ml.MeshLayoutError, match="both must have the same class"):
            metric.merge(other)
    assert all(a != b for a, b in itertools.combinations(structures, 2))


def test_what_a_metric_has_summed_can_be_read_by_name():
    mean = metrics.Mean().update(SCORES, MASK)
    close([mean.total, mean.count], [SCORES[MASK].sum(), MASK.sum()])
    right = LOGITS.argmax(1) == LABELS
    accuracy = metrics.Accuracy().update(LOGITS, LABELS, MASK)
    close([accuracy.correct, accuracy.count], [right[MASK].sum(), MASK.sum()])
    recall = metrics.Recall().update(SCORES, TRUE, MASK)
    is_true, is_guess = TRUE[MASK] > 0, SCORES[MASK] > 0
    sums = [recall.hits, recall.predicted, recall.actual, recall.count]
    close(sums, [(is_true & is_guess).sum(), is_guess.sum(), is_true.sum(), MASK.sum()])
    f1 = metrics.F1(num_classes=5, average="macro").update(LOGITS, LABELS)
    close(f1.predicted, np.bincount(LOGITS.argmax(1), minlength=5))
    close([f1.actual.sum(), f1.count], [16, 16])


@some_metrics
def test_vmap_gives_one_metric_per_row(metric, inputs):
    rows = [x.reshape(2, 8, *x.shape[1:]) for x in inputs]
    computed = jax.jit(jax.vmap(lambda *row: metric.update(*row).compute()))(*rows)
    for at in range(2):
        close(computed[at], values(updated(metric, [x[at] for x in rows], None)))


@pytest.mark.parametrize("metric", [metrics.Sum(), metrics.Mean()])
def test_low_precision_inputs_are_summed_in_float32(metric):
    for dtype in (jnp.bfloat16, jnp.float16, jnp.int8, jnp.bool_):
        one = metric.update(jnp.ones(3000, dtype))
        assert values(one) == (3000 if isinstance(metric, metrics.Sum) else 1)


# Sums.


def test_integers_that_jax_would_wrap_around_keep_their_value():
    large = np.array([2**40, 1])
    close(values(metrics.Mean().update(large)), (2**40 + 1) / 2)
    close(values(metrics.Sum().update(2**33)), 2**33)
    assert values(metrics.Recall().update(np.ones(2, "float32"), large)) == 1
    with pytest.raises(ml.errors.MetricError, match="must hold class numbers"):
        metrics.Accuracy().update(LOGITS[:2], large)


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
    assert np.isnan(values(metrics.F1(num_classes=2, average="macro")))
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


def test_a_label_that_is_not_a_class_is_nan_in_losses_and_wrong_in_accuracy():
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_a_score_at_the_threshold_is_negative(dtype):
    scores = jnp.array([0, 1, 0, 1]).astype(dtype)
    labels = np.array([0, 1, 1, 1])
    for kind, expected in (
        (metrics.Accuracy, 3 / 4),
        (metrics.Precision, 1),
        (metrics.Recall, 2 / 3),
        (metrics.F1, 4 / 5),
    ):
        close(values(kind(threshold=0.0).update(scores, labels)), expected)


@pytest.mark.parametrize("kind", [metrics.Precision, metrics.Recall, metrics.F1])
def test_two_classes_are_separated_as_by_logits(kind):
    assert kind() == kind() or repr(kind()) == repr(kind(threshold=0.0))
    close(values(kind().update(*BY_SCORE)), values(kind(threshold=0).update(*BY_SCORE)))


@pytest.mark.parametrize("kind", [metrics.Precision, metrics.Recall, metrics.F1])
def test_the_weighted_average_is_the_mean_over_labels(kind):
    each = values(kind(num_classes=5, average=None).update(LOGITS, LABELS, MASK))
    weighted = kind(num_classes=5, average="weighted").update(LOGITS, LABELS, MASK)
    close(values(weighted), each[LABELS[MASK]].mean())


def test_nan_scores_are_never_right():
    nan = np.full((3, 4), np.nan, np.float32)
    assert values(metrics.Accuracy(top_k=2).update(nan, np.arange(3))) == 0
    wrong = metrics.Accuracy(threshold=0.0).update(nan[:, 0], np.zeros(3, int))
    assert values(wrong) == 0


def test_a_class_never_predicted_has_precision_zero_and_a_missing_one_none():
    precision = metrics.Precision(num_classes=4, average=None)
    found = values(precision.update(np.array([0, 0, 1]), np.array([0, 2, 1])))
    np.testing.assert_array_equal(found, [0.5, 1, 0, np.nan])
    macro = metrics.Precision(num_classes=4, average="macro")
    assert values(macro.update(np.array([0, 0, 1]), np.array([0, 2, 1]))) == 0.5


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


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"batch": 1, "seq": 8}, marks=pytest.mark.slow),
        {"batch": 2, "seq": 4},
    ],
)
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
        whole = values(updated(metric, (logits, labels), mask))
        tokens = mesh.layout("batch", "seq").sharding
        for specs in (("batch", "seq", None), ("batch", None, "seq")):
            cut = jax.device_put(logits, mesh.layout(*specs).sharding)
            given = (cut, jax.device_put(labels, tokens))
            found = updated(metric, given, jax.device_put(mask, tokens))
            close(values(found), whole)


# Feeding.


BATCH = {"label": LABELS, "image": np.zeros((16, 2))}


def fed_alone(metric, outputs, batch, **inputs):
    one = metrics.Metrics({"it": metric})
    return one.update_from(outputs=outputs, batch=batch, **inputs).metric("it")


def test_arguments_are_found_in_outputs_then_batch():
    metric = fed_alone(metrics.Accuracy(), {"logits": LOGITS}, BATCH, weights=MASK)
    assert values(metric) == np.float32((LOGITS.argmax(1) == LABELS)[MASK].mean())
    both = {"logits": LOGITS, "label": LOGITS.argmax(1)}
    assert values(fed_alone(metrics.Accuracy(), both, BATCH)) == 1
    pair = fed_alone(metrics.Accuracy(labels=1), {"logits": LOGITS}, (None, LABELS))
    assert values(pair) == np.float32((LOGITS.argmax(1) == LABELS).mean())


def test_mean_takes_the_losses_by_default():
    metric = fed_alone(metrics.Mean(), None, BATCH, losses=SCORES, weights=MASK)
    close(values(metric), SCORES[MASK].mean())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Own:
    total: jax.Array

    @classmethod
    def empty(cls):
        return cls(jnp.zeros(()))

    @classmethod
    def from_model_output(cls, logits, label, weights, losses, missing=3, **rest):
        assert missing == 3
        assert "image" in rest
        return Own(jnp.sum(losses * weights))

    def merge(self, other):
        return Own(self.total + other.total)

    def compute(self):
        return self.total


def test_a_users_own_metric_gets_what_its_parameters_name():
    inputs = {"losses": SCORES, "weights": MASK}
    metric = fed_alone(Own, {"logits": LOGITS}, BATCH, **inputs)
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
    twice = found.merge(fed(found.empty(), ~MASK))
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
    average = nnx.metrics.Average("loss")
    average.update(loss=jnp.full(3, 7.0))  # what it has counted stays its own
    both = metrics.Metrics(
        {
            "accuracy": nnx.metrics.Accuracy(),
            "loss": average,
            "welford": nnx.metrics.Welford("loss"),
            "high": nnx.metrics.Accuracy(threshold=0.5),
        }
    )
    loss = np.where(MASK, SCORES, np.nan)

    @jax.jit
    def step(both, loss, weights):
        outputs = {"logits": LOGITS, "loss": loss, "labels": LABELS}
        found = metrics.Metrics({k: both.metric(k) for k in both if k != "high"})
        found = found.update_from(outputs=outputs, batch=BATCH, weights=weights)
        outputs = {"logits": SCORES, "labels": TRUE}
        high = metrics.Metrics({"high": both.metric("high")})
        high = high.update_from(outputs=outputs, batch=None, weights=2 * weights)
        return metrics.Metrics(
            {**{k: found.metric(k) for k in found}, "high": high.metric("high")}
        )

    once = step(both, loss, MASK)
    assert types(once) == types(both)
    close(once["loss"], SCORES[MASK].mean())
    close(once["accuracy"], (LOGITS.argmax(1) == LABELS)[MASK].mean())
    theirs = nnx.metrics.Accuracy(threshold=0.5)
    theirs.update(logits=SCORES[MASK], labels=TRUE[MASK])
    close(once["high"], theirs.compute())
    merged = once.merge(step(both, SCORES, ~MASK))
    close(merged["loss"], SCORES.mean())
    close(merged["welford"].standard_deviation, SCORES.std())
    close(merged["welford"].mean, SCORES.mean())
    close(once.empty().merge(once)["welford"].standard_deviation, SCORES[MASK].std())


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
    duck = fed_alone(Duck, {"values": loss}, {}, weights=MASK)
    close(values(duck), SCORES[MASK].mean())
    rest = fed_alone(duck.empty(), {"values": SCORES}, {}, weights=~MASK)
    close(values(duck.merge(rest)), SCORES.mean())


def test_a_metric_that_cannot_leave_out_padding_is_refused():
    fed_alone(Unmasked, {"values": SCORES}, {})
    with pytest.raises(ml.errors.MetricError) as error:
        fed_alone(Unmasked, {"values": SCORES}, {}, weights=MASK)
    assert str(error.value).endswith(
        "'s Unmasked takes neither 'mask' nor 'sample_weights', so it cannot leave out "
        "what has weight 0. Use a metric of meshlayout.metrics, or batches without "
        "padding and weights."
    )


def test_clu_and_metrax_agree_with_numpy():
    clu = pytest.importorskip("clu.metrics")
    metrax = pytest.importorskip("metrax")
    loss = np.where(MASK, SCORES, np.nan)
    step = {
        "logits": LOGITS,
        "loss": loss,
        "labels": LABELS,
        "predictions": LOGITS.argmax(1),
    }
    theirs = {
        "average": clu.Average.from_output("loss"),
        "clu": clu.Accuracy,
        "metrax": metrax.Accuracy,
    }
    found = metrics.Metrics(theirs).update_from(outputs=step, batch={}, weights=MASK)
    close(found["average"], SCORES[MASK].mean())
    close([found["clu"], found["metrax"]], (LOGITS.argmax(1) == LABELS)[MASK].mean())


# The compiled program.


def classifier_step(metric):
    """One step of a classifier, as an expert writes it, with a metric beside it."""

    def step(params, x, labels):
        def loss(params):
            logits = jnp.tanh(x @ params["in"]) @ params["out"]
            each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return each.mean(), logits

        (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(params)
        measured = None if metric is None else metric.update(logits, labels)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, measured

    return jax.jit(step, donate_argnums=0)


@pytest.mark.parametrize(
    ("batch", "classes"),
    [(("batch", "model"), None), ("batch", "model"), (("batch", "model"),) * 2],
    ids=["classes whole", "classes cut", "classes cut as the rows are"],
)
def test_accuracy_costs_no_memory_and_no_collectives(batch, classes, mesh_2x4):
    rows, width, num_classes = 512, 32, 4096

    def abstract(shape, *specs, dtype="float32"):
        sharding = mesh_2x4.layout(*specs).sharding
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    params = {
        "in": abstract((width, width), None, None),
        "out": abstract((width, num_classes), None, classes),
    }
    inputs = (
        params,
        abstract((rows, width), batch, None),
        abstract((rows,), batch, dtype="int32"),
    )
    temp_bytes, sent_bytes = {}, {}
    for name, metric in (("alone", None), ("measured", metrics.Accuracy())):
        compiled = classifier_step(metric).lower(*inputs).compile()
        temp_bytes[name] = compiled.memory_analysis().temp_size_in_bytes
        sent = ml.testing.expect_communication(compiled)
        sent_bytes[name] = sum(one.nbytes for one in sent.collectives)
    logits_bytes = rows * num_classes * 4 / 8
    assert temp_bytes["measured"] < temp_bytes["alone"] + logits_bytes / 10
    assert sent_bytes["measured"] < sent_bytes["alone"] + logits_bytes / 10


# Refusals.


ONE_SCORE = (
    "have no dim of two or more classes. For two classes and one score per example"
)
REFUSED = [
    (
        lambda: metrics.Accuracy(top_k=0),
        "Accuracy: top_k must be a positive integer, got 0.",
    ),
    (
        lambda: metrics.Accuracy(top_k=2, threshold=0.5),
        "Accuracy: top_k=2 is for one score per class, and threshold=0.5 for one score per label. Give one of them.",
    ),
    (
        lambda: metrics.Accuracy(threshold="a"),
        "Accuracy: threshold must be a finite number, got 'a'.",
    ),
    (
        lambda: metrics.ConfusionMatrix(),
        "ConfusionMatrix: num_classes must be an integer of at least 2, got None.",
    ),
    (
        lambda: metrics.Recall(average="macro"),
        "Recall: num_classes must be an integer of at least 2, got None.",
    ),
    (
        lambda: metrics.Recall(num_classes=3),
        "Recall: with num_classes=3, average must be 'macro', 'micro', 'weighted' or None.",
    ),
    (
        lambda: metrics.Precision(average="marco", num_classes=3),
        "Precision: average must be 'binary', 'macro', 'micro', 'weighted' or None, got 'marco'. Did you mean 'macro'?",
    ),
    (
        lambda: metrics.Precision(average="micro", num_classes=3, threshold=0.5),
        "Precision: threshold=0.5 is for average='binary'; with average='micro', the class with the highest score is predicted.",
    ),
    (
        lambda: metrics.CrossEntropy(from_logits=1),
        "CrossEntropy: from_logits must be True or False, got 1.",
    ),
    (
        lambda: metrics.Mean().update(SCORES, np.ones(4)),
        "Mean: weights f32[4] does not fit values f32[16]. Weights have the shape of the elements or of their first dims, such as (16,).",
    ),
    (
        lambda: metrics.Mean().update("a"),
        "Mean: values must be an array of real numbers, got 'a'.",
    ),
    (
        lambda: metrics.Accuracy().update(LOGITS, SCORES),
        "Accuracy: labels f32[16] must hold class numbers, which are integers.",
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
        lambda: metrics.ConfusionMatrix(3).update(*BY_CLASS),
        "ConfusionMatrix: num_classes=3, and predictions f32[16, 5] has 5 classes in its last dim.",
    ),
    (
        lambda: metrics.Mean().merge(metrics.Mean("x")),
        "Mean(values='losses') does not merge with Mean(values='x'): both must have the same class and configuration.",
    ),
    (
        lambda: metrics.Metrics({"a": metrics.Mean()}).merge(
            metrics.Metrics({"b": metrics.Mean()})
        ),
        "two Metrics of different names do not merge: the second lack 'a' and the first lack 'b'.",
    ),
    (
        lambda: metrics.Metrics({"a": 3}),
        "Metrics: 'a': 3 is not a metric: it must have empty, from_model_output, merge, compute, like those of this library, clu and metrax, or be nnx's Average, Accuracy or Welford.",
    ),
    (
        lambda: metrics.Metrics([metrics.Mean()]),
        "Metrics takes a dict from names to metrics, got [Mean(values='losses')].",
    ),
    (
        lambda: collection().update_from(
            outputs={"logit": LOGITS}, batch=BATCH, losses=SCORES
        ),
        "metric 'accuracy': Accuracy: there is no 'logits' among the outputs and the entries of the batch ('losses', 'batch', 'label', 'image', 'logit'). Did you mean 'logit'?",
    ),
    (
        lambda: collection().update_from(outputs=LOGITS, batch={}),
        "outputs is an array of shape (16, 5); metrics find them by name, so it must be a dict, such as {'logits': logits}.",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_what_does_not_fit_is_refused_in_words(call, message):
    with pytest.raises(ml.errors.MetricError) as error:
        call()
    assert str(error.value) == message


# Every parameter of every metric, and what nobody can mean by it.


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_setting_works_or_is_refused_in_a_sentence(kind):
    _, inputs = KINDS.get(kind, (None, ({"x": SCORES},)))
    settings = settings_of(KINDS[kind][0]) if kind in KINDS else {"unit": "steps"}

    def measure(**changes):
        metric = kind(**{**settings, **changes})
        hash(jax.tree.structure(metric))
        metric.update(*inputs).compute()

    for name in settings:
        for bad in BAD:
            message = refusal(ml.errors.MetricError, measure, **{name: bad})
            assert message is None or message.startswith(kind.__name__)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_input_works_or_is_refused_in_a_sentence(kind):
    metric, inputs = KINDS[kind]
    for at in range(len(inputs) + 1):
        for bad in [*BAD, jax.random.key(0), [[1.0], [2.0, 3.0]], 2**70, np.array("t")]:
            given = [*inputs, None]
            given[at] = bad
            message = refusal(ml.errors.MetricError, metric.update, *given)
            assert message is None or message.startswith(kind.__name__)


COLLECTING = {
    "Metrics": metrics.Metrics,
    "a metric": lambda bad: metrics.Metrics({"a": bad}),
    "a name": lambda bad: metrics.Metrics({bad: metrics.Mean()}),
    "merge": lambda bad: collection().merge(bad),
    "merge of one": lambda bad: metrics.Mean().merge(bad),
    "outputs": lambda bad: collection().update_from(outputs=bad, batch=BATCH),
    "batch": lambda bad: fed_alone(metrics.Accuracy(), {"logits": LOGITS}, bad),
    "losses": lambda bad: fed_alone(metrics.Mean(), {}, {}, losses=bad),
    "weights": lambda bad: fed_alone(
        metrics.Mean(), {}, {}, losses=SCORES, weights=bad
    ),
}


@pytest.mark.parametrize("call", COLLECTING)
def test_every_argument_of_a_collection_works_or_is_refused_in_a_sentence(call):
    for bad in BAD:
        if call != "a name" or bad.__hash__:
            refusal(ml.errors.MetricError, COLLECTING[call], bad)
