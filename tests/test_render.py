"""Tables and pictures, as text and as HTML."""

import html
import itertools
import math
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshlayout as ml
from meshlayout import _render


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
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (3 * 2**19, "1.5 MiB"),
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


def test_wide_and_combining_letters_are_aligned_as_a_terminal_shows_them():
    text = _render.text_table(["a", "b"], [["日本", "x"], ["e\u0301", "x"]])
    assert text.splitlines()[2:] == ["日本  x", "e\u0301     x"]


def test_line_breaks_in_a_cell_do_not_break_the_table():
    text = _render.text_table(["a", "b"], [["x\ny", "\x1b[31mred"]])
    assert text.splitlines()[2:] == ["x\\ny  \\x1b[31mred"]


def test_html_tables_escape_whatever_a_user_wrote():
    evil = "<script>alert('x')</script>"
    text = _render.html_table([evil], [[evil]], caption=evil, notes=[evil])
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 4


def test_html_tables_name_no_color_of_their_own():
    text = _render.html_table(["a", "b"], [["1", "2"]], "lr", "caption", ["note"])
    assert not re.search(r"#[0-9a-f]{3}|\b(black|white)\b(?!-)", text)
    assert "<style" not in text
    assert "class=" not in text


def test_html_tables_take_the_color_of_the_page_even_outside_of_standards_mode():
    (table,) = re.findall(r"<table [^>]*>", _render.html_table(["a"], [["1"]]))
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


def test_the_blocks_of_a_mesh_tell_their_coordinates():
    blocks = blocks_of(mesh_html(("a", "b", "c"), (2,) * 3))
    assert blocks[0] == ("0", "a 0, b 0, c 0: 0")
    assert blocks[6] == ("6", "a 1, b 1, c 0: 6")


def test_axis_names_are_escaped_in_pictures():
    names = ("<script>", "a&b")
    html_text = mesh_html(names, (2, 4))
    assert "<script" not in html_text
    assert ">&lt;script&gt; (2)<" in html_text
    assert ">a&amp;b (4)<" in html_text


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
