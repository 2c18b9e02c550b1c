"""What works on one process works on several, with the same numbers.

Each program below runs on one process with all devices, and on two and four that share
them. A program returns numbers and texts; those of all processes must be equal, and
those of one process, too, up to the rounding of sums in another order.
"""

import json
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import meshlayout as ml
from meshlayout.cluster import process_count, process_index
from tests.processes import run_processes


pytestmark = pytest.mark.multiprocess

ROWS, BATCH = 22, 8

PROGRAMS = {}
# The programs of `make test`, and those that return the same bits everywhere.
QUICK, EXACT, RTOL = set(), set(), {}


def program(*, quick=False, exact=False, rtol=2e-5):
    """Adds a function of a run to the programs; `exact`: to the bit, everywhere."""

    def add(function):
        name = function.__name__
        PROGRAMS[name] = function
        QUICK.update([name] if quick else [])
        EXACT.update([name] if exact else [])
        RTOL[name] = rtol
        return function

    return add


class Run:
    """The devices and the directory of one run.

    Args:
        directory: Where its programs write.
        count: The number of processes; on one process, of those to compare with.
        num_devices: How many devices they use.
        variants: How many variants of a program to run, at most.
    """

    def __init__(self, directory, count, num_devices, variants):
        self.directory, self.devices = Path(directory), jax.devices()[:num_devices]
        self.count, self.variants = count, variants

    def mesh(self, kind="inside"):
        """A mesh whose axis `model` is inside processes or across them, or none."""
        half = len(self.devices) // 2
        axes = {
            "inside": {"batch": half, "model": 2},
            "across": {"model": 2, "batch": half},
            "batch": {"batch": 2 * half},
        }
        return ml.create_mesh(axes[kind], devices=self.devices)

    def path(self, name):
        """A path for files of all processes of this run."""
        return self.directory / f"{name}-{process_count()}"


def numbers(tree):
    """The leaves of a tree as lists of numbers, gathered from all processes."""
    return [np.asarray(x, float).tolist() for x in jax.tree.leaves(ml.to_numpy(tree))]


def values(metrics):
    """Values by name, on the host, as lists of numbers."""
    return {name: np.asarray(x, float).tolist() for name, x in metrics.items()}


def message(call):
    """The error of the library that a call raises."""
    with pytest.raises(ml.MeshLayoutError) as error:
        call()
    return f"{type(error.value).__name__}: {error.value}"


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.down = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(self.norm(nnx.relu(self.up(x)))))


def build():
    return Net(nnx.Rngs(0))


def loss_fn(model, batch):
    logits = model(batch["x"])
    label, x = batch["label"], batch["x"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    outputs = {"logits": logits, "label": label, "score": logits[:, 1]}
    return losses, outputs | {"is_one": label == 1, "value": x[:, 0], "row": x[:, 1]}


def source(rows=ROWS):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4)).astype("float32")
    return {"x": x, "label": rng.integers(0, 3, rows).astype("int32")}


RULES = {
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
}


def layouts_on(mesh):
    return ml.LayoutMap(mesh, RULES if "model" in mesh.axis_names else {})


def state_on(mesh, layouts=None, optimizer=None):
    layouts = layouts_on(mesh) if layouts is None else layouts
    # Adam would make whole steps of rounding, where gradients are next to nothing.
    optimizer = optimizer or optax.sgd(0.1, momentum=0.9)
    return ml.TrainState.create(build, optimizer, layouts)


def linear_on(mesh):
    """A state that takes little to compile."""
    return ml.TrainState.create(
        lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)), optax.sgd(0.1), ml.LayoutMap(mesh)
    )


def data_on(mesh, **options):
    return ml.distribute_dataset(source(), mesh, global_batch_size=BATCH, **options)


def contents(state):
    return numbers((state.params, state.model_state, state.extra))


