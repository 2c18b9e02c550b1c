"""`Trainer`: fit, evaluate and predict, on the public steps.

`TrainerInput` reads the data, `TrainerSteps` makes the steps from a loss function.
"""

import contextlib
import functools
import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from meshlayout import _checks, _jax, errors
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import noted_batch, num_examples
from meshlayout.cluster.preemption import Preempted, Preemption, interrupts_later
from meshlayout.data import PipelineReport
from meshlayout.data.adapters.arrays import is_columns
from meshlayout.data.plan import checked_seed
from meshlayout.errors import MeshLayoutError
from meshlayout.layout_map import LayoutMap
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.step.train_step import check_state
from meshlayout.trainer.callbacks import Callback, Checkpoint, Progress, StopOnNaN
from meshlayout.trainer.callbacks.callback import checked_callbacks
from meshlayout.trainer.epochs import (
    Data,
    PlacedBatch,
    TrainerInput,
    TrainingPosition,
    checked_columns,
    has_rows,
    real_rows,
    split_rows,
)
from meshlayout.trainer.history import History, scalars, unseen
from meshlayout.trainer.steps import PredictFn, TrainerSteps, checked_metrics


_FIELDS = "state", "history", "position", "stopped", "steps_in_call", "input"
_NAN = (
    "the {0} is NaN, as too high a learning rate makes it, NaN in the data, or labels "
    "or embedding indices out of range (-1 is the last one, -100 NaN). Parameters that "
    "are NaN stay so: create the state and the trainer again. "
    "callbacks=[ml.callbacks.StopOnNaN({0!r})] stops, on_nonfinite='skip' leaves such "
    "steps out; jax_debug_nans finds them."
)


