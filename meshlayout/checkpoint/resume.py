"""Resuming from the newest intact checkpoint: the state, the metrics, the data.

`checkpoint.Loop` and `Trainer.fit(resume=True)` share it. Everything they need besides
the state is small and kept in the metadata of a checkpoint, so that `restore` returns
the state alone.

A step may add arrays to the state that training begins with (a moving average, a loss
scale), and only the step knows the structure of its metrics. So the step is called once
on the first batch, to see both; its result is thrown away, and the values come from the
checkpoint.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from meshlayout import _checks, _jax
from meshlayout._annotations import Batch, Leaf, PyTree
from meshlayout.arrays import to_numpy
from meshlayout.checkpoint.checkpointer import Checkpointer
from meshlayout.checkpoint.data_state import Continues, move_to_position
from meshlayout.checkpoint.input import Input
from meshlayout.checkpoint.manifest import Inspection, Manifest
from meshlayout.checkpoint.restore import Request
from meshlayout.checkpoint.saved_step import SavedStep
from meshlayout.errors import CheckpointError


# The key of the values to resume from in the metadata of a checkpoint.
KEY = "resume"

Notes: TypeAlias = Mapping[str, Any]
"""The values to resume from, as `notes_of` returned them before the save."""

FirstStep: TypeAlias = Callable[[PyTree, Batch], tuple[PyTree, PyTree]]


@dataclass(frozen=True)
class Resumed:
    """The values that a run continues with.

    Attributes:
        step: The step of the checkpoint.
        state: The state.
        metrics: The metrics so far; None if there are none, and `Values` if no batch is
            left that could show their structure.
        notes: The other values that `notes_of` returned.
    """

    step: int
    state: PyTree
    metrics: PyTree
    notes: Notes


class Values(dict[str, Any]):
    """Final values of metrics, by name, on the host."""

    def to_host(self) -> dict[str, Any]:
        """Returns the values by name."""
        return dict(self)


def notes_of(place: Notes, metrics: PyTree, **notes: Any) -> dict[str, Any]:
    """Returns the metadata to resume from, for the key `KEY`.

    Args:
        place: The position in the data, from `Input.place`.
        metrics: The metrics so far: a pytree of arrays, all of them small; None if
            there are none.
        **notes: Other values to keep.

    Raises:
        CheckpointError: If the metrics hold anything but arrays and numbers.
    """
    metadata: dict[str, Any] = {"place": place, **notes}
    if metrics is not None:
        check_metrics(metrics)
        metadata["metrics"] = [_on_host(leaf) for leaf in jax.tree.leaves(metrics)]
        metadata["values"] = metrics.to_host() if hasattr(metrics, "to_host") else {}
    return metadata


def check_metrics(metrics: PyTree, where: str = "") -> None:
    """Raises if metrics hold leaves that cannot be read back, such as strings.

    Args:
        metrics: The metrics so far.
        where: The public function, which opens the message.

    Raises:
        CheckpointError: Names the leaf.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(metrics):
        if not isinstance(leaf, jax.Array) and not _is_numeric(leaf):
            opening = f"{where}: " if where else ""
            msg = (
                f"{opening}metrics{jax.tree_util.keystr(path)} is "
                f"{_checks.shown(leaf)} of type {type(leaf).__name__}, which cannot be "
                "restored from a checkpoint. Metrics are arrays and numbers; keep "
                "anything else outside of them."
            )
            raise CheckpointError(msg)


