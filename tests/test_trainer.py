"""The trainer trains as a loop written by hand does, and leaves the state usable."""

import io
import itertools
import logging
import signal
import traceback
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import meshlayout as ml
from tests.error_messages import message_of
from tests.same_bits import assert_same_bits
from tests.small_states import create, mesh_of, on


FEATURES = 4
WEIGHTED = "Losses and metrics are weighted by 'weight'; loss_fn need not use it."


@pytest.fixture
def mesh() -> ml.Mesh:
    return mesh_of(batch=4)


def create_state(mesh, optimizer=None):
    build = lambda: nnx.Linear(FEATURES, 1, rngs=nnx.Rngs(0))
    return create(mesh, build, optimizer or optax.sgd(0.05))


@pytest.fixture
def trainer(mesh):
    return ml.Trainer(create_state(mesh), loss_fn)


def loss_fn(model, batch):
    out = model(batch["x"])[:, 0]
    return jnp.square(out - batch["y"]), {"out": out}


def examples(count, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, FEATURES)).astype("float32")
    return {"x": x, "y": x @ np.arange(1, FEATURES + 1).astype("float32")}


def cut(data, size):
    count = len(data["x"])
    return [
        {name: rows[at : at + size] for name, rows in data.items()}
        for at in range(0, count, size)
    ]


def quiet_fit(trainer, *data, **options):
    return trainer.fit(*data, progress=False, **options)


def params_of(state):
    return jax.tree.map(np.array, state.params)


def numpy_epochs(state, batches, epochs, rate=0.05):
    """Gradient descent on the mean squared error, and each epoch's mean loss."""
    params = params_of(state)
    w, b = params["kernel"][:, 0].astype("float64"), params["bias"].astype("float64")
    losses = []
    for _ in range(epochs):
        seen = []
        for batch in batches:
            error = batch["x"] @ w + b - batch["y"]
            seen.append(error**2)
            w = w - rate * 2 * (error[:, None] * batch["x"]).mean(axis=0)
            b = b - rate * 2 * error.mean()
        losses.append(np.concatenate(seen).mean())
    return w, b, losses


def pair_loss(model, batch):
    x, y = batch
    return jnp.square(model(x)[:, 0] - y), {"out": -model(x)}


def weighted_pair_loss(model, batch):
    return pair_loss(model, batch[:2])


def mean_loss(model, batch):
    return loss_fn(model, batch)[0].mean()


