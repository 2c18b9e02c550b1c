"""Attention over a sharded sequence: equal to full attention, in less memory."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import meshlayout as ml
from tests.tpu import abstract, create_slice_mesh


RING, HEADS = ml.parallel.ring_attention, ml.parallel.all_to_all_attention
FEATURES = 8


def full_attention(
    q,
    k,
    v,
    *,
    causal,
    segment_ids=None,
    window=None,
    scale=None,
    softcap=None,
    mask=None,
):
    """Returns attention as its definition says, every score in float32."""
    q, k, v = (x.astype("float32") for x in (q, k, v))
    length, key_length = q.shape[1], k.shape[1]
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    sees = np.ones((len(q), 1, length, key_length), bool)
    distance = np.arange(length)[:, None] - np.arange(key_length)[None]
    if causal:
        sees &= (distance >= 0)[None, None]
    if window is not None:
        before, after = window if isinstance(window, tuple) else (window, window)
        sees &= ((distance <= before) & (distance >= -after))[None, None]
    if segment_ids is not None:
        sees &= np.equal(segment_ids[:, None, :, None], segment_ids[:, None, None])
    scores = jnp.where(sees if mask is None else sees & mask, scores, -1e30)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v, precision="highest")


def random_inputs(rows, length, heads, kv_heads, key_length=None, dtype="float32"):
    rng = np.random.default_rng(length)
    key_shape = (rows, key_length or length, kv_heads, FEATURES)
    shapes = [(rows, length, heads, FEATURES), key_shape, key_shape]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def segments(rows, length):
    rng = np.random.default_rng(0)
    return np.sort(rng.integers(0, 4, (rows, length)))


def random_mask(*shape):
    mask = np.random.default_rng(0).random(shape) < 0.6
    mask[..., 3, :] = False  # a row that sees nothing
    return mask


def with_gradients(attend, **options):
    def loss(arrays):
        out = attend(*arrays, **options)
        return jnp.sum(jnp.sin(out.astype("float32"))), out

    return jax.grad(loss, has_aux=True)


def assert_close(tree, expected):
    """Asserts that two trees differ by the rounding of sums in another order."""
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 * jnp.abs(y).max())


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


SEGMENTS = {"segment_ids": segments(1, 37)}
CAUSAL, OPEN = {"causal": True}, {"causal": False}


@pytest.mark.parametrize(
    ("attend", "size", "shape", "options"),
    [
        slow(RING, 2, (32, 4, 4), CAUSAL),
        (RING, 4, (37, 4, 2), {**CAUSAL, **SEGMENTS, "scale": 0.5, "softcap": 2.0}),
        slow(RING, 8, (37, 4, 1), {**OPEN, **SEGMENTS}),
        (RING, 8, (9, 4, 2), {**CAUSAL, "window": 1}),
        slow(RING, 4, (48, 4, 2), {**OPEN, "window": (3, 13), "softcap": 2.0}),
        slow(RING, 4, (29, 4, 2, 41), OPEN),
        (RING, 2, (37, 4, 2), {**OPEN, "mask": random_mask(1, 4, 37, 37)}),
        slow(RING, 8, (37, 4, 2), {**CAUSAL, "mask": random_mask(1, 1, 37, 37)}),
        slow(RING, 8, (37, 4, 2), {**CAUSAL, **SEGMENTS}),
        slow(RING, 4, (37, 4, 2), {**CAUSAL, **SEGMENTS, "window": 30}),
        slow(RING, 8, (3, 4, 2), CAUSAL),
        slow(RING, 8, (29, 4, 2, 41), CAUSAL),
        (HEADS, 4, (32, 8, 4), CAUSAL),
        slow(HEADS, 2, (32, 8, 2), {**OPEN, "mask": random_mask(1, 8, 32, 32)}),
        slow(HEADS, 8, (32, 8, 8), {**CAUSAL, "window": 5, "softcap": 2.0}),
        slow(HEADS, 4, (32, 8, 4), {**OPEN, "segment_ids": segments(1, 32)}),
    ],
)
def test_it_is_full_attention_in_value_and_gradient(attend, size, shape, options):
    mesh = ml.create_mesh({"batch": 8 // size, "seq": size})
    inputs = random_inputs(8 // size, *shape)
    ids = options.get("segment_ids")
    if ids is not None:
        ids = np.broadcast_to(ids, (8 // size, shape[0]))
        options = {**options, "segment_ids": ids}
    expected = with_gradients(full_attention, **options)(inputs)
    with jax.set_mesh(mesh.jax_mesh):
        actual = jax.jit(with_gradients(attend, axis="seq", **options))(inputs)
    assert_close(actual, expected)


def test_it_is_jaxs_attention_where_there_is_no_axis():
    inputs = random_inputs(2, 16, 4, 2)
    expected = jax.nn.dot_product_attention(*inputs, is_causal=True)
    other, one = ml.create_mesh({"sp": 8}), ml.create_mesh({"batch": 8, "seq": 1})
    for attend in (RING, HEADS):
        run = functools.partial(attend, *inputs, axis="seq", causal=True)
        with jax.set_mesh(other.jax_mesh), pytest.warns(match="{'sp': 8} has no axis"):
            without_axis = run()
        for out in (run(), run(mesh=one), without_axis):
            np.testing.assert_array_equal(out, expected)
        with pytest.raises(ml.errors.MeshError, match=r"\(sp=8\) has no axis 'seq'"):
            run(mesh=other)
    ids = segments(2, 16)
    options = {"causal": False, "segment_ids": ids, "window": (2, 3)}
    for cap in (None, 2.0):
        actual = RING(*inputs, axis="seq", softcap=cap, **options)
        assert_close(actual, full_attention(*inputs, softcap=cap, **options))
    row = RING(*(x[0] for x in inputs), axis="seq", causal=True, mesh=one)
    np.testing.assert_allclose(row, expected[0], atol=1e-6)


@pytest.mark.parametrize("attend", [RING, slow(HEADS)])
def test_it_takes_any_number_of_batch_dims(attend):
    inputs, ids = random_inputs(6, 16, 8, 4), segments(6, 16)
    mask = random_mask(3, 1, 16, 16)
    expected = full_attention(
        *inputs, causal=True, segment_ids=ids, mask=np.tile(mask, (2, 1, 1, 1))
    )
    split = [x.reshape(2, 3, *x.shape[1:]) for x in inputs]
    options = {"axis": "seq", "causal": True, "mask": mask}
    call = functools.partial(attend, segment_ids=ids.reshape(2, 3, 16), **options)
    mesh = ml.create_mesh({"batch": 2, "seq": 4})
    assert_close(call(*split, mesh=mesh), expected.reshape(2, 3, *expected.shape[1:]))


@pytest.mark.slow
def test_bfloat16_is_as_exact_as_jaxs_attention():
    mesh = ml.create_mesh({"batch": 2, "seq": 4})
    inputs = random_inputs(2, 64, 4, 2, dtype="bfloat16")
    exact = with_gradients(full_attention, causal=True)
    truth = exact([x.astype("float32") for x in inputs])

    def error(tree):
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(truth), strict=True)
        return [float(jnp.abs(x.astype("float32") - y).mean()) for x, y in pairs]

    plain = with_gradients(jax.nn.dot_product_attention, is_causal=True)(inputs)
    ring = with_gradients(RING, axis="seq", causal=True, mesh=mesh)
    out = jax.jit(ring)(inputs)
    assert {x.dtype.name for x in jax.tree.leaves(out)} == {"bfloat16"}
    assert all(a < 1.2 * b for a, b in zip(error(out), error(plain), strict=True))


def attention_of(model_kind, attend, mask):
    """Returns a Flax attention layer's output, as a function of its attention."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 12, 16)), "float32")
    if model_kind == "nnx":
        layer = nnx.MultiHeadAttention(
            num_heads=4,
            in_features=16,
            decode=False,
            attention_fn=attend,
            rngs=nnx.Rngs(0),
        )
        return layer(x, mask=mask)
    layer = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=attend)
    variables = layer.init(jax.random.key(0), x)
    return jax.jit(functools.partial(layer.apply, mask=mask))(variables, x)