def resume(
    checkpointer: Checkpointer,
    state: PyTree,
    batches: Input,
    first_step: FirstStep | None,
    look: Callable[[Notes], None] = lambda notes: None,
) -> Resumed | None:
    """Resumes from the newest intact checkpoint, if there is one.

    Args:
        checkpointer: The checkpointer of the run's directory.
        state: The state that training would begin with; `first_step` uses it up.
        batches: The data, which is moved to its saved position.
        first_step: Returns the state and the metrics after a batch; only their
            structure is used. None if steps add nothing to the state, and there are no
            metrics.
        look: Called with the notes of a checkpoint before its arrays are read; may
            raise.

    Raises:
        CheckpointError: If the newest checkpoint cannot be resumed from, or all are
            damaged.
        RestoreDiffError: If the state differs from the saved one.

    Warns:
        CheckpointWarning: If a newer checkpoint is damaged.
    """
    like, empty = state, None
    del state  # `first_step` donates it: nothing else may hold it

    def read(source: SavedStep, manifest: Manifest) -> tuple[Resumed, list[Any]]:
        nonlocal like, empty, first_step
        notes = _notes(manifest, checkpointer.directory)
        look(notes)

        def put(iterator: Continues) -> None:
            move_to_position(iterator, checkpointer._positions(manifest))

        batches.take_up(notes["place"], put)
        batch = None if first_step is None else batches.look()
        if first_step is not None and batch is not None:
            like, empty = jax.tree.map(_abstract, first_step(like, batch))
            # Called once, even if this checkpoint is damaged and an older one is tried.
            first_step = None
        restored = checkpointer._loaded(source, Request(like=like))
        batches.catch_up(notes["place"])
        metrics = None
        if "metrics" in notes:
            metrics = Values(notes["values"])
            if empty is not None:
                metrics = _placed_like(notes["metrics"], empty)
        resumed = Resumed(manifest.step, restored.state, metrics, notes)
        return resumed, [*restored.restores]

    if not checkpointer._has_steps():
        return None
    return checkpointer._restored("latest", read, verify=True, fallback=True)


def _notes(manifest: Manifest, directory: Any) -> Notes:
    """Returns the values that `notes_of` returned before a step was saved."""
    metadata = Inspection.of(manifest).metadata
    notes = metadata.get(KEY) if isinstance(metadata, Mapping) else None
    if not isinstance(notes, Mapping) or "place" not in notes:
        msg = (
            f"step {manifest.step} in {directory} holds a state, but not its position "
            "in the data: it was saved with Checkpointer.save. Restore it with "
            "Checkpointer.restore, or resume from another directory."
        )
        raise CheckpointError(msg)
    return notes


# Metrics as small arrays in the metadata.


def _is_numeric(leaf: Leaf) -> bool:
    try:
        return _jax.is_array_dtype(np.asarray(leaf).dtype)
    except (TypeError, ValueError):
        return False


def _on_host(leaf: Leaf) -> np.ndarray[Any, Any]:
    """Returns a leaf as a NumPy array that keeps every bit."""
    if isinstance(leaf, jax.Array) and _jax.is_extended(leaf.dtype):
        leaf = jax.random.key_data(leaf)
    return to_numpy(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _placed_like(arrays: Sequence[np.ndarray[Any, Any]], empty: PyTree) -> PyTree:
    """Returns metrics of known shapes with the values that were saved.

    Raises:
        CheckpointError: If the metrics differ.
    """
    templates, treedef = jax.tree.flatten(empty)
    shapes, saved = _listed(map(_words, templates)), _listed(arrays)
    if shapes != saved:
        msg = (
            "the metrics differ from those of the run that saved the checkpoint: their "
            f"arrays were {saved}, and are {shapes}. Resume with the same metrics."
        )
        raise CheckpointError(msg)
    return treedef.unflatten(map(_placed, arrays, templates))


def _placed(host: np.ndarray[Any, Any], template: Leaf) -> Any:
    if not hasattr(template, "dtype"):
        return host.item()
    if not isinstance(template, jax.ShapeDtypeStruct):
        return host
    # Metrics have no layout map: they go where those of a first step would be.
    sharding = template.sharding
    if _jax.is_extended(template.dtype):
        impl = _jax.key_impl(template.dtype)
        wrap = jax.jit(
            lambda words: jax.random.wrap_key_data(words, impl=impl),
            out_shardings=sharding,
        )
        return wrap(host)
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(host, sharding)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)


def _words(template: Leaf) -> Any:
    """Returns a leaf with the dtype and shape that a checkpoint holds for it.

    For PRNG keys, they are those of the words.
    """
    if isinstance(template, jax.ShapeDtypeStruct) and _jax.is_extended(template.dtype):
        return jax.eval_shape(jax.random.key_data, template)
    return template if hasattr(template, "dtype") else np.asarray(template)


def _abstract(leaf: Leaf) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=leaf.sharding,
            weak_type=getattr(leaf, "weak_type", False),
        )
    return leaf


def _listed(arrays: Iterable[Any]) -> str:
    texts = [f"{array.dtype.name}{[*array.shape]}" for array in arrays]
    return ", ".join(texts) or "none"
