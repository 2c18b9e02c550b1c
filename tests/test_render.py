"""Tables, pictures of meshes and curves, as text and as HTML."""

import io
import itertools
import math
import operator
import re
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshlayout as ml
from meshlayout import _render
from meshlayout._render.curves import Curves
from meshlayout._render.tables import console_on


html_of = operator.methodcaller("_repr_html_")
BLOCK = re.compile(r'<td style="background:(#\w+);color:(#\w+)[^>]*>([^<]*)<')


def contrast(one, other):
    """Returns the contrast of two colors by the WCAG's formula."""

    def luminance(color):
        channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in channels
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_bytes_have_a_unit_that_keeps_them_short():
    texts = [_render.bytes_text(n) for n in (0, 1023, 1024, 2**20 - 1, 5000 * 2**60)]
    assert texts == ["0 B", "1023 B", "1.0 KiB", "1.0 MiB", "5000.0 EiB"]


def test_arrays_are_written_with_the_short_names_of_jax():
    for dtype in ("bfloat16", "float8_e4m3fn", "complex64", "int4", "uint8", "bool"):
        aval = jax.typeof(jnp.zeros((2, 3), dtype))
        short = aval.str_short(short_dtypes=True)
        for form in (dtype, aval.dtype, getattr(jnp, dtype, jnp.bool_)):
            assert _render.array_text(form, (2, 3)).replace(", ", ",") == short
    key = jax.random.key(0)
    assert _render.array_text(key.dtype, (3,)) == "key<fry>[3]"


def test_wide_letters_and_line_breaks_do_not_break_the_table():
    rows = [["日本", "x"], ["e\u0301", "x"], ["x\ny", "\x1b[31mred"]]
    text = _render.text_table(["a", "b"], rows)
    assert text.splitlines()[2:] == ["日本  x", "e\u0301     x", "x\\ny  \\x1b[31mred"]


def test_html_tables_escape_whatever_a_user_wrote_and_take_the_colors_of_the_page():
    evil = "<script>alert('x')</script>"
    text = _render.html_table([evil], [[evil]], caption=evil, notes=[evil])
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 4
    assert not re.search(r"#[0-9a-f]{3}|\b(black|white)\b(?!-)|<style|class=", text)
    # In quirks mode, a table does not inherit the color around it.
    (table,) = re.findall(r"<table [^>]*>", text)
    assert "color:inherit" in table


def mesh_text(names, shape):
    devices = range(math.prod(shape))
    return _render.picture_text(_render.mesh_picture(names, shape, devices))


def mesh_html(names, shape):
    devices = range(math.prod(shape))
    return _render.picture_html("", _render.mesh_picture(names, shape, devices))


@pytest.mark.parametrize(
    ("names", "shape"),
    [(("batch",), (1,)), (("a", "b", "c"), (2, 2, 2)), (("x", "y"), (16, 16))],
)
def test_every_device_of_a_mesh_is_in_its_picture_once_and_in_order(names, shape):
    devices = [str(n) for n in range(math.prod(shape))]
    assert [text for *_, text in BLOCK.findall(mesh_html(names, shape))] == devices
    cells = re.findall(r"(?<=│) +(\d+) +(?=│)", mesh_text(names, shape))
    assert cells == devices


@pytest.mark.parametrize(
    ("names", "shape"),
    [(("x",), (4096,)), (("long" * 9, "name" * 9, "c"), (64, 16, 16))],
)
def test_the_picture_of_a_big_mesh_stays_small(names, shape):
    text, html_text = mesh_text(names, shape), mesh_html(names, shape)
    assert max(map(len, text.splitlines())) <= 120
    assert len(html_text) < 600_000
    last = str(math.prod(shape) - 1)
    assert last in [block for *_, block in BLOCK.findall(html_text)]
    assert re.search(rf"\b{last}\b", text)


def test_the_grids_of_a_mesh_are_counted_and_names_are_escaped():
    assert mesh_text(("a", "b", "c"), (64, 2, 2)).endswith("\n7 of 64 grids are drawn.")
    html_text = mesh_html(("<script>", "a&b"), (2, 4))
    assert "<script" not in html_text
    assert ">&lt;script&gt; (2)<" in html_text
    blocks = BLOCK.findall(html_of(ml.create_mesh({"batch": 2, "model": 4})))
    assert [text for *_, text in blocks] == [str(n) for n in range(8)]


@pytest.mark.parametrize("count", [1, 2, 16, 256])
def test_blocks_can_be_read_and_distinguished_on_light_and_dark_pages(count):
    text = mesh_html(("x", "y"), (1, count))
    pairs = [(fill, ink) for fill, ink, _ in BLOCK.findall(text)]
    assert len(pairs) == (count if count <= 16 else 15)
    assert all(contrast(*pair) >= 4.5 for pair in pairs)
    assert all(a != b for a, b in itertools.pairwise([fill for fill, _ in pairs]))
    # Text around the blocks takes the color of the page.
    assert not re.search(r"color:(?!inherit)", BLOCK.sub("", text))


SVG = "{http://www.w3.org/2000/svg}"


def panels(curves):
    """Reads each panel of the SVG: its texts by position, and its points by name."""
    for root in ET.fromstring(curves._repr_svg_()).findall(f"{SVG}g"):
        texts = [(t.get("x"), t.get("y"), t.text) for t in root.iter(f"{SVG}text")]
        lines = [
            line.get("points").split()[:-1] for line in root.iter(f"{SVG}polyline")
        ]
        names = [text for *_, text in texts[4:]]
        yield texts[:4], dict(zip(names, lines, strict=True))


def test_a_metric_and_its_validation_share_a_panel_with_the_points_at_their_values():
    history = ml.History()
    assert repr(history.plot()) == "no values to draw"
    assert history.plot()._repr_svg_() is None
    history.add(1, {"loss": 0.9, "acc": 0.25, "confusion": np.eye(2)})
    history.add(2, {"loss": 0.5, "val_loss": 0.75, "acc": math.nan})
    history.add(5, {"loss": 0.4, "val_loss": 0.9, "acc": math.nan})
    losses, accuracies = panels(history.plot())
    limits, points = losses
    # Values go up from 150 to 0, epochs to the right from 0 to 300.
    assert limits == [
        *(("-6", "4", "0.9"), ("-6", "154", "0.4")),
        *(("0", "166", "epoch 1"), ("300", "166", "5")),
    ]
    assert points == {
        "loss": ["0.0,0.0", "75.0,120.0", "300.0,150.0"],
        "val_loss": ["75.0,45.0", "300.0,0.0"],
    }
    assert [*accuracies[1]] == ["acc"]
    assert repr(history.plot()) == (
        "loss      █▂▁  0.9 → 0.4, lowest 0.4 in epoch 5\n"
        "val_loss  ▆█   0.75 → 0.9, highest 0.9 in epoch 5\n"
        "acc       ▁    0.25 → 0.25, lowest 0.25 in epoch 1\n"
        "epochs 1 to 5"
    )
    assert repr(history.plot("acc")).startswith("acc  ▁")
    with pytest.raises(KeyError, match="the history has no 'los', only 'loss'"):
        history.plot("los")


def test_long_runs_stay_short_and_names_are_escaped():
    curves = Curves.of(range(1, 601), {"<b>": list(np.linspace(0, 1, 600))})
    spark = repr(curves).split()[1]
    assert len(spark) == 60
    assert sorted(spark) == list(spark)
    assert "<b>" not in curves._repr_svg_()


@pytest.mark.parametrize("color", ["", "1"])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_is_what_the_stream_says(color, is_terminal, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", color)
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    assert console_on(stream).is_terminal is is_terminal
