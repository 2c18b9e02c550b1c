"""Fingerprints: one for any layout, and another one for any damage."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import meshlayout as ml
from meshlayout import _jax
from meshlayout.checkpoint.fingerprint import (
    host_fingerprint,
    slice_sums,
    text_of,
    total,
)


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
    return text_of(total(sums))


def odd(number, dim, seed):
    """SplitMix64, in Python's integers."""
    z = number * 0x9E3779B97F4A7C15 + seed + dim * 0xD1B54A32D192ED03
    z = (z ^ z % 2**64 >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) | 1


def expected_fingerprint(x):
    """The sums that the module describes, of unsigned integers; no dim has size 1."""
    mixed = [int(one) * 0x9E3779B97F4A7C15 % 2 ** (8 * x.itemsize) for one in x.flat]
    text = ""
    for seed, order, of_word in (
        (0x243F6A8885A308D3, "big", "little"),
        (0x13198A2E03707344, "little", "big"),
    ):
        elements = [one.to_bytes(x.itemsize, order) for one in mixed]
        sum_ = 0
        for number, row in enumerate(np.ndindex(x.shape[:-1])):
            start = number * x.shape[-1]
            content = b"".join(elements[start : start + x.shape[-1]])
            for place in range(0, len(content), 8):
                word = content[place : place + 8].ljust(8, b"\0")
                product = int.from_bytes(word, of_word)
                for dim, index in enumerate((*row, place // 8)):
                    product *= odd(index % 2**15, dim, seed)
                    product *= odd(2**15 + index // 2**15, dim, seed)
                sum_ += product
        text += f"{sum_ % 2**64:016x}"
    return text


@pytest.mark.parametrize(
    "shape", [(5,), (3, 4, 2), (2, 3, 70), (262_200,), (32_800, 3), (2, 100, 24)]
)
def test_it_is_the_sum_that_the_module_describes(shape):
    x = np.random.default_rng(0).integers(0, 2**8, shape, np.uint8)
    assert host_fingerprint(x) == expected_fingerprint(x)
    for dtype in (np.uint16, np.uint32, np.uint64):
        wide = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (3, 5), dtype)
        assert host_fingerprint(wide) == expected_fingerprint(wide)


def test_fingerprints_of_checkpoints_stay_what_they_are():
    x = np.arange(24).reshape(2, 3, 4) % 5
    assert {
        dtype: host_fingerprint(x.astype(jax.numpy.dtype(dtype)))
        for dtype in ("bool", "int8", "bfloat16", "float32", "complex64", "float64")
    } == {
        "bool": "5ba4b0d14512fb527598d77700000000",
        "int8": "6fc7d8550aab0a40fcf3f77d00000000",
        "bfloat16": "c3f494231b9c521e8ebc23db11bdca89",
        "float32": "031b4ec8881194f4b57a4377dbe16946",
        "complex64": "32618a6def6e8860e1323eddd40af6fa",
        "float64": "44d283970562e024c94d60ad831f74ce",
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
    with _jax.x64_mode(enabled=True):
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
    assert before[:16] != after[:16]
    assert before[16:] != after[16:]


def test_other_signs_and_another_order_change_it():
    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    others = [-x, x[::-1], x[:, ::-1], np.roll(x, 1), np.where(x > 1, -x, x)]
    found = {host_fingerprint(np.ascontiguousarray(one)) for one in [x, *others]}
    assert len(found) == 6
    assert on_devices(-x, "a", "b") == host_fingerprint(-x)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_flips_of_the_top_bit_of_any_two_elements_change_it(dtype):
    x = np.zeros((6, 16), dtype)
    found = [host_fingerprint(x)]
    top = np.array(1, dtype) << np.array(x.itemsize * 8 - 1, dtype)
    for pair in itertools.combinations(range(x.size), 2):
        damaged = x.copy()
        damaged.flat[list(pair)] ^= top
        found.append(host_fingerprint(damaged))
    assert len(set(found)) == len(found)
    if x.itemsize >= 4:  # each half by itself sees it
        assert all(text[:16] != found[0][:16] for text in found[1:])
        assert all(text[16:] != found[0][16:] for text in found[1:])


@pytest.mark.parametrize("dtype", ["bool", "int4", "bfloat16", "float32", "complex128"])
@pytest.mark.parametrize("shape", [(7, 11), (5, 1, 13), (3, 9, 1), (1,), (), (0, 4)])
def test_slices_at_any_place_add_up(dtype, shape):
    x = np.random.default_rng(0).integers(0, 2, shape).astype(jax.numpy.dtype(dtype))
    whole = host_fingerprint(x)
    for dim, size in enumerate(shape):
        for cut in range(size + 1):
            before, after = (slice(None),) * dim, [0] * dim
            rest = [0] * (len(shape) - dim - 1)
            parts = [
                slice_sums(x[(*before, slice(cut))], [0] * len(shape), shape),
                slice_sums(x[(*before, slice(cut, None))], [*after, cut, *rest], shape),
            ]
            assert text_of(total(parts)) == whole
    assert host_fingerprint(np.asfortranarray(x)) == whole
