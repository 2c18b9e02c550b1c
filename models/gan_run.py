"""The GAN's part of `python -m models.train`: two models with a step of their own.

The code that other models share, in models/runs.py, is for one model and its accuracy.
Here the library's Trainer does the rest, as for any custom step.
"""

import contextlib
import math

import jax
import numpy as np

import meshlayout as ml
from models.data import Dataset, Split
from models.gan import GANTrainer, empty_metrics, gan_step
from models.runs import Run, Training, TrainingError, batch_layout, host_arrays


GANState = dict[str, ml.TrainState]


def gan_params(state: GANState) -> list[np.ndarray]:
    """Returns the parameters of both models in host memory."""
    return [x for part in state.values() for x in host_arrays(part.params)]


def train_gan(
    title: str, state: GANState, mesh: ml.Mesh, dataset: Dataset, plan: Training
) -> Run:
    """Trains both models on one mesh, and prints their losses.

    Args:
        title: Names the run in a comparison.
        state: The initial states, on the mesh; they are donated.
        mesh: The mesh of the run.
        dataset: Images to train on; those for testing are not used.
        plan: How long to train, and how.

    Raises:
        TrainingError: If a loss is no longer finite.
        MeshLayoutError: If the state cannot be saved or restored.
    """
    assert isinstance(dataset.train, Split)
    images = dataset.train.images.astype("float32") / 127.5 - 1
    data = ml.distribute_dataset(
        {"image": images},
        batch_layout(mesh),
        global_batch_size=plan.global_batch_size,
        shuffle=plan.seed,
    )
    run = Run(title, gan_params(state))
    trainer = GANTrainer(state, mesh)
    callbacks = []
    with contextlib.ExitStack() as stack:
        if plan.checkpoint_dir is not None:
            saver = stack.enter_context(ml.Checkpointer(plan.checkpoint_dir))
            callbacks.append(ml.callbacks.Checkpoint(saver))
        history = trainer.fit(
            data, plan.epochs, callbacks=callbacks, progress=False, resume=plan.resume
        )
    for epoch in range(plan.epochs):
        losses = {name: history[name][epoch] for name in state}
        shown = "  ".join(f"{name} loss {loss:.4f}" for name, loss in losses.items())
        print(f"epoch {epoch + 1}/{plan.epochs}  {shown}", flush=True)
        if not all(map(math.isfinite, losses.values())):
            raise TrainingError(
                f"a loss is not finite after epoch {epoch + 1}; try a smaller "
                "--learning-rate"
            )
        run.epoch_losses.extend(losses.values())
    run.num_steps = int(trainer.state["generator"].step)
    run.params = gan_params(trainer.state)
    return run


def explain_gan(state: GANState, mesh: ml.Mesh, images: jax.ShapeDtypeStruct) -> None:
    """Prints memory and communication of a step that is not run.

    Args:
        state: The states, abstract.
        mesh: Their mesh.
        images: Shape and dtype of a batch.
    """
    layout = batch_layout(mesh)
    weights = jax.ShapeDtypeStruct(images.shape[:1], "float32")
    batch = {
        name: x.update(sharding=layout.with_rank(x.ndim).sharding)
        for name, x in {"image": images, "weight": weights}.items()
    }
    step = ml.compile_step(gan_step)
    print(step.memory(state, batch, empty_metrics(mesh)))
    print(f"\n{step.communication(state, batch, empty_metrics(mesh))}")
