"""Compares trees to the bit, whatever they are made of."""

import jax
import numpy as np
from flax import nnx


def plain(tree):
    """The tree without NNX objects, in the structure that a user would compare."""
    if isinstance(tree, nnx.Pytree) or any(
        isinstance(leaf, nnx.Pytree)
        for leaf in jax.tree.leaves(tree, is_leaf=lambda n: isinstance(n, nnx.Pytree))
    ):
        return nnx.to_pure_dict(nnx.state(tree))
    return tree


def on_host(leaf):
    """A leaf's dtype, shape and bytes; anything that is no array as it is."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
        data = np.asarray(jax.random.key_data(leaf))
        return str(leaf.dtype), leaf.shape, data.tobytes()
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        # NumPy's 64-bit dtypes become JAX's 32-bit ones.
        host = np.asarray(leaf)
        host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype))
        return str(host.dtype), host.shape, host.tobytes()
    return leaf


def assert_same_bits(made, expected):
    """Asserts that two trees have one structure, and leaves of the same bytes."""
    made, expected = plain(made), plain(expected)
    assert jax.tree.structure(made) == jax.tree.structure(expected)
    for path, one in jax.tree.leaves_with_path(expected):
        (other,) = (v for p, v in jax.tree.leaves_with_path(made) if p == path)
        assert on_host(other) == on_host(one), jax.tree_util.keystr(path)
