"""`ml.plan`: what it proposes, estimates, compiles and says."""

import functools
import json
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import meshlayout as ml
from meshlayout.planning import candidates, chips, compilation, search
from meshlayout.planning.compilation import Outcome
from models import moe, transformer


CONFIG = transformer.TransformerConfig(
    vocab_size=64, max_length=16, features=32, num_layers=2, mlp_features=64
)
TOKENS = {"tokens": jax.ShapeDtypeStruct((16, 16), "int32")}


def build():
    return transformer.Transformer(CONFIG, rngs=nnx.Rngs(0))


def token_losses(model, batch):
    return transformer.next_token_losses(model(batch["tokens"]), batch["tokens"])


def planned(tmp_path=None, **options):
    options = {"topology": ml.create_mesh(), "cache": tmp_path, **options}
    options = {"optimizer": optax.adam(1e-3), "progress": False, **options}
    options = {"budget_s": 0, "build": build, "loss_fn": token_losses, **options}
    return ml.plan(**{"batch": TOKENS, **options})


@pytest.fixture(scope="module")
def ranking():
    return planned()


@pytest.fixture
def four():
    """Candidates that are lowered fast."""
    return {f"map {number}": ml.LayoutMap(ml.create_mesh()) for number in range(4)}


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that says what a test wants."""

    def says(judge):
        compile_all = lambda jobs, *_: ((index, judge(job)) for index, job in jobs)
        monkeypatch.setattr(search, "compile_all", compile_all)

    return says


PROGRAM = "HloModule m, num_partitions=8\n\nENTRY %main (x: f32[]) -> f32[] {\n}\n"


def test_the_usual_ways_are_proposed_on_meshes_of_one_to_three_axes(ranking):
    names = {row.name for row in ranking.rows}
    tensor = {"tensor", "tensor + fsdp", "tensor, sequence", "tensor, sequence + fsdp"}
    assert names == {"data", "fsdp", "hybrid fsdp"} | tensor
    assert {len(row.mesh.shape) for row in ranking.rows} == {1, 2, 3}
    assert {row.mesh.size for row in ranking.rows} == {8}
    assert {str(row) for row in ranking.rows} >= {"fsdp, remat=blocks"}


def test_meshes_divide_a_slice_along_its_grid():
    pytest.importorskip("libtpu")
    target = chips.Slice.of("v5e:4x4")
    shapes = [dict(mesh.shape) for mesh in candidates.meshes(target)]
    some = [{"batch": 16}, {"replica": 4, "fsdp": 4}, {"batch": 8, "model": 2}]
    assert all(shape in shapes for shape in some)
    assert all(math.prod(shape.values()) == 16 for shape in shapes)


def test_the_code_of_every_row_makes_its_mesh_layouts_and_step(ranking):
    batch = {"tokens": np.zeros((16, 16), "int32")}
    for row in ranking.rows[::14]:
        names = {"build": build, "loss_fn": token_losses, "batch": TOKENS}
        names |= {"optimizer": optax.adam(1e-3)}
        exec(row.to_code(), names)
        assert names["mesh"] == row.mesh
        state, metrics = names["train_step"](names["state"], batch)
        assert jnp.isfinite(metrics["loss"])
        expected = ml.TrainState.describe(build, optax.adam(1e-3), row.layouts)
        layouts = [jax.tree.leaves(x) for x in (state.layouts, expected.layouts)]
        assert layouts[0] == layouts[1]


SIZES = {"vocab_size": 64, "max_length": 16, "features": 32, "mlp_features": 64}
RING = functools.partial(ml.parallel.ring_attention, axis="seq", causal=True)
STAGES = {"num_layers": 4, "is_scanned": True, "microbatches": 2}
LONG = transformer.TransformerConfig(**SIZES, attention=RING)
DEEP = transformer.TransformerConfig(**SIZES, **STAGES)


@pytest.mark.parametrize(
    ("way", "axis", "model", "config"),
    [
        ("fsdp + context", "seq", transformer.Transformer, LONG),
        pytest.param(
            *("data + stages", "stage", transformer.Transformer, DEEP),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("fsdp + experts", "expert", moe.MoE, moe.MoEConfig(**SIZES)),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_axes_that_a_model_asks_for_give_the_loss_of_one_device(
    way, axis, model, config
):
    build = lambda: model(config, rngs=nnx.Rngs(0))
    rows = planned(build=build, remat="none").rows
    rows = [row for row in rows if row.name == way and not row.error]
    assert {row.mesh.axis_size(axis) for row in rows} >= {2, 4}
    names = {"build": build, "loss_fn": token_losses, "batch": TOKENS}
    batch = {"tokens": np.arange(256, dtype="int32").reshape(16, 16) % 64}
    has_loss_of_one_device(rows[0], names, batch)


def has_loss_of_one_device(row, names, batch):
    names["optimizer"] = optax.sgd(0.1)
    exec(row.to_code(), names)
    batch = ml.relayout(batch, names.get("batch_layout", row.mesh.layout("batch", ...)))
    loss = names["train_step"](names["state"], batch)[1]["loss"]
    one = ml.LayoutMap(ml.create_mesh({"batch": 1}, devices=jax.devices()[:1]))
    state = ml.TrainState.create(names["build"], optax.sgd(0.1), one)
    step, batch = ml.make_train_step(names["loss_fn"]), jax.device_get(batch)
    expected = step(state, batch)[1]["loss"]
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_images_of_a_model_with_convolutions_may_be_in_shards():
    build = lambda: nnx.Sequential(nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0)))
    loss_fn = lambda model, batch: (model(batch["image"]) ** 2).mean((1, 2, 3))
    batch = {"image": np.random.default_rng(0).normal(size=(8, 16, 16, 3))}
    batch["image"] = batch["image"].astype("float32")
    rows = planned(build=build, loss_fn=loss_fn, batch=batch).rows
    rows = [row for row in rows if row.name == "data + space"]
    assert {row.mesh.axis_size("height") for row in rows} == {2, 4, 8}
    assert "wait: collective_permute, layers/0" in rows[0].parts
    has_loss_of_one_device(rows[0], {"build": build, "loss_fn": loss_fn}, batch)


def test_a_linen_model_and_one_without_blocks_are_planned():
    module, batch = nn.Dense(8), jax.ShapeDtypeStruct((16, 8), "float32")
    linen = lambda: module.init(jax.random.key(0), jnp.zeros((1, 8)))
    square = lambda model, x: model(x) ** 2
    result = planned(build=linen, loss_fn=square, module=module, batch=batch)
    assert result.fits
    assert {row.step_options.get("remat") for row in result.rows} == {None}


def test_candidates_are_maps_or_functions_of_a_mesh():
    def halves(mesh):
        return ml.LayoutMap(mesh, {"embed/embedding": ("model", None)})

    mine = ml.LayoutMap(ml.create_mesh({"data": 8}))
    result = planned(candidates={"mine": mine, "halves": halves}, remat="none")
    names = [(row.name, dict(row.mesh.shape)) for row in result.rows]
    assert ("mine", {"data": 8}) in names
    assert {name for name, _ in names} == {"mine", "halves"}
    assert all("model" in shape for name, shape in names if name == "halves")
    names = {"build": build, "loss_fn": token_losses, "optimizer": optax.sgd(0.1)}
    names["candidates"] = {"a": mine, "b": lambda mesh: ml.parallel.fsdp(mesh)}
    for row in planned(candidates=names["candidates"], remat="none").rows[:3]:
        exec(row.to_code(), names)
        assert names["layouts"] == row.layouts
        assert names["state"].step.sharding.mesh == row.mesh.jax_mesh
    result = planned(candidates={"no": lambda x: ml.parallel.fsdp(x, axes="expert")})
    assert all("has no axis 'expert'" in row.error for row in result.rows)


def test_batches_may_be_tuples_and_losses_may_draw():
    def loss_fn(model, batch, rngs, train):
        tokens, weights = batch
        noise = jax.random.uniform(rngs(), weights.shape) * train
        return token_losses(model, {"tokens": tokens}) * weights + noise

    batch = TOKENS["tokens"], jax.ShapeDtypeStruct((16, 1), "float32")
    rows = planned(loss_fn=loss_fn, batch=batch, remat="none").rows
    assert not [row.error for row in rows if row.error]
    names = {"build": build, "loss_fn": loss_fn, "optimizer": optax.sgd(0.1)}
    exec(rows[0].to_code(), {**names, "batch": batch})


def test_of_several_steps_a_call_one_is_planned():
    options = {"candidates": {"whole": ml.LayoutMap(ml.create_mesh())}, "remat": "none"}
    one, several = planned(**options).best, jax.ShapeDtypeStruct((3, 16, 16), "int32")
    for batch in ([TOKENS] * 3, {"tokens": several}):
        best = planned(steps_per_call=3, batch=batch, **options).best
        assert best.step_s == one.step_s
        assert best.examples_per_s == one.examples_per_s
        assert "steps_per_call=3" in best.to_code()


def test_a_candidate_that_does_not_fit_the_batch_or_the_model_is_a_row():
    whole = ml.LayoutMap(ml.create_mesh())
    odd = {"tokens": jax.ShapeDtypeStruct((12, 16), "int32")}
    [row] = planned(candidates={"odd": whole}, batch=odd).rows
    assert row.error == "12 examples do not divide over batch and 1 microbatches."
    config = transformer.TransformerConfig(vocab_size=63, max_length=16)
    uneven = ml.LayoutMap(ml.create_mesh(), {"output/kernel": (None, "batch")})
    odd_build = lambda: transformer.Transformer(config, rngs=nnx.Rngs(0))
    [row] = planned(candidates={"odd": uneven}, build=odd_build).rows
    assert "63" in row.error


def test_what_layouts_send_is_that_of_rings(ranking):
    whole = ml.LayoutMap(ml.create_mesh())
    state = ml.TrainState.describe(build, optax.adam(1e-3), whole)
    nbytes = sum(4 * x.size for x in jax.tree.leaves(state.abstract.params))
    rows = {str(row): row for row in ranking.rows}
    assert rows["data"].sent["batch"] == pytest.approx(2 * 7 / 8 * nbytes)
    assert nbytes < rows["fsdp"].sent["batch"] <= 3 * 7 / 8 * nbytes


def test_rows_say_what_their_time_consists_of(ranking):
    best = ranking.best
    seconds = best.estimate.seconds
    assert best.bound == max(seconds, key=lambda name: seconds[name])
    assert sum(best.parts.values()) == pytest.approx(best.step_s)
    assert best.examples_per_s == 16 / best.step_s
    assert 0 < best.utilization < 1
    for words in ("wait: all_reduce, ", "optimizer", "blocks"):
        assert words in ranking.explain()
    assert f"({best.tokens_per_s:,.0f} tokens)" in str(ranking)
    assert "<table" in ranking._repr_html_()
    assert json.dumps(ranking.to_dict(), allow_nan=False)
    assert ranking.explain(best) == ranking.explain()


@pytest.mark.slow
def test_accumulation_and_remat_take_less_memory():
    whole = {"all": ml.LayoutMap(ml.create_mesh())}
    batch = {"tokens": jax.ShapeDtypeStruct((1024, 16), "int32")}

    def peak(**options):
        return planned(candidates=whole, batch=batch, **options).rows[0].peak_bytes

    assert peak(remat="blocks") < peak(remat="none")
    assert peak(remat="none", accumulate=2) < peak(remat="none")


def test_programs_are_compiled_as_the_step_does_it_and_once(tmp_path, monkeypatch):
    maps = {"fsdp": ml.parallel.fsdp(ml.create_mesh())}
    options = {"budget_s": 100, "remat": "none", "accumulate": 1, "candidates": maps}
    [row] = planned(tmp_path, **options).rows
    assert row.source == "roofline"
    step = ml.make_train_step(token_losses, remat="none")
    state = ml.TrainState.describe(build, optax.adam(1e-3), row.layouts).abstract
    assert row.peak_bytes == step.memory(state, TOKENS).peak_bytes
    sent = step.communication(state, TOKENS).wire_bytes
    assert sum(row.sent.values()) == sent
    monkeypatch.setattr(compilation, "_compile", None)  # it may not be called
    [again] = planned(tmp_path, **options).rows
    assert again.peak_bytes == row.peak_bytes


def test_a_slice_is_planned_by_the_tpu_compiler_in_other_processes(tmp_path):
    pytest.importorskip("libtpu")
    devices = ml.planning.describe_devices("v5e:2x2")
    layouts = ml.LayoutMap(ml.create_mesh({"batch": 4}, devices=devices))
    result = planned(
        tmp_path,
        build=lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0)),
        loss_fn=lambda model, x: model(x) ** 2,
        batch=jax.ShapeDtypeStruct((64, 64), "float32"),
        candidates={"data": layouts},
        topology="v5e:2x2",
        budget_s=100,
        accumulate=1,
        workers=1,
    )
    best = result.best
    assert (best.source, best.memory_bytes) == ("compiled", 15.75 * 2**30)
    assert 0 < best.peak_bytes < 2**24
    assert sum(best.parts.values()) == pytest.approx(best.step_s)


def test_a_compiler_that_fails_is_a_row_and_not_the_end(compiler, four):
    failed, works = Outcome(error="INTERNAL: Mosaic failed"), Outcome(PROGRAM, 1000)
    compiler(mock.Mock(side_effect=[failed, failed, works, works]))
    result = planned(budget_s=100, candidates=four, remat="none")
    errors = [row.error for row in result.rows if row.error]
    assert errors == ["INTERNAL: Mosaic failed"] * 2
    assert result.best.source == "roofline"
    compiler(lambda devices: failed)
    result = planned(budget_s=100, candidates=four, remat="none")
    with pytest.raises(ml.MeshLayoutError, match="of one: INTERNAL: Mosaic failed"):
        _ = result.best


@pytest.mark.slow
def test_without_a_budget_compilations_go_on_while_one_may_be_faster(compiler):
    compiler(lambda devices: Outcome(PROGRAM, 1000))
    result = planned(budget_s=None, remat="none")
    number = [row.source for row in result.rows].count("roofline")
    left = [row.step_s for row in result.rows if row.source == "estimated"]
    assert 4 <= number <= 12
    assert number == 12 or result.best.step_s <= min(left)


def test_the_budget_ends_what_is_compiled(compiler, four, monkeypatch):
    calls = []
    compiler(lambda devices: calls.append(1) or Outcome(PROGRAM, 1000))
    monkeypatch.setattr(search.time, "monotonic", lambda: 10.0 * len(calls))
    result = planned(budget_s=25, candidates=four, remat="none")
    assert [x.source for x in result.rows].count("roofline") == 3
    assert result.notes == ("The budget ended after 3 of 4 candidates.",)


def test_ctrl_c_returns_what_is_ranked_so_far(compiler, four):
    compiler(mock.Mock(side_effect=[Outcome(PROGRAM, 1000), KeyboardInterrupt]))
    result = planned(budget_s=100, candidates=four, remat="none")
    assert result.notes == ("Interrupted: what is ranked so far.",)
    assert [x.source for x in result.rows].count("roofline") == 1


def test_where_nothing_fits_the_smallest_change_is_compiled(compiler):
    line = "RESOURCE_EXHAUSTED: ... (20.00G) exceeds available HBM (15.75G)"
    refused = Outcome("", 20 * 2**30, 15.75 * 2**30, line)
    compiler(mock.Mock(side_effect=[refused, refused, Outcome(PROGRAM, 1000)]))
    maps = {"all": ml.LayoutMap(ml.create_mesh())}
    result = planned(candidates=maps, budget_s=100, remat="none")
    [change] = result.changes
    assert not result.fits
    assert result.best is change
    assert (str(change), change.fits) == ("all, optimizer in bfloat16", True)
    assert "optimizer = ml.planning.bfloat16_state(optimizer)" in change.to_code()
    assert "Nothing fits." in str(result)
    assert "4.2 GiB over" in str(result)


def test_state_in_bfloat16_learns_as_in_float32():
    tx, plain = ml.planning.bfloat16_state(optax.adam(0.1)), optax.adam(0.1)
    params = grads = {"w": jnp.ones((4, 4))}
    updates, expected = (
        x.update(grads, x.init(params), params)[0] for x in (tx, plain)
    )
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-2)


def test_topologies_are_compared_per_device():
    small = ml.create_mesh({"batch": 4}, devices=jax.devices()[:4])
    result = planned(topology=[small.jax_mesh, ml.create_mesh()], remat="none")
    assert {row.topology for row in result.rows} == {"4 CPU devices", "8 CPU devices"}
    rates = [row.examples_per_s / row.mesh.size for row in result.rows]
    assert rates == sorted(rates, reverse=True)
    maps = {"small": ml.LayoutMap(small), "large": ml.LayoutMap(ml.create_mesh())}
    with pytest.raises(ml.MeshLayoutError, match="'large' is for other devices"):
        planned(topology=small, candidates=maps, remat="none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": "v5e:5x5"}, r"there is no topology 'v5e:5x5'.* 4x4|v5e:4x4"),
        ({"candidates": ["fsdp"]}, "candidates must be a dict by names"),
        ({"acumulate": 2}, "Did you mean 'accumulate'"),
        ({"budget_s": -1}, "budget_s must be a finite number"),
    ],
)
def test_bad_input_is_refused_before_any_work(options, message):
    with pytest.raises(ml.MeshLayoutError, match=message):
        planned(build=None, **options)


def test_a_model_that_cannot_be_traced_gives_its_own_error():
    def broken(model, batch):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        planned(loss_fn=broken)
    assert "while plan traces the candidate 'fsdp'" in caught.value.__notes__
