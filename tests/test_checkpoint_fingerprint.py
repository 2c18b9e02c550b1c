"""Fingerprints: one for any layout, and another one for any damage."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import meshlayout as ml
from meshlayout import _jax
from meshlayout.checkpoint.fingerprint import fingerprints, host_fingerprint


DTYPES = [
    "bool",
    "int4",
    *(["uint2"] if jax.__version_info__ >= (0, 8) else []),
    "int8",
    "uint32",
    "float8_e4m3fn",
    "bfloat16",
    "float32",
    "complex64",
]


def on_devices(x, *specs):
    mesh = ml.create_mesh({"a": 4, "b": 2})
    placed = ml.copy_to_mesh(x, mesh.layout(*specs))
    return fingerprints({"x": placed})["x"].text()


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_layout_and_the_host_give_one_fingerprint(dtype):
    x = (
        np.random.default_rng(0)
        .integers(0, 2, (8, 6, 4))
        .astype(jax.numpy.dtype(dtype))
    )
    specs = [(None,) * 3, ("a", "b", None), ("b", None, "a")]
    assert {on_devices(x, *one) for one in specs} == {host_fingerprint(x)}


def test_64_bits_have_one_fingerprint():
    x = np.random.default_rng(0).normal(size=(8, 6))
    with _jax.x64_mode(True):
        assert on_devices(x, "a", "b") == host_fingerprint(x)


@pytest.mark.parametrize("shape", [(), (1,), (70_001,), (3, 40_000), (70_000, 2)])
def test_the_host_may_work_in_pieces(shape):
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    assert on_devices(x, ...) == host_fingerprint(x)


FLIPS = st.lists(
    st.tuples(st.integers(0, 64), st.sampled_from([0, 7, 15, 23, 30, 31])),
    min_size=1,
    max_size=6,
    unique=True,
)


@settings(max_examples=500, deadline=None)
@given(FLIPS)
def test_flipped_bits_change_it(flips):
    x = np.random.default_rng(0).integers(0, 2**32, (13, 5), np.uint32)
    damaged = x.copy()
    for word, bit in flips:
        damaged.flat[word] ^= np.uint32(1 << bit)
    before, after = host_fingerprint(x), host_fingerprint(damaged)
    assert before[:8] != after[:8]
    assert before[8:] != after[8:]


def test_other_signs_and_another_order_change_it():
    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    others = [-x, x[::-1], x[:, ::-1], np.roll(x, 1), np.where(x > 1, -x, x)]
    found = {host_fingerprint(np.ascontiguousarray(one)) for one in [x, *others]}
    assert len(found) == 6
    assert on_devices(-x, "a", "b") == host_fingerprint(-x)
