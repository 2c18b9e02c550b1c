"""Trains an example model on a mesh of devices: `python -m models.train`.

Without `--mesh` and `--layouts` it trains twice, first data-parallel, then the same
model tensor-parallel, and checks that both runs agree.
"""

import argparse
import contextlib
import io
import math
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshlayout as ml
from meshlayout.cluster import launcher
from meshlayout.errors import did_you_mean
from models import convnet, mlp, resnet, transformer
from models.data import Dataset, load_dataset, load_text
from models.prepare_data import (
    IMAGE_SHAPE,
    DataError,
    default_data_dir,
    find_builder,
    is_prepared,
    num_classes,
)
from models.runs import (
    Training,
    TrainingError,
    batch_layout,
    compare,
    image_loss,
    make_steps,
    token_loss,
    train,
)


MODELS = {
    ("mlp", "nnx"): mlp.MLP,
    ("mlp", "linen"): mlp.LinenMLP,
    ("convnet", "nnx"): convnet.ConvNet,
    ("convnet", "linen"): convnet.LinenConvNet,
    ("resnet", "nnx"): resnet.ResNet,
    ("resnet", "linen"): resnet.LinenResNet,
    ("transformer", "nnx"): transformer.Transformer,
    ("transformer", "linen"): transformer.LinenTransformer,
}
TRANSFORMER = transformer.TransformerConfig()


@dataclass(frozen=True)
class Layouts:
    """A choice of `--layouts`.

    Attributes:
        title: What a run with it is called.
        axes: The mesh axes that it shards something over, besides the batch.
    """

    title: str
    axes: tuple[str, ...]


LAYOUTS = {
    "data_parallel": Layouts("data-parallel", ("batch",)),
    "fsdp": Layouts("fully sharded", ("batch",)),
    "tensor": Layouts("tensor-parallel", ("model",)),
    "fsdp+tensor": Layouts("fully sharded and tensor-parallel", ("batch", "model")),
}


EXAMPLES = """\
examples:
  python -m models.train
      an MLP, data-parallel and tensor-parallel on 8 virtual devices, compared
  python -m models.train --model transformer --layouts fsdp+tensor
      a language model, sharded over both axes of a mesh
  python -m models.train --model transformer --layouts fsdp --explain
      what its step would hold and send, without running it
  python -m models.train --layouts fsdp --processes 4 --checkpoint-dir /tmp/run --resume
      four processes of two devices, saved after each epoch and resumed
"""


class OptionError(Exception):
    """An option has an invalid value, alone or together with the others."""


@dataclass(frozen=True)
class Setting:
    """A mesh and the layouts of a model's parameters on it."""

    title: str
    mesh: ml.Mesh
    layouts: ml.LayoutMap


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = command_line()
    options = parser.parse_args(arguments)
    try:
        check_options(options)
        labels = check_dataset(options)
        if options.processes > 1:
            return launch(options, arguments)
        ml.initialize()
        start_devices(options.virtual_devices)
        settings = make_settings(options, labels)
        initial = [describe_state(options, labels, one.layouts) for one in settings]
    except (OptionError, DataError, ml.MeshLayoutError) as error:
        parser.error(str(error))
    # All processes do the same; one of them says so.
    quiet = io.StringIO() if not ml.cluster.is_main() else sys.stdout
    with contextlib.redirect_stdout(quiet):
        return run(parser.prog, options, settings, initial)