@_checks.user_call
class Trainer(_checks.WithReflexes):
    """Trains, evaluates and predicts; you may override each of its steps.

    The loop is `state, metrics = train_step(state, batch, metrics)`, and waits for the
    device only at the end of an epoch. A subclass may override the steps.

    Data is an iterable of batches, or arrays and a `batch_size`. Batches on devices are
    used unchanged. Others are sharded over the mesh axes called `batch`, `data`,
    `replica`, `fsdp`, `dp`, `ddp` or `data_parallel`, and a short batch is padded to
    the size of the first. Weights of 0 mark the padding, under the key `weight` or the
    one given as `weights=` (for a tuple, an index). If padding cannot be left out (the
    loss is a mean, or a tuple has no weights), a short batch keeps its size.

    Args:
        state: A `TrainState`, or for subclasses any tree of arrays. It is used up.
        loss_fn: As for `make_train_step`; omit it if a subclass overrides the steps.
        metrics: Metrics besides the loss, by name.
        layouts: The layout map that `constrain` applies in the model; the parameters'
            own goes to `TrainState.create`.
        predict_fn: A function of a model in evaluation mode and a batch, for `predict`.
        pad: Whether batches get weights and padding where possible.
        **options: Options of `make_train_step`, such as `clip_norm=1.0`. With
            `steps_per_call=n`, `train_step` gets a list of up to n batches.

    Attributes:
        state: The state after the last finished step.
        history: The finished epochs of all calls of `fit`.
        position: How far training is; a `TrainingPosition`.
        stopped: Why training ends early; empty if it does not.

    Examples:
        >>> import optax
        >>> from flax import nnx
        >>> build = lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> state = TrainState.create(build, optax.sgd(0.1))
        >>> loss_fn = lambda model, batch: (model(batch[0]) - batch[1]) ** 2
        >>> x = np.random.default_rng(0).normal(size=(20, 2)).astype("float32")
        >>> y = x @ np.array([[2.0], [3.0]], "float32")
        >>> trainer = Trainer(state, loss_fn)
        >>> history = trainer.fit(x, y, epochs=30, batch_size=8, progress=False)
        >>> history["loss"][-1] < 0.01, trainer.predict(x, batch_size=8).shape
        (True, (20, 1))
    """

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
        for name in ("train_step", "eval_step"):  # which a subclass may define
            where = f"{type(self).__name__}.{name}"
            _checks.function(where, getattr(self, name), "state", "batch", "metrics")
        self._steps = TrainerSteps(loss_fn, predict_fn, metrics, layouts, options)
        has_own = type(self).train_step is not Trainer.train_step
        if isinstance(state, TrainState):
            state._refuse_used_up()
            if layouts is not None:
                _check_layouts(state, layouts)
        elif loss_fn and not has_own and jax.tree.leaves(state):  # else it comes later
            check_state("Trainer", state)
        # Whether the loss can leave padding out; None until it is asked.
        self._pads: bool | None = None if pad else False
        self.state: PyTree = state
        self.history, self.position = History(), TrainingPosition()
        self.stopped, self.steps_in_call = "", 1
        # Of the running `fit`: its data, callbacks, and metrics of the epoch so far.
        self.input: TrainerInput | None = None
        self._validation: TrainerInput | None = None
        self._callbacks: list[Callback] = []
        self._metrics: Metrics | None = None
        self._columns: dict[str, list[Any]] = {}  # of the data frames of `fit`
        self._report = PipelineReport()  # of a `fit`; it says nothing twice

    def __setattr__(self, name: str, value: object) -> None:
        if type(self) is Trainer and name[0] != "_" and name not in _FIELDS:
            getattr(self, name)  # raises, with what to write: it would change nothing
        if name == "history" and not isinstance(value, History):
            raise MeshLayoutError("history takes a History: ml.History() is empty.")
        super().__setattr__(name, value)

    def train_step(
        self, state: PyTree, batch: Batch, metrics: Metrics | None
    ) -> tuple[PyTree, Metrics]:
        """Returns the next state, and the metrics of the epoch including this step.

        `batch` is a global batch or, with `steps_per_call`, a list of them. `metrics`
        is None at the beginning of an epoch. The state may be used up. Padding has
        weight 0: divide `losses.weighted_sum` by the sum of the weights.
        """
        return self._steps.train(state, batch, metrics)

    def eval_step(
        self, state: PyTree, batch: Batch, metrics: Metrics | None
    ) -> Metrics:
        """Measures one batch, like `train_step`; the state is not used up."""
        self._steps.check("eval_step", batch)
        return self._steps.eval_step(state, batch, metrics)

    def predict_step(self, state: PyTree, batch: Batch) -> PyTree:
        """Returns the model's predictions for one batch; the state is not used up."""
        return self._steps.predict(state, batch)

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

        `fit(x, y, epochs=5, batch_size=32)` trains on arrays, in batches `(x, y)`
        (dicts for a dict of arrays); `fit(batches, 5)` on batches. After Ctrl-C, or an
        error in the data or a callback, another `fit` continues from the last step.

        With a `Checkpoint` among the callbacks, a SIGTERM to any process saves after
        the running step and ends the process with status 75: `Preempted` is raised.
        With `resume=True`, a run continues from the newest intact checkpoint at the
        exact batch, with the bits of an uninterrupted run. Data without `get_state`
        must repeat the same batches.

        Args:
            train: An iterable of batches, read again in each epoch, or a function that
                returns one; or examples, as arrays or as an object with `__getitem__`.
            labels: More arrays of the same examples; after batches, `epochs`.
            epochs: The number of further epochs; with `resume=True`, of all epochs.
            batch_size: Rows of a global batch, for arrays and examples. With it, items
                of a list or indexable object are examples; without it, batches.
            shuffle: The seed of the order of arrays' rows in each epoch; None keeps it.
            steps_per_epoch: Batches per epoch; the next one continues where it stopped.
            validation_data: Data to evaluate after each epoch; names begin with `val_`.
            validation_split: The share of the arrays' last rows to hold out instead.
            callbacks: Of `ml.callbacks.Callback`, called in order, `Checkpoint` last.
            progress: Whether to show progress, if no callback is a `Progress`.
            verbose: Keras' name for `progress`; 0 shows none.
            resume: Whether to resume from the newest save of the first `Checkpoint`.

        Returns:
            The history of all epochs, including those of an earlier `fit`.
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
        seed, self._report = checked_seed(shuffle, "fit"), PipelineReport()
        chosen = checked_callbacks(callbacks)
        has_progress = any(isinstance(x, Progress) for x in chosen)
        if progress and verbose != 0 and not has_progress:
            chosen.append(Progress())  # with values that others add
        # Those that save come last: what others do, such as stopping, is saved.
        chosen.sort(key=lambda x: isinstance(x, Checkpoint))
        checkpoints = [x for x in chosen if isinstance(x, Checkpoint)]
        if resume and not checkpoints:
            msg = "fit(resume=True) needs a Checkpoint among the callbacks, to resume"
            raise MeshLayoutError(f"{msg} from: ml.callbacks.Checkpoint(checkpointer).")
        data = train if labels is None else (train, labels)
        trained = self._columns if self.history.epochs else {}
        self._columns = checked_columns("fit", data, trained) | trained
        if validation_split is not None:
            if validation_data is not None or not has_rows(data, batch_size):
                msg = "fit: validation_split= holds out rows of arrays. Of batches, or"
                raise MeshLayoutError(f"{msg} beside it, give validation_data= alone.")
            data, validation_data = split_rows(data, batch_size, validation_split)
        arguments = data, batch_size, seed, steps_per_epoch
        source, self._validation = TrainerInput(self, "fit", "train", *arguments), None
        if validation_data is not None:
            if type(self).eval_step is Trainer.eval_step:
                _check_form(data, validation_data)
            kind = None if is_columns(data) else batch_size  # examples, as train is
            size = batch_size if has_rows(validation_data, kind) else None
            names = "fit: validation", "validation_data"
            self._validation = TrainerInput(self, *names, validation_data, size)
        step, num_done = self.position.step, len(self.history.epochs)
        if isinstance(self.state, TrainState):
            step = int(self.state.step)  # waits, but nothing is running yet
        self.position = TrainingPosition(
            num_done, num_done + epochs, step, steps_per_epoch=source.num_steps
        )
        self.stopped = self.history.stopped = ""
        self.input, self._callbacks, self._metrics = source, chosen, None
        if resume:
            self._metrics = checkpoints[0].resume(self, source)
        with contextlib.ExitStack() as closing:
            preemption = closing.enter_context(Preemption()) if checkpoints else None
            for callback in chosen:
                closing.callback(callback.close)
            self._check_monitors({})
            self._notify("on_fit_start")
            while self.position.epoch < self.position.last_epoch and not self.stopped:
                self._train_epoch(source, preemption)
                self._end_epoch(source)
                self._end_if_preempted(preemption)
            self._notify("on_fit_end")
        return self.history

    def evaluate(
        self,
        data: Data | PyTree,
        labels: PyTree = None,
        *,
        batch_size: int | None = None,
    ) -> dict[str, Any]:
        """Returns the loss and the metrics of the state on data like that of `fit`.

        The values are floats by name, and NumPy arrays for metrics with dims.
        """
        data = data if labels is None else (data, labels)
        return self._evaluate(TrainerInput(self, "evaluate", "data", data, batch_size))

    def predict(
        self,
        data: Data | PyTree,
        *,
        batch_size: int | None = None,
        predict_fn: PredictFn | None = None,
    ) -> PyTree:
        """Returns the predictions for all rows of a dataset, in order, as NumPy arrays.

        Data with the structure of that in `fit` goes through the loss function, whose
        outputs are returned. Data without labels goes to the model (as does all data if
        there is no loss function), a frame as one array, or by columns if `fit` had one
        alone. To call something else, give `predict_fn`. Padding is left out.
        """
        step, key = self.predict_step, self._steps.weights
        if predict_fn is not None:
            step = functools.partial(self._steps.predict, predict_fn=predict_fn)
        source = TrainerInput(self, "predict", "data", data, batch_size)
        parts: list[PyTree] = []
        pending: deque[tuple[PlacedBatch, PyTree]] = deque()
        for (placed,) in source.groups():
            with noted_batch(source.where, placed.batch):
                pending.append((placed, step(self.state, placed.batch)))
            if len(pending) > 1:  # read while the device computes the next batch
                parts.append(real_rows(*pending.popleft(), key))
        parts.append(real_rows(*pending.popleft(), key))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    def stop(self, reason: str) -> None:
        """Ends training after the current step or epoch, and says why."""
        self.stopped = self.history.stopped = self.stopped or reason

    def __repr__(self) -> str:
        stopped = f", stopped: {self.stopped}" if self.stopped else ""
        epochs, step = len(self.history.epochs), self.position.step
        return f"{type(self).__name__}({epochs} epochs, step {step}{stopped})"

    def _train_epoch(self, source: TrainerInput, preemption: Preemption | None) -> None:
        epoch = len(self.history.epochs) + 1
        is_new = self._metrics is None  # else restored, with the position in the epoch
        start = {"step_in_epoch": 0, "examples_in_epoch": 0} if is_new else {}
        self.position = replace(self.position, epoch=epoch, **start)
        self._notify("on_epoch_start", epoch)
        for group in source.groups(self._steps.group_size, text=f" of epoch {epoch}"):
            with noted_batch(source.where, group[0].batch):
                self._train(group, source.size)
            if self.position.step_in_fit == len(group):
                self._check_monitors(self._metrics or {})
            self._notify("on_step_end", self.position.step, self._metrics)
            self._end_if_preempted(preemption)
            if self.stopped:
                break

    def _train(self, group: list[PlacedBatch], first_rows: int) -> None:
        position, count = self.position, len(group)
        batches = [placed.batch for placed in group]
        rows = sum(placed.num_examples for placed in group)
        # The call donates the state: until the result is assigned, Ctrl-C must wait.
        with interrupts_later(patience=2), contextlib.ExitStack() as quiet:
            # New data and a short batch take a new program, of which the user knows.
            is_short = any(num_examples(x) != first_rows for x in batches)
            if not position.step_in_fit or (first_rows and is_short):
                quiet.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore", errors.RecompileWarning)
            batch = batches if self._steps.group_size > 1 else batches[0]
            result: Any = self.train_step(self.state, batch, self._metrics)
            is_pair = isinstance(result, tuple) and len(result) == 2
            state, metrics = result if is_pair else (self.state, result)
            self.state, self._metrics = state, checked_metrics("train_step", metrics)
            self.steps_in_call = count
            self.position = replace(
                position,
                step=position.step + count,
                step_in_fit=position.step_in_fit + count,
                step_in_epoch=position.step_in_epoch + count,
                examples_in_epoch=position.examples_in_epoch + rows,
            )

    def _end_epoch(self, source: TrainerInput) -> None:
        """Reads the epoch's metrics and validates; drops an epoch without steps."""
        position, metrics, self._metrics = self.position, self._metrics, None
        if source.is_over:
            self.stop(f"the training data ended at step {position.step}")
        if metrics is None:  # the data ended exactly with the epoch before
            self.position = replace(position, epoch=position.epoch - 1)
            return
        logs = metrics.to_host()
        if self._validation is not None and not self.stopped:
            self._notify("on_validation_start")
            values = self._evaluate(self._validation)
            logs.update({f"val_{name}": value for name, value in values.items()})
        self.history.add(position.epoch, logs)
        nan = [x for x in ("loss", "val_loss") if math.isnan(scalars(logs).get(x, 0.0))]
        watched = [x._monitor for x in self._callbacks if isinstance(x, StopOnNaN)]
        if nan and nan[0] not in watched:
            self._report.warn(_NAN.format(nan[0]))
        self._notify("on_epoch_end", position.epoch, logs)

    def _check_monitors(self, metrics: Mapping[str, Any]) -> None:
        """Refuses a callback whose value will never exist, as soon as that is known."""
        has_val = self._validation is not None
        names = [*metrics, *(f"val_{name}" for name in metrics if has_val)]
        is_own = type(self).eval_step is not Trainer.eval_step
        # A user's callback may add values, which later ones can watch.
        adds = [not x.__module__.startswith("meshlayout.") for x in self._callbacks]
        for number, callback in enumerate(self._callbacks, 1):
            name = callback._monitor
            size = np.size(metrics.get(name.removeprefix("val_"), 0.0))
            fact = f"{name!r} has {size} values: watch a scalar, as of average='macro'."
            if name in names and size > 1:
                raise MeshLayoutError(f"{type(callback).__name__}: {fact}")
            if not name or any(adds[:number]) or name in names:
                continue
            is_val = name.startswith("val_")
            if (is_val and not has_val) or (metrics and not (is_val and is_own)):
                known = ", ".join(map(repr, names)) or "what a step returns"
                fact = f"there will be no {name!r}, only {known}.{unseen(name, names)}"
                fact += " If a later callback adds it, list that one first." * any(adds)
                raise MeshLayoutError(f"{type(callback).__name__}: {fact}")

    def _end_if_preempted(self, preemption: Preemption | None) -> None:
        """Saves and raises Preempted after SIGTERM; called after each step."""
        if preemption is not None and preemption.is_due():
            for callback in self._callbacks:
                if isinstance(callback, Checkpoint):
                    callback.save_now(self, self._metrics)
            raise Preempted(self.position.step)

    def _evaluate(self, source: TrainerInput) -> dict[str, Any]:
        metrics, limit = None, 10 * self.position.step_in_epoch + 100
        for number, (placed,) in enumerate(source.groups()):
            if number == limit and source is self._validation:
                fact = f"validation has not ended after {number} batches: is its data"
                way_out = "Use lambda: itertools.islice(data, n)."
                self._report.warn(f"{fact} endless? {way_out}")
            with noted_batch(source.where, placed.batch):
                metrics = self.eval_step(self.state, placed.batch, metrics)
            checked_metrics("eval_step", metrics)
        return {} if metrics is None else metrics.to_host()

    def _notify(self, moment: str, *args: Any) -> None:
        where = f"at step {self.position.step}, epoch {self.position.epoch}"
        for callback in self._callbacks:
            with _checks.noted(f"in {type(callback).__name__}.{moment}, {where}"):
                getattr(callback, moment)(self, *args)
                if moment == "on_epoch_end":  # it may have added values of its own
                    self.history.add(*args)

    def _accepts(self, batch: Batch, *, train: bool) -> bool:
        """Returns whether the loss can leave examples out; a mean cannot."""
        name = "train_step" if train else "eval_step"
        # Nobody knows what a subclass's own steps do with weights.
        is_own = getattr(type(self), name) is not getattr(Trainer, name)
        if self._pads is None and not is_own and self._steps.loss_fn is not None:
            step = self._steps.single_step if train else self._steps.eval_step
            try:
                step.trace(self.state, batch)
                self._pads = True
            except (errors.LossError, errors.MetricError):
                self._pads = False
        return self._pads is not False


