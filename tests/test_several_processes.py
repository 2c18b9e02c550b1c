"""What works on one process works on several, with the same numbers.

Each program below runs on one process with all devices, and on two and four that share
them. What it returns must be equal on all processes, and be that of one process, too,
up to the rounding of sums in another order.
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
from tests.error_messages import outcome_of
from tests.processes import run_processes


pytestmark = pytest.mark.multiprocess

ROWS, BATCH = 22, 8

PROGRAMS, QUICK, EXACT = {}, set(), set()


def program(*, quick=False, exact=False):
    """Adds a program; `quick`: of `make test`; `exact`: to the bit, everywhere."""

    def add(function):
        PROGRAMS[function.__name__] = function
        QUICK.update([function.__name__] * quick)
        EXACT.update([function.__name__] * exact)
        return function

    return add


class Run:
    """The devices of one run, and the directory where its programs write."""

    def __init__(self, directory, num_devices, variants):
        self.directory, self.devices = Path(directory), jax.devices()[:num_devices]
        self.variants = variants

    def mesh(self, kind="inside"):
        """A mesh whose axis `model` is inside processes or across them, or none."""
        half = len(self.devices) // 2
        axes = {
            "inside": {"batch": half, "model": 2},
            "across": {"model": 2, "batch": half},
            "batch": {"batch": 2 * half},
        }
        return ml.create_mesh(axes[kind], devices=self.devices)


def numbers(tree):
    """The leaves of a tree as lists of numbers, gathered from all processes."""
    return [np.asarray(x, float).tolist() for x in jax.tree.leaves(ml.to_numpy(tree))]


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
    logits, label = model(batch["x"]), batch["label"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    return losses, {"logits": logits, "label": label, "row": batch["x"][:, 1]}


def source(rows=ROWS):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4)).astype("float32")
    return {"x": x, "label": rng.integers(0, 3, rows).astype("int32")}


RULES = {
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
}
# Adam would make whole steps of rounding, where gradients are next to nothing.
SGD = optax.sgd(0.1, momentum=0.9)


def layouts_on(mesh):
    return ml.LayoutMap(mesh, RULES if "model" in mesh.axis_names else {})


def state_on(mesh, layouts=None, optimizer=SGD):
    layouts = layouts_on(mesh) if layouts is None else layouts
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


def trained(mesh, layouts=None, optimizer=SGD, **options):
    """Metrics and state after an epoch whose last batch is padded."""
    state, metrics = state_on(mesh, layouts, optimizer), None
    accuracy = {"accuracy": ml.metrics.Accuracy()}
    train_step = ml.make_train_step(loss_fn, metrics=accuracy, **options)
    for batch in data_on(mesh):
        state, metrics = train_step(state, batch, metrics)
    return [numbers(metrics.to_host()), contents(state)]


@program()
def data_parallel(run):
    mesh, parallel = run.mesh("batch"), ml.parallel
    replicated = parallel.data_parallel(mesh)
    zero = replicated | {"^opt_state/": ml.zero_rule(mesh)}
    sharded = parallel.fsdp(mesh, axes="batch", min_bytes=0)
    return [trained(mesh, layouts) for layouts in (replicated, zero, sharded)]


@program(quick=True)
def model_parallel_across_processes(run):
    return trained(run.mesh("across"))


@program()
def composed(run):
    mesh = run.mesh("across")
    fsdp = ml.parallel.fsdp(mesh, axes="batch", min_bytes=0)
    tensor = ml.parallel.tensor_parallel(mesh, build, source()["x"][:BATCH])
    layouts = ml.parallel.compose(tensor, fsdp)
    return [layouts.to_code(nnx.eval_shape(build)), *trained(mesh, layouts)]


@program()
def optimizers(run):
    mesh = run.mesh("across")
    optimizers = [
        ml.optimizer_by_path({"kernel": optax.adam(0.05), ".*": optax.sgd(0.1)}),
        optax.MultiSteps(optax.adamw(0.05), 2),
        optax.adafactor(0.05, min_dim_size_to_factor=2),
    ]
    results = [trained(mesh, optimizer=optimizer) for optimizer in optimizers]
    if hasattr(jax, "reshard"):  # jax 0.7 has no such programs on CPUs
        on_host = ml.zero_rule(mesh, (), memory_kind="pinned_host")
        results.append(trained(mesh, ml.LayoutMap(mesh, {"^opt_state/": on_host})))
    return results


@program()
def options_of_the_step(run):
    l2 = ml.losses.l2(1e-2, "kernel")
    options = [
        {"accumulate": 2, "ema": 0.9},
        {"clip_norm": 0.1, "remat": "full", "regularizers": {"l2": l2}},
        {"precision": "float16", "on_nonfinite": "skip"},
    ]
    return [trained(run.mesh("inside"), **option) for option in options]


@program(quick=True)
def metrics_of_all_rows(run):
    metrics, mesh, result = ml.metrics, run.mesh("batch"), None
    measured = {
        "accuracy": metrics.Accuracy(),
        "confusion": metrics.ConfusionMatrix(3),
        "recall": metrics.Recall(num_classes=3, average=None),
        "last": metrics.Last("row"),
    }
    eval_step, state = ml.make_eval_step(loss_fn, metrics=measured), linear_on(mesh)
    for batch in data_on(mesh):
        result = eval_step(state, batch, result)
    return numbers(result.to_host())


@program()
def a_trainer_with_callbacks(run):
    mesh, callbacks = run.mesh("inside"), ml.callbacks
    accuracy = {"accuracy": ml.metrics.Accuracy()}
    trainer = ml.Trainer(state_on(mesh), loss_fn, metrics=accuracy)
    path = run.directory / f"trainer-{process_count()}"
    path.mkdir(exist_ok=True)
    log = path / f"{process_index()}.csv"
    with ml.Checkpointer(path / "best", best=("val_loss", "min"), keep=1) as ck:
        options = {"mode": "min", "patience": 1, "restore_best": True}
        stop = callbacks.EarlyStopping("val_accuracy", **options)
        history = trainer.fit(
            data_on(mesh, shuffle=1),
            epochs=6,
            validation_data=data_on(mesh),
            progress=False,
            callbacks=[callbacks.Log(log), callbacks.Checkpoint(ck), stop],
        )
        ck.wait()
        saved = [ck.all_steps(), ck.best_step()]
    ml.cluster.barrier("all have written")
    assert log.exists() == (process_index() == 0)
    evaluated = trainer.evaluate(source(), batch_size=BATCH)
    predicted = trainer.predict(data_on(mesh))
    results = [numbers(evaluated), numbers(predicted), contents(trainer.state)]
    return [dict(history), trainer.stopped, saved, *results]


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


@program(quick=True, exact=True)
def arrays_anywhere(run):
    arrays, relayout, key, results = ml.arrays, ml.relayout, jax.random.key(1), []
    for kind in ("across", "inside")[: run.variants]:
        mesh = run.mesh(kind)
        layout = mesh.layout("batch", "model")
        x = arrays.normal(key, (8, 4), layout)
        keys = relayout(jax.random.split(key, 8), mesh.layout("batch"))
        number, donated = relayout(2.5, mesh.layout()), arrays.ones((8, 4), layout)
        moved = [
            relayout(x, mesh.layout("model", "batch")),
            relayout(x, mesh.layout(("model", "batch"), None)),
            relayout(x, run.mesh("batch").layout("batch", None)),
            relayout(keys, mesh.layout("model")),
            relayout(jnp.arange(8).astype(jnp.int4), mesh.layout("batch")),
            relayout(np.arange(8, dtype=">i4"), mesh.layout("batch")),
            relayout(donated, mesh.layout("model", None), donate=True),
            ml.copy_to_mesh(x, mesh.layout(None, None)),
            ml.copy_to_mesh(np.zeros((0, 4)), mesh.layout(None, "model")),
            ml.pack(ml.unpack(x), layout, verify=True),
            arrays.uniform(relayout(key, mesh.layout()), (8, 4), layout),
        ]
        if hasattr(jax, "reshard"):  # jax 0.7 cannot: several processes of CPUs
            on_host = relayout(x, layout.with_memory_kind("pinned_host"))
            moved.append(relayout(on_host, layout))
        nan = relayout(np.array([np.nan, 1, 2, 3]), mesh.layout("model"))
        assert np.isnan(ml.to_numpy(nan)).tolist() == [True] + [False] * 3
        assert jax.typeof(number).weak_type
        results.append(numbers([number, moved]))
    host = np.zeros(4096, np.float32)
    placed = relayout(host, mesh.layout("batch"))
    host[:] = 1
    return [*results, float(ml.to_numpy(placed).sum())]


@program(exact=True)
def states_born_anywhere(run):
    seed, table, module = jax.random.key(0), jnp.arange(8.0), nn.Dense(8)

    def keys():  # closes over what each process has
        made = jax.random.split(seed, 8)
        drawn = jax.vmap(lambda key: jax.random.normal(key, (4,)))(made)
        return {"keys": made, "w": drawn * table[:, None]}

    def linen():
        return module.init(seed, np.ones((2, 4)))

    results = []
    for kind in ("inside", "across"):
        mesh = run.mesh(kind)
        layouts = layouts_on(mesh)
        with ml.scope(layouts):
            scoped, variables = nnx.state(build()), linen()
        created = nnx.state(ml.create(build, layouts))
        rules = {"keys": ("batch",), "w": ("model", "batch")}
        others = ml.create(keys, ml.LayoutMap(mesh, rules))
        map_of_linen = ml.LayoutMap(mesh, {"kernel": (None, "model")})
        state = ml.TrainState.create(linen, SGD, map_of_linen, module=module)
        results.append(numbers([created, scoped, variables, others, state.params]))
    return results


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
    whole, step = mesh.layout(None), ml.make_train_step(loss_fn)
    rows = {name: x[here:][:BATCH] for name, x in source().items()}
    errors = {
        "differs": outcome_of(ml.relayout, {"a": np.full(4, here)}, whole),
        "to some": outcome_of(ml.relayout, x, own.layout("own")),
        "from some": outcome_of(ml.relayout, of_first, mesh.layout("batch")),
        "shapes": outcome_of(ml.pack, shapes, mesh.layout("batch")),
        "replicas": outcome_of(ml.pack, replicas, whole),
        "batch": outcome_of(step, state_on(mesh), rows),
    }
    # JAX's own reason differs.
    reason = errors["to some"].index("Mesh(own=2)): ") + len("Mesh(own=2)): ")
    errors["to some"] = errors["to some"][:reason]
    if own.local_devices:
        assert ml.to_numpy(of_first).tolist() == list(range(16))
    else:
        assert outcome_of(ml.to_numpy, of_first) == (
            f"LayoutError: i32[16]: process {here} has no part of the array, which is "
            "on devices of other processes."
        )
    return {"of several": errors}


@program()
def looking_on_one_process_alone(run):
    """What only prints waits for nobody, and says what it says on one process."""
    mesh = run.mesh("across")
    layouts, state = layouts_on(mesh), state_on(mesh)
    train_step, (batch, *_) = ml.make_train_step(loss_fn), data_on(mesh)
    state, metrics = train_step(state, batch)
    if process_index() == 0:
        shown = [
            *(state, metrics, metrics.to_host(), float(metrics["loss"]), state.layouts),
            *(layouts.explain(state), ml.visualize(batch["x"]), mesh, batch["x"]),
            *(train_step.communication(state, batch), train_step.memory(state, batch)),
        ]
        assert all(str(value) for value in shown)
    ml.cluster.barrier("process 0 has looked")
    text = str(train_step.communication(state, batch))
    text = re.sub(r"; [\w, ]+ across \d processes|(?<= ) +", "", text)
    return [x for x in text.splitlines() if not re.search("[│┌├└]|process", x)]


@program()
def each_process_for_itself(run):
    """Processes that train on their own devices, each as long as it likes."""
    mesh = ml.create_mesh({"batch": 2}, devices=jax.local_devices()[:2])
    trainer = ml.Trainer(linear_on(mesh), loss_fn, pad=True)
    batches = ml.distribute_dataset(source(), mesh, global_batch_size=BATCH)
    epochs = 2 + process_index()
    history = trainer.fit(batches, epochs, progress=False)
    own = np.full(2, process_index())
    packed = ml.pack([own, own], mesh.layout("batch"), verify=True)
    assert ml.to_numpy(packed).tolist() == [process_index()] * 4
    assert len(history["loss"]) == epochs
    return [history["loss"][:2], len(trainer.predict(batches)["row"])]


@program()
def verified(run):
    mesh, across, verify = run.mesh("inside"), run.mesh("across"), ml.testing.verify
    state, (*_, last) = state_on(mesh), data_on(mesh)
    train_step, first = ml.make_train_step(loss_fn), next(iter(data_on(across)))
    results = [
        verify(train_step, state, last),
        verify(train_step, state_on(across), first, num_steps=2),
        verify(ml.make_eval_step(loss_fn), state, last),
    ]
    return [len(result.differences) for result in results]


def run_programs(names, *args):
    run, results = Run(*args), {}
    for name in names:
        with warnings.catch_warnings(action="ignore"):
            results[name] = PROGRAMS[name](run)
    return json.loads(json.dumps(results))


def compared(names, directory, count, devices, variants=9):
    """The programs on one process, and on `count` with `devices` each."""
    args = (sorted(names), str(directory), count * devices, variants)
    options = {"devices_per_process": devices, "timeout_s": 900, "shared": True}
    several = run_processes(count, run_programs, *args, **options)
    return run_programs(*args), several


def check(name, one, several):
    """Asserts that what processes returned is equal, and is what one returned."""
    first, expected = several[0][name], one[name]
    assert all(other[name] == first for other in several)
    if isinstance(first, dict):
        first, expected = (x | {"of several": None} for x in (first, expected))
    if name in EXACT:
        assert first == expected
        return
    leaves, structure = jax.tree.flatten(first)
    expected, same = jax.tree.flatten(expected)
    assert structure == same
    rtol = 2e-3 if name == "options_of_the_step" else 2e-5  # float16
    for leaf, other in zip(leaves, expected, strict=True):
        if isinstance(leaf, str):
            assert leaf == other
        else:
            np.testing.assert_allclose(leaf, other, rtol=rtol, atol=rtol / 10)


def test_two_processes_do_what_one_does(tmp_path):
    results = compared(QUICK, tmp_path, 2, 2, variants=1)
    for name in QUICK:
        check(name, *results)


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
    errors = two[1][0]["errors_are_those_of_all"]["of several"]
    words = {
        "differs": "'a i64[4]' is i64[4] [1, 1, 1, 1] on process 1, and i64[4] [0, 0, ",
        "to some": "i32[16]: JAX cannot move it to Layout([own], Mesh(own=2)): ",
        "from some": "'an array on devices of other processes' on process 1, and i32[16]",
        "shapes": "part 0 of process 0 has f32[1], and part 0 of process 1 has f32[2]",
        "replicas": "replicas of shard (0,) must be alike: part 0 of process 0 ",
        "batch": "an array that goes to devices of all processes must be the same on all ",
    }
    assert errors.keys() == words.keys()
    for name, text in errors.items():
        assert words[name] in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data_parallel", "options_of_the_step"])
def test_the_number_of_processes_does_not_change_a_bit(two, four, name):
    assert two[1][0][name] == four[1][0][name]
