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
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshlayout as ml
from meshlayout import launch as launcher
from meshlayout.errors import did_you_mean
from models import gan
from models.catalog import EXAMPLES, OWN_LAYOUTS, PIPELINE
from models.command_line import LAYOUTS, OptionError, check_options, command_line
from models.convnet import SPATIAL
from models.data import Dataset, load_dataset, load_text
from models.gan_run import explain_gan, train_gan
from models.prepare_data import (
    IMAGE_SHAPE,
    DataError,
    find_builder,
    is_prepared,
    num_classes,
)
from models.runs import (
    ROW_AXES,
    Training,
    TrainingError,
    batch_layouts,
    compare,
    image_loss,
    make_steps,
    token_loss,
    train,
)
from models.text import ByteTokenizer


# Bytes in a row of text, which both language models have positions for.
TEXT_LENGTH = 128


@dataclass(frozen=True)
class Setting:
    """A mesh and the layouts of parameters on it, by model: "" if there is one."""

    title: str
    mesh: ml.Mesh
    layouts: dict[str, ml.LayoutMap]


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
        ml.virtual_devices(options.virtual_devices or 8)
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
    initial: list[dict[str, ml.state.StateDescription[ml.TrainState]]],
) -> int:
    """Explains or trains what was requested; returns the exit status.

    Args:
        program: Its name, for messages.
        options: The command line's.
        settings: One run, or two to compare.
        initial: For each, its initial states by the name of their model, which is empty
            if there is only one.
    """
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
            for setting, described in zip(settings, initial, strict=True):
                states = {name: state.abstract for name, state in described.items()}
                explain(options, setting, states, plan)
            return 0
        dataset = load(options)
        print(f"Data: {dataset}", flush=True)
        dataset = dataset.limited(options.limit_train, options.limit_test)
        runs = []
        for setting, described in zip(settings, initial, strict=True):
            states = {name: state.create() for name, state in described.items()}
            print_layouts(setting, states)
            place = (setting.mesh, dataset, plan)
            if options.model == "gan":
                runs.append(train_gan(setting.title, states, *place))
            else:
                runs.append(train(setting.title, states.pop(""), *place))
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
    states: dict[str, ml.TrainState],
    plan: Training,
) -> None:
    """Prints layouts, memory and communication of a step that is not run.

    Args:
        options: The command line's.
        setting: The mesh and the layouts.
        states: The states, abstract.
        plan: How it would be trained.
    """
    print_layouts(setting, states)
    if options.model == "gan":
        images = example_inputs(options, options.global_batch_size)
        explain_gan(states, setting.mesh, images)
        return
    (state,) = states.values()
    is_text = EXAMPLES[options.model].reads_text
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
    layouts = batch_layouts(setting.mesh, batch)
    batch = {
        name: leaf.update(sharding=layouts[name].sharding)
        for name, leaf in batch.items()
    }
    print(train_step.memory(state, batch))
    print(f"\n{train_step.communication(state, batch)}")


def print_layouts(setting: Setting, states: dict[str, ml.TrainState]) -> None:
    """Prints the mesh and the tables of the parameters' layouts."""
    mesh = setting.mesh
    numbers = np.array([device.id for device in mesh.devices.flat])
    print(f"\n{setting.title} on {mesh!r}, whose {mesh.platform} devices are")
    print(f"{numbers.reshape(mesh.devices.shape)}\n")
    used = {*SPATIAL, "seq"}  # by the batch
    for name, state in states.items():
        if name:
            print(f"{name}:")
        print(setting.layouts[name].explain(state.params))
        whole = setting.layouts[name].explain(state)
        print(
            f"With Adam's state {whole.bytes_per_device / 1024:.1f} KiB; replicated it "
            f"would be {whole.nbytes / 1024:.1f} KiB.\n"
        )
        specs = [tuple(leaf.layout.spec) for leaf in whole.resolutions]
        used.update(jax.tree.leaves(specs))
    for axis in mesh.axis_names:
        if axis not in used:
            print(
                f"Nothing is sharded over mesh axis {axis!r}: its "
                f"{mesh.axis_size(axis)} devices repeat the same work.\n"
            )


