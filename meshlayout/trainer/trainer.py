"""`Trainer`: fit, evaluate and predict, on the public steps."""

import inspect
import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import jax
import numpy as np
import optax

from meshlayout import _checks, losses
from meshlayout._annotations import Batch, PyTree
from meshlayout.checkpoint.input import Data
from meshlayout.data import DistributedDataset
from meshlayout.errors import LossError, MeshLayoutError, RecompileWarning
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.state.precision import Precision
from meshlayout.step import make_eval_step, make_predict_step, make_train_step
from meshlayout.step.compiled_step import OnRecompile
from meshlayout.step.remat import Remat
from meshlayout.step.updates import OnNonfinite
from meshlayout.trainer.array_batches import are_arrays, batches_from
from meshlayout.trainer.batch_placement import (
    BatchPlacer,
    PlacedBatch,
    data_layout,
    is_even,
    mesh_of,
    outputs_of,
    real_outputs,
)
from meshlayout.trainer.callbacks import Callback
from meshlayout.trainer.checks import (
    as_callbacks,
    as_pair,
    check_metrics,
    check_needless,
    check_options,
    check_weights,
    missing,
    not_like_the_first,
)
from meshlayout.trainer.epochs import DataPasses, TrainingInput, TrainingPosition
from meshlayout.trainer.history import History
from meshlayout.trainer.interrupts import Interrupts
from meshlayout.trainer.resumption import Saver, in_order, resume_fit


_log = logging.getLogger("meshlayout")

T = TypeVar("T")

# Batches that a call takes with steps_per_call="auto".
_AUTO_BATCHES = 8

