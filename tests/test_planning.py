"""Programs ahead of time, the doctor and the command line."""

import dataclasses
import importlib
import json
import subprocess
import sys
import zlib

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshlayout as ml
from meshlayout.planning import checkup, chips, command_line


BATCH = {"x": np.ones((8, 4), "float32"), "y": np.zeros((8, 2), "float32")}


def build():
    return nnx.Linear(4, 2, rngs=nnx.Rngs(0))


def squares(model, batch):
    return (model(batch["x"]) - batch["y"]) ** 2


def new_state(**axes):
    mesh = ml.create_mesh(axes or {"batch": 8})
    return ml.TrainState.create(build, optax.adam(0.1), ml.parallel.fsdp(mesh))


@pytest.fixture
def programs(monkeypatch):
    """The names of the programs that XLA compiles meanwhile."""
    compiler = importlib.import_module("jax._src.compiler")
    names = ("backend_compile_and_load", "backend_compile")
    name = next(name for name in names if hasattr(compiler, name))
    original, compiled = getattr(compiler, name), []

    def noted(backend, module, *args, **kwargs):
        compiled.append(str(module.operation.attributes["sym_name"]))
        return original(backend, module, *args, **kwargs)

    monkeypatch.setattr(compiler, name, noted)
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield compiled
    jax.config.update("jax_enable_compilation_cache", before)


# Executables in files.


def test_a_saved_step_runs_without_compiling(tmp_path, programs):
    path = tmp_path / "step.bin"
    batch = ml.relayout(BATCH, ml.create_mesh({"batch": 8}).layout("batch", ...))
    step = ml.make_train_step(squares)
    state, metrics = step(new_state(), batch)
    step.save_compiled(path)
    state, expected = step(state, batch)
    assert [name for name in programs if "train_step" in name] != []
    del programs[:]
    jax.clear_caches()
    other = ml.make_train_step(squares)
    other.load_compiled(path)
    state, again = other(new_state(), batch)
    assert again["loss"] == metrics["loss"]
    state, later = other(state, batch)
    assert later["loss"] == expected["loss"]
    assert [name for name in programs if "train_step" in name] == []


def test_a_compiled_step_can_be_saved_for_arguments_and_compiles_others(tmp_path):
    @ml.compile_step
    def step(state, x):
        return {"w": state["w"] + x.sum()}, None

    path = tmp_path / "step.bin"
    state, x = {"w": jax.numpy.zeros(2)}, jax.numpy.ones(3)
    step.save_compiled(path, state, x)
    step.load_compiled(path)
    state, _ = step(state, x)
    assert state["w"].tolist() == [3, 3]
    with pytest.warns(ml.errors.RecompileWarning, match="changed from f32"):
        state, _ = step(state, jax.numpy.ones(4))
    assert state["w"].tolist() == [7, 7]


def test_another_program_is_an_error_that_says_what_differs(tmp_path):
    path = tmp_path / "step.bin"
    step = ml.make_train_step(squares)
    step.save_compiled(path, new_state(), BATCH)
    other = ml.make_train_step(lambda model, batch: 2 * squares(model, batch))
    other.load_compiled(path)
    state = new_state()
    with pytest.raises(ml.errors.StepError) as caught:
        other(state, BATCH)
    assert "holds another program than this step's (- saved, + now): " in str(
        caught.value
    )
    assert "stablehlo" in str(caught.value)
    assert not state.step.is_deleted()


@pytest.mark.parametrize(
    ("fact", "value", "sentence"),
    [
        ("jax", "0.1.0", "was compiled for jax 0.1.0, and here it is "),
        ("devices of the kind", "TPU v9", "was compiled for devices of the kind TPU v9, and here it"),
        (
            "a number of processes of",
            2,
            "was compiled for a number of processes of 2, and here it is 1",
        ),
    ],
)
def test_an_executable_of_other_versions_or_devices_is_refused(
    tmp_path, fact, value, sentence
):
    path = tmp_path / "step.bin"
    step = ml.make_train_step(squares)
    step.save_compiled(path, new_state(), BATCH)
    magic, header, rest = path.read_bytes().split(b"\n", 2)
    header = json.dumps({**json.loads(header), fact: value}).encode()
    path.write_bytes(b"\n".join([magic, header, rest]))
    with pytest.raises(ml.errors.StepError) as caught:
        ml.make_train_step(squares).load_compiled(path)
    assert sentence in str(caught.value)


