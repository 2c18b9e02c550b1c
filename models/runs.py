"""One training run on a mesh, and the comparison of two."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import meshlayout as ml
from models.convnet import SPATIAL
from models.data import Dataset, Split, Text, batches, num_batches
from models.resnet import LinenResNet, LinenResNet50
from models.transformer import next_token_losses


# How far apart two runs may be that differ only in how their sums are rounded. A step
# rounds at 1e-7; Adam and ReLU amplify that where a gradient is near zero, in the
# convnet sooner than in the MLP. So the first steps must agree up to rounding, and the
# whole training in what it has learned.
FIRST_STEPS = 10
FIRST_LOSSES_TOLERANCE = 1e-4
FIRST_PARAMS_TOLERANCE = 1e-3
EPOCH_LOSSES_TOLERANCE = 1e-2
TEST_ACCURACIES_TOLERANCE = 1e-2

# Mesh axes over which the rows of batches are sharded.
ROW_AXES = ("batch", "expert")

# Metrics are read this many steps late, so that reading never waits for the devices.
STEPS_IN_FLIGHT = 8

Batch = Mapping[str, Any]
LossFunction = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
Step = Callable[[ml.TrainState, Batch], tuple[ml.TrainState, ml.metrics.Metrics]]


class TrainingError(Exception):
    """Training failed, or two runs that should agree do not."""


@dataclass
class Totals:
    """Sums over the examples seen so far, and the mean loss of each step."""

    loss: float = 0.0
    correct: float = 0.0
    weight: float = 0.0
    step_losses: list[float] = field(default_factory=list)

    def add(self, metrics: ml.metrics.Metrics, weight: float) -> None:
        """Adds the mean loss and the accuracy of one step, for so many examples."""
        loss = float(metrics["loss"])
        self.loss += loss * weight
        self.correct += float(metrics["accuracy"]) * weight
        self.weight += weight
        self.step_losses.append(loss)

    @property
    def mean_loss(self) -> float:
        """Loss per example."""
        return self.loss / self.weight if self.weight else math.nan

    @property
    def accuracy(self) -> float:
        """Fraction of the examples that were classified correctly."""
        return self.correct / self.weight if self.weight else math.nan


@dataclass(frozen=True)
class Training:
    """How long a run trains, and how.

    Attributes:
        epochs: Passes over the training examples.
        global_batch_size: Examples in one step, over all devices together.
        seed: Seeds the order of the training examples.
        step_options: For `ml.make_train_step`, such as `accumulate=4`.
        checkpoint_dir: Where to save the state after each epoch; None for nowhere.
        resume: Whether to continue after the newest epoch saved there.
    """

    epochs: int
    global_batch_size: int
    seed: int = 0
    step_options: Mapping[str, Any] = field(default_factory=dict)
    checkpoint_dir: Path | None = None
    resume: bool = False


@dataclass
class Run:
    """The results of a training run that are compared, in host memory."""

    title: str
    initial_params: list[np.ndarray]
    num_steps: int = 0
    first_params: list[np.ndarray] = field(default_factory=list)
    first_losses: list[float] = field(default_factory=list)
    epoch_losses: list[float] = field(default_factory=list)
    test_accuracies: list[float] = field(default_factory=list)
    params: list[np.ndarray] = field(default_factory=list)


def image_loss(pixel_mean: float, pixel_deviation: float) -> LossFunction:
    """Returns the loss function of a classifier of images.

    Args:
        pixel_mean: The mean to subtract from images.
        pixel_deviation: The divisor of the shifted images.
    """

    def loss_fn(
        model: Callable[..., jax.Array], batch: Batch, *, train: bool
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        images = (batch["image"].astype(jnp.float32) - pixel_mean) / pixel_deviation
        # NNX models know their mode; of those in Linen one has to be told.
        has_modes = isinstance(model, LinenResNet | LinenResNet50)
        mode = {"train": train} if has_modes else {}
        logits = model(images, **mode)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses, {"logits": logits, "label": batch["label"]}

    return loss_fn


def token_loss(
    model: Callable[..., jax.Array], batch: Batch
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss function of a language model: cross entropies of the next tokens."""
    tokens = batch["tokens"]
    logits = model(tokens)
    outputs = {"logits": logits[:, :-1], "label": tokens[:, 1:]}
    return next_token_losses(logits, tokens), outputs