class Rows:
    """Examples by index, as PyTorch's datasets have them."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data["x"])

    def __getitem__(self, index):
        # Slices never raise IndexError: only `__len__` says where it ends.
        return {name: rows[index] for name, rows in self.data.items()}


class Batches(Rows):
    """Batches by index, as `keras.utils.Sequence`s have them."""

    def __len__(self):
        return -(-super().__len__() // 8)

    def __getitem__(self, index):
        return super().__getitem__(slice(8 * index, 8 * index + 8))


class OwnStep(ml.Trainer):
    """Computes the gradients of a mean over the real examples by itself."""

    def train_step(self, state, batch, metrics):
        def mean(model):
            losses, weights = loss_fn(model, batch)[0], batch["weight"]
            return ml.losses.weighted_sum(losses, weights) / weights.sum(), losses

        (_, losses), grads = nnx.value_and_grad(mean, has_aux=True)(state.model)
        metrics = metrics or ml.metrics.Metrics({"loss": ml.metrics.Mean()})
        metrics = metrics.update_from(outputs=None, batch=batch, losses=losses)
        return state.apply_gradients(grads), metrics


ROWS = examples(22)
PAIR, CUT = (ROWS["x"], ROWS["y"]), cut(ROWS, 8)  # the last one has 6
PAIRS = [(one["x"], one["y"]) for one in CUT]
LISTED = [*map(Rows(ROWS).__getitem__, range(22))]
# A second program would be an error: the one for 8 rows serves all.
ONE, TWO, SIZE = {"on_recompile": "error"}, {"steps_per_call": 2}, {"batch_size": 8}
# Data, a loss, options of the trainer and of fit. In all but the first seven, padding
# could not be left out.
FITS = {
    "batches": ([CUT], loss_fn, ONE, {}),
    "tuples": ([PAIRS], weighted_pair_loss, {**ONE, "weights": 2}, {}),
    "batches by index": ([Batches(ROWS)], loss_fn, ONE, {}),
    "dict": ([ROWS], loss_fn, {}, SIZE),
    "own step": ([ROWS], loss_fn, {}, SIZE),
    "examples by index": ([Rows(ROWS)], loss_fn, {}, SIZE),
    "a list of examples": ([LISTED], loss_fn, {}, SIZE),
    "tuple": ([PAIR], pair_loss, {}, SIZE),
    "labels": (PAIR, pair_loss, {}, SIZE),
    "tuples without weights": ([lambda: iter(PAIRS)], pair_loss, {}, {}),
    "lists, two steps": ([lambda: iter(map(list, PAIRS))], pair_loss, TWO, {}),
    "a mean": ([lambda: iter(CUT)], mean_loss, {}, {}),
    "a mean, two steps": ([CUT], mean_loss, TWO, {}),
    "unpadded": ([lambda: iter(CUT)], mean_loss, {"pad": False}, {}),
    "unpadded, two steps": ([CUT], mean_loss, {"pad": False, **TWO}, {}),
}


@pytest.mark.parametrize("name", FITS)
def test_fit_is_gradient_descent_on_the_real_examples(mesh, name, caplog):
    arrays, loss, options, size = FITS[name]
    state = create_state(mesh)
    w, b, losses = numpy_epochs(state, CUT, epochs=3)
    kind = OwnStep if name == "own step" else ml.Trainer
    trainer = kind(state, loss, **options)
    held = [ROWS] if name == "a list of examples" else arrays
    more = {"validation_data": PAIR if len(held) == 2 else held[0], **size}
    more |= {"shuffle": None} if size else {}
    history = quiet_fit(trainer, *arrays, epochs=3, **more)
    params = params_of(trainer.state)
    # float32 against float64 over nine steps
    np.testing.assert_allclose(params["kernel"][:, 0], w, atol=1e-5)
    np.testing.assert_allclose(params["bias"], b, atol=1e-5)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)
    assert history.epochs == [1, 2, 3]
    assert history is trainer.history
    for sizes in (size, {"batch_size": 3}) if size else ({},):
        # With 3 rows, which become 4, it is another program, of which nobody is warned.
        measured = trainer.evaluate(*held, **sizes)["loss"]
        np.testing.assert_allclose(history["val_loss"][-1], measured, rtol=1e-6)
    said = (
        "a batch of 6 rows does not divide into 4 shards: every device computes all of "
        "it. To have it padded, "
    )
    is_tuple = len(arrays) == 2 or name.startswith(("tuple", "lists"))
    advice = "write x, y, *_ = batch, and give Trainer weights=2; or use dicts."
    said += advice if is_tuple else "return one loss per example."
    assert caplog.messages.count(said) == (name in [*FITS][7:])


def test_with_a_batch_size_items_that_could_be_batches_are_examples(mesh):
    def loss(model, batch):
        return jnp.square(model(batch["x"])[:, 0] - batch["y"][:, 0])

    data = {"x": ROWS["x"], "y": np.repeat(ROWS["y"].reshape(22, 1), 4, 1)}
    histories = []
    for source in (data, Rows(data), [*map(Rows(data).__getitem__, range(22))]):
        trainer = ml.Trainer(create_state(mesh), loss)
        history = quiet_fit(trainer, source, validation_data=source, batch_size=8)
        assert int(trainer.state.step) == 3
        histories.append((history, trainer.evaluate(source, batch_size=8)))
    assert histories[0] == histories[1] == histories[2]


def test_weights_of_batches_count_are_named_once_and_not_negative(mesh, caplog):
    data, state, weight = examples(16), create_state(mesh), np.linspace(0, 2, 16)
    weight = weight.astype("float32")
    params = params_of(state)
    errors = data["x"] @ params["kernel"][:, 0] + params["bias"] - data["y"]
    expected = (errors**2 * weight).sum() / weight.sum()

    def distributed(data):
        return ml.distribute_dataset(data, mesh, global_batch_size=8)

    caplog.set_level("INFO")
    for make, options in (
        (dict, {"batch_size": 8}),
        (lambda data: cut(data, 8), {}),
        (distributed, {}),
    ):
        caplog.clear()
        trainer = ml.Trainer(state, loss_fn)
        measured = trainer.evaluate(make({**data, "weight": weight}), **options)
        np.testing.assert_allclose(measured["loss"], expected, rtol=1e-6)
        ((_, level, text),) = caplog.record_tuples
        assert (level, text) == (logging.INFO, WEIGHTED)
        bad = make({**data, "weight": -weight})
        assert "weights must be finite and not negative; " in message_of(
            trainer.evaluate, bad, **options
        )


@pytest.mark.parametrize(
    ("name", "weighted"),
    [("weights", "weights"), ("sample_weight", "sample_weight"), ("weight", None)],
)
def test_weights_under_another_name_are_told_of(name, weighted, mesh, caplog):
    data = {**examples(16), name: np.ones(16, "float32")}
    for source, options in ((data, {"batch_size": 8}), (cut(data, 8), {})):
        caplog.clear()
        trainer = ml.Trainer(create_state(mesh), loss_fn)
        quiet_fit(trainer, source, 2, **options)
        assert [text for text in caplog.messages if "not weight" in text] == [
            f"the data's entry {weighted!r} does not weight the examples. If it is to, "
            f"give Trainer weights={weighted!r}."
        ] * bool(weighted)


class Counted(ml.Trainer):
    """Counts instead of training, and keeps what it saw."""

    def __init__(self):
        super().__init__({"n": jnp.int32(0)}, pad=False)
        self.seen = []

    def train_step(self, state, batch, metrics):
        self.seen.extend(np.asarray(batch["i"]).astype(int).tolist())
        return state, ml.metrics.Metrics({"i": ml.metrics.Last().update(batch["i"][0])})


def numbered(*numbers):
    return [{"i": np.array([number], np.float32)} for number in numbers]


@pytest.mark.parametrize(
    ("data", "epochs", "steps", "seen", "num_epochs"),
    [
        (numbered(1, 2), 2, None, [1, 2, 1, 2], 2),
        (lambda: iter(numbered(1, 2)), 2, None, [1, 2, 1, 2], 2),
        (numbered(1, 2, 3), 2, 2, [1, 2, 3, 1], 2),
        (iter(numbered(*range(9))), 2, 3, [*range(6)], 2),
        # An iterator that ends, ends training.
        (iter(numbered(1, 2, 3, 4)), 9, 3, [1, 2, 3, 4], 2),
        (iter(numbered(1, 2, 3, 4)), 9, 4, [1, 2, 3, 4], 1),
    ],
)
def test_epochs_are_passes_or_steps_and_an_iterator_goes_on(
    data, epochs, steps, seen, num_epochs
):
    trainer = Counted()
    history = quiet_fit(trainer, data, epochs, steps_per_epoch=steps)
    assert trainer.seen == seen
    assert history.epochs == [*range(1, num_epochs + 1)]
    over = "the training data ended at step 4" if epochs == 9 else ""
    assert history.stopped == over
    if len(seen) == 6:  # in a later fit, too
        quiet_fit(trainer, data, steps_per_epoch=steps)
        assert (trainer.seen, history.epochs) == ([*range(9)], [1, 2, 3])


def test_an_overridden_step_of_several_batches_always_gets_a_list():
    class Many(ml.Trainer):
        def train_step(self, state, batch, metrics):
            seen.append([int(one["i"][0]) for one in batch])
            return state, ml.metrics.Metrics({})

    seen: list[list[int]] = []
    quiet_fit(Many({"n": 0}, pad=False, steps_per_call=2), numbered(*range(5)))
    assert seen == [[0, 1], [2, 3], [4]]


def test_a_state_on_one_device_needs_no_mesh(mesh):
    trainer = ml.Trainer(jax.device_put(create_state(mesh), jax.devices()[0]), loss_fn)
    assert quiet_fit(trainer, cut(examples(6), 4))["loss"][0] > 0
    assert trainer.predict(examples(6), batch_size=4)["out"].shape == (6,)


def test_predict_returns_every_row_in_order_and_no_padding(mesh):
    rows = examples(21)["x"]
    pair = ml.Trainer(create_state(mesh), predict_fn=lambda model, x: (model(x), x))
    _, x = pair.predict([rows[:8], rows[8:16], rows[16:]])
    np.testing.assert_array_equal(x, rows)
    data = examples(8)
    batch = {**data, "weight": np.array([1] * 5 + [0] * 3, "float32")}
    trainer = ml.Trainer(create_state(mesh), predict_fn=lambda model, b: b["x"])
    for batches in ([on(mesh, batch)], [batch], cut(batch, 6)):
        np.testing.assert_array_equal(trainer.predict(batches), data["x"])
    padded = ml.distribute_dataset(
        {"x": data["x"][:5]}, mesh, global_batch_size=8, weights="weight"
    )
    np.testing.assert_array_equal(trainer.predict(padded), data["x"][:5])


class Frame:
    """Named columns, as those of pandas; of several dtypes if `values` are objects."""

    def __init__(self, values, columns="abcd"):
        self.values, self.columns = values, [*columns]

    def __getitem__(self, name):
        (column,) = self.values[:, [self.columns.index(name)]].T
        is_bool = isinstance(column[0], bool)
        return column.astype("bool" if is_bool else type(column[0]))

    def items(self):
        return [(name, self[name]) for name in self.columns]

    def __array__(self, dtype=None, copy=None):
        return self.values


def test_frames_of_numbers_and_bools_are_numbers_and_others_are_refused(mesh):
    x = examples(16)["x"].round()
    mixed = np.column_stack([x[:, :3].astype(object), (x[:, 3] > 0).astype(object)])
    trainer = ml.Trainer(create_state(mesh), predict_fn=lambda model, x: x)
    found = trainer.predict(Frame(mixed), batch_size=8)
    np.testing.assert_array_equal(found, mixed.astype("float32"))
    mixed[:, 1], trainer = "text", ml.Trainer(create_state(mesh), pair_loss)
    refused = message_of(lambda: trainer.fit(Frame(mixed), x[:, 0], batch_size=8))
    assert refused.startswith(
        "leaf '0': no numbers are in the columns 'b' (<U4). Leave them out, or write of "
        "numbers pd.to_numeric(frame[name]).astype('float32'), of dates (x - x.min())"
    )
    names = message_of(lambda: trainer.fit(Frame(x, [*"abc", 3]), batch_size=8))
    assert names.startswith("the data frame's columns have names of several types: ")


class Index(np.ndarray):
    """Labels of rows, as those of pandas."""

    equals, isin = np.array_equal, np.isin


def test_rows_in_another_order_are_told_of(mesh, caplog):
    trainer, frames = ml.Trainer(create_state(mesh), pair_loss), []
    for labels in (range(8), range(8), reversed(range(8)), range(8, 16)):
        frames.append(Frame(examples(8)["x"]))
        frames[-1].iloc, frames[-1].index = None, np.array([*labels]).view(Index)
    for other, is_told in zip(frames[1:], (False, True, False), strict=True):
        caplog.clear()
        trainer.predict((frames[0], other), batch_size=8, predict_fn=lambda _, x: x[0])
        assert is_told == any(
            "rows are paired by position" in x for x in caplog.messages
        )
    caplog.clear()
    fewer = Frame(examples(6)["x"])
    fewer.iloc, fewer.index = None, np.arange(6).view(Index)
    for pair, way in (
        ((frames[0], fewer), " If their index pairs them, write x.loc[y.index]."),
        ((fewer, frames[0]), " If their index pairs them, write y.loc[x.index]."),
        ((np.ones(8), np.ones(6)), "and must be the same."),
        ({"a": 1.0}, " One row is frame.iloc[[0]], or x[:1]."),
    ):
        assert message_of(trainer.predict, pair, batch_size=8).endswith(way)
    assert not caplog.messages


def test_a_frame_has_the_columns_of_the_one_in_fit(mesh):
    data, swapped = examples(16), Frame(examples(16)["x"], "bacd")
    frame, y = Frame(data["x"]), data["y"]
    both = "the data frame has the columns b, a, c, d, and that of fit had a, b, c, d: "
    trainer = ml.Trainer(create_state(mesh), pair_loss)
    calls = {
        "predict": lambda: trainer.predict(swapped, batch_size=8),
        "evaluate": lambda: trainer.evaluate(swapped, y, batch_size=8),
        "fit": lambda: quiet_fit(trainer, swapped, y, batch_size=8),
        "fit: validation": lambda: quiet_fit(
            trainer, frame, y, batch_size=8, validation_data=(swapped, y)
        ),
    }
    quiet_fit(trainer, frame, y, batch_size=8, validation_split=0.5)
    for where, call in calls.items():
        assert message_of(call) == f"{where}: {both}give them in that order."
    trainer.predict(frame, batch_size=8)
    fewer = Frame(data["x"][:, :3], "abe")
    assert message_of(lambda: trainer.predict(fewer, batch_size=8)) == (
        "predict: the data frame has the columns a, b, e, and that of fit had a, b, c, d: "
        "missing: c, d; extra: e. Prepare it as that of fit."
    )
    dummies = ["age", "city_Rome", "city_Oslo", "city_Bern"]
    trainer = ml.Trainer(create_state(mesh), pair_loss)
    quiet_fit(trainer, Frame(data["x"], dummies), y, batch_size=8)
    for names, has_dummies in ((dummies[:3], True), (["age", "city"], False)):
        fewer = Frame(data["x"][:, : len(names)], names)
        said = message_of(lambda: trainer.predict(fewer, batch_size=8))  # noqa: B023
        assert said.endswith(
            " Prepare it as that of fit. After pd.get_dummies, write frame.reindex("
            "columns=columns, fill_value=0), with the columns of fit."
            if has_dummies
            else "missing: city_Rome, city_Oslo, city_Bern; extra: city. Prepare it as "
            "that of fit."
        )

    def by_name(model, batch):
        out = model(jnp.stack([batch[name] for name in "abcd"], 1))
        return out[:, 0] - batch["y"], {"out": out}

    trainer = ml.Trainer(create_state(mesh), by_name)
    whole = Frame(np.column_stack([data["x"], y]), "abcdy")
    quiet_fit(trainer, whole, batch_size=8)
    moved = Frame(np.column_stack([y, data["x"]]), "yabcd")
    np.testing.assert_array_equal(
        *(trainer.predict(each, batch_size=8)["out"] for each in (whole, moved))
    )
    assert message_of(calls["predict"]) == f"predict: {both}give them in that order."


def test_a_model_with_two_inputs_and_data_for_it_name_a_function(mesh):
    class Two(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(()))

        def __call__(self, x, meta):
            return self.scale * (x + meta)

    trainer = ml.Trainer(create(mesh, Two))
    inputs = {"meta": np.ones((8, 2), "float32"), "x": np.ones((8, 2), "float32")}
    with pytest.raises(ml.errors.MeshLayoutError) as caught:
        trainer.predict(inputs, batch_size=8)
    assert str(caught.value) == (
        "model is called as model(batch), but takes (x, meta). Give predict_fn=lambda "
        "model, b: model(b['x'], b['meta'])."
    )
    assert {f.filename for f in traceback.extract_tb(caught.tb)} == {__file__}


def test_codes_of_missing_values_are_noted(mesh, caplog):
    trainer, data = ml.Trainer(create_state(mesh), loss_fn), examples(16)
    for codes in ([-1, 0, 1, 2], [-1, 1, 1, 1], [-2, -1, 0, 1]):
        quiet_fit(trainer, {**data, "code": np.array(codes * 4)}, batch_size=8)
    said = (
        "leaf 'code' has rows of -1, as pandas codes missing values. As a class or an "
    )
    assert caplog.messages.count(f"{said}index, it is the last one.") == 1


def test_another_fit_goes_on_with_the_order_of_rows(mesh):
    seen, x = [], np.arange(16, dtype="float32")
    data = {"x": x[:, None] * np.ones(4, "float32"), "y": x}

    def ordered(model, batch):
        jax.debug.callback(lambda rows: seen.append(rows.tolist()), batch["x"][:, 0])
        return model(batch["x"])[:, 0]

    for epochs in ([4], [2, 2]):
        trainer = ml.Trainer(create_state(mesh), ordered)
        for count in epochs:
            quiet_fit(trainer, data, batch_size=16, epochs=count)
    jax.effects_barrier()
    assert seen[:4] == seen[4:]
    assert len({*map(tuple, seen)}) == 4


def test_values_that_callbacks_add_are_in_progress_lines(mesh, capsys):
    class Adds(ml.callbacks.Callback):
        def on_epoch_end(self, trainer, epoch, logs):
            logs["val_own"] = 0.25

    ml.Trainer(create_state(mesh), loss_fn).fit(
        examples(8), batch_size=8, callbacks=[Adds()]
    )
    assert "val_own   0.2500" in capsys.readouterr().out


def test_a_best_epoch_before_a_resume_is_told_of(mesh, caplog, tmp_path):
    better = {"patience": 9, "min_delta": 1e6, "restore_best": True}
    for epochs in (1, 2):
        caplog.clear()
        stopping = ml.callbacks.EarlyStopping("loss", **better)
        with ml.Checkpointer(tmp_path) as ck:
            trainer = ml.Trainer(create_state(mesh), loss_fn)
            callbacks = [stopping, ml.callbacks.Checkpoint(ck)]
            options = {"callbacks": callbacks, "epochs": epochs, "resume": True}
            quiet_fit(trainer, examples(8), batch_size=8, **options)
        said = "the best epoch, 1, was before the run was resumed" in caplog.text
        assert said == (epochs == 2)


def test_durations_are_refused_by_name(mesh):
    data = {**examples(8), "since": np.zeros(8, "m8[s]")}
    trainer = ml.Trainer(create_state(mesh), loss_fn)
    said = message_of(lambda: quiet_fit(trainer, data, batch_size=8))
    assert said.startswith("leaf 'since' has dtype timedelta64[s], which JAX lacks.")


def test_validation_without_an_end_is_noted(mesh, caplog):
    trainer, batch = ml.Trainer(create_state(mesh), loss_fn), examples(8)
    endless = lambda: itertools.islice(itertools.repeat(batch), 120)
    quiet_fit(trainer, [batch], validation_data=endless)
    said = (
        "validation has not ended after 110 batches: is its data endless? Use lambda: "
    )
    assert caplog.messages.count(f"{said}itertools.islice(data, n).") == 1


def test_layouts_that_the_state_does_not_have_are_refused(mesh):
    other = mesh_of(batch=2, model=2)
    rules = {"kernel": ("model", None)}
    for layouts in (
        ml.LayoutMap(other, rules),
        ml.LayoutMap(mesh, {"kernel": ("batch", None)}),
        ml.LayoutMap(other, {}),
        ml.parallel.fsdp(mesh, min_bytes=0),
    ):
        said = message_of(
            lambda: ml.Trainer(create_state(mesh), loss_fn, layouts=layouts)  # noqa: B023
        )
        assert said == (
            "Trainer: the state does not lie as layouts= says. Give them to TrainState."
            "create(build, optimizer, layouts)."
        )
    state = create(other, lambda: nnx.Linear(4, 1, rngs=nnx.Rngs(0)), rules=rules)
    ml.Trainer(state, loss_fn, layouts=ml.LayoutMap(other, rules))


def test_data_without_labels_goes_to_the_model(mesh):
    data, frame, options = examples(21), Frame(examples(21)["x"]), {"batch_size": 8}
    x, trainer = data["x"], ml.Trainer(create_state(mesh), pair_loss)
    new = trainer.predict(frame, **options)  # before any `fit`, as after it
    np.testing.assert_array_equal(trainer.predict(x, **options), new)
    quiet_fit(trainer, frame, data["y"], epochs=2, **options)
    params = params_of(trainer.state)
    expected = x @ params["kernel"] + params["bias"]
    bare = trainer.predict(x, **options)
    np.testing.assert_allclose(bare, expected, atol=1e-5)
    batches = [{"x": one["x"]} for one in cut(data, 8)]
    padded = ml.distribute_dataset({"x": x}, mesh, global_batch_size=8)
    for source, more in ((frame, options), (batches, {}), (padded, {})):
        np.testing.assert_array_equal(trainer.predict(source, **more), bare)
    twice = trainer.predict(x, predict_fn=lambda model, x: 2 * model(x), **options)
    np.testing.assert_allclose(twice, 2 * bare)
    whole = trainer.predict((x, data["y"]), **options)
    np.testing.assert_allclose(whole["out"], -expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["arrays", "a frame"])
def test_data_as_that_of_fit_goes_to_the_loss_function(mesh, kind):
    def autoencoder(model, batch):
        (x,) = batch
        return jnp.square(model(x)[:, 0]), {"out": model(x)}

    def of_columns(model, batch):
        return autoencoder(model, (jnp.stack([batch[name] for name in "abcd"], 1),))

    x, options = examples(21)["x"], {"batch_size": 8}
    loss, source = (autoencoder, (x,)) if kind == "arrays" else (of_columns, Frame(x))
    trainer = ml.Trainer(create_state(mesh), loss)
    quiet_fit(trainer, source, **options)
    params = params_of(trainer.state)
    expected = x @ params["kernel"] + params["bias"]
    for same in (source, x) if kind == "arrays" else (source,):
        found = trainer.predict(same, **options)["out"]
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_weights_that_the_trainer_would_not_see_are_refused(mesh):
    data = examples(13)
    batches = ml.distribute_dataset(
        (data["x"], data["y"]), mesh, global_batch_size=8, weights=2
    )
    trainer = ml.Trainer(create_state(mesh), weighted_pair_loss)
    said = (
        "the batch's weights are at 2, but the step looks for them at 'weight', so that "
        "padding would count as examples. Give weights=2 to the step, or weights='weight' to the dataset."
    )
    assert message_of(trainer.fit, batches) == said
    assert message_of(trainer.evaluate, batches) == said
    for padded in (batches, iter(batches)):  # predict would return the padding
        assert "padding would count as examples" in message_of(trainer.predict, padded)


def test_predict_says_what_it_needs(mesh):
    def bare(model, batch):
        return loss_fn(model, batch)[0]

    state, data = create_state(mesh), [examples(8)]
    with pytest.raises(KeyError) as caught:
        ml.Trainer(state, bare).predict({"x": data[0]["x"]}, batch_size=8)
    assert caught.value.__notes__ == [
        "predict calls bare, or what you give as predict_fn(model, batch); for inputs "
        "alone write predict(x, ...)",
        "in predict: batch 1, {x: float32[8, 4]}",
    ]
    assert message_of(ml.Trainer(state, bare).predict, data) == (
        "predict: bare returns losses but no outputs. Return a pair of losses and a dict "
        "of outputs, or give predict_fn(model, batch)."
    )
    np.testing.assert_array_equal(  # one row, and no loss function
        ml.Trainer(state).predict(ROWS["x"][:1], batch_size=1),
        state.model(ROWS["x"])[:1],
    )
    mean = ml.Trainer(state, predict_fn=lambda model, b: b["x"].mean())
    assert message_of(mean.predict, data) == (
        "predict: an output has shape () for a batch of 8 rows; give one row per example."
    )


def test_nothing_is_read_before_the_end_of_an_epoch(trainer, monkeypatch, tmp_path):
    reads = []
    array = type(jnp.zeros(()))
    for name in ("__float__", "__array__", "__int__", "__bool__", "block_until_ready"):
        real = getattr(array, name)

        def spy(self, *args, name=name, real=real, **kwargs):
            reads.append(name)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(array, name, spy)
    # As on a device that is far behind: what is not there is not read.
    monkeypatch.setattr(array, "is_ready", lambda self: False)
    monkeypatch.setattr(jax, "block_until_ready", lambda x: reads.append("wait") or x)
    counts = []

    class Count(ml.callbacks.Callback):
        def on_step_end(self, trainer, step, metrics):
            counts.append(len(reads))

    # On several virtual CPU devices, every eighth step of all tests waits.
    monkeypatch.setattr("meshlayout.step.compiled_step._MAX_IN_FLIGHT", 10**9)
    quiet_fit(trainer, cut(examples(56), 8))
    reads.clear()
    terminal = Console(file=io.StringIO(), force_terminal=True)
    callbacks = [
        ml.callbacks.Progress(terminal),
        ml.callbacks.StopOnNaN(),
        ml.callbacks.Log(tmp_path / "log.jsonl"),
        Count(),
    ]
    trainer.fit(cut(examples(24), 8), callbacks=callbacks)
    before = counts[-3]
    assert counts[-3:] == [before] * 3
    float(jnp.zeros(()))
    assert len(reads) > before  # the spy sees reads


class BangError(Exception):
    """What a user's code raises."""


