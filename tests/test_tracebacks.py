"""An error in a user's function shows the user's frames and the sentence, wherever run."""

import functools
import inspect
import operator
import pdb
import re
import subprocess
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import meshlayout as ml
from tests.error_messages import message_of
from tests.small_states import create, mesh_of


NOTE_OF_JAX = "JAX has removed its internal frames"
BATCH = {"x": np.ones((8, 2), "float32")}


def missing(batch):
    return batch["labels"]


def bad_key(model, batch):
    return model(batch["x"])[:, 0] - missing(batch)


def bad_shape(model, batch):
    return model(batch["x"]) @ jnp.ones((3, 3))


def one_loss(model, batch):
    return model(batch["x"])[:, 0]


@pytest.fixture
def state():
    return create(mesh_of(batch=4), lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0)))


def float_labels(model, batch):
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["x"][:, 0])


def placed(mesh):
    return ml.relayout(BATCH, mesh.layout(mesh.axis_names[0], ...))


NOTES = {
    "Labels that are class numbers are": (
        lambda state: CALLS["fit"](state, float_labels)
    ),
    "A model takes what its __call__ takes, such as batch['x'], not a batch.": (
        lambda state: CALLS["fit"](state, lambda model, batch: model(batch))
    ),
    "verify takes a step, such as make_train_step(loss_fn).": (
        lambda state: ml.testing.verify(one_loss, state, placed(mesh_of(batch=4)))
    ),
}
if jax.__version_info__ >= (0, 8):  # others move the rows
    NOTES["The state and the batch may be on two meshes: lay both out on one."] = (
        lambda state: ml.make_predict_step(one_loss)(state, placed(mesh_of(dp=2, tp=2)))
    )


@pytest.mark.parametrize("note", NOTES)
def test_what_errors_of_jax_mean_is_explained(state, note):
    with pytest.raises((TypeError, ValueError, AttributeError)) as caught:
        NOTES[note](state)
    assert note in " ".join(caught.value.__notes__)


CALLS = {
    "fit": lambda state, loss: ml.Trainer(state, loss).fit([BATCH], progress=False),
    "evaluate": lambda state, loss: ml.Trainer(state, loss).evaluate([BATCH]),
    "predict": lambda state, loss: ml.Trainer(state, loss).predict([BATCH]),
    "train step": lambda state, loss: ml.make_train_step(loss)(state, BATCH),
    "eval step": lambda state, loss: ml.make_eval_step(loss)(state, BATCH),
    "compiled step": lambda state, loss: ml.compile_step(
        lambda state, batch: (state, loss(state.model, batch))
    )(state, BATCH),
    "run": lambda state, loss: ml.distribute.MirroredStrategy(["CPU:0"]).run(
        lambda: loss(state.model, BATCH)
    ),
}


@pytest.mark.parametrize("loss", [bad_key, bad_shape])
@pytest.mark.parametrize("call", CALLS)
def test_an_error_in_a_loss_function_shows_the_users_frames(state, call, loss):
    with pytest.raises((KeyError, TypeError)) as caught:
        CALLS[call](state, loss)
    frames = traceback.extract_tb(caught.tb)
    own = [frame.name for frame in frames if frame.filename == __file__]
    assert own[-1] == (missing if loss is bad_key else bad_shape).__name__
    assert len(frames) - len(own) <= 3  # JAX leaves some frames of jax.numpy
    text = "".join(traceback.format_exception(caught.value))
    assert NOTE_OF_JAX not in text
    assert "meshlayout/" not in text.replace(str(caught.value), "")


def test_the_librarys_own_errors_and_missing_names_show_no_frames_of_libraries(state):
    metrics = {"mae": ml.metrics.Mean(values="abs")}
    trainer, history = ml.Trainer(state, one_loss, metrics=metrics), ml.History()
    history.add(1, {"accuracy": 0.5})
    for call in (
        lambda: trainer.fit([BATCH], progress=False),
        lambda: trainer.steps,
        lambda: ml.metrics.AUCC,
        lambda: history["acc"],
    ):
        with pytest.raises((ml.errors.MetricError, AttributeError, KeyError)) as caught:
            call()
        files = {frame.filename for frame in traceback.extract_tb(caught.tb)}
        assert files == {__file__}
    assert "Did you mean 'accuracy'?" in str(caught.value)


def test_all_frames_are_shown_on_request(state, monkeypatch):
    monkeypatch.setenv("MESHLAYOUT_TRACEBACK", "full")
    with pytest.raises(TypeError) as caught:
        CALLS["fit"](state, bad_shape)
    files = [frame.filename for frame in traceback.extract_tb(caught.tb)]
    assert any("meshlayout/trainer" in file for file in files)
    assert NOTE_OF_JAX in "".join(traceback.format_exception(caught.value))


