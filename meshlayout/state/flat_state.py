"""A train state as a compiled step takes and returns it: a tuple of plain arrays.

To take a `TrainState` apart and to put one together costs a call of a small step a
third of its time on the host, and most states are only handed to the next call. So a
step returns a state that is put together when somebody reads a field.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer

from meshlayout import _jax
from meshlayout._annotations import DType, Leaf
from meshlayout.state.train_state import TrainState


@dataclass(frozen=True)
class StateStructure:
    """The structure of a train state, and which of its leaves are PRNG keys.

    Attributes:
        treedef: As `jax.tree.flatten` gives it.
        keys: The place and the dtype of each leaf that is a PRNG key; a compiled
            function takes the words of one faster.
    """

    treedef: Any  # PyTreeDef, a variable to a type checker
    keys: tuple[tuple[int, DType], ...]

    @classmethod
    def of(cls, state: TrainState) -> "StateStructure":
        """Returns the structure of a state."""
        leaves, treedef = jax.tree.flatten(state)
        return cls(treedef, _keys_in(leaves))

    def flatten(self, state: TrainState) -> Sequence[Leaf] | None:
        """Returns the arrays of a state, or None if its structure is another one.

        The dicts in a state can be changed in place, so that the arrays it was made of
        are only taken while nobody has read it.
        """
        flat = state.__dict__.get("_flat")
        if flat is not None:
            leaves, structure = flat
            return leaves if structure is self or structure == self else None
        leaves, treedef = jax.tree.flatten(state)
        if treedef != self.treedef or _keys_in(leaves) != self.keys:
            return None
        for index, _ in self.keys:
            leaves[index] = _words(leaves[index])
        return tuple(leaves)

    def unflatten(self, leaves: Sequence[Leaf]) -> TrainState:
        """Returns the state of some arrays."""
        leaves = list(leaves)
        for index, dtype in self.keys:
            leaves[index] = _jax.key_of_words(leaves[index], dtype)
        return self.treedef.unflatten(leaves)

    def lazy(self, leaves: Sequence[Leaf]) -> TrainState:
        """Returns the state of some arrays, put together when a field is read."""
        state: TrainState = object.__new__(TrainState)
        state.__dict__["_flat"] = (leaves, self)
        return state


def _keys_in(leaves: Sequence[Leaf]) -> tuple[tuple[int, DType], ...]:
    dtypes = [getattr(leaf, "dtype", None) for leaf in leaves]
    return tuple(
        (index, dtype)
        for index, dtype in enumerate(dtypes)
        if type(dtype) is _jax.KeyDType
    )


def _words(key: Leaf) -> Any:
    if isinstance(key, jax.ShapeDtypeStruct):
        words = jax.eval_shape(jax.random.key_data, key)
        return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=key.sharding)
    if isinstance(key, Tracer):
        return jax.random.key_data(key)
    return _jax.words_of_key(key)
