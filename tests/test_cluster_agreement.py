"""What processes bring together: barriers, values of one or of all, comparisons."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import meshlayout as ml
from meshlayout import _jax
from meshlayout.errors import ClusterError
from tests.bad_values import BAD, refusal
from tests.error_messages import outcome_of
from tests.processes import run_processes


cluster = ml.cluster

ORDER = "All processes must make the same calls of ml.cluster, in the same order."


def host_values():
    """A leaf of each kind, which 32 bits or an unpadded text could not hold."""
    return {
        "float": 0.1,
        "int": 2**70,
        "bool": True,
        "text": "zeros \0 and ü\0",
        "bytes": b"\0\xff\0",
        "f64": np.array([0.1, -0.0, np.inf, np.nan]),
        "i64": np.array([2**62, -1]),
        "bf16": np.array([1.5, 3], ml_dtypes.bfloat16),
        "c128": np.array([1e-300 + 1j]),
        "big endian": np.array([1, 256], ">u2"),
        "date": np.array(["2026-01-31"], "datetime64[D]"),
        "empty": np.zeros((0, 3), np.int8),
        "nested": [(), None, ({"deep": np.bool_(True)},)],
    }


def bits(tree):
    """Each leaf's type and bits, as text."""
    return [
        [str(path), *leaf_bits(leaf)] for path, leaf in jax.tree.leaves_with_path(tree)
    ]


def leaf_bits(leaf):
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return [type(leaf).__name__, repr(leaf)]
    if leaf.dtype.hasobject:
        return [str(leaf.dtype), repr(leaf.tolist())]
    native = leaf.astype(leaf.dtype.newbyteorder("="))
    return [str(native.dtype), list(leaf.shape), native.tobytes().hex()]


def job():
    index, seen = cluster.process_index(), {}
    seen["sent"] = bits(cluster.broadcast(host_values() if index == 0 else None))
    seen["gathered"] = bits(cluster.all_gather(host_values()))
    gathered = cluster.all_gather({"index": index, "x": np.full(2, index)})
    seen["in order"] = jax.tree.map(np.ndarray.tolist, gathered)
    large = np.random.default_rng(index).integers(0, 256, 3_000_001).astype(np.uint8)
    both = cluster.all_gather(large)
    seen["large"] = [both[index].tobytes() == large.tobytes(), both.shape]
    with ThreadPoolExecutor(1) as pool:
        seen["thread"] = pool.submit(outcome_of, cluster.broadcast, 1).result()
    seen["has backend"] = _jax.has_backend()
    seen["array"] = str(cluster.broadcast(jnp.ones(2, "bfloat16") * index).dtype)
    mesh = ml.create_mesh({"batch": 2})
    put = jax.device_put(jnp.arange(3.0), mesh.layout(None).sharding)
    (part,) = ml.unpack(put)
    seen["put by JAX"] = [ml.to_numpy(put).tolist(), np.asarray(part).tolist()]
    seen["refused"] = refusals(index)
    cluster.barrier("end")
    return seen


def refusals(index):
    other = index == 1
    told = {}
    told["absent"] = outcome_of(cluster.barrier, "a", 0.6) if not other else ""
    if other:
        time.sleep(3)
        told["absent"] = outcome_of(cluster.barrier, "a", 5)
    told["call"] = outcome_of(*[(cluster.barrier, "b"), (cluster.all_gather, 1)][index])
    told["path"] = outcome_of(cluster.all_gather, [{"x": 1, "y": 2}, {"x": 1}][index])
    told["dtype"] = outcome_of(
        cluster.all_gather, {"x": np.ones(2, ["f4", "f8"][index])}
    )
    told["containers"] = outcome_of(cluster.all_gather, [[1], (1,)][index])
    told["leaf"] = outcome_of(cluster.all_gather, {"x": (lambda: 0) if other else 1})
    cluster.assert_same(host_values(), "the configuration")
    told["value"] = outcome_of(
        cluster.assert_same, {"lr": 0.1 + index}, "the configuration"
    )
    zeros, large = np.zeros(2), np.zeros(1000)
    told["sign"] = outcome_of(cluster.assert_same, -zeros if other else zeros, "x")
    told["large"] = outcome_of(cluster.assert_same, large + index, "x")
    many = dict.fromkeys("abcde", index)
    told["many"] = outcome_of(cluster.assert_same, many, "the configuration")
    mesh = ml.create_mesh({"batch": 2})
    # Bound together without a comparison, as raw JAX lets one do.
    replicated = jax.make_array_from_process_local_data(
        mesh.layout(None).sharding, np.full(2, index, "f4")
    )
    told["replicated"] = outcome_of(
        cluster.assert_same, {"w": replicated}, "the params"
    )
    return told


