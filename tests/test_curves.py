"""Curves of a history: what is drawn is what was measured."""

import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import meshlayout as ml
from meshlayout._render.curves import Curves


SVG = "{http://www.w3.org/2000/svg}"

values = st.floats(-1e6, 1e6).filter(lambda v: v == 0 or abs(v) > 1e-6)


def panels(curves):
    """Reads each panel of the SVG: its labels by position, and its dots."""
    for root in ET.fromstring(curves._repr_svg_()).findall(f"{SVG}g"):
        faint = [t for t in root.iter(f"{SVG}text") if t.get("opacity")]
        high, low, first, last = faint
        yield (
            [(float(t.get("y")) - 4, float(t.text)) for t in (low, high)],
            [(float(t.get("x")), float(t.text.split()[-1])) for t in (first, last)],
            [
                (float(c.get("cx")), float(c.get("cy")), c.find(f"{SVG}title").text)
                for c in root.iter(f"{SVG}circle")
            ],
        )


def inverse(ticks):
    """Returns the value at a position, and how exact a tenth of a pixel is."""
    (low, first), (high, last) = sorted(ticks)
    slope = (last - first) / (high - low)
    return lambda position: first + (position - low) * slope, abs(slope) * 0.15


@settings(max_examples=50, deadline=None)
@given(st.lists(values, min_size=2, max_size=20))
def test_dots_are_where_the_axes_say(numbers):
    if max(numbers) - min(numbers) < 1e-3 * max(map(abs, numbers)):
        numbers = [*numbers, numbers[-1] + max(map(abs, numbers)) + 1.0]
    curves = Curves.of(range(1, len(numbers) + 1), {"loss": numbers})
    ((y_ticks, x_ticks, dots),) = panels(curves)
    value_at, value_error = inverse(y_ticks)
    epoch_at, epoch_error = inverse(x_ticks)
    for epoch, (number, (x, y, _)) in enumerate(zip(numbers, dots, strict=True), 1):
        assert abs(value_at(y) - number) <= value_error + 1e-3 * max(map(abs, numbers))
        assert abs(epoch_at(x) - epoch) <= epoch_error + 1e-5


def test_a_metric_and_its_validation_share_a_panel_and_each_dot_says_its_value():
    history = ml.History()
    history.add(1, {"loss": 0.9, "acc": 0.25, "confusion": np.eye(2)})
    history.add(2, {"loss": 0.5, "val_loss": 0.75, "acc": math.nan})
    losses, accuracies = panels(history.plot())
    assert [title for *_, title in losses[2]] == [
        "loss 0.9 in epoch 1",
        "loss 0.5 in epoch 2",
        "val_loss 0.75 in epoch 2",
    ]
    assert [title for *_, title in accuracies[2]] == ["acc 0.25 in epoch 1"]
    expected = (
        "loss      █▁  0.9 → 0.5, lowest 0.5 in epoch 2\n"
        "val_loss   ▅  0.75 → 0.75, lowest 0.75 in epoch 2\n"
        "acc       ▁   0.25 → 0.25, lowest 0.25 in epoch 1\n"
        "epochs 1 to 2"
    )
    assert repr(history.plot()) == expected
    assert repr(history.plot("acc")).startswith("acc  ▁")


def test_only_known_metrics_are_drawn():
    history = ml.History()
    history.add(1, {"loss": 0.9})
    with pytest.raises(KeyError, match="the history has no 'los', only 'loss'"):
        history.plot("los")
    assert repr(ml.History().plot()) == "no values to draw"
    assert ml.History().plot()._repr_svg_() is None


def test_long_runs_are_averaged_and_names_are_escaped():
    curves = Curves.of(range(1, 601), {"<b>": list(np.linspace(0, 1, 600))})
    line, _ = repr(curves).splitlines()
    spark = line.split()[1]
    assert len(spark) == 60
    assert sorted(spark) == list(spark)
    assert "<b>" not in curves._repr_svg_()
    assert "&lt;b&gt;" in curves._repr_svg_()