@pytest.mark.parametrize(
    ("moment", "error", "steps", "epochs"),
    [
        ("on_fit_start", BangError, 0, 0),
        ("on_epoch_start", BangError, 2, 1),
        ("on_step_end", KeyboardInterrupt, 3, 1),
        ("on_epoch_end", BangError, 4, 2),
        ("on_fit_end", BangError, 4, 2),
    ],
)
def test_training_continues_after_an_error(moment, error, steps, epochs, trainer):
    def bang(self, trainer, *args):
        if trainer.position.epoch >= 2 or moment == "on_fit_start":
            raise error

    batches = cut(examples(16), 8)
    callback = type("Bad", (ml.callbacks.Callback,), {moment: bang})()
    with pytest.raises(error):
        quiet_fit(trainer, batches, 2, callbacks=[callback])
    assert int(trainer.state.step) == steps
    assert trainer.history.epochs == list(range(1, epochs + 1))
    quiet_fit(trainer, batches)
    assert int(trainer.state.step) == trainer.position.step == steps + 2
    assert trainer.history.epochs == list(range(1, epochs + 2))


def test_ctrl_c_within_a_step_waits_for_the_new_state(mesh):
    class Interrupted(ml.Trainer):
        def train_step(self, state, batch, metrics):
            result = super().train_step(state, batch, metrics)
            if self.position.step == 1:
                signal.raise_signal(signal.SIGINT)
            return result

    before = signal.getsignal(signal.SIGINT)
    trainer = Interrupted(create_state(mesh), loss_fn)
    with pytest.raises(KeyboardInterrupt):
        quiet_fit(trainer, cut(examples(32), 8))
    assert signal.getsignal(signal.SIGINT) is before
    assert int(trainer.state.step) == 2
    assert np.isfinite(params_of(trainer.state)["kernel"]).all()