@pytest.fixture(scope="module")
def seen():
    return run_processes(2, job, devices_per_process=1)


@pytest.mark.multiprocess
def test_values_arrive_bit_by_bit_on_all_processes_without_devices(seen):
    for process in seen:
        assert not process["has backend"]
        assert process["sent"] == bits(host_values())
        assert process["array"] == "bfloat16"


@pytest.mark.multiprocess
def test_values_of_all_processes_are_stacked_by_their_index(seen):
    expected = jax.tree.map(
        lambda leaf: (
            np.array([leaf, leaf], object)
            if isinstance(leaf, (str, bytes)) or leaf is host_values()["int"]
            else np.stack([leaf, leaf])
        ),
        host_values(),
    )
    for process in seen:
        assert process["gathered"] == bits(expected)
        assert process["in order"] == {"index": [0, 1], "x": [[0, 0], [1, 1]]}
        assert process["large"] == [True, [2, 3_000_001]]


@pytest.mark.multiprocess
def test_an_array_that_jax_put_on_one_device_of_each_process_has_its_parts(seen):
    for process in seen:
        assert process["put by JAX"] == [[0.0, 1.0, 2.0]] * 2


@pytest.mark.multiprocess
def test_calls_from_other_threads_are_refused(seen):
    text = (
        "ClusterError: broadcast: call it in the main thread, as threads have no common "
        "order."
    )
    assert [process["thread"] for process in seen] == [text] * 2


REFUSED = {
    "absent": "process 0 waited 1 s for process 1, which did not come to barrier 'a'. "
    f"{ORDER}",
    "call": "processes are in different calls: the call is all_gather on process 1, "
    f"and barrier 'b' on process 0. {ORDER}",
    "path": "all_gather: the trees differ between processes: 'y' is missing on process "
    "1, and int on process 0; the structure is PyTreeDef({{'x': *}}) on process 1, and "
    "PyTreeDef({{'x': *, 'y': *}}) on process 0.",
    "dtype": "all_gather: the trees differ between processes: 'x' is f64[2] on process "
    "1, and f32[2] on process 0.",
    "containers": "all_gather: the trees differ between processes: the structure is "
    "PyTreeDef((*,)) on process 1, and PyTreeDef([*]) on process 0.",
    "value": "the configuration must be the same on all processes: 'lr' is 1.1 on "
    "process 1, and 0.1 on process 0.",
    "sign": "x must be the same on all processes: the value is f64[2] [-0.0, -0.0] on "
    "process 1, and f64[2] [0.0, 0.0] on process 0.",
    "large": "x must be the same on all processes: the value is f64[1000] (digest "
    "{}) on process 1, and f64[1000] (digest {}) on process 0.",
    "many": "the configuration must be the same on all processes: 'a' is 1 on process "
    "1, and 0 on process 0; 'b' is 1 on process 1, and 0 on process 0; 'c' is 1 on "
    "process 1, and 0 on process 0; and 2 more differ.",
    "replicated": "the params must be the same on all processes: 'w' is f32[2] [1.0, "
    "1.0] on process 1, and f32[2] [0.0, 0.0] on process 0.",
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", REFUSED)
def test_what_differs_is_named_on_all_processes(seen, case):
    for process in seen:
        # A value that cannot be sent is named, too.
        assert "local object 'refusals.<locals>" in process["refused"]["leaf"]
        text = process["refused"][case]
        digests = re.findall(r"digest (\w+)", text)
        assert len({*digests}) == len(digests)
        assert text == f"ClusterError: {REFUSED[case].format(*digests)}"


@pytest.mark.parametrize("value", BAD, ids=lambda value: type(value).__name__)
def test_bad_timeouts_are_refused_in_a_sentence(value):
    refusal(ClusterError, cluster.barrier, "a", value)


def test_a_process_alone_gets_its_own_values():
    assert bits(cluster.broadcast(host_values())) == bits(host_values())
    assert cluster.all_gather(np.arange(3)).tolist() == [[0, 1, 2]]
    cluster.barrier("a", 1)
    local = ml.relayout(jnp.arange(8), ml.create_mesh({"batch": 8}).layout("batch"))
    cluster.assert_same(local, "x")
    assert cluster.broadcast(local).tolist() == list(range(8))