def check_dataset(options: argparse.Namespace) -> int:
    """Returns the number of labels or tokens of the dataset, without reading it.

    Raises:
        OptionError: If the model cannot learn from it.
        DataError: If it is unknown, or prepared and damaged.
    """
    if EXAMPLES[options.model].reads_text:
        if options.dataset is not None:
            raise OptionError(
                f"argument --dataset: the {options.model} reads the topics of Python's "
                f"help(), not {options.dataset!r}; leave --dataset out"
            )
        return ByteTokenizer.vocab_size
    options.dataset = options.dataset or "fashion_mnist"
    builder = find_builder(options.dataset, options.data_dir)
    is_prepared(builder)
    return num_classes(builder)


def load(options: argparse.Namespace) -> Dataset:
    """Reads the data to train and test on.

    Raises:
        DataError: If it is unavailable.
    """
    if EXAMPLES[options.model].reads_text:
        return load_text(TEXT_LENGTH)
    return load_dataset(options.dataset, options.data_dir)


def make_settings(options: argparse.Namespace, labels: int) -> list[Setting]:
    """Returns the requested runs: one, or two to compare.

    Raises:
        OptionError: As `make_setting`, or if JAX cannot compute as asked here.
    """
    is_ring, backend = options.layouts == "fsdp+context", jax.default_backend()
    is_limited = options.model in ("transformer", "moe") and not is_ring
    if options.precision == "float16" and is_limited and backend != "gpu":
        raise OptionError(
            f"argument --precision: on {backend.upper()}, the attention of JAX does "
            "not compute in float16; take bfloat16"
        )
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
        axes = LAYOUTS[layouts].mesh if layouts is not None else "batch=-1"
        sizes = [int(size) for size in re.findall(r"=(\d+)", axes)]
        if jax.device_count() % math.prod(sizes):  # as of a single device
            axes = re.sub(r"=\d+", "=1", axes)
    try:
        mesh = ml.create_mesh(axes)
    except ml.errors.MeshError as error:
        # The rest of that message is about the Python API.
        fact, is_count, _ = str(error).partition(", or give ")
        way = "; on CPU, --virtual-devices says how many there are" if is_count else ""
        raise OptionError(f"argument --mesh: {fact}{way}") from error
    own_axes = LAYOUTS[layouts].axes if layouts is not None else ()
    known = tuple(dict.fromkeys(("batch", "model", *own_axes)))
    for axis in mesh.axis_names:
        if axis not in known:
            raise OptionError(
                f"argument --mesh: no layout here uses an axis {axis!r}; the axes are "
                f"{' and '.join(map(repr, known))}.{did_you_mean(axis, known)}"
            )
    if layouts is None:
        layouts = "tensor" if "model" in mesh.axis_names else "data_parallel"
    for needed in LAYOUTS[layouts].axes:
        if needed not in mesh.axis_names:
            raise OptionError(
                f"argument --layouts: {layouts} needs a mesh with an axis {needed!r}; "
                f"--mesh {axes} has none"
            )
    size = options.global_batch_size
    if rows := [axis for axis in mesh.axis_names if axis in ROW_AXES]:
        shards = mesh.axis_size(rows)
        if size % shards:
            raise OptionError(
                f"argument --global-batch-size: {size} does not divide into {shards} "
                f"shards over mesh axis {' and '.join(map(repr, rows))}; nearest that "
                f"do: {nearest_multiples(size, shards)}"
            )
    parts = PIPELINE["microbatches"] * options.accumulate
    parts *= mesh.axis_size("batch") if "batch" in mesh.axis_names else 1
    if layouts == "pipeline" and size % parts:
        raise OptionError(
            f"argument --global-batch-size: {size} rows do not divide into {parts}, "
            "the microbatches of the stages and the shards of each; nearest that do: "
            f"{nearest_multiples(size, parts)}"
        )
    whole = {
        "height": ("pixels of an image's height", IMAGE_SHAPE[0]),
        "width": ("pixels of an image's width", IMAGE_SHAPE[1]),
        "seq": ("tokens of a row", TEXT_LENGTH),
        "stage": ("layers", PIPELINE["num_layers"]),
    }
    for axis, (what, count) in whole.items():
        shards = mesh.axis_size(axis) if axis in own_axes else 1
        if count % shards:
            sizes = [str(n) for n in range(1, count + 1) if count % n == 0]
            raise OptionError(
                f"argument --mesh: the {count} {what} do not divide into {shards} "
                f"shards over mesh axis {axis!r}; sizes that do: {', '.join(sizes)}"
            )
    names = tuple(gan.MODELS) if options.model == "gan" else ("",)
    maps = {name: make_layouts(options, labels, mesh, layouts, name) for name in names}
    return Setting(LAYOUTS[layouts].title, mesh, maps)


