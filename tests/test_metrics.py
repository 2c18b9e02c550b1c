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
some_metrics = pytest.mark.parametrize(
    ("metric", "inputs"), [EVERY[at] for at in (0, 2, 5, 7, 10)]
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


def test_what_a_metric_has_summed_can_be_read():
    mean = metrics.Mean().update(SCORES, MASK)
    close([mean.total, mean.count], [SCORES[MASK].sum(), MASK.sum()])
    right = LOGITS.argmax(1) == LABELS
    accuracy = metrics.Accuracy().update(LOGITS, LABELS, MASK)
    close([accuracy.total, accuracy.count], [right[MASK].sum(), MASK.sum()])
    recall = metrics.Recall().update(SCORES, TRUE, MASK)
    is_true, is_guess = TRUE[MASK] > 0, SCORES[MASK] > 0
    hits, predicted, actual = recall.sums
    close(hits, [(is_true & is_guess).sum()])
    close([predicted, actual], [[is_guess.sum()], [is_true.sum()]])


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


def test_values_and_weights_are_any_numbers():
    infinite = metrics.Mean().update(jnp.array([jnp.inf, 1.0])).update(2.0)
    assert values(infinite) == np.inf
    assert np.isnan(values(metrics.Mean().update(jnp.array([jnp.nan, 1.0]))))
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
    for metric in (metrics.Mean(), metrics.Last(), metrics.Accuracy(), metrics.F1()):
        assert np.isnan(values(metric))
    assert np.isnan(values(metrics.Perplexity()))
    assert np.isnan(values(metrics.F1(num_classes=2)))
    assert values(metrics.Sum()) == 0
    assert values(metrics.ConfusionMatrix(2)).tolist() == [[0, 0], [0, 0]]


# Losses and classes.


def test_perplexity_is_that_of_numpy():
    chances = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
    wanted = np.exp(-np.log(chances[np.arange(16), LABELS]).mean())
    close(values(metrics.Perplexity().update(LOGITS, LABELS)), wanted)
    one_hot = np.eye(5, dtype=np.float32)[LABELS]
    close(values(metrics.Perplexity().update(LOGITS, one_hot)), wanted)


def test_a_label_that_is_not_a_class_is_nan_in_losses_and_wrong_in_accuracy():
    labels = np.array([1, -1])
    logits = np.array([[0.0, 1.0], [0.0, 1.0]], np.float32)
    assert np.isnan(values(metrics.Perplexity().update(logits, labels)))
    for top_k, wanted in ((1, 0.5), (2, 0.5), (3, 0.5)):
        assert values(metrics.Accuracy(top_k=top_k).update(logits, labels)) == wanted
    ignored = metrics.Perplexity().update(logits, labels, labels >= 0)
    assert values(ignored) == pytest.approx(1 + np.exp(-1))


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


def test_nan_scores_are_never_right():
    nan = np.full((3, 4), np.nan, np.float32)
    for top_k in (1, 2):
        assert values(metrics.Accuracy(top_k=top_k).update(nan, np.arange(3))) == 0
    assert values(metrics.Recall(num_classes=4).update(nan, np.arange(3))) == 0
    wrong = metrics.Accuracy(threshold=0.0).update(nan[:, 0], np.zeros(3, int))
    assert values(wrong) == 0


def test_a_class_never_predicted_has_precision_zero_and_a_missing_one_none():
    precision = metrics.Precision(num_classes=4, average=None)
    found = values(precision.update(np.array([0, 0, 1]), np.array([0, 2, 1])))
    np.testing.assert_array_equal(found, [0.5, 1, 0, np.nan])
    macro = metrics.Precision(num_classes=4)
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


def test_tokens_sharded_on_two_dims_give_what_whole_ones_give():
    mesh = ml.create_mesh({"batch": 2, "seq": 4})
    logits = RNG.normal(size=(4, 8, 8)).astype(np.float32)
    labels = RNG.integers(0, 8, (4, 8))
    mask = RNG.integers(0, 2, (4, 8))
    for metric in (
        metrics.Accuracy(top_k=3),
        metrics.Perplexity(),
        metrics.ConfusionMatrix(8),
        metrics.F1(num_classes=8),
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
    with pytest.raises(AttributeError, match="cannot assign to field 'loss'"):
        found.loss = 3


def test_a_collection_shows_its_values():
    shown = metrics.Metrics({"z": metrics.Sum(), "matrix": metrics.ConfusionMatrix(2)})
    assert repr(shown).split()[-7:] == [
        "z",
        "0",
        "matrix",
        "[[0.",
        "0.]",
        "[0.",
        "0.]]",
    ]
    assert "<td" in shown._repr_html_()
    jax.jit(lambda m: repr(m) and m)(shown)


# Metrics of others.


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Duck:
    total: jax.Array
    count: jax.Array

    @classmethod
    def empty(cls):
        return cls(jnp.zeros(()), jnp.zeros(()))

    @classmethod
    def from_model_output(cls, values, sample_weights=None, missing=3):
        assert missing == 3
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


MISFIT = (
    "do not fit. Labels are class numbers, which are integers, or one-hot; predictions "
    "have a last dim for two or more classes. One score per example, for two classes, "
    "takes threshold=: 0.0 for logits, 0.5 for probabilities."
)
ONE, ONE_TRUE = SCORES[:, None], TRUE[:, None]
REFUSED = [
    (
        lambda: metrics.Accuracy(top_k=2, threshold=0.5),
        "Accuracy: threshold= is for one score per label, and top_k= for one score per class. Give one of them.",
    ),
    (
        lambda: metrics.Precision(average="micro"),
        "Precision: average must be 'macro' or None, got 'micro'. Did you mean 'macro'?",
    ),
    (
        lambda: metrics.F1(num_classes=3, threshold=0.5),
        "F1: threshold= is for one score per label, and num_classes= for one score per class. Give one of them.",
    ),
    (
        lambda: metrics.Mean().update(SCORES, np.ones(4)),
        "Mean: weights f32[4] does not fit elements f32[16]. Give weights of the shape of the elements or of their first dims, such as (16,).",
    ),
    (
        lambda: metrics.Mean().update("a"),
        "Mean: values must be an array of real numbers, got 'a'.",
    ),
    (
        lambda: metrics.Accuracy().update(LOGITS, SCORES),
        f"Accuracy: predictions f32[16, 5] and labels f32[16] {MISFIT}",
    ),
    (
        lambda: metrics.Accuracy().update(LOGITS, LABELS[:4]),
        f"Accuracy: predictions f32[16, 5] and labels i32[4] {MISFIT}",
    ),
    (
        lambda: metrics.Accuracy().update(ONE, TRUE),
        f"Accuracy: predictions f32[16, 1] and labels i32[16] {MISFIT}",
    ),
    (
        lambda: metrics.Accuracy().update(ONE, ONE_TRUE),
        f"Accuracy: predictions f32[16, 1] and labels i32[16, 1] {MISFIT}",
    ),
    (
        lambda: metrics.F1(num_classes=2).update(*BY_SCORE),
        f"F1: predictions f32[16] and labels i32[16] {MISFIT}",
    ),
    (
        lambda: metrics.Recall().update(LOGITS, LABELS),
        "Recall: predictions f32[16, 5] and labels i32[16] do not fit. With a threshold, there must be one prediction per label.",
    ),
    (
        lambda: metrics.ConfusionMatrix(3).update(*BY_CLASS),
        "ConfusionMatrix: predictions f32[16, 5] and labels i32[16] do not fit. There are num_classes=3.",
    ),
    (
        lambda: metrics.Mean().merge(metrics.Mean("x")),
        "Mean(values='losses') does not merge with Mean(values='x'): both must have the same class and settings.",
    ),
    (
        lambda: metrics.Metrics({"a": metrics.Mean()}).merge(
            metrics.Metrics({"b": metrics.Mean()})
        ),
        "Metrics of a do not merge with Metrics of b.",
    ),
    (
        lambda: metrics.Metrics({"a": 3}),
        "metrics: 'a': 3 is not a metric: it must have empty, from_model_output, merge, compute, like those of this library, clu and metrax, or be nnx's Average or Accuracy.",
    ),
    (
        lambda: metrics.Metrics([metrics.Mean()]),
        "metrics: expected a dict from names to metrics, got [Mean(values='losses')].",
    ),
    (
        lambda: collection().update_from(
            outputs={"logit": LOGITS}, batch=BATCH, losses=SCORES
        ),
        "metric 'accuracy': Accuracy: there is no 'logits' among the outputs and the entries of the batch ('losses', 'batch', 'label', 'image', 'logit'). Did you mean 'logit'? Accuracy(predictions=...) takes the name or the position of yours.",
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
