"""Tables, pictures of meshes and curves, as text and as HTML."""

import html
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
from hypothesis import given, settings, strategies as st

import meshlayout as ml
from meshlayout import _render
from meshlayout._render.consoles import console_on
from meshlayout._render.curves import Curves


html_of = operator.methodcaller("_repr_html_")
BLOCK = re.compile(
    r'<td title="([^"]*)" style="background:(#\w+);color:(#\w+)[^>]*>([^<]*)<'
)


def blocks_of(text):
    """Returns what each colored block of a picture says: its text and its tooltip."""
    return [
        (html.unescape(text), html.unescape(tip))
        for tip, _, _, text in BLOCK.findall(text)
    ]


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


# Values.


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**40, "1.0 TiB"),
        (5000 * 2**60, "5000.0 EiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes_have_a_unit_that_keeps_them_short(n, text):
    assert _render.bytes_text(n) == text


@pytest.mark.parametrize(
    "dtype",
    [
        *("float32", "bfloat16", "float16", "float8_e4m3fn", "complex64"),
        *("int4", "int32", "uint8", "bool"),
    ],
)
def test_arrays_are_written_with_the_short_names_of_jax(dtype):
    aval = jax.typeof(jnp.zeros((2, 3), dtype))
    short = aval.str_short(short_dtypes=True)
    for form in (dtype, jnp.dtype(dtype), aval.dtype, getattr(jnp, dtype, jnp.bool_)):
        assert _render.array_text(form, (2, 3)).replace(", ", ",") == short


def test_arrays_of_keys_and_scalars_have_a_type_too():
    keys = jax.random.split(jax.random.key(0), 3)
    assert _render.array_text(keys.dtype, keys.shape) == "key<fry>[3]"
    assert _render.array_text(np.float32, ()) == "f32[]"


# Tables.


def test_the_columns_of_a_text_table_are_aligned():
    text = _render.text_table(
        ["path", "bytes"], [["a", 5], ["encoder/kernel", 12345]], align="lr"
    )
    assert text.splitlines() == [
        "path            bytes",
        "──────────────  ─────",
        "a                   5",
        "encoder/kernel  12345",
    ]


def test_wide_letters_and_line_breaks_do_not_break_the_table():
    rows = [["日本", "x"], ["e\u0301", "x"], ["x\ny", "\x1b[31mred"]]
    text = _render.text_table(["a", "b"], rows)
    assert text.splitlines()[2:] == [
        "日本  x",
        "e\u0301     x",
        "x\\ny  \\x1b[31mred",
    ]


def test_html_tables_escape_whatever_a_user_wrote():
    evil = "<script>alert('x')</script>"
    text = _render.html_table([evil], [[evil]], caption=evil, notes=[evil])
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 4


def test_html_tables_take_the_colors_of_the_page():
    text = _render.html_table(["a", "b"], [["1", "2"]], "lr", "caption", ["note"])
    assert not re.search(r"#[0-9a-f]{3}|\b(black|white)\b(?!-)|<style|class=", text)
    # In quirks mode, a table does not inherit the color around it.
    (table,) = re.findall(r"<table [^>]*>", text)
    assert "color:inherit" in table


def test_a_huge_html_table_says_how_many_rows_it_leaves_out():
    rows = [[f"layer_{n}"] for n in range(100_000)]
    text = _render.html_table(["path"], rows)
    assert "99,000 more rows are not shown here." in text
    assert len(text) < 1_000_000


# Meshes.

MESHES = [
    (("batch",), (8,)),
    (("batch",), (1,)),
    (("batch", "model"), (2, 4)),
    (("data", "fsdp", "model"), (2, 2, 2)),
    (("a", "b", "c", "d"), (2, 2, 2, 2)),
    (("x", "y"), (16, 16)),
]


def mesh_picture(names, shape):
    return _render.mesh_picture(names, shape, range(math.prod(shape)))


def mesh_text(names, shape):
    return _render.picture_text(mesh_picture(names, shape))


def mesh_html(names, shape):
    return _render.picture_html("the mesh", mesh_picture(names, shape))


@pytest.mark.parametrize(("names", "shape"), MESHES)
def test_every_device_of_a_mesh_is_in_its_picture_once_and_in_order(names, shape):
    devices = [str(n) for n in range(math.prod(shape))]
    assert [text for text, _ in blocks_of(mesh_html(names, shape))] == devices
    cells = re.findall(r"(?<=│) +(\d+) +(?=│)", mesh_text(names, shape))
    assert cells == devices


def test_the_picture_of_a_mesh_names_axes_and_coordinates():
    assert mesh_text(("batch", "model"), (2, 4)) == (
        "           model (4)\n"
        "batch (2)   0   1   2   3\n"
        "          ┌───┬───┬───┬───┐\n"
        "        0 │ 0 │ 1 │ 2 │ 3 │\n"
        "          ├───┼───┼───┼───┤\n"
        "        1 │ 4 │ 5 │ 6 │ 7 │\n"
        "          └───┴───┴───┴───┘"
    )


@pytest.mark.parametrize(
    ("names", "shape"),
    [
        (("x",), (4096,)),
        (("x", "y"), (64, 64)),
        (("a", "b", "c"), (64, 16, 16)),
        (("long" * 9, "name" * 9), (16, 16)),
    ],
)
def test_the_picture_of_a_big_mesh_stays_small(names, shape):
    text, html_text = mesh_text(names, shape), mesh_html(names, shape)
    assert max(map(len, text.splitlines())) <= 120
    assert len(html_text) < 600_000
    last = str(math.prod(shape) - 1)
    assert last in [block for block, _ in blocks_of(html_text)]
    assert re.search(rf"\b{last}\b", text)


def test_the_pictures_of_many_grids_say_how_many_they_leave_out():
    text = mesh_text(("a", "b", "c"), (64, 2, 2))
    assert text.endswith("\n7 of 64 grids are drawn.")


def test_the_blocks_of_a_mesh_tell_their_coordinates_and_names_are_escaped():
    blocks = blocks_of(mesh_html(("a", "b", "c"), (2,) * 3))
    assert blocks[6] == ("6", "a 1, b 1, c 0: 6")
    html_text = mesh_html(("<script>", "a&b"), (2, 4))
    assert "<script" not in html_text
    assert ">&lt;script&gt; (2)<" in html_text


def test_a_mesh_has_a_picture_in_notebooks():
    blocks = blocks_of(html_of(ml.create_mesh({"batch": 2, "model": 4})))
    assert [text for text, _ in blocks] == [str(n) for n in range(8)]


# Colors.


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 16, 64, 256])
def test_blocks_can_be_read_and_distinguished(count):
    blocks = BLOCK.findall(mesh_html(("x", "y"), (1, count)))
    pairs = [(fill, ink) for _, fill, ink, _ in blocks]
    assert len(pairs) == (count if count <= 16 else 15)
    assert all(contrast(*pair) >= 4.5 for pair in pairs)
    assert all(a != b for a, b in itertools.pairwise([fill for fill, _ in pairs]))