def _check_form(data: PyTree, validation: PyTree) -> None:
    """Refuses validation arrays in a form other than that of the training arrays."""
    pair = data, validation
    is_tuple = [isinstance(x, tuple) for x in pair]
    is_dict = [isinstance(x, Mapping) or hasattr(x, "columns") for x in pair]
    if all(map(is_columns, pair)) and any(x != y for x, y in (is_tuple, is_dict)):
        theirs, mine = map(_checks.type_text, pair)
        names = data if isinstance(data, Mapping) else ()
        form = ", ".join(f"{name!r}: {name}v" for name in names)
        way = "(xv, yv)" if is_tuple[0] else f"{{{form}}}" if form else theirs
        msg = f"fit: validation_data is {mine}, and the training data {theirs}: write"
        raise MeshLayoutError(f"{msg} {way}.")


def _check_layouts(state: TrainState, layouts: LayoutMap) -> None:
    """Refuses a state on another mesh, or with parameters that do not follow a map."""
    now: Any = _jax.sharding_of(state.step)
    params = layouts.resolve(state.params).resolutions
    # To a map for activations alone, parameters are whole.
    others = [x for x in params if x.placed and not x.layout.is_fully_replicated]
    if others or getattr(now, "mesh", None) not in (None, layouts.mesh.jax_mesh):
        msg = "Trainer: the state does not lie as layouts= says. Give them to"
        raise MeshLayoutError(f"{msg} TrainState.create(build, optimizer, layouts).")