@pytest.mark.parametrize(
    ("model_kind", "attend"),
    [("nnx", RING), ("linen", HEADS), slow("linen", RING), slow("nnx", HEADS)],
)
def test_it_drops_into_flaxs_attention(model_kind, attend):
    mask = nn.make_causal_mask(jnp.ones((2, 12)))
    default = {"nnx": nnx, "linen": nn}[model_kind].dot_product_attention
    expected = attention_of(model_kind, default, mask)
    with jax.set_mesh(ml.create_mesh({"batch": 2, "seq": 4}).jax_mesh):
        by_mask = functools.partial(attend, axis="seq", causal=False)
        by_flag = functools.partial(attend, axis="seq", causal=True)
        assert_close(attention_of(model_kind, by_mask, mask), expected)
        assert_close(attention_of(model_kind, by_flag, None), expected)


def test_layers_in_a_scan_with_remat_are_equal_to_one_device():
    inputs = random_inputs(2, 24, 4, 4)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(3, 8, 8)) / 3)

    def loss(weights, x, attend):
        @jax.checkpoint
        def layer(x, w):
            return x + attend(x @ w, x, x, axis="seq", causal=True), None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, x, weights)[0]))

    step = jax.jit(jax.value_and_grad(loss), static_argnums=2)
    expected = step(weights, inputs[0], RING)
    with jax.set_mesh(ml.create_mesh({"batch": 2, "seq": 4}).jax_mesh):
        assert_close(step(weights, inputs[0], RING), expected)