def test_an_error_of_the_librarys_own_code_is_shown_whole(state, monkeypatch):
    monkeypatch.setattr(ml.trainer.trainer.Trainer, "_evaluate", None)
    with pytest.raises(TypeError) as caught:
        ml.Trainer(state, bad_key).evaluate([BATCH])
    files = [frame.filename for frame in traceback.extract_tb(caught.tb)]
    assert any("meshlayout/trainer" in file for file in files)


def test_debuggers_land_in_the_users_frame(state):
    with pytest.raises(KeyError) as caught:
        CALLS["fit"](state, bad_key)
    stack, current = pdb.Pdb(nosigint=True).get_stack(None, caught.tb)
    frame, line = stack[current]
    assert frame.f_code == missing.__code__
    assert "x" in frame.f_locals["batch"]
    assert line == missing.__code__.co_firstlineno + 1


@pytest.mark.slow
def test_ipython_shows_the_users_frames(tmp_path):
    pytest.importorskip("IPython")
    script = tmp_path / "cell.py"
    script.write_text(
        "import numpy as np, optax\nfrom flax import nnx\nimport meshlayout as ml\n"
        "build = lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0))\n"
        "state = ml.TrainState.create(build, optax.sgd(0.1))\n"
        "def loss_fn(model, batch):\n    return model(batch['x']) - batch['labels']\n"
        "batches = [{'x': np.ones((8, 2), 'float32')}]\n"
        "ml.Trainer(state, loss_fn).fit(batches)\n"
    )
    command = [sys.executable, "-m", "IPython", "--colors=NoColor", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert "batch['labels']" in said
    assert "KeyError: 'labels'" in said
    assert "meshlayout/" not in said
    assert "_src" not in said


# Functions and classes that users give options to, and methods.
NEAR = """
    Checkpointer Checkpointer.restore Checkpointer.save Layout LayoutMap
    PrecisionPolicy Rule Trainer Trainer.evaluate Trainer.fit Trainer.predict
    TrainState.create check_layout compile_step constrain copy_to_mesh create
    describe distribute_dataset doctor initialize make_eval_step make_predict_step
    make_train_step optimizer_by_path pack relayout scope visualize zero_rule
    arrays.normal arrays.zeros callbacks.Checkpoint callbacks.EarlyStopping
    callbacks.Log callbacks.StopOnNaN checkpoint.load_orbax
    checkpoint.load_safetensors checkpoint.save_safetensors data.from_tfds
    data.pack_sequences distribute.MirroredStrategy distribute.OneDeviceStrategy
    distribute.Strategy.run losses.compute_average_loss losses.l2 losses.record
    metrics.Accuracy metrics.ConfusionMatrix metrics.Mean metrics.Precision
    parallel.fsdp parallel.pipeline parallel.ring_attention parallel.tensor_parallel
    step.EvalStep.memory testing.assert_layout testing.expect_communication
    testing.verify
"""


@pytest.mark.parametrize("name", NEAR.split())
def test_misspelled_options_are_named_by_every_public_call(name):
    function = operator.attrgetter(name)(ml)
    *_, last = (
        option
        for option, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and option[0] != "_"
    )
    typo = last[:-2] + last[-1]
    said = message_of(function, **{typo: None})
    assert said == f"{name.rpartition('.')[2]} got {typo}=. Did you mean {last!r}?"


def test_reflexes_of_other_libraries_are_answered(state):
    assert message_of(ml.Trainer(state).predict, [BATCH], workers=3) == (
        "predict got workers=. It takes data, batch_size, predict_fn."
    )
    assert message_of(ml.Trainer(state).fit, BATCH, sample_weight=[1.0]) == (
        "fit got sample_weight=. Weights go into the data: {'x': x, 'y': y, 'weight': "
        "weights}."
    )
    said = message_of(ml.Trainer(state).fit, BATCH, class_weight={0: 1.0, 1: 5.0})
    assert said.endswith("'weight': np.array([1.0, 5.0])[y]}.")
    assert message_of(ml.make_train_step(bad_key), state, BATCH, np.ones(8)) == (
        "train_step: the third argument is for earlier metrics, got an array of shape "
        "(8,). Labels go into the batch, as {'x': x, 'y': y}."
    )
    assert message_of(ml.create_mesh, (2, 4), ("batch", "model")) == (
        "create_mesh: too many positional arguments. Write create_mesh({'batch': 2, "
        "'model': 4}). Give by name: devices=, dcn=, axis_types=."
    )
    assert message_of(ml.Trainer, nnx.Linear(2, 1, rngs=nnx.Rngs(0)), bad_key) == (
        "Trainer takes a TrainState, got a Linear. Write ml.TrainState.create(lambda: "
        "nnx.clone(model), optimizer (to predict, optax.identity())), or "
        "ml.compile_step(step)."
    )
    theirs = train_state.TrainState(0, None, {}, optax.sgd(0.1), ())
    flax = "a flax.training.train_state.TrainState. Write ml.TrainState.create(lambda: "
    flax += '{"params": state.params}, state.tx, layouts, module=module).replace('
    flax += "opt_state=state.opt_state, step=state.step), or ml.compile_step(step)."
    steps = ml.make_train_step(bad_key), ml.make_eval_step(bad_key)
    for call in (*steps, lambda *_: ml.Trainer(theirs, bad_key)):
        assert f"takes a TrainState, got {flax}" in message_of(call, theirs, BATCH)
    stats = type("Stats", (train_state.TrainState,), {"batch_stats": {}})
    said = message_of(steps[0], stats(0, None, {}, optax.sgd(0.1), ()), BATCH)
    assert '{"params": state.params, "batch_stats": state.batch_stats}, ' in said
    pair = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), None
    assert "lambda: nnx.clone(model), optimizer.tx" in message_of(
        ml.make_train_step(bad_key), pair, BATCH
    )
    swapped = message_of(ml.make_train_step, lambda batch, model: 0)
    assert swapped.endswith(
        "called as loss_fn(model, batch), but takes (batch, model)."
    )
    alone = message_of(ml.make_predict_step, lambda model: 1.0)
    assert "predict_fn(model, batch)" in alone
    said = message_of(ml.make_train_step, lambda model, batch, training: 0)
    assert said.endswith("training). Parameters named rngs and train are passed, too.")
    error = functools.partial(message_of, error=AttributeError)
    assert error(lambda: ml.MirroredStrategy) == (
        "module 'meshlayout' has no attribute 'MirroredStrategy': write "
        "meshlayout.distribute.MirroredStrategy"
    )
    assert error(lambda: state.summary()).endswith("print(state) is the summary.")
    assert "Trainer(state, loss_fn" in error(lambda: ml.Trainer(state).compile())
    assert error(lambda: ml.History().history).endswith("as in history['loss'].")
    strategy = ml.distribute.get_strategy()
    assert error(lambda: strategy.experimental_local_results) == (
        f"{type(strategy).__name__} has no 'experimental_local_results'. Write "
        "local_results."
    )
    mesh, value = ml.create_mesh({"batch": 8}), ml.distribute.PerReplica
    data = ml.distribute_dataset(np.arange(8), mesh, global_batch_size=8)
    for owner, name in [
        *((ml, name) for name in ("DVariable", "DTensorDataset", "default_mesh")),
        *((ml.distribute, name) for name in ("experimental", "VariableAggregation")),
        *((data, name) for name in ("take", "shuffle", "batch", "repeat")),
        (ml.LayoutMap(mesh), "scope"),
        (mesh.layout(), "sharding_specs"),
        (iter(data), "get_next_as_optional"),
        (ml.distribute.get_replica_context(), "merge_call"),
        *((value(jnp.ones(8), num_replicas=8), name) for name in ("numpy", "mean")),
        *((ml, name) for name in ("DeviceMesh", "TensorLayout", "DTensorCheckpoint")),
        (ml, "GradientTape"),
    ]:
        said = error(lambda: getattr(owner, name))  # noqa: B023
        assert re.search(rf"has no (attribute )?'{name}'. (Write|Names) ", said), said
    tpu = ml.distribute.TPUStrategy
    assert "Layout(['batch', None], mesh)" in message_of(ml.Layout, sharding_specs=[])
    save = ml.Checkpointer("unused").save
    assert message_of(save, 2, model=state).endswith("data, metadata, metrics, force.")
    mirrored = ml.distribute.MirroredStrategy
    assert "4 is not a device. Give a list, such as jax" in message_of(mirrored, 4)
    coordinator = message_of(
        ml.distribute.ClusterCoordinator, mirrored(["/device:CPU:0"])
    )
    assert coordinator.endswith("which needs none: call its run.")
    assert "Leave it out: ml.initialize()" in message_of(tpu, resolver="x")
    assert "Leave it out: ml.initialize()" in message_of(tpu, "x")
    for call in (ml.make_train_step, ml.Trainer, ml.Trainer(state).fit, state.replace):
        assert "The optimizer is the state's: " in message_of(call, learning_rate=0.1)
        assert "optimizer_by_path({'head'" in message_of(call, trainable="head")
    torch = {  # attributes of PyTorch's modules, functions and options
        state: "to cuda train eval parameters state_dict load_state_dict lr zero_grad "
        "batch_stats",
        data: "set_epoch",
        ml: "fully_shard FullyShardedDataParallel init_process_group init_device_mesh "
        "DistributedDataParallel DDP FSDP checkpoint_wrapper GradScaler autocast "
        "clip_grad_norm_ get_rank compile save load distribute_tensor list_devices "
        "dtensor Shard Partial optim",
        mesh: "get_local_rank",
        ml.parallel: "ModelParallel ColwiseParallel parallelize_module",
        ml.distribute: "RunOptions InputOptions VariableSynchronization cluster_resolver",
    }
    for owner, names in torch.items():
        for name in names.split():
            said = error(lambda: getattr(owner, name))  # noqa: B023
            assert re.search(rf"has no (attribute )?'{name}'\. (?!For)", said), said
    make = functools.partial(ml.make_train_step, bad_key)
    fsdp = functools.partial(ml.parallel.fsdp, ml.create_mesh({"batch": 8}))
    distribute, create = ml.distribute_dataset, ml.TrainState.create
    options = {
        make: "gradient_accumulation_steps max_grad_norm gradient_clip_val no_sync amp "
        "grad_clip scheduler scaler gradient_checkpointing",
        fsdp: "auto_wrap_policy shard_axis sharding_strategy mixed_precision mp_policy "
        "cpu_offload offload_policy reshard_after_forward ignored_modules",
        distribute: "drop_last num_workers seed collate_fn sampler pin_memory",
        create: "wrt",
        functools.partial(
            ml.Trainer, state
        ): "max_epochs callbacks devices strategy loss",
        ml.Trainer(state).fit: "validation_steps ckpt_path",
        functools.partial(ml.Checkpointer, "x"): "save_best_only max_to_keep",
    }
    for function, names in options.items():
        for name in names.split():
            said = message_of(function, **{name: 1})
            assert re.search(rf"got {name}=\. (?!No)", said), said
    for precision, near in {"fp16": "float16", jnp.bfloat16: "bfloat16"}.items():
        assert message_of(make, precision=precision).endswith(f"mean {near!r}?")
    assert "got the class Linear. " in message_of(make, remat=nnx.Linear)
    for owner, name in [
        (state, "half"),
        (ml.Checkpointer("unused"), "latest"),
    ]:
        assert error(lambda: getattr(owner, name)).endswith("/docs/coming_from.")  # noqa: B023
    assert "Did you mean 'create_mesh'?" in error(lambda: ml.create_mehs)
    assert "Did you mean 'Accuracy'?" in error(lambda: ml.metrics.Acuracy)
    for call, words in {
        lambda: ml.callbacks.ModelCheckpoint: "Write Checkpoint(ml.Checkpointer(",
        lambda: ml.callbacks.TensorBoard: "Write Log(directory).",
        lambda: ml.Checkpointer("unused").steps: "Write ck.all_steps().",
        lambda: ml.callbacks.ReduceLROnPlateau: "hyperparams['learning_rate']",
        lambda: ml.metrics.AUC: "pip install google-metrax",
        lambda: ml.Trainer(state).predict_proba: "lambda model, x: jax.nn.softmax(",
        lambda: ml.metrics.MeanSquaredError: "Write Mean(values='error')",
        lambda: ml.losses.SparseCategoricalCrossentropy: "Call optax.softmax_cross_",
        lambda: ml.Trainer(state).model: "Write model = trainer.state.model; ",
        lambda: ml.Trainer(state).score: "Write evaluate(x, y, batch_size=32)",
        lambda: ml.Trainer(state).train_on_batch: "ml.make_train_step(loss_fn)",
        lambda: ml.Trainer(state).save_weights: "ml.Checkpointer(directory) as ck",
    }.items():
        assert words in error(call)
    calls = {
        lambda: ml.Trainer(state).fit(1, 2, 3, 4): "fit: too many positional arguments."
        " Write Trainer(state, loss_fn).fit(x, y, epochs=5, batch_size=32). Give by "
        "name: batch_size=, shuffle=, steps_per_epoch=, validation_data=, "
        "validation_split=, callbacks=.",
        lambda: ml.callbacks.Checkpoint("dir", monitor="val_loss"): "Checkpoint got "
        "monitor=. Write Checkpoint(ml.Checkpointer(directory, best=('val_loss', "
        "'min'))).",
        lambda: ml.metrics.ConfusionMatrix(labels="y"): "ConfusionMatrix: missing a "
        "required argument: 'num_classes'.",
    }
    for call, message in calls.items():
        assert message_of(call) == message
    assert "state.tx" in error(lambda: state.optimizer)


def test_a_sum_over_replicas_that_a_step_does_not_have_is_explained(state):
    @ml.compile_step
    def step(state, batch):
        return state, jax.lax.pmean(batch["x"].mean(), "batch")

    with pytest.raises(NameError, match="unbound axis name: batch") as caught:
        step(state, BATCH)
    (note,) = caught.value.__notes__
    assert note.startswith("A step is one program over the whole batch, ")
