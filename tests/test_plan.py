"""`ml.plan`: what it proposes, estimates, compiles and says."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import meshlayout as ml
from meshlayout.planning import command_line, compilation, search
from meshlayout.planning.compilation import Outcome
from models import transformer


CONFIG = transformer.TransformerConfig(
    vocab_size=64, max_length=16, features=32, num_layers=2, mlp_features=64
)
TOKENS = {"tokens": jax.ShapeDtypeStruct((16, 16), "int32")}


def build():
    return transformer.Transformer(CONFIG, rngs=nnx.Rngs(0))


def token_losses(model, batch):
    return transformer.next_token_losses(model(batch["tokens"]), batch["tokens"])


def planned(tmp_path=None, **options):
    options = {
        "budget_s": 0,
        "topology": ml.create_mesh(),
        "cache": tmp_path,
        **options,
    }
    arguments = {"optimizer": optax.adam(1e-3), "progress": False, **options}
    arguments = {"build": build, "loss_fn": token_losses, "batch": TOKENS, **arguments}
    return ml.plan(**arguments)


@pytest.fixture(scope="module")
def ranking():
    return planned()


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that says what a test wants, by the variant's text."""

    def says(judge):
        def compile_all(jobs, cache, workers):
            for index, job in jobs:
                yield index, judge(job)

        monkeypatch.setattr(search, "job_of", lambda lowered, mesh, name: mesh)
        monkeypatch.setattr(search, "compile_all", compile_all)

    return says


PROGRAM = "HloModule m, num_partitions=8\n\nENTRY %main (x: f32[]) -> f32[] {\n}\n"


# What is proposed.


def test_the_usual_ways_are_proposed_on_meshes_of_one_to_three_axes(ranking):
    names = {row.variant.name for row in ranking.rows}
    assert names >= {"data", "data, zero", "fsdp", "tensor", "tensor + fsdp"}
    assert {len(row.mesh.shape) for row in ranking.rows} == {1, 2, 3}
    assert {row.mesh.size for row in ranking.rows} == {8}
    assert {str(row.variant) for row in ranking.rows} >= {"fsdp, remat=blocks"}


def test_meshes_divide_a_slice_along_its_grid():
    pytest.importorskip("libtpu")
    devices = ml.planning.describe_devices("v5e:4x4")
    shapes = [dict(mesh.shape) for mesh in search.meshes(devices, (4, 4))]
    assert {"batch": 16} in shapes
    assert {"replica": 4, "fsdp": 4} in shapes
    assert {"batch": 4, "model": 4} in shapes
    assert {"replica": 2, "fsdp": 4, "model": 2} in shapes
    assert all(math.prod(shape.values()) == 16 for shape in shapes)


def test_the_code_of_every_row_makes_its_mesh_layouts_and_step(ranking):
    batch = {"tokens": np.zeros((16, 16), "int32")}
    for row in ranking.rows:
        if row.error or row.step_options:
            continue
        names = {"build": build, "loss_fn": token_losses, "step_options": {}}
        names |= {"optimizer": optax.adam(1e-3), "batch": TOKENS}
        exec(row.to_code(), names)
        assert names["mesh"] == row.mesh
        state, metrics = names["train_step"](names["state"], batch)
        assert jnp.isfinite(metrics["loss"])
        expected = ml.TrainState.describe(build, optax.adam(1e-3), row.layouts)
        layouts = [jax.tree.leaves(x) for x in (state.layouts, expected.layouts)]
        assert layouts[0] == layouts[1]


def test_a_linen_model_and_one_without_blocks_are_planned():
    module = nn.Dense(8)
    x = jax.ShapeDtypeStruct((16, 8), "float32")
    result = planned(
        build=lambda: module.init(jax.random.key(0), jnp.zeros((1, 8))),
        loss_fn=lambda model, x: model(x) ** 2,
        module=module,
        batch=x,
    )
    assert result.fits
    assert {row.step_options.get("remat") for row in result.rows} == {None}


def test_candidates_are_maps_or_functions_of_a_mesh():
    mesh = ml.create_mesh({"data": 8})

    def halves(mesh):
        return ml.LayoutMap(mesh, {"embed/embedding": ("model", None)})

    candidates = {"mine": ml.LayoutMap(mesh), "halves": halves}
    result = planned(candidates=candidates, remat="none")
    names = [(row.variant.name, dict(row.mesh.shape)) for row in result.rows]
    assert ("mine", {"data": 8}) in names
    assert {name for name, _ in names} == {"mine", "halves"}
    assert all("model" in shape for name, shape in names if name == "halves")
    with pytest.raises(ml.errors.MeshError, match="has no axis 'expert'"):
        planned(candidates={"no": lambda mesh: ml.parallel.fsdp(mesh, axes="expert")})


