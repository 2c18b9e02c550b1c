"""`Trainer`: fit, evaluate and predict, on the public steps."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack

import jax
import numpy as np
import optax

from meshlayout import losses
from meshlayout.errors import MeshLayoutError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.state.precision import Precision
from meshlayout.step import make_eval_step, make_predict_step, make_train_step
from meshlayout.step.compiled import OnRecompile
from meshlayout.step.remat import Remat
from meshlayout.step.updates import OnNonfinite
from meshlayout.trainer.batches import Fed, Feeder, data_layout, is_even, mesh_of
from meshlayout.trainer.callbacks import Callback
from meshlayout.trainer.checks import (
    as_callbacks,
    as_pair,
    check_counts,
    check_metrics,
    check_needless,
    check_options,
    check_weights,
    missing,
)
from meshlayout.trainer.history import History
from meshlayout.trainer.interrupts import Interrupts
from meshlayout.trainer.passes import Data, Passes
from meshlayout.trainer.position import Position
from meshlayout.trainer.predicting import outputs_of, real_outputs
from meshlayout.trainer.reading import Reading
from meshlayout.trainer.resuming import Saver, in_order, resume_fit


# Batches that a call takes with steps_per_call="auto".
_AUTO_BATCHES = 8


class StepOptions(TypedDict, total=False):
    """Options of `make_train_step`, which says what they mean."""

    regularizers: Sequence[losses.Regularizer] | losses.Regularizer
    weights: str | int
    denominator: losses.Denominator
    accumulate: int
    clip_norm: float | None
    on_nonfinite: OnNonfinite
    ema: float | None
    trainable: str | None
    learning_rate: optax.Schedule | None
    precision: Precision
    remat: Remat
    zero: Literal[0, 1]
    steps_per_call: int | Literal["auto"]
    on_recompile: OnRecompile


class Trainer:
    """Trains, evaluates and predicts; each step of it can be overridden.

    The loop is that of the tutorial, `state, metrics = train_step(state, batch,
    metrics)`, and waits for the device only at the end of an epoch, and where a
    callback asks for a value. A subclass may define `train_step`, `eval_step` or
    `predict_step` with these signatures, and the state may then be any tree of arrays.

    Batches that their maker has placed on devices are taken as they are. Others, of
    NumPy arrays, are sharded over the mesh, and a short one is padded to the size of
    the first, so that one program serves all; for that they carry weights, under the
    key `weight` of a dict (or another one, `weights=`), or last in a tuple if `weights`
    is that place. The padding has weight 0. A list of batches that need no padding gets
    no weights.

    Args:
        state: A `TrainState`, or for a subclass any tree of arrays. It is used up by
            training; `trainer.state` is always the newest.
        loss_fn: As for `make_train_step`. A subclass that overrides the steps needs
            none.
        metrics: What is measured beside the loss, by name; in training and validation.
        layouts: The layout map that `constrain` follows in the model.
        predict_fn: A function of the model, in evaluation mode, and a batch, for
            `predict`; the outputs of the loss function if left out.
        data_layout: Where batches go: a layout, or its entries, for all arrays of a
            batch, as `("batch", ...)`. By default their first dim is sharded over the
            mesh axes called `batch`, `data` or `fsdp`, and is whole if there is none.
        pad: Whether batches get weights and padding. A loss function that returns a
            scalar takes no batches with weights.
        **options: Options of `make_train_step` and, as far as they apply,
            `make_eval_step`, as `clip_norm=1.0`. With `steps_per_call`, a train step
            takes a list of so many batches ("auto": 8), and those that are left over
            at the end of an epoch one by one, each in a list of its own.

    Attributes:
        state: The state after the last finished step.
        history: The finished epochs, of all calls of `fit`.
        position: How far training is.
        stopped: Why training stops before its last epoch; empty if it does not.
        steps_in_call: The steps that the last call of the train step made.
        reading: What the running `fit` reads, and how far; for callbacks that save it.

    Raises:
        MeshLayoutError: If an option does not exist, or needs a loss function.
        StepError: If an option of the steps is wrong.

    Example:
        >>> import jax.numpy as jnp
        >>> import meshlayout as ml
        >>> from flax import nnx
        >>> layouts = ml.LayoutMap(ml.create_mesh({"batch": 8}), {})
        >>> state = ml.TrainState.create(
        ...     lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), layouts
        ... )
        >>> def loss_fn(model, batch):
        ...     return jnp.square(model(batch["x"]) - batch["y"])
        >>> x = np.random.default_rng(0).normal(size=(20, 2)).astype("float32")
        >>> data = {"x": x, "y": x @ np.array([[2.0], [3.0]], "float32")}
        >>> def batches():
        ...     for at in range(0, 20, 8):
        ...         yield {name: rows[at : at + 8] for name, rows in data.items()}
        >>> trainer = Trainer(state, loss_fn)
        >>> history = trainer.fit(batches, epochs=30, progress=False)
        >>> history["loss"][-1] < 0.01
        True
    """

    def __init__(
        self,
        state: Any,
        loss_fn: Callable[..., Any] | None = None,
        *,
        metrics: Mapping[str, Any] | None = None,
        layouts: LayoutMap | None = None,
        predict_fn: Callable[[Any, Any], Any] | None = None,
        data_layout: Layout | Sequence[Any] | None = None,
        pad: bool = True,
        **options: Unpack[StepOptions],
    ) -> None:
        check_options(Trainer, options, StepOptions.__annotations__)
        if loss_fn is None:
            check_needless(metrics, options)
        self.state = state
        self.history = History()
        self.position = Position()
        self.stopped = ""
        self.steps_in_call = 1
        self.reading: Reading | None = None
        self._so_far: Metrics | None = None
        self._loss_fn, self._predict_fn = loss_fn, predict_fn
        self._data_layout, self._pad = data_layout, pad
        self._has_padded = False
        self._weights = options.get("weights", "weight")
        self._group = options.get("steps_per_call", 1)
        self._make_steps(metrics, layouts, options)

    def _make_steps(
        self,
        metrics: Mapping[str, Any] | None,
        layouts: LayoutMap | None,
        options: StepOptions,
    ) -> None:
        """Makes the steps; nothing is compiled before it is called."""
        self._many = self._one = self._evaluating = self._predicting = None
        # Data of another batch size is no accident where it is only measured.
        measuring: StepOptions = {"on_recompile": "ignore", **options}
        predicting = _options_for(make_predict_step, measuring)
        if self._loss_fn is not None:
            both = {"metrics": metrics, "layouts": layouts}
            self._many = make_train_step(self._loss_fn, **both, **options)
            single: StepOptions = {**options, "steps_per_call": 1}
            self._one = make_train_step(self._loss_fn, **both, **single)
            evaluating = _options_for(make_eval_step, measuring)
            self._evaluating = make_eval_step(self._loss_fn, **both, **evaluating)
        predict_fn = self._predict_fn
        if predict_fn is None and self._loss_fn is not None:
            predict_fn = outputs_of(self._loss_fn)
        if predict_fn is not None:
            self._predicting = make_predict_step(
                predict_fn, layouts=layouts, **predicting
            )

    # The steps.

    def train_step(
        self, state: Any, batch: Any, metrics: Metrics | None
    ) -> tuple[Any, Metrics]:
        """Runs one step; to be overridden.

        Args:
            state: The state, which may be used up.
            batch: A global batch; with `steps_per_call`, a list of them, which holds
                one where it is left over.
            metrics: The epoch's metrics so far; None at its beginning.

        Returns:
            The next state, and the metrics with this step's added.

        Raises:
            MeshLayoutError: If there is no loss function.
        """
        if self._many is None or self._one is None:
            raise MeshLayoutError(missing(self, "train_step"))
        # A batch may be a list itself, of arrays.
        if self._group == 1 or not isinstance(batch, list):
            return self._one(state, batch, metrics)
        if len(batch) == 1:
            return self._one(state, batch[0], metrics)
        return self._many(state, batch, metrics)

    def eval_step(self, state: Any, batch: Any, metrics: Metrics | None) -> Metrics:
        """Measures one batch; to be overridden.

        Args:
            state: The state, which is not used up.
            batch: A global batch.
            metrics: Those of the batches so far; None at the beginning.

        Raises:
            MeshLayoutError: If there is no loss function.
        """
        if self._evaluating is None:
            raise MeshLayoutError(missing(self, "eval_step"))
        return self._evaluating(state, batch, metrics)

    def predict_step(self, state: Any, batch: Any) -> Any:
        """Returns what the model makes of one batch; to be overridden.

        Args:
            state: The state, which is not used up.
            batch: A global batch.

        Raises:
            MeshLayoutError: If there is neither a `predict_fn` nor a loss function.
        """
        if self._predicting is None:
            raise MeshLayoutError(missing(self, "predict_step"))
        return self._predicting(state, batch)

    # The loops.

    def fit(
        self,
        train: Data,
        epochs: int = 1,
        *,
        steps_per_epoch: int | None = None,
        validation_data: Data | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
        resume: bool = False,
    ) -> History:
        """Trains for some epochs more, or goes on with a run that ended too early.

        Ctrl-C, and any error of the data or a callback, leaves `state` as the last
        finished step returned it, and `history` with the finished epochs; training can
        go on with another `fit`. Ctrl-C waits for the call of a step to return.

        With a `Checkpoint` among the callbacks, SIGTERM (on several processes, to any
        of them) saves after the step that is running, and ends the process with status
        75, `ml.checkpoint.EXIT_STATUS`. A run that ended so, or was killed, goes on
        from the newest intact checkpoint when it is started again with `resume=True`:
        state, metrics of the epoch so far, history, and the data to the batch; it ends
        with the bits of one that was not interrupted. Data that does not tell its
        place (`get_state`) is read up to it, and has to give the same batches again.

        Args:
            train: An iterable of batches, a new pass each epoch; a function that
                returns one; or an iterator.
            epochs: How many; with `resume`, those before the interruption count.
            steps_per_epoch: Batches in an epoch, instead of one pass. The next epoch
                goes on where this one stopped; a new pass begins where one ends.
            validation_data: Batches to evaluate after each epoch; their values have
                `val_` in front of their names.
            callbacks: What else is to be done; see `ml.callbacks`.
            progress: Whether to show progress, where no callback is a `Progress`.
            resume: Whether to go on from the newest checkpoint of the first
                `Checkpoint`. Where there is none, training begins as without. Without
                it, a directory must hold no step after the one that training begins
                at: it would be taken for this training's.

        Returns:
            The history of all epochs, those of an earlier `fit` too.

        Raises:
            MeshLayoutError: If the data is none, or gives no batch; if a callback is
                none; with `resume`, if there is no `Checkpoint`.
            CheckpointError: If the checkpoint cannot be gone on from; its message says
                why, and a note whether the trainer's state is used up. Without
                `resume`, if a directory holds later steps of another training.
            Preempted: After SIGTERM, which ends the process.
        """
        check_counts(epochs=epochs, steps_per_epoch=steps_per_epoch)
        passes = Passes("train", train, steps_per_epoch, epochs)
        feeder = self._feeder(train)
        validation = self._validation(validation_data, epochs)
        called = in_order(as_callbacks(callbacks), progress=progress)
        saver = Saver(called)
        self.reading = Reading(passes, feeder)
        self._begin(passes, epochs)
        if resume:
            self._so_far = resume_fit(self, saver.first, self._group_size)
        else:
            saver.check_new(self.position.step)
        with ExitStack() as closing, Interrupts() as interrupts, saver:
            for callback in called:
                closing.callback(callback.close)
            for callback in called:
                callback.on_fit_start(self)
            while self.position.epoch < self.position.last_epoch and not self.stopped:
                self._train_epoch(self.reading, called, interrupts, saver)
                self._end_epoch(passes, called, validation)
                saver.look(self, None)
            for callback in called:
                callback.on_fit_end(self)
        return self.history

    def evaluate(self, data: Data) -> dict[str, Any]:
        """Measures the state on some data.

        Args:
            data: Batches, as for `fit`; one pass.

        Returns:
            The values by name, as floats; those of metrics with dims as NumPy arrays.

        Raises:
            MeshLayoutError: If the data is none, or gives no batch.
        """
        return self._evaluate(Passes("data", data), self._feeder(data))

    def predict(self, data: Data) -> Any:
        """Returns what the model makes of some data: the real examples, in order.

        Rows of weight 0 are padding, the trainer's or the data's, and are left out.

        Args:
            data: Batches, as for `fit`; one pass.

        Returns:
            What `predict_fn` returns, or the dict of outputs of the loss function: a
            tree of NumPy arrays with one row per example.

        Raises:
            MeshLayoutError: If the data is none, gives no batch, or an output has no
                row per example.
        """
        feeder = self._feeder(data, needs_weights=False)
        found: list[Any] = []
        waiting: tuple[Fed, Any] | None = None
        for batch in Passes("data", data).epoch():
            fed = feeder(batch)
            outputs = self.predict_step(self.state, fed.batch)
            # Read while the device is at the next batch.
            if waiting is not None:
                found.append(real_outputs(feeder, *waiting))
            waiting = fed, outputs
        if waiting is not None:
            found.append(real_outputs(feeder, *waiting))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

    def stop(self, reason: str) -> None:
        """Ends training after the step, or the epoch, that is being finished.

        Args:
            reason: Why, for `stopped`, the history and the progress.
        """
        self.stopped = self.stopped or reason

    def __repr__(self) -> str:
        name = type(self).__name__
        now, stopped = self.position, f", stopped: {self.stopped}" * bool(self.stopped)
        return f"{name}({len(self.history.epochs)} epochs, step {now.step}{stopped})"

    # Pieces of the loops.

    def _begin(self, passes: Passes, epochs: int) -> None:
        done = len(self.history.epochs)
        step = self.position.step
        if isinstance(self.state, TrainState):
            step = int(self.state.step)  # the one wait, before the loop
        self.position = Position(
            done, done + epochs, step, steps_per_epoch=passes.num_steps
        )
        self.stopped = self.history.stopped = ""
        self._so_far = None

    def _train_epoch(
        self,
        reading: Reading,
        callbacks: Sequence[Callback],
        interrupts: Interrupts,
        saver: Saver,
    ) -> None:
        """Trains for an epoch, or the rest of one that is resumed."""
        epoch, metrics = len(self.history.epochs) + 1, self._so_far
        self.position = replace(self.position, epoch=epoch)
        if metrics is None:
            self.position = replace(self.position, step_in_epoch=0, examples_in_epoch=0)
        for callback in callbacks:
            callback.on_epoch_start(self, epoch)
        for batch, steps, examples in reading.batches(self._group_size):
            with interrupts.held:
                self.state, metrics = as_pair(
                    self, self.train_step(self.state, batch, metrics)
                )
                self._advance(steps, examples)
            check_metrics(self, "train_step", metrics)
            for callback in callbacks:
                callback.on_step_end(self, self.position.step, metrics)
            saver.look(self, metrics)
            if self.stopped:
                break
        self._so_far = metrics

    def _end_epoch(
        self,
        passes: Passes,
        callbacks: Sequence[Callback],
        validation: tuple[Passes, Feeder] | None,
    ) -> None:
        """Reads the epoch's metrics, and validates; an epoch of no step is none."""
        metrics, self._so_far = self._so_far, None
        now = self.position
        if passes.is_over:
            self.stop(f"the training data ended at step {now.step}")
        if metrics is None:
            self.position = replace(now, epoch=now.epoch - 1)
            self.history.stopped = self.stopped
            return
        logs = metrics.to_host()
        for step in (self._many, self._one):
            if step is not None:
                step.check()
        if validation is not None and not self.stopped:
            for callback in callbacks:
                callback.on_validation_start(self)
            found = self._evaluate(*validation)
            logs.update({f"val_{name}": value for name, value in found.items()})
        if now.steps_per_epoch is None and not self.stopped:
            self.position = replace(now, steps_per_epoch=now.step_in_epoch)
        self.history.add(now.epoch, logs)
        for callback in callbacks:
            callback.on_epoch_end(self, now.epoch, logs)
        self.history.stopped = self.stopped

    def _advance(self, steps: int, examples: int) -> None:
        now = self.position
        self.steps_in_call = steps
        self.position = replace(
            now,
            step=now.step + steps,
            step_in_fit=now.step_in_fit + steps,
            step_in_epoch=now.step_in_epoch + steps,
            examples_in_epoch=now.examples_in_epoch + examples,
        )

    @property
    def _group_size(self) -> int:
        """How many batches a call of the train step takes."""
        return _AUTO_BATCHES if isinstance(self._group, str) else self._group

    def _evaluate(self, passes: Passes, feeder: Feeder) -> dict[str, Any]:
        metrics: Metrics | None = None
        for batch in passes.epoch():
            metrics = self.eval_step(self.state, feeder(batch).batch, metrics)
            check_metrics(self, "eval_step", metrics)
        return {} if metrics is None else metrics.to_host()

    def _validation(
        self, data: Data | None, epochs: int
    ) -> tuple[Passes, Feeder] | None:
        if data is None:
            return None
        passes = Passes("validation_data", data, num_epochs=epochs)
        return passes, self._feeder(data)

    def _feeder(self, data: Data, *, needs_weights: bool = True) -> Feeder:
        check_weights(data, self._weights)
        layout = data_layout(mesh_of(self.state), self._data_layout)
        # Once batches carry weights all do: without would be another program.
        pad = self._has_padded or (self._pad and not is_even(data, layout))
        self._has_padded = pad
        return Feeder(layout, self._weights, pad=pad, needs_weights=needs_weights)


def _options_for(make: Callable[..., Any], options: StepOptions) -> dict[str, Any]:
    """Returns the options that a maker of steps takes."""
    taken = inspect.signature(make).parameters
    return {name: value for name, value in options.items() if name in taken}