def trained(mesh, layouts=None, **options):
    """Losses, accuracy and state after an epoch whose last batch is padded."""
    state = state_on(mesh, layouts)
    accuracy = {"accuracy": ml.metrics.Accuracy()}
    train_step = ml.make_train_step(loss_fn, metrics=accuracy, **options)
    losses, metrics = [], None
    for batch in data_on(mesh):
        state, metrics = train_step(state, batch, metrics)
        losses.append(metrics.to_host()["loss"])
    return {"losses": losses, **values(metrics.to_host()), "state": contents(state)}


# Layouts of a model.


@program()
def data_parallel(run):
    mesh, parallel = run.mesh("batch"), ml.parallel
    replicated = parallel.data_parallel(mesh)
    zero = replicated | {"^opt_state/": ml.zero_rule(mesh)}
    with jax.set_mesh(mesh.jax_mesh):
        found = {"replicated": trained(mesh, replicated)}
    sharded = parallel.fsdp(mesh, axes="batch", min_bytes=0)
    return found | {"zero": trained(mesh, zero), "fsdp": trained(mesh, sharded)}


@program()
def model_parallel_inside_processes(run):
    return trained(run.mesh("inside"))


@program(quick=True)
def model_parallel_across_processes(run):
    return trained(run.mesh("across"))


def tensor_parallel_on(mesh):
    return ml.parallel.tensor_parallel(mesh, build, source()["x"][:BATCH])


@program()
def tensor_parallel(run):
    return {
        kind: trained(run.mesh(kind), tensor_parallel_on(run.mesh(kind)))
        for kind in ("inside", "across")
    }


@program()
def composed(run):
    mesh = run.mesh("across")
    fsdp = ml.parallel.fsdp(mesh, axes="batch", min_bytes=0)
    layouts = ml.parallel.compose(tensor_parallel_on(mesh), fsdp)
    return {"code": layouts.to_code(nnx.eval_shape(build)), **trained(mesh, layouts)}


@program()
def optimizers(run):
    mesh, found = run.mesh("across"), {}
    optimizers = {
        "by path": ml.optimizer_by_path(
            {"kernel": optax.adam(0.05), ".*": optax.sgd(0.1)}
        ),
        "every second": optax.MultiSteps(optax.adamw(0.05), 2),
        "factored": optax.adafactor(0.05, min_dim_size_to_factor=2),
        "injected": optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(1, 0, 9)),
    }
    for name, optimizer in optimizers.items():
        state = state_on(mesh, optimizer=optimizer)
        train_step = ml.make_train_step(loss_fn)
        for batch in data_on(mesh):
            state, _ = train_step(state, batch)
        found[name] = contents(state)
    if hasattr(jax, "reshard"):  # jax 0.7 has no such programs on CPUs
        on_host = ml.zero_rule(mesh, (), memory_kind="pinned_host")
        offload = ml.LayoutMap(mesh, {"^opt_state/": on_host})
        found["on the host"] = trained(mesh, offload)
    return found


# Options of the step.

OPTIONS = {
    "accumulate": {"accumulate": 2},
    "ema": {"ema": 0.9},
    "clip": {"clip_norm": 0.1},
    "skip": {"on_nonfinite": "skip"},
    "float16": {"precision": "float16"},
    "remat": {"remat": "full"},
    "regularizers": {"regularizers": {"l2": ml.losses.l2(1e-2, "kernel")}},
}


@program(rtol=2e-3)  # float16
def options_of_the_step(run):
    return {name: trained(run.mesh("inside"), **o) for name, o in OPTIONS.items()}


@program()
def batches_of_the_host(run):
    mesh = run.mesh("inside")
    state, losses = state_on(mesh), []
    train_step = ml.make_train_step(loss_fn)
    for to_array in (np.asarray, jnp.asarray):
        batch = {name: to_array(rows[:BATCH]) for name, rows in source().items()}
        state, metrics = train_step(state, batch)
        losses.append(metrics.to_host()["loss"])
    two_steps = ml.make_train_step(loss_fn, steps_per_call=2)
    state, metrics = two_steps(state, list(data_on(mesh))[:2])
    return [losses, contents(state), metrics.to_host()["loss"]]