def lowered(attend, mesh, length, *, heads=2, dtype="float32", gradient=True, **given):
    """Returns the lowered program of an attention whose arrays are sharded."""
    layout = mesh.layout("batch", "seq", None, None)
    rows = mesh.shape["batch"]
    x = abstract(
        (rows, length, heads, 128 if dtype == "bfloat16" else 8), dtype, layout
    )

    def loss(*arrays):
        return jnp.sin(attend(*arrays, axis="seq", **given).astype("float32")).sum()

    function = jax.grad(loss, argnums=(0, 1, 2)) if gradient else loss
    with jax.sharding.use_abstract_mesh(mesh.jax_mesh.abstract_mesh):
        return jax.jit(function).lower(x, x, x)


@pytest.mark.parametrize(("attend", "slack"), [(RING, 1), slow(HEADS, 1.01)])
def test_memory_falls_with_the_number_of_devices(attend, slack):
    peaks = {}
    for size in (1, 2, 8):
        mesh = ml.create_mesh({"batch": 1, "seq": size}, devices=jax.devices()[:size])
        program = lowered(attend, mesh, 512, heads=8, causal=True).compile()
        sizes = program.memory_analysis()
        peaks[size] = sizes.temp_size_in_bytes + sizes.argument_size_in_bytes
    assert all(n * peaks[n] <= slack * peaks[1] for n in peaks if n > 1), peaks


@pytest.mark.parametrize(
    ("options", "share"),
    [(OPEN, 1), (CAUSAL, 17 / 32), ({**CAUSAL, "window": 16}, 3 / 8)],
)
def test_all_devices_do_the_same_part_of_the_work(options, share):
    # One program without branches runs on all devices: what it multiplies is the work
    # of each. A causal one sees 2n + 1 of 4n blocks, each a quarter of a shard's.
    mesh = ml.create_mesh({"seq": 8})
    x = random_inputs(1, 64, 2, 2)[0]
    call = functools.partial(RING, axis="seq", mesh=mesh, **options)
    program = jax.jit(call).trace(x, x, x)
    assert " cond" not in str(program.jaxpr)
    whole = 2 * 2 * 2 * 64 * 64 * FEATURES  # two products, two heads, two FLOPs
    assert ml.hlo.read_cost(program).flops == share * whole