def run(
    program: str,
    options: argparse.Namespace,
    settings: list[Setting],
    initial: list[ml.state.StateDescription[ml.TrainState]],
) -> int:
    """Explains or trains what was asked for; returns the exit status."""
    plan = Training(
        epochs=options.epochs,
        global_batch_size=options.global_batch_size,
        seed=options.seed,
        step_options=step_options(options),
        checkpoint_dir=options.checkpoint_dir,
        resume=options.resume,
    )
    try:
        if options.explain:
            for setting, description in zip(settings, initial, strict=True):
                explain(options, setting, description.abstract, plan)
            return 0
        dataset = load(options)
        print(f"Data: {dataset}", flush=True)
        dataset = dataset.limited(options.limit_train, options.limit_test)
        runs = []
        for setting, description in zip(settings, initial, strict=True):
            state = description.create()
            print_layouts(setting, state)
            runs.append(train(setting.title, state, setting.mesh, dataset, plan))
        if len(runs) == 2:
            compare(*runs, num_test_examples=len(dataset.test))
    except (DataError, TrainingError, ml.MeshLayoutError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
    return 0


def launch(options: argparse.Namespace, arguments: list[str] | None) -> int:
    """Starts this command in several processes; returns the exit status.

    Raises:
        OptionError: If the devices do not divide among them.
    """
    count, devices = options.processes, options.virtual_devices or 8
    if devices % count:
        raise OptionError(
            f"argument --processes: {devices} virtual devices do not divide among "
            f"{count} processes; --virtual-devices says how many there are"
        )
    own = sys.argv[1:] if arguments is None else arguments
    how = ["-n", str(count), "--devices-per-process", str(devices // count)]
    return launcher.main([*how, "-m", "models.train", *own, "--processes", "1"])


def step_options(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of the train step that the command line names."""
    return {
        "accumulate": options.accumulate,
        "precision": options.precision,
        "remat": options.remat,
    }


def explain(
    options: argparse.Namespace,
    setting: Setting,
    state: ml.TrainState,
    plan: Training,
) -> None:
    """Prints layouts, memory and communication of a step that is not run.

    Args:
        options: The command line's.
        setting: The mesh and the layouts.
        state: The state, abstract.
        plan: How it would be trained.
    """
    print_layouts(setting, state)
    is_text = options.model == "transformer"
    train_step, _ = make_steps(
        token_loss if is_text else image_loss(0.0, 1.0), plan.step_options
    )
    size = options.global_batch_size
    inputs = example_inputs(options, size)
    batch = {"weight": jax.ShapeDtypeStruct((size,), "float32")}
    if is_text:
        batch["tokens"] = inputs
    else:
        batch["image"] = inputs.update(dtype=jnp.uint8)
        batch["label"] = jax.ShapeDtypeStruct((size,), "int32")
    layout = batch_layout(setting.mesh)
    batch = {
        name: leaf.update(sharding=layout.with_rank(leaf.ndim).sharding)
        for name, leaf in batch.items()
    }
    print(train_step.memory(state, batch))
    print(f"\n{train_step.communication(state, batch)}")


def print_layouts(setting: Setting, state: ml.TrainState) -> None:
    """Prints the mesh and the table of the parameters' layouts."""
    mesh = setting.mesh
    numbers = np.array([device.id for device in mesh.devices.flat])
    print(f"\n{setting.title} on {mesh!r}, whose {mesh.platform} devices are")
    print(f"{numbers.reshape(mesh.devices.shape)}\n")
    print(setting.layouts.explain(state.params))
    whole = setting.layouts.explain(state)
    print(
        f"With Adam's state {whole.bytes_per_device / 1024:.1f} KiB; replicated it "
        f"would be {whole.replicated_bytes / 1024:.1f} KiB.\n"
    )
    specs = [tuple(leaf.layout.spec) for leaf in whole.resolutions]
    used = {"batch", *jax.tree.leaves(specs)}
    for axis in mesh.axis_names:
        if axis not in used:
            print(
                f"Nothing is sharded over mesh axis {axis!r}: its "
                f"{mesh.axis_size(axis)} devices repeat the same work.\n"
            )


class OptionParser(argparse.ArgumentParser):
    """A parser that says which option was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Prints what is wrong to stderr, and exits with status 2."""
        unknown = re.fullmatch(r"unrecognized arguments: (\S+).*", message)
        near = ""
        if unknown:
            name = unknown[1].partition("=")[0]
            near = did_you_mean(name, self._option_string_actions)
        super().error(f"{message}{'.' * bool(near)}{near}")


def command_line() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = OptionParser(
        prog="python -m models.train",
        usage="python -m models.train [options]",
        description="Trains an example model, a classifier of 28x28 images or a\n"
        "language model, on a mesh of devices. Without --mesh and --layouts it trains\n"
        "twice, data-parallel on a mesh with one axis 'batch' and tensor-parallel on\n"
        "'batch' and 'model', and exits with status 1 unless both runs agree.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLES,
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        choices=("mlp", "convnet", "resnet", "transformer"),
        default="mlp",
        help="784-128-10, two convolutions and two dense layers, three residual blocks "
        "with batch normalization, or a language model of bytes (default: %(default)s)",
    )
    model.add_argument(
        "--flax",
        choices=("nnx", "linen"),
        default="nnx",
        help="Flax's interface that the model is written in (default: %(default)s)",
    )
    mesh = parser.add_argument_group("devices and layouts")
    mesh.add_argument(
        "--mesh",
        metavar="AXES",
        help="the axes of the mesh and their sizes, as 'batch=2,model=4'; the batch is "
        "sharded over 'batch', parameters over 'batch' or 'model' by --layouts; one "
        "size may be -1 for the devices that are left (default: 'batch=-1', or "
        "'batch=2,model=-1' for tensor and fsdp+tensor)",
    )
    mesh.add_argument(
        "--layouts",
        choices=tuple(LAYOUTS),
        help="how parameters and optimizer state are sharded: not at all, over 'batch' "
        "(fsdp), over 'model' as the model's operations allow (tensor), or both "
        "(default: tensor if --mesh has an axis 'model', else data_parallel)",
    )
    mesh.add_argument(
        "--virtual-devices",
        type=int,
        metavar="N",
        help="how many devices a CPU stands for (default: 8); on GPU and TPU the real "
        "devices are used",
    )
    mesh.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="split the virtual devices among N processes on this machine, as a "
        "cluster's hosts would have them (default: %(default)s)",
    )
    mesh.add_argument(
        "--explain",
        action="store_true",
        help="print layouts, memory and communication of the train step, and stop "
        "before anything is created",
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "--dataset",
        metavar="NAME",
        help="a TFDS dataset of labeled 28x28 images: fashion_mnist, mnist, kmnist, "
        "emnist/letters ... (default: fashion_mnist); the transformer reads the topics "
        "of Python's help() instead",
    )
    data.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="where TFDS keeps prepared datasets (default: $TFDS_DATA_DIR, else "
        "~/tensorflow_datasets)",
    )
    data.add_argument(
        "--limit-train",
        type=int,
        metavar="N",
        help="train on the first N images only",
    )
    data.add_argument(
        "--limit-test",
        type=int,
        metavar="N",
        help="test on the first N images only",
    )
    training = parser.add_argument_group("training")
    training.add_argument(
        "--epochs",
        type=int,
        default=3,
        metavar="N",
        help="passes over the training images (default: %(default)s)",
    )
    training.add_argument(
        "--global-batch-size",
        type=int,
        default=128,
        metavar="N",
        help="images in one step, over all devices together (default: %(default)s)",
    )
    training.add_argument(
        "--learning-rate",
        type=float,
        default=1e-3,
        metavar="X",
        help="Adam's step size (default: %(default)s)",
    )
    training.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the initial parameters and of the order of the images "
        "(default: %(default)s)",
    )
    training.add_argument(
        "--precision",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="what the model computes in; parameters stay float32 (default: "
        "%(default)s)",
    )
    training.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="split each batch into N microbatches, whose gradients are added before "
        "the update (default: %(default)s)",
    )
    training.add_argument(
        "--remat",
        choices=("none", "blocks", "full"),
        default="none",
        help="what the backward pass computes again instead of keeping it (default: "
        "%(default)s)",
    )
    training.add_argument(
        "--checkpoint-dir",
        type=Path,
        metavar="DIR",
        help="save the state here after each epoch; needs --mesh or --layouts",
    )
    training.add_argument(
        "--resume",
        action="store_true",
        help="begin after the newest epoch saved in --checkpoint-dir",
    )
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Raises OptionError for the first option with an invalid value."""
    for name in (
        "epochs",
        "global_batch_size",
        "virtual_devices",
        "processes",
        "accumulate",
        "limit_train",
        "limit_test",
    ):
        value = getattr(options, name)
        if value is not None and value < 1:
            flag = "--" + name.replace("_", "-")
            raise OptionError(f"argument {flag}: must be at least 1, not {value}")
    if not 0 < options.learning_rate < math.inf:
        raise OptionError(
            "argument --learning-rate: must be positive and finite, not "
            f"{options.learning_rate}"
        )
    if not 0 <= options.seed < 2**32:
        raise OptionError(
            f"argument --seed: must be from 0 to 2**32 - 1, not {options.seed}"
        )
    if options.resume and options.checkpoint_dir is None:
        raise OptionError("argument --resume: needs --checkpoint-dir to resume from")
    is_comparison = options.mesh is None and options.layouts is None
    if options.checkpoint_dir is not None and is_comparison:
        raise OptionError(
            "argument --checkpoint-dir: without --mesh and --layouts two runs are "
            "compared; name one, as --layouts data_parallel"
        )
    if options.data_dir is None:
        options.data_dir = default_data_dir()
    elif not options.data_dir.expanduser().is_dir():
        raise OptionError(
            f"argument --data-dir: there is no directory {str(options.data_dir)!r}; "
            "`python -m models.prepare_data --data-dir DIR` makes and fills one"
        )
    options.data_dir = options.data_dir.expanduser()


def check_dataset(options: argparse.Namespace) -> int:
    """Returns how many labels or tokens the dataset has, which is not read yet.

    Raises:
        OptionError: If the model cannot learn from it.
        DataError: If it is unknown, or prepared and damaged.
    """
    if options.model == "transformer":
        if options.dataset is not None:
            raise OptionError(
                "argument --dataset: the transformer reads the topics of Python's "
                f"help(), not {options.dataset!r}; leave --dataset out"
            )
        return TRANSFORMER.vocab_size
    options.dataset = options.dataset or "fashion_mnist"
    builder = find_builder(options.dataset, options.data_dir)
    is_prepared(builder)
    return num_classes(builder)


def load(options: argparse.Namespace) -> Dataset:
    """Reads what to train and test on.

    Raises:
        DataError: If it cannot be had.
    """
    if options.model == "transformer":
        return load_text(TRANSFORMER.max_length)
    return load_dataset(options.dataset, options.data_dir)


def start_devices(num_virtual: int | None) -> None:
    """Starts JAX with its accelerators, or with virtual devices on a CPU."""
    with warnings.catch_warnings():
        if num_virtual is None:
            # Without --virtual-devices, the warning about real accelerators is noise.
            warnings.simplefilter("ignore")
        ml.virtual_devices(num_virtual or 8)


def make_settings(options: argparse.Namespace, labels: int) -> list[Setting]:
    """Returns the runs that were asked for: one, or two to compare."""
    if options.mesh is None and options.layouts is None:
        names = ("data_parallel", "tensor")
        return [make_setting(options, labels, None, name) for name in names]
    return [make_setting(options, labels, options.mesh, options.layouts)]


def make_setting(
    options: argparse.Namespace, labels: int, axes: str | None, layouts: str | None
) -> Setting:
    """Returns one mesh with its layouts, checked against the options.

    Raises:
        OptionError: If the mesh cannot be made, lacks an axis that the layouts need or
            has one that nothing uses, or the batch does not divide over it.
    """
    if axes is None:
        axes = "batch=-1"
        if layouts is not None and "model" in LAYOUTS[layouts].axes:
            # A single device is a mesh too.
            axes = "batch=2,model=-1" if jax.device_count() > 1 else "batch=1,model=1"
    try:
        mesh = ml.create_mesh(axes)
    except ml.errors.MeshError as error:
        # The rest of that message is about the Python API.
        fact, is_count, _ = str(error).partition(", or give ")
        way = "; on CPU, --virtual-devices says how many there are" if is_count else ""
        raise OptionError(f"argument --mesh: {fact}{way}") from error
    for axis in mesh.axis_names:
        if axis not in ("batch", "model"):
            raise OptionError(
                f"argument --mesh: no layout here uses an axis {axis!r}; the axes are "
                f"'batch' and 'model'.{did_you_mean(axis, ('batch', 'model'))}"
            )
    if layouts is None:
        layouts = "tensor" if "model" in mesh.axis_names else "data_parallel"
    for needed in LAYOUTS[layouts].axes:
        if needed not in mesh.axis_names:
            raise OptionError(
                f"argument --layouts: {layouts} needs a mesh with an axis {needed!r}; "
                f"--mesh {axes} has none"
            )
    if "batch" in mesh.axis_names:
        shards, size = mesh.axis_size("batch"), options.global_batch_size
        if size % shards:
            lower, upper = size // shards * shards, -(-size // shards) * shards
            nearest = f"{lower} and {upper}" if lower else f"{upper}"
            raise OptionError(
                f"argument --global-batch-size: {size} does not divide into {shards} "
                f"shards over mesh axis 'batch'; nearest that do: {nearest}"
            )
    layout_map = make_layouts(options, labels, mesh, layouts)
    return Setting(LAYOUTS[layouts].title, mesh, layout_map)


def make_layouts(
    options: argparse.Namespace, labels: int, mesh: ml.Mesh, layouts: str
) -> ml.LayoutMap:
    """Returns the layouts of `--layouts`, from the library's ready-made rules."""
    if layouts == "data_parallel":
        return ml.parallel.data_parallel(mesh)
    if layouts == "fsdp":
        return ml.parallel.fsdp(mesh)
    inputs = example_inputs(options, options.global_batch_size)
    model = make_model(options, labels)
    tensor = ml.parallel.tensor_parallel(mesh, model, inputs)
    if layouts == "tensor":
        return tensor
    return ml.parallel.compose(tensor, ml.parallel.fsdp(mesh))