@program()
def predictions(run):
    mesh = run.mesh("across")
    state = state_on(mesh)
    predict_step = ml.make_predict_step(lambda model, batch: model(batch["x"]))
    return [numbers(predict_step(state, batch)) for batch in data_on(mesh)]


@program()
def a_linen_model(run):
    mesh, module = run.mesh("across"), nn.Dense(3)
    state = ml.TrainState.create(
        lambda: module.init(jax.random.key(0), jnp.ones((1, 4))),
        optax.sgd(0.1),
        ml.LayoutMap(mesh, {"kernel": ("model", None)}),
        module=module,
    )
    trainer = ml.Trainer(state, loss_fn)
    history = trainer.fit(data_on(mesh), epochs=2, progress=False)
    return [dict(history), numbers(trainer.state.params)]


# Metrics.


@program(quick=True)
def metrics_of_all_rows(run):
    metrics = ml.metrics
    measured = {
        "accuracy": metrics.Accuracy(),
        "confusion": metrics.ConfusionMatrix(3),
        "f1": metrics.F1(num_classes=3),
        "recall": metrics.Recall(num_classes=3, average=None),
        "sum": metrics.Sum("value"),
        "last": metrics.Last("row"),
    }
    mesh, found = run.mesh("batch"), None
    eval_step, state = ml.make_eval_step(loss_fn, metrics=measured), linear_on(mesh)
    for batch in data_on(mesh):
        found = eval_step(state, batch, found)
    assert "accuracy" in str(found)
    return values(found.to_host())


# The trainer.


@program()
def a_trainer_with_callbacks(run):
    mesh, callbacks, path = run.mesh("inside"), ml.callbacks, run.path("trainer")
    accuracy = {"accuracy": ml.metrics.Accuracy()}
    trainer = ml.Trainer(state_on(mesh), loss_fn, metrics=accuracy)
    path.mkdir(exist_ok=True)
    log = path / f"{process_index()}.csv"
    with ml.Checkpointer(path / "best", best=("val_loss", "min"), keep=1) as ck:
        history = trainer.fit(
            data_on(mesh, shuffle=1),
            epochs=6,
            validation_data=data_on(mesh),
            progress=False,
            callbacks=[
                callbacks.Log(log),
                callbacks.Checkpoint(ck),
                callbacks.EarlyStopping("val_accuracy", patience=1, restore_best=True),
                callbacks.StopOnNaN(),
            ],
        )
        ck.wait()
        saved = [ck.all_steps(), ck.best_step()]
    ml.cluster.barrier("all have written")
    assert log.exists() == (process_index() == 0)
    return {
        "history": dict(history),
        "stopped": trainer.stopped,
        "saved": saved,
        "evaluated": values(trainer.evaluate(source(), batch_size=BATCH)),
        "predicted": values(trainer.predict(data_on(mesh))),
        "state": contents(trainer.state),
    }


@program(quick=True)
def all_stop_after_the_same_step(run):
    """The values that decide are read at other times on each process."""
    mesh, data = run.mesh("batch"), source(96)
    data["x"][20] = np.nan
    batches = ml.distribute_dataset(data, mesh, global_batch_size=BATCH)
    trainer = ml.Trainer(linear_on(mesh), loss_fn)
    stop = ml.callbacks.StopOnNaN()
    trainer.fit(batches, 2, progress=False, callbacks=[stop])
    return {"why": trainer.stopped, "of several": {"step": trainer.position.step}}


# Arrays.