def test_a_tpu_sends_by_permutes_while_it_computes():
    pytest.importorskip("libtpu")
    mesh = create_slice_mesh(batch=2, seq=4)
    options = {"heads": 2, "dtype": "bfloat16", "causal": True}
    program = lowered(RING, mesh, 2048, **options).compile()
    sent = ml.hlo.read_communication(program).collectives
    assert {x.kind for x in sent} == {"collective_permute"}
    assert all(x.is_async for x in sent)
    # In units of one device's keys and values in bfloat16: both passes send them to the
    # three others (the first time for both at once), and their gradients, in float32
    # until the last, home. Eight arrays are put in causal order and back.
    unit = 2 * 2 * 2048 // 4 * 2 * 128
    total = sum(x.times * x.nbytes for x in sent)
    assert 16 * unit <= total <= (3 + 3 + 2 * 3 + 1 + 4) * unit
    # In each loop, every permute starts before the first product and ends after it.
    text = program.as_text()
    bodies = re.findall(r"^%?wide.region[^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    bodies = [body for body in bodies if "collective-permute-start(" in body]
    assert len(bodies) == 2
    for body in bodies:
        head, _, last = body.rpartition("collective-permute-start(")
        assert "collective-permute-done(" not in head
        meanwhile = last.partition("collective-permute-done(")[0]
        assert len(re.findall("convolution|dot|fusion", meanwhile)) > 4


@pytest.mark.slow
def test_a_tpu_exchanges_heads_by_all_to_alls_alone():
    pytest.importorskip("libtpu")
    mesh = create_slice_mesh(batch=2, seq=4)
    program = lowered(
        HEADS, mesh, 512, heads=8, dtype="bfloat16", causal=True
    ).compile()
    sent = ml.hlo.read_communication(program).collectives
    shard = 512 // 4 * 8 * 128 * 2  # bytes
    assert [(x.kind, x.axes, x.nbytes) for x in sent] == (
        [("all_to_all", ("seq",), shard)] * 8  # q, k, v, the result and gradients
    )


@pytest.mark.parametrize(
    ("attend", "shape", "options", "message"),
    [
        (HEADS, (30, 8, 8), {}, "30 positions do not divide among 4 devices of mesh axis "
         "'seq'. Nearest that would: 28 and 32. ring_attention takes any number."),
        (HEADS, (32, 6, 6), {}, "6 heads of keys do not divide among 4 devices of mesh "
         "axis 'seq'. Nearest that would: 4 and 8. ring_attention takes any number."),
        (RING, (32, 6, 4), {}, "6 heads of queries do not divide among 4 of keys. "
         "Nearest that would: 4 and 8."),
        (RING, (32, 4, 4), {"bias": 1.0}, "bias=1.0 is not supported. Leave it out."),
        (RING, (32, 4, 4), {"dropout_rate": 0.1}, "dropout_rate=0.1: no device has all "
         "weights. Drop features of the result instead, or give deterministic=True."),
        (RING, (32, 4, 4), {"window": (1, 2, 3)}, "window is one number or two: "
         "(1, 2, 3)."),
        (RING, (32, 4, 4), {"segment_ids": np.ones((2, 16))}, "segment_ids of shape "
         "(2, 16) are not one for each query and key, got query (2, 32, 4, 8), key "
         "(2, 32, 4, 8) and value (2, 32, 4, 8). Give mask= instead."),
        (RING, (32, 4, 4), {"mask": np.ones((32, 31), bool)}, "mask must be bools that "
         "broadcast to (2, 4, 32, 32), got (32, 31)."),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(attend, shape, options, message):
    mesh = ml.create_mesh({"batch": 2, "seq": 4})
    with pytest.raises(ml.errors.LayoutError) as caught:
        attend(*random_inputs(2, *shape), axis="seq", causal=True, mesh=mesh, **options)
    assert str(caught.value) == f"{attend.__name__}: {message}"


def test_it_is_refused_inside_shard_map():
    def on_device(x):
        return RING(x, x, x, axis="seq", causal=True)

    mesh, spec = ml.create_mesh({"seq": 8}).jax_mesh, jax.P(None, "seq")
    call = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(ml.errors.MeshError, match="Call it outside, on whole arrays"):
        call(random_inputs(1, 32, 2, 2)[0])