# Batches that are measured while the next one is placed. An evaluation further ahead of
# the devices gains nothing, fills them with batches, and shows its progress at once.
_MAX_PENDING = 2


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

    Data is an iterable of batches, or arrays and a `batch_size`. Batches that are
    already on devices are used unchanged. Others, of NumPy arrays, are sharded
    over the mesh, and a short one is padded to the size of the first, so that one
    program serves all; for that they carry weights, under the key `weight` of a dict
    (or another one, `weights=`), or last in a tuple if `weights` is that place. The
    padding has weight 0. A list of batches that need no padding gets no weights. Where
    nothing can mark padding (the loss function returns a mean, or a tuple has no place
    for weights), a short batch keeps its size, and is compiled for it.

    Args:
        state: A `TrainState`, or for a subclass any tree of arrays. It is used up by
            training; `trainer.state` is always the newest.
        loss_fn: As for `make_train_step`. A subclass that overrides the steps needs
            none.
        metrics: Metrics besides the loss, by name; in training and validation.
        layouts: The layout map that `constrain` follows in the model.
        predict_fn: A function of the model, in evaluation mode, and a batch, for
            `predict`; the outputs of the loss function if left out.
        data_layout: Where batches go: a layout, or its entries, for all arrays of a
            batch, as `("batch", ...)`. By default their first dim is sharded over the
            mesh axes called `batch`, `data` or `fsdp`, and is whole if there is none.
        pad: Whether batches get weights and padding, where that is possible.
        **options: Options of `make_train_step` and, as far as they apply,
            `make_eval_step`, as `clip_norm=1.0`. With `steps_per_call`, a train step
            takes a list of so many batches ("auto": 8), and those that are left over
            at the end of an epoch one by one, each in a list of its own.

    Attributes:
        state: The state after the last finished step.
        history: The finished epochs, of all calls of `fit`.
        position: How far training is; a `TrainingPosition`.
        stopped: Why training stops before its last epoch; empty if it does not.
        steps_in_call: The steps that the last call of the train step made.
        validation_steps: The batches of a validation; None if that is not known.
        input: What the running `fit` reads, and how far; for callbacks that save it.

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
        state: PyTree,
        loss_fn: Callable[..., Any] | None = None,
        *,
        metrics: Mapping[str, Any] | None = None,
        layouts: LayoutMap | None = None,
        predict_fn: Callable[[Any, Batch], PyTree] | None = None,
        data_layout: Layout | Sequence[Any] | None = None,
        pad: bool = True,
        **options: Unpack[StepOptions],
    ) -> None:
        check_options(Trainer, options, StepOptions.__annotations__)
        pad = _checks.flag("pad", pad, where="Trainer")
        if loss_fn is None:
            check_needless(metrics, options)
        else:
            _check_loss_fn(loss_fn)
        if predict_fn is not None:
            names = ("model", "batch")
            _checks.function("predict_fn", predict_fn, *names, where="Trainer")
        self.state = state
        self.history = History()
        self.position = TrainingPosition()
        self.stopped = ""
        self.steps_in_call = 1
        self.input: TrainingInput | None = None
        self.validation_steps: int | None = None
        self._is_fitting = False
        self._so_far: Metrics | None = None
        self._loss_fn, self._predict_fn = loss_fn, predict_fn
        self._data_layout, self._pad = data_layout, pad
        self._has_padded = self._takes_no_weights = False
        self._weights = options.get("weights", "weight")
        self._group = options.get("steps_per_call", 1)
        self._make_steps(metrics, layouts, options)

    def _make_steps(
        self,
        metrics: Mapping[str, Any] | None,
        layouts: LayoutMap | None,
        options: StepOptions,
    ) -> None:
        """Makes the steps; each is compiled when it is first called."""
        self._many = self._one = self._evaluating = self._predicting = None
        # Evaluating with a different batch size is legitimate, so it does not warn.
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
        self, state: PyTree, batch: Batch, metrics: Metrics | None
    ) -> tuple[PyTree, Metrics]:
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

    def eval_step(
        self, state: PyTree, batch: Batch, metrics: Metrics | None
    ) -> Metrics:
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

    def predict_step(self, state: PyTree, batch: Batch) -> PyTree:
        """Returns the model's predictions for one batch; to be overridden.

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
        train: Data | PyTree,
        labels: PyTree | int = None,
        epochs: int = 1,
        *,
        batch_size: int | None = None,
        shuffle: bool = True,
        steps_per_epoch: int | None = None,
        validation_data: Data | PyTree | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
        resume: bool = False,
    ) -> History:
        """Trains for some more epochs, or resumes a run that ended too early.

        `fit(x, y, epochs=5, batch_size=32)` trains on arrays; batches are tuples `(x,
        y)`, and for a dict of arrays dicts. `fit(batches, 5)` trains on batches.

        Ctrl-C, and any error of the data or a callback, leaves `state` as the last
        finished step returned it, and `history` with the finished epochs; training can
        continue with another `fit`. Ctrl-C waits for the call of a step to return.

        With a `Checkpoint` among the callbacks, SIGTERM (on several processes, to any
        of them) saves after the step that is running, and ends the process with status
        75, `ml.checkpoint.EXIT_STATUS`. A run that ended so, or was killed, resumes
        from the newest intact checkpoint when it is started again with `resume=True`:
        state, metrics of the epoch so far, history, and the data to the batch; it ends
        with the bits of one that was not interrupted. Data without a position
        (`get_state`) is read up to it, and must give the same batches again.

        Args:
            train: An iterable of batches, a new pass each epoch; a function that
                returns one; or an iterator. Or arrays with one row per example: one,
                or a dict or tuple of them.
            labels: Further arrays of the same examples; or `epochs`, after batches.
            epochs: How many; with `resume`, those before the interruption count.
            batch_size: Rows of a global batch, for arrays.
            shuffle: Whether arrays are shuffled, in a new order each epoch. Batches
                keep their order.
            steps_per_epoch: Batches in an epoch, instead of one pass. The next epoch
                resumes where this one stopped; a new pass begins where one ends.
            validation_data: Batches, or arrays, to evaluate after each epoch; the names
                of their values begin with `val_`.
            callbacks: What else to do; see `ml.callbacks`.
            progress: Whether to show progress, if no callback is a `Progress`.
            resume: Whether to resume from the newest checkpoint of the first
                `Checkpoint`. Where there is none, training begins as without. Without
                it, a directory must hold no step after the one that training begins
                at: it would be mistaken for one of this run.

        Returns:
            The history of all epochs, including those of an earlier `fit`.

        Raises:
            MeshLayoutError: If an argument is wrong, the data yields no batch, or a
                batch differs from the first one; with `resume`, if there is no
                `Checkpoint`.
            CheckpointError: If the checkpoint cannot be resumed from; its message says
                why, and a note whether the trainer's state is used up. Without
                `resume`, if a directory holds later steps of another training.
            Preempted: After SIGTERM, which ends the process.
        """
        if isinstance(labels, (int, np.integer)):
            labels, epochs = None, int(labels)
        epochs = _checks.count("epochs", epochs, where="fit")
        if steps_per_epoch is not None:
            steps_per_epoch = _checks.count(
                "steps_per_epoch", steps_per_epoch, where="fit"
            )
        for name, value in (
            ("shuffle", shuffle),
            ("progress", progress),
            ("resume", resume),
        ):
            _checks.flag(name, value, where="fit")
        ordered = in_order(as_callbacks(callbacks), progress=progress)
        if self._is_fitting:
            msg = (
                "fit was called inside a fit of the same trainer, by a callback or the "
                "data. Call it after that one has returned, or make another Trainer."
            )
            raise MeshLayoutError(msg)
        data = batches_from("fit", "train", train, labels, batch_size, shuffle=shuffle)
        # What a subclass's own steps make of weights is not known.
        weights = None if self._loss_fn is None else self._weights
        passes = DataPasses("train", data, steps_per_epoch, epochs, weights)
        placer = self._placer(data)
        validation = self._validation(validation_data, batch_size, epochs)
        saver = Saver(ordered)
        self.input = TrainingInput(passes, placer)
        self._begin(passes, epochs)
        self._is_fitting = True
        try:
            if resume:
                self._so_far = resume_fit(self, saver.first, self._group_size)
            else:
                saver.check_new(self.position.step)
            self._run(self.input, ordered, validation, saver)
        finally:
            self._is_fitting = False
        return self.history

    def _run(
        self,
        source: TrainingInput,
        callbacks: Sequence[Callback],
        validation: tuple[DataPasses, BatchPlacer] | None,
        saver: Saver,
    ) -> None:
        with ExitStack() as closing, Interrupts() as interrupts, saver:
            for callback in callbacks:
                closing.callback(callback.close)
            self._notify(callbacks, "on_fit_start")
            while self.position.epoch < self.position.last_epoch and not self.stopped:
                self._train_epoch(source, callbacks, interrupts, saver)
                self._end_epoch(source.passes, callbacks, validation)
                saver.end_if_due(self, None)
            self._notify(callbacks, "on_fit_end")

    def evaluate(
        self,
        data: Data | PyTree,
        labels: PyTree = None,
        *,
        batch_size: int | None = None,
    ) -> dict[str, Any]:
        """Measures the state on some data.

        Args:
            data: Batches or arrays, as for `fit`; one pass.
            labels: As for `fit`.
            batch_size: As for `fit`.

        Returns:
            The values by name, as floats; those of metrics with dims as NumPy arrays.

        Raises:
            MeshLayoutError: If the data is of another type, yields no batch, or a
                batch differs from the first one.
        """
        data = batches_from("evaluate", "data", data, labels, batch_size)
        return self._evaluate("evaluate", DataPasses("data", data), self._placer(data))

    def predict(self, data: Data | PyTree, *, batch_size: int | None = None) -> PyTree:
        """Returns the model's predictions for all rows of some data, in their order.

        Padding that was added by the trainer, or by `distribute_dataset`, is left out;
        rows to which you gave weight 0 yourself are not.

        Args:
            data: Batches or arrays, as for `fit`; one pass.
            batch_size: As for `fit`.

        Returns:
            What `predict_fn` returns, or the dict of outputs of the loss function: a
            tree of NumPy arrays with one row per example.

        Raises:
            MeshLayoutError: If the data is of another type, yields no batch, or an
                output does not have one row per example.
        """
        data = batches_from("predict", "data", data, None, batch_size)
        placer = self._placer(data, needs_weights=False)
        predictions: list[PyTree] = []
        pending: tuple[PlacedBatch, PyTree] | None = None
        for number, batch in enumerate(DataPasses("data", data).epoch(), 1):
            with self._located(f"predict: batch {number}", [batch], placer):
                placed = placer(batch)
                outputs = self.predict_step(self.state, placed.batch)
            # Read while the device computes the next batch.
            if pending is not None:
                predictions.append(real_outputs(placer, *pending))
            pending = placed, outputs
        if pending is not None:
            predictions.append(real_outputs(placer, *pending))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *predictions)

    def stop(self, reason: str) -> None:
        """Ends training after the current step or epoch.

        Args:
            reason: Why, for `stopped`, the history and the progress.
        """
        self.stopped = self.stopped or reason

    def __repr__(self) -> str:
        name = type(self).__name__
        now, stopped = self.position, f", stopped: {self.stopped}" * bool(self.stopped)
        return f"{name}({len(self.history.epochs)} epochs, step {now.step}{stopped})"

    # Pieces of the loops.

    def _begin(self, passes: DataPasses, epochs: int) -> None:
        done = len(self.history.epochs)
        step = self.position.step
        if isinstance(self.state, TrainState):
            step = int(self.state.step)  # the only wait, before the first step
        self.position = TrainingPosition(
            done, done + epochs, step, steps_per_epoch=passes.num_steps
        )
        self.stopped = self.history.stopped = ""
        self.history._shown_in = None
        self._so_far = None

    def _train_epoch(
        self,
        source: TrainingInput,
        callbacks: Sequence[Callback],
        interrupts: Interrupts,
        saver: Saver,
    ) -> None:
        """Trains for an epoch, or the rest of one that is resumed."""
        epoch, metrics = len(self.history.epochs) + 1, self._so_far
        self.position = replace(self.position, epoch=epoch)
        if metrics is None:
            self.position = replace(self.position, step_in_epoch=0, examples_in_epoch=0)
        self._notify(callbacks, "on_epoch_start", epoch)
        placer, number = source.placer, self.position.step_in_epoch

        def place(batch: Batch) -> PlacedBatch:
            nonlocal number
            number += 1
            with self._located(
                f"fit: batch {number} of epoch {epoch}", [batch], placer
            ):
                return placer(batch)

        for group in source.groups(self._group_size, place):
            first = self.position.step_in_epoch + 1
            last = first + len(group) - 1
            batches = f"batch {first}" if len(group) == 1 else f"batches {first}-{last}"
            where = f"fit: {batches} of epoch {epoch}"
            with interrupts.held, self._located(where, _hosts(group), placer):
                pair = self._call(
                    lambda batch, metrics=metrics: as_pair(
                        self, self.train_step(self.state, batch, metrics)
                    ),
                    group,
                    placer,
                    as_list=self._group_size > 1,
                )
                if pair is None:
                    source.retry(list(map(placer, _hosts(group))))
                    continue
                self.state, metrics = pair
                self._advance(len(group), sum(one.num_examples for one in group))
            check_metrics(self, "train_step", metrics)
            self._notify(callbacks, "on_step_end", self.position.step, metrics)
            saver.end_if_due(self, metrics)
            if self.stopped:
                break
        self._so_far = metrics

    def _call(
        self,
        step: Callable[[Batch], T],
        group: list[PlacedBatch],
        placer: BatchPlacer,
        *,
        as_list: bool = False,
    ) -> T | None:
        """Calls a step, without the weights that a loss function does not take.

        Returns:
            What the step returns. None if no step was made, because the batches of the
            call have several sizes without their padding.
        """

        def called(group: list[PlacedBatch]) -> T:
            batches = [placed.batch for placed in group]
            batch = batches if as_list else batches[0]
            if not any(placed.is_odd for placed in group):
                return step(batch)
            with warnings.catch_warnings():  # it cannot be padded
                warnings.simplefilter("ignore", RecompileWarning)
                return step(batch)

        group = placer.without_stale_weights(group)
        try:
            return called(group)
        except LossError:
            # It is raised before anything runs: the state is not used up.
            hosts = [placed.host for placed in group]
            if not placer.stop_weighting(hosts[0]):
                raise
            unweighted = list(map(placer, hosts))
            if len(group) > 1 and any(placed.is_odd for placed in unweighted):
                self._stop_weighting()
                return None
            with suppress(LossError):
                result = called(unweighted)
                self._stop_weighting()
                return result
            placer.pad = True
            raise

    def _stop_weighting(self) -> None:
        _log.info("the loss function returns a mean: batches get no weights")
        self._takes_no_weights = True

    def _notify(self, callbacks: Sequence[Callback], moment: str, *args: Any) -> None:
        for callback in callbacks:
            with _checks.noted(
                lambda callback=callback: (
                    f"in {type(callback).__name__}.{moment}, at step "
                    f"{self.position.step}, epoch {self.position.epoch}"
                )
            ):
                getattr(callback, moment)(self, *args)

    @contextmanager
    def _located(
        self, where: str, batches: list[Batch], placer: BatchPlacer
    ) -> Iterator[None]:
        """Adds to an error its batch, and how that differs from the first one."""
        try:
            yield
        except Exception as error:
            differences = [placer.difference(batch) for batch in batches]
            difference = next(filter(None, differences), "")
            if difference and not isinstance(error, MeshLayoutError):
                raise not_like_the_first(where, difference) from error
            error.add_note(f"in {where}{f': {difference}' if difference else ''}")
            raise

    def _end_epoch(
        self,
        passes: DataPasses,
        callbacks: Sequence[Callback],
        validation: tuple[DataPasses, BatchPlacer] | None,
    ) -> None:
        """Reads the epoch's metrics and validates; drops an epoch without steps."""
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
            passes, placer = validation
            self.validation_steps = passes.num_steps
            self._notify(callbacks, "on_validation_start")
            values = self._evaluate("fit: validation", passes, placer, callbacks)
            logs.update({f"val_{name}": value for name, value in values.items()})
        if now.steps_per_epoch is None and not self.stopped:
            self.position = replace(now, steps_per_epoch=now.step_in_epoch)
        self.history.add(now.epoch, logs)
        self._notify(callbacks, "on_epoch_end", now.epoch, logs)
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

    def _evaluate(
        self,
        name: str,
        passes: DataPasses,
        placer: BatchPlacer,
        callbacks: Sequence[Callback] = (),
    ) -> dict[str, Any]:
        metrics: Metrics | None = None
        pending: deque[PyTree] = deque()
        for number, batch in enumerate(passes.epoch(), 1):
            with self._located(f"{name}: batch {number}", [batch], placer):
                placed = placer(batch)
                metrics = self._call(
                    lambda batch, metrics=metrics: self.eval_step(
                        self.state, batch, metrics
                    ),
                    [placed],
                    placer,
                )
            check_metrics(self, "eval_step", metrics)
            pending.append(metrics)
            if len(pending) > _MAX_PENDING:
                _wait_for(pending.popleft())
            self._notify(callbacks, "on_validation_step_end", number)
        return {} if metrics is None else metrics.to_host()

    def _validation(
        self, data: Data | PyTree | None, batch_size: int | None, epochs: int
    ) -> tuple[DataPasses, BatchPlacer] | None:
        if data is None:
            return None
        source: Any = data
        if are_arrays(data):
            source = batches_from("fit", "validation_data", data, None, batch_size)
        placer = self._placer(source)
        if isinstance(source, DistributedDataset):
            source = source.restarted()  # every validation measures the same rows
        return DataPasses("validation_data", source, num_epochs=epochs), placer

    def _placer(self, data: Data, *, needs_weights: bool = True) -> BatchPlacer:
        check_weights(data, self._weights)
        layout = data_layout(mesh_of(self.state), self._data_layout)
        # Once one batch carries weights, all do: otherwise the step compiles twice.
        pad = self._has_padded or (self._pad and not is_even(data, layout))
        self._has_padded = pad = pad and not self._takes_no_weights
        return BatchPlacer(layout, self._weights, pad=pad, needs_weights=needs_weights)


def _wait_for(metrics: PyTree) -> None:
    """Waits until metrics are computed; a step of the user's may have used them up."""
    for leaf in jax.tree.leaves(metrics):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.block_until_ready()


def _hosts(group: list[PlacedBatch]) -> list[Batch]:
    """Returns the host batches of those that the trainer placed."""
    return [placed.batch if placed.host is None else placed.host for placed in group]


def _check_loss_fn(loss_fn: Any) -> None:
    """Raises MeshLayoutError unless this can be called with a model and a batch."""
    extras = {"rngs", "train"}
    try:
        names = {*inspect.signature(loss_fn).parameters} - extras
    except (TypeError, ValueError):
        names = {"model", "batch"}
    if len(names) < 2 or not callable(loss_fn):
        _checks.function("loss_fn", loss_fn, "model", "batch", where="Trainer")


def _options_for(make: Callable[..., Any], options: StepOptions) -> dict[str, Any]:
    """Returns the options that a `make_*_step` function accepts."""
    taken = inspect.signature(make).parameters
    return {name: value for name, value in options.items() if name in taken}