def make_steps(
    loss_fn: LossFunction, options: Mapping[str, Any] = MappingProxyType({})
) -> tuple[ml.step.TrainStep, Step]:
    """Returns the compiled steps for training and for testing.

    Both measure the mean loss and the accuracy over a batch's examples. Padding has
    weight 0 and does not count, even in batch statistics.

    Args:
        loss_fn: `token_loss`, or a result of `image_loss`.
        options: For `ml.make_train_step`, such as `accumulate=4`.
    """
    metrics = {"accuracy": ml.metrics.Accuracy()}
    eval_step = ml.make_eval_step(loss_fn, metrics=metrics)

    def test_step(
        state: ml.TrainState, batch: Batch
    ) -> tuple[ml.TrainState, ml.metrics.Metrics]:
        return state, eval_step(state, batch)

    return ml.make_train_step(loss_fn, metrics=metrics, **options), test_step


def batch_layout(mesh: ml.Mesh) -> ml.Layout:
    """Returns the layout of batches: rows over the axes for them, if there are any."""
    rows = tuple(axis for axis in mesh.axis_names if axis in ROW_AXES)
    return mesh.layout(rows, ...) if rows else mesh.layout(...)


def batch_layouts(mesh: ml.Mesh, batch: Batch) -> dict[str, ml.Layout]:
    """Returns a layout per array: images also over `height` and `width`, if any.

    Tokens are sharded over `seq`, too.
    """
    images = [axis if axis in mesh else None for axis in SPATIAL]
    layouts = {name: batch_layout(mesh).with_rank(x.ndim) for name, x in batch.items()}
    if "image" in batch:
        layouts["image"] = mesh.layout(*images)
    if "seq" in mesh and "tokens" in batch:
        layouts["tokens"] = mesh.layout("batch", "seq")
    return layouts


def one_pass(
    step: Step,
    state: ml.TrainState,
    host_batches: Iterable[Mapping[str, np.ndarray]],
    mesh: ml.Mesh,
    after_step: Callable[[ml.TrainState, Totals], None] = lambda state, totals: None,
) -> tuple[ml.TrainState, Totals]:
    """Runs a step on each batch; returns the last state and the totals.

    Args:
        step: A step of `make_steps`.
        state: The initial state; a step that trains uses it up.
        host_batches: Batches in host memory.
        mesh: The mesh to put batches on, in the layouts of `batch_layouts`.
        after_step: Called with the new state and the totals so far, which are a few
            steps behind, so that reading them does not wait for the devices.
    """
    totals, waiting = Totals(), deque()
    for batch in host_batches:
        state, metrics = step(state, ml.relayout(batch, batch_layouts(mesh, batch)))
        waiting.append((metrics, float(batch["weight"].sum())))
        if len(waiting) > STEPS_IN_FLIGHT:
            totals.add(*waiting.popleft())
        after_step(state, totals)
    while waiting:
        totals.add(*waiting.popleft())
    return state, totals


def loss_of(examples: Split | Text) -> LossFunction:
    """Returns the loss function for examples of this kind."""
    if isinstance(examples, Text):
        return token_loss
    return image_loss(*examples.pixel_statistics())


