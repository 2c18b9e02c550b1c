"""`Trainer`: fit, evaluate and predict, on the public steps.

This file has the methods that users call and override; their arguments are checked
here, once. `FitLoop` runs the epochs, `TrainerInput` reads the data, `BatchPlacer` puts
batches on the mesh, and `TrainerSteps` makes the steps from a loss function.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshlayout import _checks, _jax
from meshlayout._annotations import Batch, PyTree
from meshlayout._batches import batch_layout, num_examples, num_row_shards
from meshlayout._tracebacks import user_call
from meshlayout.data import DistributedDataset
from meshlayout.data.adapters.arrays import is_columns
from meshlayout.data.plan import checked_seed
from meshlayout.errors import MeshLayoutError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap
from meshlayout.mesh import Mesh
from meshlayout.metrics import Metrics
from meshlayout.state import TrainState
from meshlayout.trainer.batch_placement import BatchPlacer, PlacedBatch
from meshlayout.trainer.callbacks import Callback
from meshlayout.trainer.epochs import Restarted, TrainerInput, TrainingPosition
from meshlayout.trainer.fit_loop import FitLoop, evaluate
from meshlayout.trainer.history import History
from meshlayout.trainer.passes import Data
from meshlayout.trainer.steps import StepOptions, TrainerSteps, check_options
from meshlayout.trainer.tables import batches_from


class Trainer:
    """Trains, evaluates and predicts; you may override each of its steps.

    Use this for a training loop with epochs, validation, callbacks and resuming. The
    loop is the usual one, `state, metrics = train_step(state, batch, metrics)`, and
    waits for the device only at the end of an epoch, and where a callback reads a
    value. A subclass may define `train_step`, `eval_step` or `predict_step` with the
    same signatures; if it defines all that it uses, the state may be any tree of
    arrays.

    Data is an iterable of batches, or arrays and a `batch_size`. Batches that are
    already on devices are used unchanged. Batches of NumPy arrays are sharded over the
    mesh, and a short batch is padded to the size of the first, so that one program
    serves all. To mark the padding, with weight 0, batches get weights: in a dict under
    the key `weight` (or another one, `weights=`), in a tuple at the end if `weights` is
    that index. A list of batches that need no padding gets no weights. If nothing can
    mark padding (the loss function returns a mean, or a tuple has no place for
    weights), a short batch keeps its size, for which a second program is compiled.

    Args:
        state: A `TrainState`, or any tree of arrays for a subclass. Training uses it
            up; `trainer.state` is always the newest state.
        loss_fn: As for `make_train_step`. A subclass that overrides the steps needs
            none.
        metrics: Metrics besides the loss, by name; in training and validation.
        layouts: The layout map that `constrain` follows in the model.
        predict_fn: A function of the model, in evaluation mode, and a batch, for
            `predict`; by default the outputs of the loss function.
        data_layout: The layout of all arrays of a batch, or its entries, such as
            `("batch", ...)`. By default the first dim is sharded over the mesh axes
            called `batch`, `data`, `replica`, `fsdp`, `dp`, `ddp` or `data_parallel`.
        pad: Whether batches get weights and padding where possible.
        **options: Options of `make_train_step`, such as `clip_norm=1.0`, and of
            `make_eval_step`, as far as it has them. With `steps_per_call=n`, a call of
            the train step takes a list of n batches ("auto": 8); batches left over at
            the end of an epoch come one by one, each in a list of its own.

    Attributes:
        state: The state after the last finished step.
        history: The finished epochs of all calls of `fit`.
        position: How far training is; a `TrainingPosition`.
        stopped: Why training stops before its last epoch; empty if it does not.
        steps_in_call: The number of steps in the last call of the train step.
        validation_steps: The number of batches in a validation; None if not known.
        input: The data of the running `fit` and the position in it, for callbacks that
            save it.

    Raises:
        MeshLayoutError: If an option does not exist, or needs a loss function.
        StepError: If an option of the steps is wrong.

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
        ...     return jnp.square(model(batch["x"]) - batch["y"])
        >>> x = np.random.default_rng(0).normal(size=(20, 2)).astype("float32")
        >>> data = {"x": x, "y": x @ np.array([[2.0], [3.0]], "float32")}
        >>> def batches():
        ...     for i in range(0, 20, 8):
        ...         yield {name: rows[i : i + 8] for name, rows in data.items()}
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
        check_options(options, inspect.signature(Trainer).parameters)
        pad = _checks.flag("pad", pad, where="Trainer")
        self._steps = TrainerSteps(loss_fn, predict_fn, metrics, layouts, options)
        self.state = state
        self.history = History()
        self.position = TrainingPosition()
        self.stopped = ""
        self.steps_in_call = 1
        self.input: TrainerInput | None = None
        self.validation_steps: int | None = None
        self._is_fitting = False
        self._has_loss = loss_fn is not None
        self._data_layout, self._pad = data_layout, pad
        # Whether a dataset was padded, and whether the loss function turned out to
        # return a mean, which cannot leave padding out.
        self._has_padded = self._takes_no_weights = False

    # The steps.

    def train_step(
        self, state: PyTree, batch: Batch, metrics: Metrics | None
    ) -> tuple[PyTree, Metrics]:
        """Runs one step; may be overridden.

        Args:
            state: The state, which may be used up.
            batch: A global batch; with `steps_per_call`, a list of batches, or of a
                single one that is left over.
            metrics: The metrics of the epoch so far; None at its beginning.

        Returns:
            The next state, and the metrics including this step.

        Raises:
            MeshLayoutError: If there is no loss function.
        """
        result = self._steps.train(state, batch, metrics)
        if result is None:
            raise self._missing("train_step")
        return result

    def eval_step(
        self, state: PyTree, batch: Batch, metrics: Metrics | None
    ) -> Metrics:
        """Measures one batch; may be overridden.

        Args:
            state: The state, which is not used up.
            batch: A global batch.
            metrics: The metrics of the batches so far; None at the beginning.

        Raises:
            MeshLayoutError: If there is no loss function.
        """
        if self._steps.evaluate is None:
            raise self._missing("eval_step")
        return self._steps.evaluate(state, batch, metrics)

    def predict_step(self, state: PyTree, batch: Batch) -> PyTree:
        """Returns the model's predictions for one batch; may be overridden.

        Args:
            state: The state, which is not used up.
            batch: A global batch.

        Raises:
            MeshLayoutError: If there is neither a `predict_fn` nor a loss function.
        """
        if self._steps.predict is None:
            raise self._missing("predict_step")
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
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
        resume: bool = False,
    ) -> History:
        """Trains for a number of epochs, or resumes an interrupted run.

        `fit(x, y, epochs=5, batch_size=32)` trains on arrays; batches are tuples
        `(x, y)`, or dicts for a dict of arrays. `fit(batches, 5)` trains on batches.

        Ctrl-C, and any error of the data or a callback, leaves in `state` the result of
        the last finished step, and in `history` the finished epochs; another `fit`
        continues from there. Ctrl-C waits for the running call of a step to return.

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
            epochs: The number of epochs; with `resume`, including those before the
                interruption.
            batch_size: Rows of a global batch, for arrays.
            shuffle: A seed, which with the epoch determines the order of the rows of
                arrays; None keeps it. Batches keep theirs.
            steps_per_epoch: Batches per epoch, instead of one pass. The next epoch
                continues where this one stopped; at the end of a pass a new one begins.
            validation_data: Batches or arrays to evaluate after each epoch; the names
                of their values begin with `val_`.
            callbacks: Instances of `ml.callbacks.Callback`, called in this order.
            progress: Whether to show progress, if no callback is a `Progress`.
            resume: Whether to resume from the newest checkpoint of the first
                `Checkpoint`, if there is one. Without `resume`, its directory must not
                hold steps later than the one that training begins at: they would be
                mistaken for steps of this run.

        Returns:
            The history of all epochs, including those of an earlier `fit`.

        Raises:
            MeshLayoutError: If an argument is wrong, the data yields no batch, or a
                batch differs from the first one; with `resume`, if no callback is a
                `Checkpoint`.
            CheckpointError: If the checkpoint cannot be resumed from; a note says
                whether the trainer's state is used up. Without `resume`, if a directory
                holds later steps of another run.
            Preempted: After SIGTERM; it ends the process.
        """
        if self._is_fitting:
            msg = (
                "fit was called inside a fit of the same trainer, by a callback or the "
                "data. Call it after the other one has returned, or make another "
                "Trainer."
            )
            raise MeshLayoutError(msg)
        # `labels` is an integer in `fit(batches, 5)`, the form of most tutorials.
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
        for name, value in (("progress", progress), ("resume", resume)):
            _checks.flag(name, value, where="fit")
        data = batches_from(
            "fit",
            "train",
            train,
            labels,
            batch_size,
            layout=self._layout(),
            shuffle=checked_seed(shuffle, "fit"),
        )
        source = self._input(
            "fit",
            "train",
            data,
            steps_per_epoch=steps_per_epoch,
            num_epochs=epochs,
            # Nobody knows what a subclass's own steps do with weights of 0.
            weights=self._steps.weights if self._has_loss else None,
        )
        loop = FitLoop(
            self,
            source,
            self._validation(validation_data, batch_size, epochs),
            callbacks,
            group_size=self._steps.group_size,
            progress=progress,
        )
        step, num_done = self.position.step, len(self.history.epochs)
        if isinstance(self.state, TrainState):
            step = int(self.state.step)  # waits, but nothing is running yet
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

    @user_call
    def evaluate(
        self,
        data: Data | PyTree,
        labels: PyTree = None,
        *,
        batch_size: int | None = None,
    ) -> dict[str, Any]:
        """Returns the loss and the metrics of the state on a dataset.

        Args:
            data: Batches or arrays, as for `fit`; one pass.
            labels: As for `fit`.
            batch_size: As for `fit`.

        Returns:
            The values by name, as floats; values with dims as NumPy arrays.

        Raises:
            MeshLayoutError: If the data is of another type, yields no batch, or a
                batch differs from the first one.
        """
        layout = self._layout()
        data = batches_from("evaluate", "data", data, labels, batch_size, layout=layout)
        return evaluate(self, self._input("evaluate", "data", data))

    @user_call
    def predict(self, data: Data | PyTree, *, batch_size: int | None = None) -> PyTree:
        """Returns the model's predictions for all rows of a dataset, in order.

        Padding that the trainer or `distribute_dataset` added is left out; rows to
        which you gave weight 0 yourself are not.

        Args:
            data: Batches or arrays, as for `fit`; one pass.
            batch_size: As for `fit`.

        Returns:
            The results of `predict_fn`, or the outputs of the loss function: a tree of
            NumPy arrays with one row per example.

        Raises:
            MeshLayoutError: If the data is of another type, yields no batch, or an
                output does not have one row per example.
        """
        layout = self._layout()
        data = batches_from("predict", "data", data, None, batch_size, layout=layout)
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
                "predict: the outputs of the batches cannot be concatenated; each must "
                "be the same tree of arrays, which differ only in their first dim."
            )
            raise MeshLayoutError(msg) from error

    def stop(self, reason: str) -> None:
        """Ends training after the current step or epoch; for callbacks.

        Args:
            reason: The reason, shown by `stopped`, the history and the progress.

        Raises:
            MeshLayoutError: If it is not a string, or is empty.
        """
        if not isinstance(reason, str) or not reason:
            msg = (
                f"stop: reason must be a non-empty string, got {_checks.shown(reason)}."
            )
            raise MeshLayoutError(msg)
        self.stopped = self.stopped or reason

    def __repr__(self) -> str:
        name = type(self).__name__
        position, stopped = (
            self.position,
            f", stopped: {self.stopped}" * bool(self.stopped),
        )
        return (
            f"{name}({len(self.history.epochs)} epochs, step {position.step}{stopped})"
        )

    # What the loops need.

    def _missing(self, step: str) -> MeshLayoutError:
        """Returns the error for a step with neither a loss function nor an override."""
        msg = (
            f"{type(self).__name__} has no loss function to make {step} from: give "
            f"loss_fn, or override {step} in a subclass."
        )
        return MeshLayoutError(msg)

    def _layout(self) -> Layout | None:
        """Returns the layout of batches; None if the state is on no mesh."""
        mesh, layout = _mesh_of(self.state), self._data_layout
        if layout is None:
            return None if mesh is None else batch_layout(mesh)
        return layout if isinstance(layout, Layout) else Layout(layout, mesh)

    def _validation(
        self, data: Data | PyTree | None, batch_size: int | None, epochs: int
    ) -> TrainerInput | None:
        if data is None:
            return None
        if not is_columns(data):
            batch_size = None  # that of the training data
        name, layout = "validation_data", self._layout()
        source = batches_from("fit", name, data, None, batch_size, layout=layout)
        if isinstance(source, DistributedDataset):
            source = Restarted(source)  # every validation measures the same rows
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
        """Returns the data for a loop; see `TrainerInput` for the options."""
        layout = self._layout()
        # Once one batch carries weights, all do: otherwise the step compiles twice.
        pad = self._has_padded or (self._pad and not _is_even(data, layout))
        self._has_padded = pad = pad and not self._takes_no_weights
        placer = BatchPlacer(
            layout, self._steps.weights, pad=pad, needs_weights=needs_weights
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
    except MeshLayoutError:  # raised again, with the batch's number, when it is placed
        return False
    shards = 1 if layout is None else num_row_shards(layout)
    return len(sizes) == 1 and sizes.pop() % shards == 0