def test_a_candidate_that_does_not_fit_the_model_is_a_row(ranking):
    odd = ml.LayoutMap(ml.create_mesh(), {"norm/scale": ("batch",)})
    three = {"tokens": jax.ShapeDtypeStruct((12, 16), "int32")}
    [row] = planned(candidates={"odd": odd}, batch=three).rows
    assert row.error == "12 examples do not divide over batch and the microbatches."
    uneven = ml.LayoutMap(ml.create_mesh(), {"output/kernel": (None, "batch")})
    odd_config = transformer.TransformerConfig(vocab_size=63, max_length=16)
    [row] = planned(
        candidates={"odd": uneven},
        build=lambda: transformer.Transformer(odd_config, rngs=nnx.Rngs(0)),
    ).rows
    assert "63 is not divisible" in row.error or "63" in row.error
    assert not row.fits


# Estimates.


def test_what_layouts_send_is_that_of_rings(ranking):
    rows = {(row.variant.name, len(row.mesh.shape)): row for row in ranking.rows}
    rows = {key: row for key, row in rows.items() if not row.step_options}
    state = ml.TrainState.describe(
        build, optax.adam(1e-3), ml.LayoutMap(ml.create_mesh())
    )
    nbytes = sum(4 * x.size for x in jax.tree.leaves(state.abstract.params))
    data = next(x for x in ranking.rows if str(x.variant) == "data")
    assert data.sent["batch"] == pytest.approx(2 * 7 / 8 * nbytes)
    whole = next(x for x in ranking.rows if str(x.variant) == "fsdp")
    assert nbytes < whole.sent["batch"] <= 3 * 7 / 8 * nbytes


def test_rows_say_what_their_time_consists_of(ranking):
    assert [row.source for row in ranking.rows] == ["estimated"] * len(ranking.rows)
    best = ranking.best
    assert best is ranking.rows[0]
    assert best.bound in ("compute", "memory", "network")
    assert best.examples_per_s == 16 / best.step_s
    assert 0 < best.utilization < 1
    assert best.peak_bytes > 0
    text = ranking.explain()
    assert all(
        word in text for word in ("compute", "memory", "network", "100", "%")[:3]
    )
    assert best.tokens_per_s == 16 * 16 / best.step_s
    assert f"({best.tokens_per_s:,.0f} tokens)" in str(ranking)
    assert "<table" in ranking._repr_html_()
    facts = json.loads(json.dumps(ranking.to_dict(), default=str))
    assert facts["rows"][0]["mesh"] == dict(best.mesh.shape)


def test_accumulation_and_remat_take_less_memory():
    mesh = ml.create_mesh()
    candidates = {"all": ml.LayoutMap(mesh)}

    batch = {"tokens": jax.ShapeDtypeStruct((1024, 16), "int32")}

    def peak(**options):
        [row, *_] = planned(candidates=candidates, batch=batch, **options).rows
        return row.peak_bytes

    assert peak(remat="blocks") < peak(remat="none")
    assert peak(remat="none", accumulate=2) < peak(remat="none")


# Compilations.


@pytest.mark.slow
def test_programs_are_compiled_once_in_processes_of_their_own(tmp_path, monkeypatch):
    options = {"budget_s": 100, "remat": "none", "accumulate": 1}
    mesh = ml.create_mesh()
    options["candidates"] = {"all": ml.LayoutMap(mesh), "fsdp": ml.parallel.fsdp(mesh)}
    first = planned(tmp_path, **options)
    assert [row.source for row in first.rows] == ["roofline"] * 2
    assert all(row.compile_s > 0 and row.host_bytes > 0 for row in first.rows)
    step = ml.make_train_step(token_losses, remat="none")
    for row in first.rows:
        state = ml.TrainState.describe(build, optax.adam(1e-3), row.layouts).abstract
        assert row.peak_bytes == step.memory(state, TOKENS).peak_bytes
        sent = step.communication(state, TOKENS).wire_bytes
        assert sum(row.sent.values()) == sent
    monkeypatch.setattr(compilation, "_started", None)  # it may not be called
    again = planned(tmp_path, **options)
    assert [x.peak_bytes for x in again.rows] == [x.peak_bytes for x in first.rows]


def test_a_compiler_that_fails_is_a_row_and_not_the_end(compiler):
    def judge(mesh):
        error = "INTERNAL: Mosaic failed" if len(mesh.shape) == 1 else ""
        return Outcome("" if error else PROGRAM, 1000, error=error)

    compiler(judge)
    result = planned(budget_s=100)
    errors = {row.error for row in result.rows if len(row.mesh.shape) == 1}
    assert errors == {"INTERNAL: Mosaic failed"}
    assert result.fits
    assert len(result.best.mesh.shape) == 2
    assert result.best.source == "roofline"


def test_without_a_budget_the_best_are_compiled(compiler):
    compiler(lambda mesh: Outcome(PROGRAM, 1000))
    result = planned(budget_s=None)
    assert [x.source for x in result.rows].count("roofline") == 4
    assert result.rows[0].source == "roofline"


def test_the_budget_ends_what_is_compiled(compiler, monkeypatch):
    now = [0.0]

    def judge(mesh):
        now[0] += 10
        return Outcome(PROGRAM, 1000)

    compiler(judge)
    monkeypatch.setattr(search.time, "monotonic", lambda: now[0])
    result = planned(budget_s=25)
    assert [x.source for x in result.rows].count("roofline") == 3
    assert re.match(r"The budget ended after 3 of \d+ candidates", result.notes[0])


