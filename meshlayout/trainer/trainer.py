"""`Trainer`: fit, evaluate and predict, on the public steps."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding

from meshlayout import _checks, _jax, losses
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import batch_layout, num_examples, num_row_shards
from meshlayout.checkpoint.input import Data
from meshlayout.data import DistributedDataset
from meshlayout.errors import MeshLayoutError, did_you_mean
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.state.precision import Precision
from meshlayout.step import make_eval_step, make_predict_step, make_train_step
from meshlayout.step.compiled_step import OnRecompile
from meshlayout.step.objective import check_loss_fn, check_weights
from meshlayout.step.remat import Remat
from meshlayout.step.updates import OnNonfinite
from meshlayout.trainer.array_batches import are_arrays, batches_from
from meshlayout.trainer.batch_placement import BatchPlacer, PlacedBatch
from meshlayout.trainer.callbacks import Callback
from meshlayout.trainer.epochs import TrainerInput, TrainingPosition
from meshlayout.trainer.fit_loop import FitLoop, evaluate
from meshlayout.trainer.history import History


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
        _check_options(options)
        pad = _checks.flag("pad", pad, where="Trainer")
        if predict_fn is not None:
            check_loss_fn("predict_fn", "Trainer", predict_fn)
        if loss_fn is not None:
            check_loss_fn("loss_fn", "Trainer", loss_fn)
        else:
            _refuse_needless(metrics, options)
        self.state = state
        self.history = History()
        self.position = TrainingPosition()
        self.stopped = ""
        self.steps_in_call = 1
        self.input: TrainerInput | None = None
        self.validation_steps: int | None = None
        self._is_fitting = False
        self._loss_fn, self._predict_fn = loss_fn, predict_fn
        self._data_layout, self._pad = data_layout, pad
        self._has_padded = self._takes_no_weights = False
        self._weights = options.get("weights", "weight")
        check_weights(self._weights)
        size: Any = options.get("steps_per_call", 1)
        if size != "auto":
            hint = 'It may also be "auto".'
            _checks.count("steps_per_call", size, where="Trainer", hint=hint)
        self._group_size = _AUTO_BATCHES if size == "auto" else size
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
            predict_fn = _outputs_of(self._loss_fn)
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
            raise self._missing("train_step")
        # A batch may be a list itself, of arrays.
        if self._group_size == 1 or not isinstance(batch, list):
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
            raise self._missing("eval_step")
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
            raise self._missing("predict_step")
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
        if self._is_fitting:
            msg = (
                "fit was called inside a fit of the same trainer, by a callback or the "
                "data. Call it after that one has returned, or make another Trainer."
            )
            raise MeshLayoutError(msg)
        num_epochs: Any = epochs
        if isinstance(labels, (int, np.integer)):  # fit(batches, epochs)
            if epochs != 1:
                msg = f"fit: epochs is given twice, as {labels!r} and {epochs!r}."
                raise MeshLayoutError(msg)
            labels, num_epochs = None, labels
        epochs = _checks.count("epochs", num_epochs, where="fit")
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
        data = batches_from("fit", "train", train, labels, batch_size, shuffle=shuffle)
        source = self._input(
            "fit",
            "train",
            data,
            steps_per_epoch=steps_per_epoch,
            num_epochs=epochs,
            # What a subclass's own steps make of weights is not known.
            weights=None if self._loss_fn is None else self._weights,
        )
        loop = FitLoop(
            self,
            source,
            self._validation(validation_data, batch_size, epochs),
            callbacks,
            group_size=self._group_size,
            progress=progress,
        )
        step, num_done = self.position.step, len(self.history.epochs)
        if isinstance(self.state, TrainState):
            step = int(self.state.step)  # the only wait, before the first step
        self.position = TrainingPosition(
            num_done, num_done + epochs, step, steps_per_epoch=source.num_steps
        )
        self.stopped = self.history.stopped = ""
        self.history._shown_in = None
        self.input, self._is_fitting = source, True
        try:
            loop.run(resume=resume)
        finally:
            self._is_fitting = False
        return self.history

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
        return evaluate(self, self._input("evaluate", "data", data))

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
        source = self._input("predict", "data", data, needs_weights=False)
        predictions: list[PyTree] = []
        pending: tuple[PlacedBatch, PyTree] | None = None
        for group in source.groups():
            with source.located(group):
                outputs = self.predict_step(self.state, group[0].batch)
            # Read while the device computes the next batch.
            if pending is not None:
                predictions.append(source.placer.real_outputs(*pending))
            pending = group[0], outputs
        if pending is not None:
            predictions.append(source.placer.real_outputs(*pending))
        try:
            return jax.tree.map(lambda *parts: np.concatenate(parts), *predictions)
        except ValueError as error:
            msg = (
                "predict: the outputs of the batches do not fit together; each must be "
                "the same tree of arrays, which differ in their first dim only."
            )
            raise MeshLayoutError(msg) from error

    def stop(self, reason: str) -> None:
        """Ends training after the current step or epoch.

        Args:
            reason: Why, for `stopped`, the history and the progress.

        Raises:
            MeshLayoutError: If it is not a text, or empty.
        """
        if not isinstance(reason, str) or not reason:
            msg = (
                f"stop: reason must be a non-empty string, got {_checks.shown(reason)}."
            )
            raise MeshLayoutError(msg)
        self.stopped = self.stopped or reason

    def __repr__(self) -> str:
        name = type(self).__name__
        now, stopped = self.position, f", stopped: {self.stopped}" * bool(self.stopped)
        return f"{name}({len(self.history.epochs)} epochs, step {now.step}{stopped})"

    # What the loops need.

    def _missing(self, step: str) -> MeshLayoutError:
        """Returns the error for a step with neither a loss function nor an override."""
        msg = (
            f"{type(self).__name__} has no loss function to make its {step} from: give "
            f"loss_fn, or override {step} in a subclass."
        )
        return MeshLayoutError(msg)

    def _check_steps(self) -> None:
        """Raises StepError if a train step of the epoch was not finite; waits."""
        for step in (self._many, self._one):
            if step is not None:
                step.check()

    def _validation(
        self, data: Data | PyTree | None, batch_size: int | None, epochs: int
    ) -> TrainerInput | None:
        if data is None:
            return None
        source: Any = data
        if are_arrays(data):
            source = batches_from("fit", "validation_data", data, None, batch_size)
        if isinstance(source, DistributedDataset):
            source = source.restarted()  # every validation measures the same rows
        where = "fit: validation"
        return self._input(where, "validation_data", source, num_epochs=epochs)

    def _input(
        self,
        where: str,
        name: str,
        data: Any,
        *,
        needs_weights: bool = True,
        **options: Any,
    ) -> TrainerInput:
        """Returns data as the loops take it; see `TrainerInput` for the options."""
        mesh, layout = _mesh_of(self.state), self._data_layout
        if layout is not None and not isinstance(layout, Layout):
            layout = Layout(layout, mesh)
        elif layout is None and mesh is not None:
            layout = batch_layout(mesh)
        # Once one batch carries weights, all do: otherwise the step compiles twice.
        pad = self._has_padded or (self._pad and not _is_even(data, layout))
        self._has_padded = pad = pad and not self._takes_no_weights
        placer = BatchPlacer(
            layout, self._weights, pad=pad, needs_weights=needs_weights
        )
        return TrainerInput(where, name, data, placer, **options)


def _mesh_of(state: PyTree) -> Mesh | None:
    """Returns the mesh of a state, or None if it is not on one."""
    for leaf in jax.tree.leaves(state):
        if isinstance(_jax.sharding_of(leaf), NamedSharding):
            return Layout.of(leaf).mesh
    return None


def _is_even(data: Any, layout: Layout | None) -> bool:
    """Returns whether data is known to need no padding: a list of equal batches."""
    if not isinstance(data, (list, tuple)):
        return False
    try:
        sizes = {num_examples(batch) for batch in data}
    except MeshLayoutError:  # it is raised where the batch is placed, with its number
        return False
    shards = 1 if layout is None else num_row_shards(layout)
    return len(sizes) == 1 and sizes.pop() % shards == 0


def _check_options(options: Mapping[str, Any]) -> None:
    """Raises MeshLayoutError for options that do not exist."""
    known = [*StepOptions.__annotations__]
    for name in options:
        if name not in known:
            near = did_you_mean(name, [*inspect.signature(Trainer).parameters, *known])
            msg = (
                f"Trainer has no option {name!r}.{near} Those of its steps are "
                f"{', '.join(known)}."
            )
            raise MeshLayoutError(msg)


def _refuse_needless(
    metrics: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> None:
    """Raises MeshLayoutError for what only steps made from a loss function have."""
    names = [name for name in options if name not in ("weights", "steps_per_call")]
    names += [] if metrics is None else ["metrics"]
    if names:
        msg = (
            f"Trainer was given no loss function, and {', '.join(names)} for the steps "
            "that are made from it. Give loss_fn, or leave these to your own steps."
        )
        raise MeshLayoutError(msg)


def _options_for(make: Callable[..., Any], options: StepOptions) -> dict[str, Any]:
    """Returns the options that a `make_*_step` function accepts."""
    taken = inspect.signature(make).parameters
    return {name: value for name, value in options.items() if name in taken}


def _outputs_of(loss_fn: Callable[..., Any]) -> Callable[[Any, Batch], PyTree]:
    """Returns a function of a model and a batch that returns the loss's outputs."""
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    asked = inspect.signature(loss_fn).parameters

    def outputs(model: Any, batch: Batch) -> PyTree:
        extras: dict[str, Any] = {"train": False} if "train" in asked else {}
        if "rngs" in asked:
            extras["rngs"] = nnx.Rngs(0)
        result = loss_fn(model, batch, **extras)
        if not isinstance(result, tuple) or not result[1]:
            msg = (
                f"predict: {name} returns losses and no outputs. Return a pair of "
                "losses and a dict of outputs, or give the trainer a "
                "predict_fn(model, batch)."
            )
            raise MeshLayoutError(msg)
        return result[1]

    return outputs