def test_text_around_the_blocks_takes_the_color_of_the_page():
    around = BLOCK.sub("", mesh_html(("batch", "model"), (2, 4)))
    assert "model (4)" in around
    assert not re.search(r"color:(?!inherit)", around)


# Curves.

SVG = "{http://www.w3.org/2000/svg}"


def panels(curves):
    """Reads each panel of the SVG: its limits by position, and the points by name."""
    for root in ET.fromstring(curves._repr_svg_()).findall(f"{SVG}g"):
        high, low, first, last, *names = root.iter(f"{SVG}text")
        lines = [
            [
                tuple(map(float, point.split(",")))
                for point in line.get("points").split()
            ]
            for line in root.iter(f"{SVG}polyline")
        ]
        yield (
            [(float(t.get("y")) - 4, float(t.text)) for t in (low, high)],
            [(float(t.get("x")), float(t.text.split()[-1])) for t in (first, last)],
            {name.text: line[:-1] for name, line in zip(names, lines, strict=True)},
        )


def inverse(ticks):
    """Returns the value at a position, and how exact a tenth of a pixel is."""
    (low, first), (high, last) = sorted(ticks)
    slope = (last - first) / (high - low)
    return lambda position: first + (position - low) * slope, abs(slope) * 0.15


values = st.floats(-1e6, 1e6).filter(lambda v: v == 0 or abs(v) > 1e-6)


@settings(max_examples=50, deadline=None)
@given(st.lists(values, min_size=2, max_size=20))
def test_curves_are_where_the_axes_say(numbers):
    if max(numbers) - min(numbers) < 1e-3 * max(map(abs, numbers)):
        numbers = [*numbers, numbers[-1] + max(map(abs, numbers)) + 1.0]
    curves = Curves.of(range(1, len(numbers) + 1), {"loss": numbers})
    ((y_ticks, x_ticks, lines),) = panels(curves)
    value_at, value_error = inverse(y_ticks)
    epoch_at, epoch_error = inverse(x_ticks)
    for epoch, (number, (x, y)) in enumerate(
        zip(numbers, lines["loss"], strict=True), 1
    ):
        assert abs(value_at(y) - number) <= value_error + 1e-3 * max(map(abs, numbers))
        assert abs(epoch_at(x) - epoch) <= epoch_error + 1e-5


def test_a_metric_and_its_validation_share_a_panel():
    history = ml.History()
    assert repr(history.plot()) == "no values to draw"
    assert history.plot()._repr_svg_() is None
    history.add(1, {"loss": 0.9, "acc": 0.25, "confusion": np.eye(2)})
    history.add(2, {"loss": 0.5, "val_loss": 0.75, "acc": math.nan})
    losses, accuracies = panels(history.plot())
    sizes = {name: len(line) for name, line in {**losses[2], **accuracies[2]}.items()}
    assert sizes == {"loss": 2, "val_loss": 1, "acc": 1}
    assert repr(history.plot()) == (
        "loss      █▁  0.9 → 0.5, lowest 0.5 in epoch 2\n"
        "val_loss  ▅   0.75 → 0.75, lowest 0.75 in epoch 2\n"
        "acc       ▁   0.25 → 0.25, lowest 0.25 in epoch 1\n"
        "epochs 1 to 2"
    )
    assert repr(history.plot("acc")).startswith("acc  ▁")
    with pytest.raises(KeyError, match="the history has no 'los', only 'loss'"):
        history.plot("los")


def test_long_runs_are_averaged_and_names_are_escaped():
    curves = Curves.of(range(1, 601), {"<b>": list(np.linspace(0, 1, 600))})
    line, _ = repr(curves).splitlines()
    spark = line.split()[1]
    assert len(spark) == 60
    assert sorted(spark) == list(spark)
    assert "<b>" not in curves._repr_svg_()
    assert "&lt;b&gt;" in curves._repr_svg_()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("color", ["", "1"])
def test_a_terminal_is_what_the_stream_says(color, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", color)
    assert not console_on(io.StringIO()).is_terminal
    assert console_on(Terminal()).is_terminal