def test_ctrl_c_returns_what_is_ranked_so_far(compiler):
    counts = []

    def judge(mesh):
        counts.append(mesh)
        if len(counts) == 2:
            raise KeyboardInterrupt
        return Outcome(PROGRAM, 1000)

    compiler(judge)
    result = planned(budget_s=100)
    assert result.notes == ("Interrupted: what is ranked so far.",)
    assert [x.source for x in result.rows].count("roofline") == 1


def test_where_nothing_fits_the_smallest_change_is_compiled(compiler):
    needs = []

    def judge(mesh):
        needs.append(1)
        if len(needs) < 4:
            line = "RESOURCE_EXHAUSTED: ... (20.00G) exceeds available HBM (15.75G)"
            return Outcome("", 20 * 2**30, 15.75 * 2**30, line)
        return Outcome(PROGRAM, 1000)

    compiler(judge)
    candidates = {"all": ml.LayoutMap(ml.create_mesh())}
    result = planned(candidates=candidates, budget_s=100, remat="none")
    assert not result.fits
    assert all(row.peak_bytes > row.memory_bytes for row in result.rows)
    [change] = result.changes
    assert change.fits
    assert "optimizer = ml.planning.bfloat16_state(optimizer)" in change.to_code()
    assert result.best is change
    assert "Nothing fits." in str(result)
    assert "4.2 GiB over" in str(result)


def test_state_in_bfloat16_is_half_and_learns():
    tx = ml.planning.bfloat16_state(optax.adam(0.1))
    params = {"w": jnp.ones((4, 4))}
    state = tx.init(params)
    assert {x.dtype.name for x in jax.tree.leaves(state) if x.ndim} == {"bfloat16"}
    updates, state = tx.update({"w": jnp.ones((4, 4))}, state, params)
    expected, _ = optax.adam(0.1).update(
        {"w": jnp.ones((4, 4))}, optax.adam(0.1).init(params), params
    )
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-2)
    assert {x.dtype.name for x in jax.tree.leaves(state) if x.ndim} == {"bfloat16"}


@pytest.mark.slow
def test_a_slice_is_planned_by_the_tpu_compiler(tmp_path):
    pytest.importorskip("libtpu")
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    result = planned(
        tmp_path,
        build=lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0)),
        loss_fn=lambda model, x: model(x) ** 2,
        batch=x,
        topology="v5e:2x2",
        budget_s=None,
    )
    compiled = [row for row in result.rows if row.source == "compiled"]
    assert len(compiled) == 4
    assert all(row.fits and row.step_s > 0 for row in compiled)
    assert result.best.memory_bytes == 15.75 * 2**30
    assert sum(result.best.parts.values()) == pytest.approx(result.best.step_s)


def test_topologies_are_compared_per_device():
    small = ml.create_mesh({"batch": 4}, devices=jax.devices()[:4])
    result = planned(topology=[small.jax_mesh, ml.create_mesh()])
    names = {row.variant.topology for row in result.rows}
    assert names == {"4 CPU devices", "8 CPU devices"}
    rates = [row.examples_per_s / row.mesh.size for row in result.rows]
    assert rates == sorted(rates, reverse=True)


# Bad input.


def test_bad_input_is_refused_before_any_work():
    with pytest.raises(ml.errors.MeshError, match="there is no topology 'v5e:5x5'"):
        planned(topology="v5e:5x5")
    with pytest.raises(ml.MeshLayoutError, match="Did you mean 'accumulate'"):
        planned(acumulate=2)
    with pytest.raises(ml.MeshLayoutError, match="budget_s must be a finite number"):
        planned(budget_s=-1)
    with pytest.raises(ml.MeshLayoutError, match="workers must be a positive"):
        planned(workers=0)


def test_a_model_that_cannot_be_traced_gives_its_own_error():
    def broken(model, batch):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        planned(loss_fn=broken)
    notes = " ".join(caught.value.__notes__)
    assert "while plan traces the step" in notes


PROBLEM = """
import jax, optax
from flax import nnx

def problem():
    import meshlayout as ml
    return dict(
        build=lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)),
        loss_fn=lambda model, x: model(x) ** 2,
        batch=jax.ShapeDtypeStruct((16, 8), "float32"),
        optimizer=optax.sgd(0.1),
        topology=ml.create_mesh(),
        progress=False,
    )
"""


def test_plan_is_a_sub_command(tmp_path, capsys):
    path = tmp_path / "problem.py"
    path.write_text(PROBLEM)
    arguments = ["plan", f"{path}:problem", "--budget-s", "0"]
    assert command_line.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["fits"] is True
    assert command_line.main(arguments) == 0
    assert "examples/s" in capsys.readouterr().out
    assert command_line.main(["plan", f"{path}:problm"]) == 1
    assert "Did you mean 'problem'?" in capsys.readouterr().err
    assert command_line.main([*arguments, "--topology", "v5e:9x9"]) == 1
    assert "there is no topology" in capsys.readouterr().err
