"""Fingerprints: one for any layout, and another one for any damage."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import meshlayout as ml
from meshlayout import _jax
from meshlayout.checkpoint.fingerprint import host_fingerprint, slice_sums, text_of


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
    sums = [
        slice_sums(
            np.asarray(shard.data),
            [part.start or 0 for part in shard.index],
            placed.shape,
        )
        for shard in placed.addressable_shards
        if shard.replica_id == 0
    ]
    return text_of([sum(parts) % 2**32 for parts in zip(*sums, strict=True)])


def mixed(word):
    """The finalizer of MurmurHash3, in Python's integers."""
    word = (word ^ word >> 16) * 0x85EBCA6B % 2**32
    word = (word ^ word >> 13) * 0xC2B2AE35 % 2**32
    return word ^ word >> 16


def test_it_is_the_sum_that_the_module_describes():
    x = np.random.default_rng(0).integers(0, 2**32, (3, 4, 2), np.uint32)
    text = ""
    for seed in (0x243F6A88, 0x85A308D3):
        total = 0
        for index, word in np.ndenumerate(x):
            weight = 1
            for dim, position in [*enumerate(index), (255, 0)]:
                step = seed + dim * 0x7F4A7C15
                weight *= mixed((position * 0x9E3779B1 + step) % 2**32) | 1
            total += mixed(int(word) ^ weight % 2**32)
        text += f"{total % 2**32:08x}"
    assert host_fingerprint(x) == text


def test_checkpoints_of_earlier_versions_have_the_same_fingerprints():
    x = np.arange(24).reshape(2, 3, 4) % 5
    assert {
        dtype: host_fingerprint(x.astype(jax.numpy.dtype(dtype)))
        for dtype in ("bool", "int8", "bfloat16", "float32", "complex64", "float64")
    } == {
        "bool": "1d0a8e7c52336ed0",
        "int8": "2c5303dc29a22192",
        "bfloat16": "1d48bd44c8ef2ee6",
        "float32": "655e2897053ca9c5",
        "complex64": "7e43d3786e202f88",
        "float64": "30357475b00276cd",
    }


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
