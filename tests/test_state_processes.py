"""States and arrays on two real processes, made of what each of them has."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import meshlayout as ml
from tests.processes import run_processes


pytestmark = pytest.mark.multiprocess

RULES = {"kernel|drawn|keys|table": ("batch", ...)}
MODULE = nn.Dense(3)


def builder():
    """A builder that closes over keys of both kinds, and arrays of JAX and NumPy."""
    key, raw = jax.random.key(3), jax.random.PRNGKey(4)
    keys = jax.random.split(jax.random.key(5), 4)
    table, numbers = jnp.arange(8.0), np.arange(8, dtype="int32")
    return lambda: {
        "drawn": jax.random.normal(key, (8, 2)),
        "bias": jax.random.normal(raw, (3,)),
        "keys": keys,
        "table": table * numbers,
    }


def linen_builder(module):
    key, x = jax.random.key(6), jnp.ones((2, 8))
    return lambda: module.init(key, x)


def words(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def parts(tree):
    """The shards of this process: where each begins and ends, and its values."""
    return {
        jax.tree_util.keystr(path): [
            [shard.index[0].indices(len(leaf))[:2], np.asarray(shard.data).tolist()]
            for shard in words(leaf).addressable_shards
        ]
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def moved():
    return {name: builder()()[name] for name in ("drawn", "keys")}


def job():
    mesh = ml.create_mesh({"batch": 4})
    layouts, rows = ml.LayoutMap(mesh, RULES), mesh.layout("batch", ...)
    build = linen_builder(MODULE)
    state = ml.TrainState.create(build, optax.adam(1e-3), layouts, module=MODULE)
    return {
        "created": parts(ml.create(builder(), layouts)),
        "params": parts(state.params),
        "copied": parts(ml.copy_to_mesh(moved(), rows)),
        "moved": parts(ml.relayout(moved(), rows)),
    }


@pytest.mark.slow
def test_what_every_process_has_comes_to_the_devices_of_all():
    expected = {
        "created": builder()(),
        "params": linen_builder(MODULE)()["params"],
        "copied": moved(),
        "moved": moved(),
    }
    found = run_processes(2, job, shared=True)
    for path, leaf in jax.tree.leaves_with_path(expected):
        whole, name = np.asarray(words(leaf)), jax.tree_util.keystr(path[1:])
        seen = np.zeros(len(whole), int)
        for process in found:
            for (begin, end), values in process[path[0].key][name]:
                part = np.asarray(values, whole.dtype)
                np.testing.assert_array_equal(part, whole[begin:end])
                seen[begin:end] += 1
        assert (seen == (4 if path[-1].key == "bias" else 1)).all(), path