@program(quick=True, exact=True)
def arrays_anywhere(run):
    arrays, found = ml.arrays, {}
    key = jax.random.key(1)
    for kind in ("across", "inside")[: run.variants]:
        mesh = run.mesh(kind)
        layout = mesh.layout("batch", "model")
        x = arrays.normal(key, (8, 4), layout)
        keys = ml.relayout(jax.random.split(key, 8), mesh.layout("batch"))
        moved = {
            "other": ml.relayout(x, mesh.layout("model", "batch")),
            "whole": ml.copy_to_mesh(x, mesh.layout(None, None)),
            "both": ml.relayout(x, mesh.layout(("model", "batch"), None)),
            "other mesh": ml.relayout(x, run.mesh("batch").layout("batch", None)),
            "like": arrays.relayout_like(x, arrays.zeros((8, 4), layout)),
            "keys": ml.relayout(keys, mesh.layout("model")),
            "copied keys": ml.copy_to_mesh(keys, mesh.layout(None)),
            "int4": ml.relayout(jnp.arange(8).astype(jnp.int4), mesh.layout("batch")),
            "NumPy": ml.relayout(np.arange(8, dtype=">i4"), mesh.layout("batch")),
            "number": ml.relayout(2.5, mesh.layout()),
            "packed": ml.pack(ml.unpack(x), layout, verify=True),
            "created": arrays.full((8, 4), 0.5, layout),
            "range": arrays.arange(8, layout=mesh.layout("batch")),
            "uniform": arrays.uniform(
                ml.relayout(key, mesh.layout()), (8, 4), layout, minval=-1
            ),
            "called": arrays.call_with_layout(jnp.eye, layout, 8, 4),
            "donated": ml.relayout(
                arrays.ones((8, 4), layout), mesh.layout("model", None), donate=True
            ),
            "empty": ml.copy_to_mesh(np.zeros((0, 4)), mesh.layout(None, "model")),
        }
        if hasattr(jax, "reshard"):  # jax 0.7 cannot: several processes of CPUs
            on_host = ml.relayout(x, layout.with_memory_kind("pinned_host"))
            moved["host memory"] = ml.relayout(on_host, layout)
        nan = ml.relayout(np.array([np.nan, 1, 2, 3]), mesh.layout("model"))
        assert np.isnan(ml.to_numpy(nan)).tolist() == [True] + [False] * 3
        assert jax.typeof(moved["number"]).weak_type
        ml.check_layout(moved["other"], mesh.layout("model", "batch"))
        ml.testing.assert_layout(moved["whole"], mesh.layout(None, None))
        found[kind] = numbers(moved)
    host = np.zeros(4096, np.float32)
    placed = ml.relayout(host, mesh.layout("batch"))
    host[:] = 1
    found["copied"] = float(ml.to_numpy(placed).sum())
    return found


@program(exact=True)
def states_born_anywhere(run):
    def keys():
        made = jax.random.split(jax.random.key(0), 8)
        return {"keys": made, "w": jax.vmap(lambda k: jax.random.normal(k, (4,)))(made)}

    found = {}
    for kind in ("inside", "across"):
        mesh = run.mesh(kind)
        layouts = layouts_on(mesh)
        with ml.scope(layouts):
            scoped = build()
            variables = nn.Dense(8).init(jax.random.key(0), np.ones((2, 4)))
        rules = {"keys": ("batch",), "w": ("model", "batch")}
        found[kind] = numbers(
            [
                nnx.state(ml.create(build, layouts)),
                nnx.state(scoped),
                variables,
                ml.create(keys, ml.LayoutMap(mesh, rules)),
                state_on(mesh).rng,
            ]
        )
    return found


