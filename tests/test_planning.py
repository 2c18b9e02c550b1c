"""Programs ahead of time, the doctor and the command line."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import types

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout import __main__ as command_line
from meshlayout.planning import checkup, chips
from tests.processes import run_processes


BATCH = {"x": np.ones((8, 4), "float32"), "y": np.zeros((8, 2), "float32")}


def build():
    return nnx.Linear(4, 2, rngs=nnx.Rngs(0))


def squares(model, batch):
    return (model(batch["x"]) - batch["y"]) ** 2


def new_state(**axes):
    mesh = ml.create_mesh(axes or {"batch": 8})
    return ml.TrainState.create(build, optax.adam(0.1), ml.parallel.fsdp(mesh))


# Executables in files.


def steps_of(folder, load):
    """Runs steps from files, or saves them; returns what they measure and compile."""
    compiled, results = [], []

    def noted(event, _, **facts):
        if "backend_compile" in event:
            compiled.append(str(facts))

    @ml.compile_step
    def add(state, batch):
        error = (batch["x"] @ state["w"] - batch["y"]).mean()
        return {"w": state["w"] + error}, {"loss": error}

    def evaluate(state, batch):
        return state, evaluation(state, batch)

    evaluation, train = ml.make_eval_step(squares), ml.make_train_step(squares)
    mesh = ml.create_mesh()
    plain = {"w": ml.relayout(np.ones((4, 2), "float32"), mesh.layout(None, None))}
    on_mesh = ml.relayout(BATCH, mesh.layout("batch", ...))
    jax.monitoring.register_event_duration_secs_listener(noted)
    for step, owner, state, batch in [
        (add, add, plain, on_mesh),
        (evaluate, evaluation, new_state(), BATCH),
        (train, train, new_state(), BATCH),
    ]:
        path = f"{folder}/{owner.__name__}"
        if load:
            owner.load_compiled(path)
        for index in range(2):
            old, (state, metrics) = state, step(state, batch)
            results.append(float(metrics["loss"]))
            assert jax.tree.leaves(old)[0].is_deleted() == (step is not evaluate)
            if not (load or index):
                owner.save_compiled(path)
    names = ("add", "train_step", "eval_step")
    return results, [x for x in compiled if any(name in x for name in names)]


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_another_process_runs_saved_steps_without_compiling(tmp_path, count):
    options = {"devices_per_process": 8 // count, "initialize": count > 1}
    if count == 1:
        saved = [steps_of(str(tmp_path), False)]
    else:
        saved = run_processes(count, steps_of, str(tmp_path), False, **options)
    loaded = run_processes(count, steps_of, str(tmp_path), True, **options)
    assert len(saved) == len(loaded) == count
    for (expected, compiled), (results, again) in zip(saved, loaded, strict=True):
        assert compiled != []
        assert (results, again) == (expected, [])


def test_a_loaded_step_compiles_for_other_shapes_with_a_warning(tmp_path):
    @ml.compile_step
    def step(state, x):
        return {"w": state["w"] + x.sum()}, None

    path = tmp_path / "step.bin"
    state, _ = step({"w": jax.numpy.zeros(2)}, jax.numpy.ones(3))
    step.save_compiled(path)
    step.load_compiled(path)
    state, _ = step(state, jax.numpy.ones(3))
    with pytest.warns(ml.errors.RecompileWarning, match="changed from f32"):
        state, _ = step(state, jax.numpy.ones(4))
    assert step(state, jax.numpy.ones(3))[0]["w"].tolist() == [13, 13]


def test_a_saved_step_has_the_values_of_static_arguments(tmp_path):
    @ml.compile_step(static_argnames=("count", "sign"), on_recompile="ignore")
    def step(state, count, x, *, sign="+"):
        return state + count * x.sum() * (1 if sign == "+" else -1), None

    calls = [(1, "+"), (3, "+"), (1, "-"), (True, "+"), (1, "+")]
    run = lambda call: step(np.zeros(()), call[0], np.ones(3), sign=call[1])[0]
    run(calls[0])
    step.save_compiled(tmp_path / "folder" / "step")
    step.load_compiled(tmp_path / "folder" / "step")
    assert [*map(float, map(run, calls))] == [3, 9, -3, 3, 3]


def test_the_first_letters_that_differ_are_shown(tmp_path):
    def step_of(last):
        constant = np.arange(999) + last * (np.arange(999) == 900)
        return ml.compile_step(lambda state, x: (state + constant, x))

    (step := step_of(0))(np.zeros(999, int), 1)
    step.save_compiled(tmp_path / "step")
    (other := step_of(5)).load_compiled(tmp_path / "step")
    with pytest.raises(ml.errors.StepError, match="another program") as caught:
        other(np.zeros(999, int), 1)
    assert "89030000" in str(caught.value)  # 900 + 5, in hexadecimal


def test_another_program_is_an_error_that_says_what_differs(tmp_path, monkeypatch):
    path, step, state = tmp_path / "step.bin", ml.make_train_step(squares), new_state()
    with pytest.raises(ml.errors.StepError, match="takes a step that was called"):
        step.save_compiled(path)
    with pytest.raises(ml.errors.StepError, match="or it is damaged"):
        step.load_compiled(path)
    step(new_state(), BATCH)
    step.save_compiled(path)
    double = ml.make_train_step(lambda model, batch: 2 * squares(model, batch))
    devices = ml.create_mesh({"batch": 4}, devices=jax.devices()[4:])
    elsewhere = ml.TrainState.create(build, optax.adam(0.1), ml.parallel.fsdp(devices))
    for other, given, words in [
        (double, state, "stablehlo.constant"),
        (ml.make_train_step(squares), elsewhere, "+devices [4, 5, 6, 7]. Save"),
    ]:
        other.load_compiled(path)
        with pytest.raises(ml.errors.StepError) as caught:
            other(given, BATCH)
        assert "another program than this one (- saved, + here): " in str(caught.value)
        assert words in str(caught.value)
        assert not given.step.is_deleted()
    with monkeypatch.context() as patch:
        patch.setattr(jax.version, "__version__", "0.1.0")
        with pytest.raises(ml.errors.StepError, match=r"jax: +0\.1\.0\. Save it"):
            step.load_compiled(path)
    content = path.read_bytes()
    for damaged in (
        b"",
        b"\x80no pickle",
        content[:-99],
        content[:500] + b"00" + content[502:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(ml.errors.StepError, match="or it is damaged"):
            step.load_compiled(path)


# Programs for devices that are not here.


def test_topologies_that_do_not_exist_name_those_that_do():
    for text in ("", "v9:2x2", "h100:3", "v5e:4x5", None, 8):
        with pytest.raises(ml.errors.MeshError, match="there is no topology"):
            ml.planning.describe_devices(text)


def test_without_libtpu_the_line_that_adds_it_keeps_jax(monkeypatch):
    def no_compiler(*args, **kwargs):
        raise RuntimeError("no libtpu")

    monkeypatch.setattr(chips._jax, "described_devices", no_compiler)
    with pytest.raises(ml.errors.MeshError) as caught:
        ml.planning.describe_devices("v5e:2x4")
    line = f"pip install 'jax[tpu]=={jax.__version__}'"
    assert str(caught.value).endswith(f"If it is not installed, {line}.")


def test_a_step_is_compiled_for_a_slice_with_its_reports():
    pytest.importorskip("libtpu")
    state, batch = new_state(batch=4, model=2), BATCH
    step = ml.make_train_step(squares)
    layouts = ml.parallel.fsdp(ml.create_mesh({"batch": 4, "model": 2}))
    described = ml.TrainState.describe(build, optax.adam(0.1), layouts).abstract
    named = {"state": described, "batch": jax.eval_shape(lambda: batch)}
    for args, kwargs in [((state, batch), {}), ((), named)]:
        program = step.compile_for("v5e:2x4", *args, **kwargs)
        assert dict(program.mesh.shape) == {"batch": 4, "model": 2}
        assert program.mesh.platform == "tpu"
        assert program.communication["all_reduce"] == 1
        assert program.cost.flops == step.cost(state, batch).flops
        assert program.memory.parameter_bytes == 40
        assert "all_reduce" in str(program)
    assert dict(step.compile_for("v5e:4x4", state, batch).mesh.shape)["batch"] == 8
    here = ml.create_mesh({"batch": 2, "model": 2}, devices=jax.devices()[:4])
    program = step.compile_for(here, state, batch)
    assert (program.mesh, program.communication["all_reduce"]) == (here, 1)


def test_what_is_looked_at_twice_is_traced_once_for_a_slice_too():
    pytest.importorskip("libtpu")
    devices = ml.planning.describe_devices("v5e:2x4")  # of two hosts
    layouts = ml.parallel.fsdp(ml.create_mesh({"batch": 8}, devices=devices))
    state = ml.TrainState.describe(build, optax.adam(0.1), layouts).abstract
    step, batch = ml.make_train_step(squares), jax.eval_shape(lambda: BATCH)
    assert step.trace(state, batch).jaxpr is step.trace(state, batch).jaxpr


def test_a_target_gets_layout_maps_and_lists_of_batches():
    def loss_fn(model, batch):
        hidden = ml.constrain(model(batch["x"]), "hidden")
        return (hidden - batch["y"]) ** 2

    state, sums = new_state(batch=4, model=2), []
    layouts = ml.LayoutMap(ml.create_mesh({"batch": 4, "model": 2}), unused="ignore")
    layouts["hidden"] = ml.Rule(("batch", "model"), on_uneven="replicate")
    here = ml.create_mesh({"batch": 2, "model": 2}, devices=jax.devices()[:4])
    abstract = jax.eval_shape(lambda: BATCH)
    for batches in ([BATCH, BATCH], [abstract, abstract]):
        step = ml.make_train_step(loss_fn, layouts=layouts, steps_per_call=2)
        program = step.compile_for(here, state, batches)
        assert program.mesh == here
        sums.append(program.memory.batch_bytes)
        assert "model" in str(program.communication)
    # Rows of both batches over two shards, and the metrics.
    assert sums[0] == sums[1] == 2 * 4 * (4 + 2) * 4 + 8
    elsewhere = ml.create_mesh({"data": 8})
    with pytest.raises(ml.errors.LayoutError, match=r"not in Mesh\(data=8\)"):
        step.compile_for(elsewhere, state, [BATCH, BATCH])


def test_a_program_that_does_not_fit_says_by_how_much():
    pytest.importorskip("libtpu")
    large = {"w": jax.ShapeDtypeStruct((2**16, 2**16), "float32")}
    step = ml.compile_step(lambda state, x: ({"w": state["w"] @ state["w"]}, x))
    with pytest.raises(ml.errors.StepError, match="GiB on each device"):
        step.compile_for("v5e:1x1", large, BATCH)


# The doctor.


def machine(monkeypatch, *, devices=("cpu",), hardware=(), versions=(), **variables):
    """Makes JAX, the packages and the environment those of another machine."""
    requires = {
        "jax": [
            *("jaxlib<=0.10.2,>=0.10.1", "jaxlib==0.9.0; extra == 'old'"),
            "jax-cuda12-plugin[with-cuda]<=0.10.2,>=0.10.2; extra == 'cuda'",
            "libtpu==0.0.42.*; extra == 'tpu'",
        ],
        "jax-cuda13-plugin": ["jax-cuda13-pjrt==0.10.2"],
        "meshlayout": [
            *("ray[train]>=2; extra == 'ray'", "cloudpickle>=3; extra == 'ray'"),
            "jax[tpu]; extra == 'tpu'",
        ],
    }
    versions = {"meshlayout": "1", "jax": "0.10.2", "jaxlib": "0.10.2"} | dict(versions)

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    def local_devices():
        if not devices:
            raise RuntimeError("none.")
        return [
            types.SimpleNamespace(platform=x, device_kind=x, memory_stats=dict)
            for x in devices
        ]

    monkeypatch.setattr(checkup.metadata, "version", version)
    monkeypatch.setattr(checkup.metadata, "requires", requires.get)
    monkeypatch.setattr(checkup.jax, "local_devices", local_devices)
    monkeypatch.setattr(checkup._jax, "visible_accelerators", lambda: [*hardware])
    monkeypatch.setattr(checkup.os, "cpu_count", lambda: 2)
    names = "NPROC XLA_FLAGS JAX_NUM_CPU_DEVICES https_proxy no_proxy JAX_PLATFORMS"
    unset = dict.fromkeys(names.split(), "") | {"TFDS_DATA_DIR": "/"}
    for name, value in (unset | variables).items():
        monkeypatch.setenv(name, value)


PROXY = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "https_proxy": "http://proxy:3128"}
GPU = {"hardware": ["gpu"], "versions": {"jax-cuda13-plugin": "0.10.2"}}
PJRT = {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.1"}


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("pip install 'jaxlib<=0.10.2,>=0.10.1'", {"versions": {"jaxlib": "0.9.0"}}),
        ("jaxlib 0.10.3 do not fit", {"versions": {"jaxlib": "0.10.3"}}),
        ("plugin 0.8.1 do not", {"versions": {"jax-cuda12-plugin": "0.8.1"}}),
        ("pip install 'jax-cuda13-pjrt==0.10.2'", {"versions": PJRT}),
        ("pip install 'libtpu==0.0.42.*'", {"versions": {"libtpu": "0.0.5.1"}}),
        ("JAX_PLATFORMS=cpu asks", GPU | {"JAX_PLATFORMS": "cpu"}),
        ("DEVICES hides", GPU | {"CUDA_VISIBLE_DEVICES": ""}),
        ("this machine has a GPU, but JAX uses the CPU; another process", GPU),
        ("has no plugin: pip install 'jax[tpu]==0.10.2'", {"hardware": ["tpu"]}),
        ("JAX starts no devices (none); JAX_PLATFORMS=''", {"devices": ()}),
        ("8 virtual devices came too late", {"JAX_NUM_CPU_DEVICES": "8"}),
        ("2 virtual", {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}),
        ("set NPROC=16 before JAX starts", {"devices": ["cpu"] * 8}),
        ("add 10.0.0.1 to no_proxy", PROXY | {"no_proxy": "10.0.0.10"}),
        ("'meshlayout[ray] @ ", {"needs": "ray", "versions": {"cloudpickle": "3"}}),
        ("libtpu is not installed", {"needs": "tpu"}),
    ],
)
def test_what_is_wrong_is_said_with_what_mends_it(words, changes, monkeypatch):
    needs = changes.get("needs", ())
    machine(monkeypatch, **{k: x for k, x in changes.items() if k != "needs"})
    [sentence] = ml.doctor(needs=needs).wrong
    assert words in sentence
    assert sentence.endswith(".")


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": {"jaxlib": "0.10.1", "libtpu": "0.0.42.1"}},
        {"devices": ["gpu"], **GPU},
        {"devices": ["cpu"] * 8, "JAX_NUM_CPU_DEVICES": "8", "NPROC": "16"},
        PROXY | {"no_proxy": "localhost, 10.0.0.1"},
        PROXY | {"no_proxy": ".cluster", "JAX_COORDINATOR_ADDRESS": "a.cluster:1"},
        {"https_proxy": "http://proxy:3128"},
    ],
)
def test_nothing_is_wrong_with_a_machine_that_works(changes, monkeypatch):
    machine(monkeypatch, **changes)
    result = ml.doctor()
    assert (result.wrong, result.advice) == ([], [])
    assert "Nothing is wrong." in str(result)


def test_what_could_be_better_is_advice(monkeypatch):
    machine(monkeypatch, NPROC="64", TFDS_DATA_DIR="/none")
    was_on = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        advice = ml.doctor().advice
    finally:
        jax.config.update("jax_enable_compilation_cache", was_on)
    for line, name in zip(advice, ("NPROC", "JAX_COMP", "TFDS_DATA"), strict=True):
        assert name in line


def test_the_checkup_of_this_machine_is_a_table_and_json():
    with pytest.raises(ml.MeshLayoutError, match="Did you mean 'data'"):
        ml.doctor(needs=["dta"])
    result = ml.doctor()
    assert 'ml.create_mesh({"batch": 8})' in str(result)
    assert json.loads(json.dumps(result.to_dict()))["mesh"] == result.mesh


# The command line.


def run(*arguments, **variables):
    """Runs the command in a process; returns its status and output."""
    program = [sys.executable, "-m", "meshlayout", *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "text": True, "check": False}
    result = subprocess.run(program, env=os.environ | variables, **options)
    return result.returncode, result.stdout


def test_the_doctor_ends_with_1_where_something_is_wrong(capsys, monkeypatch):
    with monkeypatch.context() as patch:
        machine(patch)
        assert command_line.main(["doctor", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["wrong"] == []
    status, text = run("doctor", JAX_PLATFORMS="cuda")
    assert status == 1
    assert "JAX_PLATFORMS='cuda': unset it" in text


def test_inspect_prints_steps_sizes_layouts_and_the_tree(tmp_path, capsys):
    pytest.importorskip("orbax.checkpoint")
    with ml.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, new_state(), metrics={"loss": float("nan")})
    inspect = ["inspect", str(tmp_path / "run")]
    assert command_line.main(inspect) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "steps: 1, 2"
    [kernel] = [line.split() for line in lines if line.startswith("params/kernel")]
    assert kernel[1:] == ["f32[4,", "2]", "[unsharded,", "unsharded]", "Mesh(batch=8)"]
    assert command_line.main([*inspect, "--json", "--step=1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["steps"], facts["step"]) == ([1, 2], 1)
    assert facts["arrays"]["params/kernel"].startswith("f32[4, 2]")
    assert facts["metrics"] == {"loss": None}
    for wrong_place in ([*inspect, "--step=3"], [f"{inspect[1]}/none"]):
        with pytest.raises(SystemExit, match="meshlayout inspect: "):
            command_line.main(["inspect", *wrong_place[-2:]])
    assert not (tmp_path / "run" / "none").exists()


PROBLEM = """
import jax, optax, meshlayout as ml
from flax import nnx

