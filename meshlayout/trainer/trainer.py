"""`Trainer`: fit, evaluate and predict, on the public steps.

This file has the methods that users call and override. `FitLoop` runs the epochs,
`TrainerInput` reads the data, and `TrainerSteps` makes the steps from a loss function.
"""

import functools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshlayout import _checks, _jax
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import batch_layout
from meshlayout._tracebacks import user_call
from meshlayout.data.adapters.arrays import is_columns
from meshlayout.data.plan import checked_seed
from meshlayout.errors import MeshLayoutError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.trainer.callbacks import Callback
from meshlayout.trainer.epochs import (
    Data,
    PlacedBatch,
    TrainerInput,
    TrainingPosition,
    real_rows,
    rows_of,
    split_rows,
)
from meshlayout.trainer.history import History
from meshlayout.trainer.loop import FitLoop, evaluate
from meshlayout.trainer.steps import PredictFn, TrainerSteps


_log = logging.getLogger("meshlayout")


class Trainer:
    """Trains, evaluates and predicts; you may override each of its steps.

    The loop is the usual one, `state, metrics = train_step(state, batch, metrics)`, and
    waits for the device only at the end of an epoch, and where a callback reads a
    value. A subclass may define `train_step`, `eval_step` or `predict_step`; if it
    defines all that it uses, the state may be any tree of arrays.

    Data is an iterable of batches, or arrays and a `batch_size`. Batches that are on
    devices are used unchanged. Others are sharded over the mesh axes called `batch`,
    `data`, `replica`, `fsdp`, `dp`, `ddp` or `data_parallel`, and a short batch is
    padded to the size of the first, so that one program serves all. To mark the
    padding, with weight 0, batches get weights: in a dict under the key `weight` (or
    another one, `weights=`), in a tuple at the end if `weights` is that index. If
    nothing can leave padding out (the loss function returns a mean, or a tuple has no
    place for weights), a short batch keeps its size, which takes a second program.

    Args:
        state: A `TrainState`, or any tree of arrays for a subclass. Training uses it
            up; `trainer.state` is always the newest state.
        loss_fn: As for `make_train_step`; none if a subclass overrides the steps.
        metrics: Metrics besides the loss, by name; in training and validation.
        layouts: The layout map that `constrain` follows in the model.
        predict_fn: A function of the model, in evaluation mode, and a batch, for
            `predict`.
        pad: Whether batches get weights and padding where possible.
        **options: Options of `make_train_step`, such as `clip_norm=1.0`, which also
            hold for the other steps. With `steps_per_call=n`, a call of the train step
            takes a list of n batches, and at the end of an epoch of those left over.

    Attributes:
        state: The state after the last finished step.
        history: The finished epochs of all calls of `fit`.
        position: How far training is; a `TrainingPosition`.
        stopped: Why training stops before its last epoch; empty if it does not.
        steps_in_call: The number of steps in the last call of the train step.
        input: The data of the running `fit`, and `validation`, for callbacks.

    Example:
        >>> import jax.numpy as jnp
        >>> import meshlayout as ml
        >>> import optax
        >>> from flax import nnx
        >>> layouts = ml.LayoutMap(ml.create_mesh({"batch": 8}), {})
        >>> state = ml.TrainState.create(
        ...     lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), layouts
        ... )
        >>> def loss_fn(model, batch):
        ...     x, y = batch
        ...     return jnp.square(model(x) - y)
        >>> x = np.random.default_rng(0).normal(size=(20, 2)).astype("float32")
        >>> y = x @ np.array([[2.0], [3.0]], "float32")
        >>> trainer = Trainer(state, loss_fn)
        >>> history = trainer.fit(x, y, epochs=30, batch_size=8, progress=False)
        >>> history["loss"][-1] < 0.01, trainer.predict(x, batch_size=8).shape
        (True, (20, 1))
    """

    @user_call
    def __init__(
        self,
        state: PyTree,
        loss_fn: Callable[..., Any] | None = None,
        *,
        metrics: Mapping[str, Any] | None = None,
        layouts: LayoutMap | None = None,
        predict_fn: PredictFn | None = None,
        pad: bool = True,
        **options: Any,
    ) -> None:
        self._steps = TrainerSteps(loss_fn, predict_fn, metrics, layouts, options)
        # Whether the loss can leave padding out; None until it is asked.
        self._pads: bool | None = None if pad else False
        self.state, self.history, self.position = state, History(), TrainingPosition()
        self.stopped, self.steps_in_call = "", 1
        self.input: TrainerInput | None = None
        self.validation: TrainerInput | None = None
        self._told: set[str] = set()

    # The steps, which may be overridden.

    def train_step(
        self, state: PyTree, batch: Batch, metrics: Metrics | None
    ) -> tuple[PyTree, Metrics]:
        """Runs one step; returns the next state, and the metrics including this step.

        `batch` is a global batch; with `steps_per_call`, a list of batches. `metrics`
        are those of the epoch so far; None at its beginning. The state may be used up.
        """
        return self._steps.train(state, batch, metrics)

    def eval_step(
        self, state: PyTree, batch: Batch, metrics: Metrics | None
    ) -> Metrics:
        """Measures one batch, as `train_step`; the state is not used up."""
        return self._steps.evaluate(state, batch, metrics)

    def predict_step(self, state: PyTree, batch: Batch) -> PyTree:
        """Returns the model's predictions for one batch; the state is not used up."""
        return self._steps.predict(state, batch)

    # The loops.

    @user_call
    def fit(
        self,
        train: Data | PyTree,
        labels: PyTree | int = None,
        epochs: int = 1,
        *,
        batch_size: int | None = None,
        shuffle: int | None = 0,
        steps_per_epoch: int | None = None,
        validation_data: Data | PyTree | None = None,
        validation_split: float | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
        verbose: int | None = None,
        resume: bool = False,
    ) -> History:
        """Trains for a number of epochs, or resumes an interrupted run.

        `fit(x, y, epochs=5, batch_size=32)` trains on arrays, in batches `(x, y)`, or
        dicts for a dict of arrays; `fit(batches, 5)` on batches.

        Ctrl-C, and any error of the data or a callback, leaves in `state` the result of
        the last finished step, and in `history` the finished epochs; another `fit`
        continues from there.

        With a `Checkpoint` among the callbacks, a SIGTERM to any process saves after
        the running step, and ends the process with status 75,
        `ml.checkpoint.EXIT_STATUS`. A run that ended so, or was killed, resumes from
        the newest intact checkpoint if it is started again with `resume=True`: state,
        metrics of the epoch so far, history, and the data at the very batch. Its result
        has the same bits as that of an uninterrupted run. Data without a position
        (`get_state`) is read up to it, and must yield the same batches again.

        Args:
            train: An iterable of batches, iterated anew in each epoch; a function that
                returns one; or an iterator. Or arrays with one row per example: an
                array, or a dict or tuple of arrays.
            labels: More arrays of the same examples; or `epochs`, after batches.
            epochs: The number of epochs, with those before an interruption.
            batch_size: Rows of a global batch, for arrays.
            shuffle: A seed, which with the epoch determines the order of the rows of
                arrays; None keeps it. Batches keep theirs.
            steps_per_epoch: Batches per epoch, instead of one pass. The next epoch
                continues where this one stopped; at the end of a pass a new one begins.
            validation_data: Batches or arrays to evaluate after each epoch; the names
                of their values begin with `val_`.
            validation_split: The share of arrays to hold out as validation data: their
                last rows, before they are shuffled.
            callbacks: Instances of `ml.callbacks.Callback`, called in this order.
            progress: Whether to show progress, if no callback is a `Progress`.
            verbose: Keras' name for `progress`; 0 shows none.
            resume: Whether to resume from the newest checkpoint of the first
                `Checkpoint`, if any. Without `resume`, its directory must not hold
                steps later than the one that training begins at.

        Returns:
            The history of all epochs, including those of an earlier `fit`.

        Raises:
            MeshLayoutError: If an argument is wrong, or the data yields no batch.
            CheckpointError: If the checkpoint cannot be resumed from.
            Preempted: After SIGTERM; it ends the process.
        """
        # `labels` is an integer in `fit(batches, 5)`, the form of most tutorials.
        if isinstance(labels, (int, np.integer)):
            if epochs != 1:
                msg = f"fit: epochs is given twice, as {labels!r} and {epochs!r}."
                raise MeshLayoutError(msg)
            labels, epochs = None, int(labels)
        epochs = _checks.count("epochs", epochs, where="fit")
        if steps_per_epoch is not None:
            _checks.count("steps_per_epoch", steps_per_epoch, where="fit")
        seed, data = checked_seed(shuffle, "fit"), validation_data
        if validation_split is not None:
            if data is not None or not is_columns(train):
                msg = (
                    "fit: validation_split= holds out rows of arrays. With batches, or "
                    "validation data of your own, give validation_data= alone."
                )
                raise MeshLayoutError(msg)
            rows = rows_of(
                "fit", "train", train, labels, batch_size, self._steps.weights
            )
            (train, data), labels = split_rows(rows, validation_split), None
        source = TrainerInput(
            *(self, "fit", "train", train, labels, batch_size, seed),
            steps_per_epoch=steps_per_epoch,
            num_epochs=epochs,
            trains=True,
        )
        self.validation = None
        if data is not None:
            size = batch_size if is_columns(data) else None
            names = "fit: validation", "validation_data"
            self.validation = TrainerInput(self, *names, data, None, size)
        loop = FitLoop(self, source, callbacks)
        step, num_done = self.position.step, len(self.history.epochs)
        if isinstance(self.state, TrainState):
            if isinstance(self.state.step, jax.Array) and self.state.step.is_deleted():
                msg = "fit: the trainer's state is used up: a step reused its memory. "
                hint = "Give it the state that the step returned, or trainer.state."
                raise MeshLayoutError(msg + hint)
            step = int(self.state.step)  # waits, but nothing is running yet
        self.position = TrainingPosition(
            num_done, num_done + epochs, step, steps_per_epoch=source.num_steps
        )
        self.stopped = self.history.stopped = ""
        self.input = source
        loop.run(progress=progress and verbose != 0, resume=resume)
        return self.history

    @user_call
    def evaluate(
        self,
        data: Data | PyTree,
        labels: PyTree = None,
        *,
        batch_size: int | None = None,
    ) -> dict[str, Any]:
        """Returns the loss and the metrics of the state on data like that of `fit`.

        The values are floats by name, and NumPy arrays for metrics that have dims.
        """
        source = TrainerInput(self, "evaluate", "data", data, labels, batch_size)
        return evaluate(self, source)

    @user_call
    def predict(
        self,
        data: Data | PyTree,
        *,
        batch_size: int | None = None,
        predict_fn: PredictFn | None = None,
    ) -> PyTree:
        """Returns the model's predictions for all rows of a dataset, in order.

        Data as `fit` and `evaluate` had it goes through the loss function, whose
        outputs are returned. Data with fewer arrays, without labels, goes to the model.
        To call something else, give `predict_fn`, a function of the model, in
        evaluation mode, and a batch. Padding that the trainer or `distribute_dataset`
        added is left out; rows to which you gave weight 0 yourself are not.

        Returns:
            A tree of NumPy arrays with one row per example.
        """
        step, key = self.predict_step, self._steps.weights
        if predict_fn is not None:
            step = functools.partial(self._steps.predict, predict_fn=predict_fn)
        source = TrainerInput(
            *(self, "predict", "data", data, None, batch_size), marks=False
        )
        parts: list[PyTree] = []
        pending: deque[tuple[PlacedBatch, PyTree]] = deque()
        for (placed,) in source.groups():
            with _checks.noted(source.where):
                pending.append((placed, step(self.state, placed.batch)))
            if len(pending) > 1:  # read while the device computes the next batch
                parts.append(real_rows(*pending.popleft(), key))
        parts.append(real_rows(*pending.popleft(), key))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    def stop(self, reason: str) -> None:
        """Ends training after the current step or epoch, and says why."""
        self.stopped = self.stopped or reason

    def __repr__(self) -> str:
        stopped = f", stopped: {self.stopped}" if self.stopped else ""
        epochs, step = len(self.history.epochs), self.position.step
        return f"{type(self).__name__}({epochs} epochs, step {step}{stopped})"

    # What the loops need.

    def _tell(self, sentence: str, topic: str = "") -> None:
        """Logs a sentence, once; or only the first one about a topic."""
        if (topic or sentence) not in self._told:
            self._told.add(topic or sentence)
            _log.warning("%s", sentence)

    def _accepts(self, batch: Batch, *, train: bool) -> bool:
        """Returns whether a batch may have weights that mark padding."""
        step = "train_step" if train else "eval_step"
        # Nobody knows what a subclass's own steps do with weights.
        is_own = getattr(type(self), step) is not getattr(Trainer, step)
        if self._pads is not None or is_own or self._steps.loss_fn is None:
            return self._pads is not False
        self._pads = self._steps.take_weights(self.state, batch, train=train)
        return self._pads

    def _layout(self) -> Layout | None:
        """Returns the layout of batches; None if the state is on no mesh."""
        for leaf in jax.tree.leaves(self.state):
            if isinstance(_jax.sharding_of(leaf), NamedSharding):
                return batch_layout(Layout.of(leaf).mesh)
        return None