def test_an_error_in_a_later_batch_says_which_it_was(mesh):
    first = examples(8)
    trainer = ml.Trainer(create_state(mesh), loss_fn, on_recompile="ignore")
    data = [first, first, {"x": first["x"]}]
    for call, where in (
        (quiet_fit, "in fit: batch 3 of epoch 1"),
        (ml.Trainer.evaluate, "in evaluate: batch 3"),
    ):
        with pytest.raises(KeyError) as caught:
            call(trainer, lambda: iter(data))
        arrays = "{weight: float32[8], x: float32[8, 4]}"
        assert caught.value.__notes__[-1] == f"{where}, {arrays}"
    assert int(trainer.state.step) == 2


def test_a_state_that_is_used_up_is_refused(mesh):
    state, batches = create_state(mesh), cut(examples(8), 8)
    other = ml.Trainer(state, loss_fn)
    quiet_fit(ml.Trainer(state, loss_fn), batches)
    said = message_of(ml.Trainer, state, loss_fn, error=ml.errors.StateError)
    assert "Continue with what the step returned, or trainer.state, or " in said
    for call in (quiet_fit, ml.Trainer.evaluate, ml.Trainer.predict):
        assert "used up" in message_of(call, other, batches)


@pytest.mark.parametrize("loss", [optax.sigmoid_binary_cross_entropy, optax.huber_loss])
def test_losses_of_each_row_with_each_label_give_a_warning(mesh, loss):
    data = {**examples(8), "y": (examples(8)["y"] > 0).astype("float32")}
    functions = {
        "broadcast": lambda model, batch: loss(model(batch["x"]), batch["y"]),
        "column": lambda model, batch: loss(model(batch["x"])[:, 0], batch["y"]),
        # As the losses of all pairs are, of pictures and texts.
        "pairs": lambda model, batch: loss(batch["x"] @ batch["x"].T, jnp.eye(8)),
    }
    for name, function in functions.items():
        inputs = {"x": data["x"]} if name == "pairs" else data
        trainer = ml.Trainer(create_state(mesh), function)
        allow = jax.numpy_rank_promotion("allow")  # as in users' programs
        with allow, warnings.catch_warnings(record=True, action="always") as caught:
            for _ in range(2):  # of a train step and an eval step, once
                quiet_fit(trainer, [inputs], validation_data=[inputs])
        texts = [str(x.message) for x in caught if "broadcast" in str(x.message)]
        assert len(texts) == (name == "broadcast")
        assert all("model(x)[:, 0]" in text for text in texts)