@program(exact=True)
def errors_are_those_of_all(run):
    """What cannot be done is refused on all processes, and none waits for another."""
    mesh, here = run.mesh("batch"), process_index()
    if process_count() == 1:
        return {"of several": {}}
    x = ml.arrays.arange(16, layout=mesh.layout("batch"))
    own = ml.create_mesh({"own": 2}, devices=run.devices[:2])
    of_first = ml.arrays.arange(16, layout=own.layout("own"))
    shapes = [np.ones(1 + here) for _ in mesh.local_devices]
    replicas = [np.full(2, here) for _ in mesh.local_devices]
    whole = mesh.layout(None)
    found = {
        "differs": message(lambda: ml.relayout({"a": np.full(4, here)}, whole)),
        "to some": message(lambda: ml.relayout(x, own.layout("own"))),
        "from some": message(lambda: ml.relayout(of_first, mesh.layout("batch"))),
        "shapes": message(lambda: ml.pack(shapes, mesh.layout("batch"))),
        "replicas": message(lambda: ml.pack(replicas, whole, verify=True)),
        "batch": message(lambda: _step_on_other_batches(mesh)),
    }
    # JAX's own reason, and the shape of this process's first part, differ.
    reason = found["to some"].index("Mesh(own=2)): ") + len("Mesh(own=2)): ")
    found["to some"] = found["to some"][:reason]
    found["shapes"] = found["shapes"].partition("]: ")[2]
    if own.local_devices:
        assert ml.to_numpy(of_first).tolist() == list(range(16))
    else:
        assert message(lambda: ml.to_numpy(of_first)) == (
            f"LayoutError: i32[16]: process {here} has no part of the array, which is "
            "on devices of other processes."
        )
        assert message(lambda: ml.testing.one_device_mesh(own)) == (
            "MeshError: one_device_mesh: this process has no devices in Mesh(own=2)."
        )
    return {"of several": found}


def _step_on_other_batches(mesh):
    batch = {name: x[process_index() :][:BATCH] for name, x in source().items()}
    ml.make_train_step(loss_fn)(state_on(mesh), batch)


# Reports.


@program()
def reports(run):
    mesh = run.mesh("across")
    layouts, state = layouts_on(mesh), state_on(mesh)
    train_step, (batch, *_) = ml.make_train_step(loss_fn), data_on(mesh)
    x = ml.arrays.zeros((8, 8), mesh.layout("batch", "model"))
    compiled = jax.jit(lambda x: x.sum(0)).lower(x).compile()
    texts = [
        layouts.explain(state.params),
        layouts.to_code(state.params),
        train_step.communication(state, batch),
        train_step.memory(state, batch),
        train_step.cost(state, batch),
        ml.visualize(x),
        ml.hlo.read_communication(compiled, mesh),
    ]
    # Ids of devices are longer there, and pictures wider.
    text = "\n".join(map(str, texts))
    text = re.sub(r"; [\w, ]+ across \d processes|(?<= ) +", "", text)
    return [x for x in text.splitlines() if not re.search("[│┌├└]|process", x)]


@program()
def looking_on_one_process_alone(run):
    """What only prints waits for nobody."""
    mesh = run.mesh("across")
    layouts, state = layouts_on(mesh), state_on(mesh)
    train_step, (batch, *_) = ml.make_train_step(loss_fn), data_on(mesh)
    state, metrics = train_step(state, batch)
    length = 0
    if process_index() == 0:
        shown = [
            *(state, metrics, metrics.to_host(), float(metrics["loss"]), state.layouts),
            *(layouts.explain(state), ml.visualize(batch["x"]), mesh, batch["x"]),
            *(train_step.communication(state, batch), train_step.memory(state, batch)),
            train_step.lower(state, batch).compile().as_text(),
        ]
        length = sum(len(str(value)) for value in shown)
    ml.cluster.barrier("process 0 has looked")
    assert (length > 0) == (process_index() == 0)
    return contents(state)