def test_files_that_are_none_are_refused(tmp_path):
    path = tmp_path / "step.bin"
    step = ml.make_train_step(squares)
    with pytest.raises(ml.errors.StepError, match="No such file"):
        step.load_compiled(path)
    path.write_bytes(b"meshlayout executable 1\n{}\n" + zlib.compress(b""))
    with pytest.raises(ml.errors.StepError, match="or it is damaged"):
        step.load_compiled(path)
    with pytest.raises(ml.errors.StepError, match="the step was not called"):
        step.save_compiled(path)


# Programs for devices that are not here.


def test_topologies_that_do_not_exist_name_those_that_do():
    with pytest.raises(ml.errors.MeshError) as caught:
        ml.planning.describe_devices("v5e:4x5")
    assert str(caught.value) == (
        "there is no topology 'v5e:4x5'. Did you mean 'v5e:4x8'? There are v5e:1x1, "
        "v5e:2x2, v5e:2x4, v5e:4x4, v5e:4x8, v5e:8x8, v5e:8x16, v5e:16x16."
    )
    for text in ("", "v9:2x2", "h100:3", None, 8):
        with pytest.raises(ml.errors.MeshError, match="there is no topology"):
            ml.planning.describe_devices(text)


def test_without_libtpu_the_line_that_adds_it_keeps_jax(monkeypatch):
    def no_compiler(*args, **kwargs):
        raise RuntimeError("no libtpu")

    monkeypatch.setattr(chips.topologies, "get_topology_desc", no_compiler)
    monkeypatch.setattr(chips, "is_importable", lambda name: False)
    with pytest.raises(ml.errors.MeshError) as caught:
        ml.planning.describe_devices("v5e:2x4")
    line = f"pip install 'jax[tpu]=={jax.__version__}'"
    assert str(caught.value).endswith(f"its compiler is needed: {line}.")


def test_refusals_for_memory_say_by_how_much():
    text = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for "
    )
    text += "HLO temporaries (17.91G) exceeds available HBM (15.75G)."
    assert chips.memory_refusal(RuntimeError(text)) == (17.91 * 2**30, 15.75 * 2**30)
    text = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. "
    text += "Used 20.00G of 15.75G hbm. Exceeded hbm capacity by 4.25G."
    assert chips.memory_refusal(RuntimeError(text)) == (20 * 2**30, 15.75 * 2**30)
    assert chips.memory_refusal(RuntimeError("INVALID_ARGUMENT")) is None


@pytest.mark.parametrize("is_abstract", [True, False])
def test_a_step_is_compiled_for_a_slice_with_its_reports(is_abstract):
    pytest.importorskip("libtpu")
    state = new_state(batch=4, model=2)
    batch = BATCH
    if is_abstract:
        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        batch = jax.eval_shape(lambda: BATCH)
    step = ml.make_train_step(squares)
    program = step.compile_for("v5e:2x4", state, batch)
    assert dict(program.mesh.shape) == {"batch": 4, "model": 2}
    assert program.mesh.platform == "tpu"
    assert program.communication["all_reduce"] == 1
    assert program.cost.flops == step.cost(state, batch).flops
    assert program.memory.parameter_bytes == 40
    assert program.schedule().total_s > 0
    assert program.schedule(hop_s=1e-3).total_s > 1e-3
    assert "all_reduce" in str(program)


def test_a_step_is_compiled_for_a_mesh_that_is_here():
    step = ml.make_train_step(squares)
    mesh = ml.create_mesh({"batch": 4}, devices=jax.devices()[:4])
    program = step.compile_for(mesh, new_state(), BATCH)
    assert program.mesh == mesh
    with pytest.raises(ml.errors.MeshError, match="the compiler for CPU estimates no"):
        program.schedule()


# The doctor.


WELL = checkup.Machine(
    python="3.11.7",
    versions={"jax": "0.10.2", "jaxlib": "0.10.2"},
    environment={},
    platform="cpu",
    devices=["cpu"],
    cache="/cache",
    data_directory="/data",
    cores=2,
)


def findings(needs=(), **changes):
    machine = dataclasses.replace(WELL, **changes)
    return [(x.kind, x.sentence) for x in checkup.findings_of(machine, needs)]