def nearest_multiples(size: int, divisor: int) -> str:
    """Returns the positive multiples of a number on both sides of a size."""
    lower, upper = size // divisor * divisor, -(-size // divisor) * divisor
    return f"{lower} and {upper}" if lower else f"{upper}"


def make_layouts(
    options: argparse.Namespace, labels: int, mesh: ml.Mesh, layouts: str, part: str
) -> ml.LayoutMap:
    """Returns the layouts of `--layouts`: ready-made rules, or a model's own map.

    Args:
        options: The command line's.
        labels: How many labels or tokens there are.
        mesh: The mesh.
        layouts: The choice.
        part: Which of the example's models, or "" if there is one.

    Raises:
        OptionError: If the model has no such map.
    """
    if layouts in OWN_LAYOUTS:
        own = EXAMPLES[options.model].layouts
        if layouts not in own:
            has = f"its own are {', '.join(own)}" if own else "it has none of its own"
            every = [x for x in LAYOUTS if x not in OWN_LAYOUTS]
            ready = ", ".join(name for name in every if not LAYOUTS[name].models)
            raise OptionError(
                f"argument --layouts: {options.model} has no map {layouts}: {has}, and "
                f"for every model there are {ready}"
            )
        return ml.LayoutMap(mesh, own[layouts])
    if layouts in ("data_parallel", "spatial"):
        return ml.parallel.data_parallel(mesh)
    if layouts in ("fsdp", "fsdp+context"):
        return ml.parallel.fsdp(mesh, axes=LAYOUTS[layouts].axes)
    if layouts == "pipeline":
        return ml.parallel.stages(mesh)
    inputs = example_inputs(options, options.global_batch_size)
    if part == "generator":
        inputs = jax.ShapeDtypeStruct((inputs.shape[0], gan.LATENT_FEATURES), "float32")
    model = make_model(options, labels, part)
    if layouts == "expert":
        return ml.parallel.expert_parallel(mesh, "expert", model, inputs)
    tensor = ml.parallel.tensor_parallel(mesh, model, inputs)
    if not layouts.startswith("fsdp"):
        return tensor
    return ml.parallel.compose(tensor, ml.parallel.fsdp(mesh))


def make_model(options: argparse.Namespace, labels: int, part: str = "") -> Any:
    """Returns the Linen module, or a function that makes the NNX module."""
    if part:
        return lambda: gan.MODELS[part](rngs=nnx.Rngs(options.seed))
    example = EXAMPLES[options.model]
    variant = example.variants[options.flax]
    sizes = example.changes.get(options.layouts, {})
    if options.flax == "linen":
        return variant(labels, **sizes)
    return lambda: variant(labels, rngs=nnx.Rngs(options.seed), **sizes)


def example_inputs(options: argparse.Namespace, num_rows: int) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the model's inputs."""
    if EXAMPLES[options.model].reads_text:
        return jax.ShapeDtypeStruct((num_rows, TEXT_LENGTH), "int32")
    return jax.ShapeDtypeStruct((num_rows, *IMAGE_SHAPE), "float32")


def describe_state(
    options: argparse.Namespace, labels: int, layouts: dict[str, ml.LayoutMap]
) -> dict[str, ml.state.StateDescription[ml.TrainState]]:
    """Describes the initial states by model, without creating them.

    Raises:
        LayoutMapError: If the layouts do not fit the model.
    """
    if options.model == "gan":
        return gan.describe_state(layouts, options.learning_rate, seed=options.seed)
    model = make_model(options, labels)
    optimizer = optax.adam(options.learning_rate)
    if options.flax == "nnx":
        return {"": ml.TrainState.describe(model, optimizer, layouts[""])}
    inputs = example_inputs(options, 1)
    described = ml.TrainState.describe(
        lambda: model.init(
            jax.random.key(options.seed), jnp.zeros(inputs.shape, inputs.dtype)
        ),
        optimizer,
        layouts[""],
        module=model,
    )
    return {"": described}


if __name__ == "__main__":
    sys.exit(main())