def problem():
    batch = jax.ShapeDtypeStruct((8, 8), "float32")
    return {
        "build": lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "batch": batch,
        "loss_fn": lambda model, x: model(x) ** 2, "optimizer": optax.sgd(0.1),
        "topology": ml.create_mesh(), "budget_s": 0,
    }

def nothing():
    return 3
"""


def test_plan_takes_a_problem_from_a_file_or_a_module(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PROBLEM)
    (tmp_path / "none.py").write_text(PROBLEM.replace('"topology"', '"cache"'))
    assert command_line.main(["plan", "mine.py:problem", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] != []
    for text, words in [
        ("mine:problm", "mine has no 'problm'. Did you mean 'problem'?"),
        ("mine", "'mine' is not module:function or file.py:function: "),
        ("not.py:problem", "'not.py:problem' is not module:function"),
        ("none.py:problem", "a dict that also has topology; or give --topology."),
        ("none.py:nothing", "a dict that also has build, loss_fn, batch, optimizer"),
    ]:
        with pytest.raises(SystemExit, match=re.escape(words)):
            command_line.main(["plan", text])


def test_launch_is_a_sub_command_that_loads_no_jax(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os; print('number', os.environ['JAX_PROCESS_ID'])")
    status, out = run("launch", "--json", "-n", "2", script)
    *lines, facts = out.splitlines()
    assert sorted(lines) == ["[0] number 0", "[1] number 1"]
    assert (status, json.loads(facts)["exit_status"]) == (0, 0)
    program = "import sys, meshlayout.__main__; print('jax' in sys.modules)"
    result = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert result == "False\n"