def test_nothing_is_wrong_with_a_plain_machine():
    assert findings() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"versions": {"jax": "0.10.2", "jaxlib": "0.9.0"}},
            "pip install 'jaxlib==0.10.2'",
        ),
        (
            {"versions": {"jax": "0.10.2", "jax-cuda12-plugin": "0.8.1"}},
            "pip install 'jax[cuda12]==0.10.2'",
        ),
        (
            {"hardware": ["gpu"], "environment": {"JAX_PLATFORMS": "cpu"}},
            "this machine has a GPU, but JAX uses the CPU; JAX_PLATFORMS=cpu asks for it",
        ),
        ({"hardware": ["tpu"]}, "pip install 'jax[tpu]==0.10.2'"),
        (
            {"hardware": ["tpu"], "importable": ["libtpu"]},
            "another process may hold it",
        ),
        ({"asked_devices": 8}, "8 virtual CPU devices were asked for too late"),
        ({"devices": ["cpu"] * 8}, "set NPROC=16 before JAX starts"),
        (
            {
                "environment": {
                    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234",
                    "https_proxy": "http://proxy:3128",
                }
            },
            "add 10.0.0.1 to no_proxy",
        ),
    ],
)
def test_what_is_wrong_is_said_with_what_mends_it(changes, words):
    [(kind, sentence)] = findings(**changes)
    assert kind == "wrong"
    assert words in sentence
    assert sentence.endswith(".")


def test_what_could_be_better_is_advice():
    slow = {"cache": "", "data_directory": "", "environment": {"NPROC": "64"}}
    assert [kind for kind, _ in findings(**slow)] == ["advice"] * 3


def test_extras_are_missing_only_where_they_are_asked_for():
    assert findings(importable=["orbax.checkpoint"], needs=["checkpoint"]) == []
    assert findings(importable=["cloudpickle"], needs=["data", "checkpoint"]) == [
        ("wrong", "grain is not installed: pip install 'meshlayout[data]'."),
        (
            "wrong",
            "orbax.checkpoint is not installed: pip install 'meshlayout[checkpoint]'.",
        ),
    ]
    with pytest.raises(ml.MeshLayoutError, match="Did you mean 'data'"):
        ml.doctor(needs=["dta"])


def test_the_checkup_of_this_machine_is_a_table_and_json():
    result = ml.doctor()
    assert result.machine.platform == "cpu"
    assert 'ml.create_mesh({"batch": 8})' in str(result)
    assert "jaxlib" in result._repr_html_()
    assert "environment" not in json.loads(json.dumps(result.to_dict()))


# The command line.


def test_the_doctor_ends_with_1_where_something_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(checkup, "_machine_here", lambda: WELL)
    assert command_line.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_well"] is True
    sick = dataclasses.replace(WELL, asked_devices=8)
    monkeypatch.setattr(checkup, "_machine_here", lambda: sick)
    assert command_line.main(["doctor"]) == 1
    assert "wrong: 8 virtual CPU devices" in capsys.readouterr().out
    assert command_line.main(["doctor", "--needs", "nothing"]) == 1
    assert capsys.readouterr().err.startswith(
        "meshlayout doctor: doctor: needs must be"
    )


def test_inspect_prints_steps_sizes_layouts_and_the_tree(tmp_path, capsys):
    pytest.importorskip("orbax.checkpoint")
    with ml.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, new_state(), metrics={"loss": float("nan")})
    assert command_line.main(["inspect", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("steps: 1, 2; step 2 has ")
    assert "params/kernel" in text
    assert "f32[4, 2]" in text
    assert (
        command_line.main(["inspect", str(tmp_path / "run"), "--json", "--step=1"]) == 0
    )
    facts = json.loads(capsys.readouterr().out)
    assert (facts["steps"], facts["step"]) == ([1, 2], 1)
    assert facts["arrays"]["params/kernel"].startswith("f32[4, 2]")
    assert facts["metrics"] == {"loss": None}
    assert command_line.main(["inspect", str(tmp_path / "none")]) == 1
    assert "there is no directory" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_launch_is_a_sub_command_that_loads_no_jax(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os; print('number', os.environ['JAX_PROCESS_ID'])")
    program = (
        "import runpy, sys; sys.argv = ['meshlayout', 'launch', '--json', '-n', '2', "
        f"{str(script)!r}]\n"
        "try: runpy.run_module('meshlayout', run_name='__main__')\n"
        "except SystemExit as end: print(end.code, {'jax', 'numpy'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    *lines, facts, end = run.stdout.splitlines()
    assert sorted(lines) == ["[0] number 0", "[1] number 1"]
    assert json.loads(facts)["exit_status"] == 0
    assert end == "0 set()"