def test_an_attribute_that_would_change_nothing_cannot_be_set(trainer):
    with pytest.raises(AttributeError, match=r"trainer\.state\.replace\(tx="):
        trainer.learning_rate = 0.1
    with pytest.raises(AttributeError, match=r"Write trainer\.stop\("):
        trainer.stop_training = True
    said = message_of(setattr, trainer, "history", None)
    assert said == "history takes a History: ml.History() is empty."
    adam = optax.adam(0.1)
    with pytest.raises(ml.errors.StateError, match=r"count\)\. .*opt_state=tx\.init\("):
        trainer.state.replace(tx=adam)
    slots = adam.init(trainer.state.params)
    assert trainer.state.replace(tx=adam, opt_state=slots).tx is adam
    before = params_of(trainer.state)
    trainer.state = trainer.state.replace(tx=optax.sgd(0.0))
    quiet_fit(trainer, cut(examples(8), 8))
    assert_same_bits(params_of(trainer.state), before)
    assert int(trainer.state.step) == 1


def test_a_habit_of_another_library_is_answered_with_what_to_write(mesh, trainer):
    data = examples(8)
    create = "Trainer(ml.TrainState.create(build"
    assert create in message_of(ml.Trainer, 1, loss_fn, 2)
    assert "(data, mesh, global" in message_of(
        ml.distribute_dataset, data, global_batch_size=8
    )
    dataset = ml.distribute_dataset(data, mesh, global_batch_size=8)
    assert repr(dataset) == "DistributedDataset(global_batch_size=8, batches=1)"
    with pytest.raises(TypeError) as caught:
        quiet_fit(trainer, data["x"], data["y"], batch_size=8)
    said = "fit(x, y) makes tuples, fit({'x': x, 'y': y}) dicts."
    assert said in caught.value.__notes__