def train(
    title: str,
    state: ml.TrainState,
    mesh: ml.Mesh,
    dataset: Dataset,
    plan: Training,
) -> Run:
    """Trains and tests one model on one mesh, and prints its progress.

    Args:
        title: Names the run in a comparison.
        state: The initial state, on the mesh; it is donated.
        mesh: The mesh of the run.
        dataset: The data to train and test on.
        plan: How long to train, and how.

    Raises:
        TrainingError: If the loss is no longer finite.
        MeshLayoutError: If the batches do not fit the step's options, or the state
            cannot be saved or restored.
    """
    train_step, test_step = make_steps(loss_of(dataset.train), plan.step_options)
    run = Run(title, host_arrays(state.params))
    batch_size, epochs, saver = plan.global_batch_size, plan.epochs, None
    with contextlib.ExitStack() as stack:
        if plan.checkpoint_dir is not None:
            saver = stack.enter_context(ml.Checkpointer(plan.checkpoint_dir))
        done = saver.latest_step() if saver is not None and plan.resume else None
        if saver is not None and done is not None:
            state = saver.restore(state)
            print(f"Resuming after epoch {done}, from {plan.checkpoint_dir}.")
        for epoch in range((done or 0) + 1, epochs + 1):
            start = time.perf_counter()
            name = f"epoch {epoch}/{epochs}"
            order = np.random.default_rng((plan.seed, epoch))
            train_batches = batches(dataset.train, batch_size, order=order)
            with progress_bar(name, num_batches(dataset.train, batch_size)) as show:

                def after_step(state: ml.TrainState, totals: Totals) -> None:
                    show(totals)
                    run.num_steps += 1
                    if run.num_steps == FIRST_STEPS:
                        run.first_params = host_arrays(state.params)

                state, trained = one_pass(
                    train_step, state, train_batches, mesh, after_step
                )
            test_batches = batches(dataset.test, batch_size)
            state, tested = one_pass(test_step, state, test_batches, mesh)
            print(
                f"{name}  loss {trained.mean_loss:.4f}  "
                f"accuracy {trained.accuracy:.2%}  "
                f"test accuracy {tested.accuracy:.2%}  "
                f"({time.perf_counter() - start:.1f} s)",
                flush=True,
            )
            if not math.isfinite(trained.mean_loss):
                raise TrainingError(
                    f"the loss is {trained.mean_loss} after epoch {epoch}; try a "
                    "smaller --learning-rate"
                )
            run.first_losses.extend(trained.step_losses)
            run.epoch_losses.append(trained.mean_loss)
            run.test_accuracies.append(tested.accuracy)
            if saver is not None:
                saver.save(epoch, state)
    del run.first_losses[FIRST_STEPS:]
    run.params = host_arrays(state.params)
    return run


@contextlib.contextmanager
def progress_bar(name: str, num_steps: int) -> Iterator[Callable[[Totals], None]]:
    """Shows a progress bar on a terminal; yields the function that updates it."""
    console = Console()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as progress:
        task = progress.add_task(name, total=num_steps, numbers="")

        def show(totals: Totals) -> None:
            if totals.step_losses:
                progress.update(
                    task,
                    completed=len(totals.step_losses),
                    numbers=f"loss {totals.mean_loss:.4f}  "
                    f"accuracy {totals.accuracy:.2%}",
                )

        yield show


def host_arrays(tree: Any) -> list[np.ndarray]:
    """Returns the leaves of a tree as whole arrays in host memory."""
    return jax.tree.leaves(ml.to_numpy(tree))


def compare(first: Run, second: Run, num_test_examples: int) -> None:
    """Prints how far apart two runs are that should have learned the same thing.

    Raises:
        TrainingError: If they are further apart than rounding explains.
    """
    # A few examples near the decision boundary may fall on either side.
    accuracies_tolerance = max(TEST_ACCURACIES_TOLERANCE, 3 / num_test_examples)
    rows = [
        ("initial parameters", first.initial_params, second.initial_params, 0.0),
        (
            f"losses of the first {len(first.first_losses)} steps",
            first.first_losses,
            second.first_losses,
            FIRST_LOSSES_TOLERANCE,
        ),
        (
            f"parameters after {FIRST_STEPS} steps",
            first.first_params,
            second.first_params,
            FIRST_PARAMS_TOLERANCE,
        ),
        (
            "mean losses of the epochs",
            first.epoch_losses,
            second.epoch_losses,
            EPOCH_LOSSES_TOLERANCE,
        ),
        (
            "test accuracies",
            first.test_accuracies,
            second.test_accuracies,
            accuracies_tolerance,
        ),
        ("parameters at the end", first.params, second.params, math.inf),
    ]
    print(f"\n{first.title} against {second.title}, largest differences")
    apart = []
    for what, ours, theirs, allowed in rows:
        if not ours:
            continue
        difference = largest_difference(ours, theirs)
        bound = "" if allowed == math.inf else f"   at most {allowed:.0e} is allowed"
        print(f"  {what:<30}{difference:8.1e}{bound}")
        if not difference <= allowed:
            apart.append(f"{what} differ by {difference:.1e}")
    if apart:
        raise TrainingError(f"the runs do not agree: {'; '.join(apart)}")
    print("Both runs agree.")


def largest_difference(first: Sequence[Any], second: Sequence[Any]) -> float:
    """Returns the largest absolute difference between two lists of arrays."""
    pairs = zip(first, second, strict=True)
    differences = [float(np.max(np.abs(np.subtract(a, b)))) for a, b in pairs]
    return max(differences, default=0.0)