@program()
def each_process_for_itself(run):
    """Processes that train on their own devices, each as long as it likes."""
    mesh = ml.create_mesh({"batch": 2}, devices=jax.local_devices()[:2])
    trainer = ml.Trainer(linear_on(mesh), loss_fn, pad=True)
    batches = ml.distribute_dataset(source(), mesh, global_batch_size=BATCH)
    stop = ml.callbacks.StopOnNaN()
    epochs = 2 + process_index()
    history = trainer.fit(batches, epochs, progress=False, callbacks=[stop])
    own = np.full(2, process_index())
    packed = ml.pack([own, own], mesh.layout("batch"), verify=True)
    assert ml.to_numpy(packed).tolist() == [process_index()] * 4
    assert len(history["loss"]) == epochs
    return [history["loss"][:2], len(trainer.predict(batches)["row"])]


# Tests of users.


@program()
def verified(run):
    mesh = run.mesh("inside")
    state, (*_, last) = state_on(mesh), data_on(mesh)
    train_step = ml.make_train_step(loss_fn)
    predict_step = ml.make_predict_step(lambda model, batch: model(batch["x"]))
    across = run.mesh("across")
    verify = ml.testing.verify
    results = [
        verify(train_step, state, last),
        verify(train_step, state_on(across), next(iter(data_on(across))), num_steps=2),
        verify(ml.make_eval_step(loss_fn), state, last),
        verify(predict_step, state, last),
    ]
    return [len(result.differences) for result in results]


# What is run, and where.


def run_programs(names, *args):
    """Runs programs; returns what each of them returned."""
    run, found = Run(*args), {}
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = PROGRAMS[name](run)
    return json.loads(json.dumps(found))


def compared(names, directory, count, devices, variants=9):
    """The programs on one process, and on `count` with `devices` each."""
    args = (sorted(names), str(directory), count, count * devices, variants)
    several = run_processes(
        *(count, run_programs, *args),
        devices_per_process=devices,
        timeout_s=900,
        shared=True,
    )
    return run_programs(*args), several


def check(name, one, several):
    """Asserts that what processes returned is equal, and is what one returned."""
    first, expected = several[0][name], one[name]
    assert all(other[name] == first for other in several)
    if isinstance(first, dict):
        first = first | {"of several": None}
        expected = expected | {"of several": None}
    if name in EXACT:
        assert first == expected
        return
    leaves, structure = jax.tree.flatten(first)
    expected, same = jax.tree.flatten(expected)
    assert structure == same
    for leaf, other in zip(leaves, expected, strict=True):
        if isinstance(leaf, str):
            assert leaf == other
        else:
            rtol = RTOL[name]
            np.testing.assert_allclose(leaf, other, rtol=rtol, atol=rtol / 10)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return compared(QUICK, tmp_path_factory.mktemp("quick"), 2, 2, variants=1)


@pytest.mark.parametrize("name", sorted(QUICK))
def test_two_processes_do_what_one_does(quick, name):
    check(name, *quick)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return compared(PROGRAMS, tmp_path_factory.mktemp("two"), 2, 4)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return compared(PROGRAMS, tmp_path_factory.mktemp("four"), 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("count", ["two", "four"])
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_several_processes_do_what_one_does(request, name, count):
    check(name, *request.getfixturevalue(count))


@pytest.mark.slow
def test_what_cannot_be_done_on_several_processes_is_said(two):
    found = two[1][0]["errors_are_those_of_all"]["of several"]
    words = {
        "differs": "'a i64[4]' is i64[4] [1, 1, 1, 1] on process 1, and i64[4] [0, 0, ",
        "to some": "i32[16]: JAX cannot move it to Layout([own], Mesh(own=2)): ",
        "from some": "'an array on devices of other processes' on process 1, and i32[16]",
        "shapes": "part 0 of process 0 has f32[1], and part 0 of process 1 has f32[2]",
        "replicas": "replicas of shard (0,) must be alike: part 0 of process 0 ",
        "batch": "an array that goes to devices of all processes must be the same on all ",
    }
    assert found.keys() == words.keys()
    for name, text in found.items():
        assert words[name] in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data_parallel", "options_of_the_step"])
def test_the_number_of_processes_does_not_change_a_bit(two, four, name):
    assert two[1][0][name] == four[1][0][name]
