"""The report on a layout map, and its lock text."""

import jax
import numpy as np
import optax
import pytest

import meshlayout as ml


TREE = {
    "embed": {"embedding": (4096, 64)},
    "layers": [{"attention": {"kernel": (64, 64), "bias": (64,)}} for _ in range(2)],
    "head": {"kernel": (64, 4096)},
}
RULES = {
    r"attention/kernel": (None, "model"),
    r"embed/embeding": ("model", None),  # sic
    r"head": ("batch", "model"),
    r"head/kernel": ("batch", "model"),
}


@pytest.fixture
def tree():
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
        TREE,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def test_the_totals_are_the_sums(mesh, tree):
    report = ml.LayoutMap(mesh, RULES).explain(tree)
    whole = 4 * (2 * 4096 * 64 + 2 * (64 * 64 + 64))
    here = 4 * (4096 * 64 + 64 * 4096 // 8 + 2 * (64 * 64 // 4 + 64))
    assert report.nbytes == whole
    assert report.bytes_per_device == here
    assert f"saving {100 - round(100 * here / whole)}%" in str(report)


def test_arrays_on_another_mesh_are_said_to_be_there(mesh):
    here = ml.relayout({"head": np.zeros((64, 4096))}, ml.create_mesh().layout(...))
    report = ml.LayoutMap(mesh, RULES, unused="ignore").explain(here)
    assert "head: now on Mesh(batch=8); this is what the map would give" in str(report)


def test_rules_without_effect_and_large_whole_leaves_are_named(mesh, tree):
    layouts = ml.LayoutMap(mesh, {**RULES, "kernel$": [...]}, conflict="first")
    report = layouts.explain(tree)
    assert report.dead_rules == {"embed/embeding": ("embed/embedding",)}
    line = "dead rule 'embed/embeding' matches no path. Nearest: embed/embedding."
    assert line in report.notes
    assert set(report.shadowed_rules) == {"head", "kernel$"}
    assert report.shadowed_rules["kernel$"] == ("attention/kernel", "head/kernel")
    assert report.large_replicated == ("embed/embedding",)
    torch = r"model.transformer.*.head.weight"
    report = ml.LayoutMap(mesh, {torch: [...]}).explain(tree)
    assert report.dead_rules == {torch: ("head/kernel",)}


@pytest.mark.parametrize("shape", [(3, 3, 1, 8), (8, 1, 3, 3)])
def test_what_may_be_a_grouped_kernel_is_noted_if_an_axis_is_left_over(mesh, shape):
    kernel = {"kernel": jax.ShapeDtypeStruct(shape, "float32")}
    slots = jax.eval_shape(optax.adam(0.1).init, kernel)
    alone, dim = ml.create_mesh({"batch": 8}), shape.index(8)
    channels = ml.LayoutMap(
        mesh, {"kernel": [None] * dim + ["model"] + [None] * (3 - dim)}
    )
    (note,) = ml.LayoutMap(mesh).explain({"params": kernel, "slots": slots}).notes
    assert note.startswith("note: kernel: if its feature_group_count > 1, XLA may ")
    assert note.endswith("and train steps refuse that, jax.jit does not")
    for layouts in (channels, ml.LayoutMap(alone)):
        assert not layouts.explain(kernel).notes


def test_text_and_html_tell_every_leaf(mesh, tree):
    report = ml.LayoutMap(mesh, RULES).explain(tree)
    html = report._repr_html_()
    assert "<table" in html
    for leaf in report.resolutions:
        path = leaf.path.replace("0", "*").replace("1", "*")  # one row for all layers
        assert path in str(report)
        assert path in html
        assert str(leaf.layout) in str(report)
    assert repr(report) == str(report)
    tree = {"<script>": jax.ShapeDtypeStruct((2,), "float32")}
    assert "<script>" not in ml.LayoutMap(mesh).explain(tree)._repr_html_()


def test_layers_share_a_row_and_the_rows_of_a_rule_stand_together(mesh):
    layer = {
        name: jax.ShapeDtypeStruct((64, 64), "float32") for name in ("up", "down", "z")
    }
    report = ml.LayoutMap(mesh, {"up|down": (None, "model")}).explain([layer] * 80)
    rows = [line.split() for line in str(report).splitlines() if "f32" in line]
    assert [" ".join(row[:6]) for row in rows] == [
        "*/down 80 x f32[64, 64] [unsharded,",
        "*/up 80 x f32[64, 64] [unsharded,",
        "*/z 80 x f32[64, 64] [unsharded,",
    ]
    assert rows[0][6:] == ["model]", "up|down", "320.0", "KiB", "75%"]
    layer = {"fc1": np.ones(4), "fc2": np.ones(2)}
    text = str(ml.LayoutMap(mesh).explain([layer] * 2))
    assert "*/fc1 " in text  # the number that all leaves of the row share
    assert "*/fc2 " in text
    assert len(str(report)) < 1000


def test_the_lock_is_stable_text(mesh, tree):
    resolved = ml.LayoutMap(mesh, RULES).resolve(tree)
    lock = resolved.to_lock()
    assert lock == (
        "# layouts on Mesh(batch=2, model=4)\n"
        "embed/embedding: f32[4096, 64] [unsharded, unsharded]\n"
        "head/kernel: f32[64, 4096] [batch, model]\n"
        "layers/0/attention/bias: f32[64] [unsharded]\n"
        "layers/0/attention/kernel: f32[64, 64] [unsharded, model]\n"
        "layers/1/attention/bias: f32[64] [unsharded]\n"
        "layers/1/attention/kernel: f32[64, 64] [unsharded, model]\n"
    )
    resolved.check_lock(lock)
    resolved.check_lock(lock.replace("\n", "\r\n"))


def test_a_rename_that_changes_a_layout_breaks_the_lock(mesh, tree):
    layouts = ml.LayoutMap(mesh, RULES)
    lock = layouts.resolve(tree).to_lock()
    tree["top"] = tree.pop("head")
    with pytest.raises(ml.errors.LayoutMapError) as caught:
        layouts.resolve(tree).check_lock(lock)
    assert str(caught.value) == (
        "the layouts are not the locked ones (- locked, + now):\n"
        "  -head/kernel: f32[64, 4096] [batch, model]\n"
        "  +top/kernel: f32[64, 4096] [unsharded, unsharded]\n"
        "If this is intended, write a new lock with to_lock()."
    )


def test_a_resolution_is_found_by_path(mesh, tree):
    resolved = ml.LayoutMap(mesh, RULES).resolve(tree)
    assert resolved["head/kernel"].rule == "head/kernel"
    assert resolved.layouts["head"]["kernel"] == resolved["head/kernel"].layout
    with pytest.raises(ml.errors.LayoutMapError) as caught:
        resolved["head/kernle"]
    assert str(caught.value) == (
        "no leaf has the path 'head/kernle'. Did you mean 'head/kernel'?"
    )