def step_of(train_step):
    return type("Own", (ml.Trainer,), {"train_step": train_step})({"n": 0})


WRONG = {
    "an option of Trainer must be 'metrics', 'regularizers', ": (
        lambda data: ml.Trainer({}, loss_fn, clip_nrm=1.0)
    ),
    "make_train_step: loss_fn is called as loss_fn(model, batch), but takes (y_true, ": (
        lambda data: ml.Trainer({}, lambda y_true, y_pred: (y_true - y_pred) ** 2)
    ),
    "Trainer got no loss function": lambda data: ml.Trainer({}, ema=0.9),
    "the trainer has no loss function": lambda data: ml.Trainer({"n": 0}).fit(data),
    **{
        f"train_step must return (state, metrics), with metrics of type "
        f"ml.metrics.Metrics, got {shown}.": (
            lambda data, result=result: step_of(lambda *_: result).fit(data)
        )
        for result, shown in (((0, 1), "1"), ({"loss": 1}, "{'loss': 1}"))
    },
    "Own.train_step is called as Own.train_step(state, batch, metrics), but takes ": (
        lambda data: step_of(lambda self, data: 0)
    ),
    "train must be arrays, an iterable of batches, or a": (
        lambda data: Counted().fit("train.csv", batch_size=2)
    ),
    "fit: batch_size= is for arrays, and a list_iterator yields batches: leave out "
    "batch_size=. If it yields examples, write ml.distribute_dataset(train, "
    "ml.create_mesh(), global_batch_size=2).": (
        lambda data: Counted().fit(iter(data), batch_size=2)
    ),
    "fit: validation needs the size of a batch: ml.distribute_dataset(validation_data,": (
        lambda data: Counted().fit(data, validation_data={"i": np.ones((2, 9))})
    ),
    **{
        f"fit: validation_data is {mine}, and the training data {theirs}.": (
            lambda data, train=train, validation=validation: ml.Trainer(
                {}, loss_fn
            ).fit(train, batch_size=2, validation_data=validation)
        )
        for mine, theirs, train, validation in (
            ("a tuple", "a dict: write {'i': iv}", {"i": np.ones(2)}, (np.ones(2),)),
            ("a ndarray", "a tuple: write (xv, yv)", (np.ones(2),), np.ones(2)),
        )
    },
    "fit: epochs must be a positive": lambda data: Counted().fit(data, epochs=0),
    "fit: epochs is given twice": lambda data: Counted().fit(data, 2, epochs=3),
    "fit: shuffle=True is not a seed. Write shuffle=0:": (
        lambda data: Counted().fit(data, shuffle=True)
    ),
    "fit needs the size of a batch: fit(..., batch_size=32).": (
        lambda data: Counted().fit({"i": np.ones((2, 9))})
    ),
    "the source is empty: it yielded no examples.": (
        lambda data: Counted().fit({"i": np.ones(0)}, batch_size=2)
    ),
    "fit: a strategy's batches are for its run. Give arrays, or ml.distribute_dataset(": (
        lambda data: Counted().fit(
            ml.distribute.MirroredStrategy().distribute_dataset(examples(8), 8)
        )
    ),
    "train yielded no batch. Perhaps it is": lambda data: Counted().fit(iter([])),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_refused_with_a_sentence(message):
    assert message_of(WRONG[message], numbered(1, 2)).startswith(message)


def test_arrays_are_shuffled_by_seed_and_epoch_and_lose_no_row():
    orders = []
    for seed in (0, 0, 7):
        trainer, rows = Counted(), {"i": np.arange(10, dtype="float32")}
        quiet_fit(trainer, rows, epochs=2, batch_size=4, shuffle=seed)
        orders.append([trainer.seen[:10], trainer.seen[10:]])
    assert orders[0] == orders[1] != orders[2]
    assert [sorted(epoch) for epoch in orders[2]] == [list(range(10))] * 2
    assert orders[2][0] != orders[2][1] != list(range(10))


def test_a_batch_of_weight_0_makes_no_step(mesh, caplog):
    data = examples(16)
    data["weight"] = np.ones(16, "float32")
    batches = cut(data, 8)
    padding = {**batches[0], "weight": np.zeros(8, "float32")}
    empty = {name: rows[:0] for name, rows in data.items()}
    states = []
    for given in (batches, [padding, batches[0], padding, empty, batches[1]]):
        optimizer = optax.adamw(0.05, weight_decay=0.1)
        trainer = ml.Trainer(create_state(mesh, optimizer), loss_fn)
        history = quiet_fit(trainer, given)
        states.append((trainer.state.params, trainer.state.opt_state, history["loss"]))
        assert int(trainer.state.step) == trainer.position.step == 2
    assert_same_bits(*states)
    for number in (1, 3, 4):
        assert f"batch {number} of train has no rows, or only" in caplog.text


def test_a_share_of_the_rows_is_held_out(mesh, caplog, capsys):
    data = examples(40)
    first, last = cut(data, 30)
    options = {"batch_size": 8, "epochs": 2, "shuffle": 3}
    split = ml.Trainer(create_state(mesh), loss_fn)
    whole = ml.Trainer(create_state(mesh), loss_fn)
    found = quiet_fit(split, data, validation_split=0.25, **options)
    expected = quiet_fit(whole, first, validation_data=last, **options)
    assert found == expected
    split = ml.Trainer(create_state(mesh), loss_fn)
    assert quiet_fit(split, Rows(data), validation_split=0.25, **options) == expected
    assert not caplog.messages
    weighted = {**data, "weight": np.ones(40, "float32")}
    split.fit(weighted, validation_split=0.25, **options)
    assert not caplog.messages
    assert capsys.readouterr().out.splitlines().count(WEIGHTED) == 1
    assert message_of(lambda: quiet_fit(split, cut(data, 8), validation_split=0.1)) == (
        "fit: validation_split= holds out rows of arrays. Of batches, or beside it, "
        "give validation_data= alone."
    )