def make_model(options: argparse.Namespace, labels: int) -> Any:
    """Returns the Linen module, or a function that makes the NNX module."""
    model_type = MODELS[options.model, options.flax]
    sizes = TRANSFORMER if options.model == "transformer" else labels
    if options.flax == "linen":
        return model_type(sizes)
    return lambda: model_type(sizes, rngs=nnx.Rngs(options.seed))


def example_inputs(options: argparse.Namespace, num_rows: int) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the model's inputs."""
    if options.model == "transformer":
        return jax.ShapeDtypeStruct((num_rows, TRANSFORMER.max_length), "int32")
    return jax.ShapeDtypeStruct((num_rows, *IMAGE_SHAPE), "float32")


def describe_state(
    options: argparse.Namespace, labels: int, layouts: ml.LayoutMap
) -> ml.state.StateDescription[ml.TrainState]:
    """Describes the initial state, without creating it.

    Raises:
        LayoutMapError: If the layouts do not fit the model.
    """
    model = make_model(options, labels)
    optimizer = optax.adam(options.learning_rate)
    if options.flax == "nnx":
        return ml.TrainState.describe(model, optimizer, layouts)
    inputs = example_inputs(options, 1)
    return ml.TrainState.describe(
        lambda: model.init(
            jax.random.key(options.seed), jnp.zeros(inputs.shape, inputs.dtype)
        ),
        optimizer,
        layouts,
        module=model,
    )


if __name__ == "__main__":
    sys.exit(main())
