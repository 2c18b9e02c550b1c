"""The command line of `python -m models.train`: its options and their values."""

import argparse
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from meshlayout.errors import did_you_mean
from models.catalog import EXAMPLES
from models.prepare_data import default_data_dir


@dataclass(frozen=True)
class Layouts:
    """A choice of `--layouts`.

    Attributes:
        title: The title of a run with it.
        axes: The mesh axes that it uses besides the batch's.
        mesh: The mesh if none is named; sizes that do not divide the devices become 1.
        models: The models that it is for, the first one by default; none for all.
    """

    title: str
    axes: tuple[str, ...]
    mesh: str = "batch=-1"
    models: tuple[str, ...] = ()


TENSOR = Layouts("tensor-parallel", ("model",), "batch=2,model=-1")
FSDP_TENSOR = Layouts(
    "fully sharded and tensor-parallel", ("batch", "model"), "batch=2,model=-1"
)
# The ready-made rules of `meshlayout.parallel`, and the maps at the foot of a model.
LAYOUTS = {
    "data_parallel": Layouts("data-parallel", ("batch",)),
    "fsdp": Layouts("fully sharded", ("batch",)),
    "tensor": TENSOR,
    "tensor_parallel": TENSOR,
    "fsdp+tensor": FSDP_TENSOR,
    "fsdp+tensor_parallel": FSDP_TENSOR,
    "fsdp+context": Layouts(
        "fully sharded, with sequences in shards",
        ("batch", "seq"),
        "batch=2,seq=-1",
        ("transformer",),
    ),
    "pipeline": Layouts("in stages", ("stage",), "batch=-1,stage=4", ("transformer",)),
    "expert": Layouts(
        "expert-parallel", ("batch", "expert"), "batch=2,expert=-1", ("moe",)
    ),
    "spatial": Layouts(
        "spatially parallel",
        ("height", "width"),
        "batch=2,height=2,width=-1",
        ("convnet",),
    ),
    "DATA_PARALLEL": Layouts("data-parallel by its own map", ("batch",)),
    "FSDP": Layouts("fully sharded by its own map", ("batch",)),
    "MODEL_PARALLEL": Layouts(
        "tensor-parallel by its own map", ("model",), "batch=2,model=-1"
    ),
    "FSDP_MODEL_PARALLEL": Layouts(
        "fully sharded and tensor-parallel by its own map",
        ("batch", "model"),
        "batch=2,model=-1",
    ),
}


USAGE_EXAMPLES = """\
examples:
  python -m models.train
      an MLP, data-parallel and tensor-parallel on 8 virtual devices, compared
  python -m models.train --model transformer --layouts fsdp+tensor
      a language model, sharded over both axes of a mesh
  python -m models.train --model transformer --layouts fsdp --explain
      what its step would hold and send, without running it
  python -m models.train --model resnet50 --layouts FSDP --precision bfloat16
      ResNet-50 by the layout map at the foot of models/resnet.py
  python -m models.train --layouts pipeline
      a language model whose layers are in four stages; likewise fsdp+context, expert
      and spatial, each with a model that it is for
  python -m models.train --layouts fsdp --processes 4 --checkpoint-dir runs/mlp --resume
      four processes of two devices, saved after each epoch and resumed
"""


class OptionError(Exception):
    """An option has an invalid value, alone or together with the others."""


class OptionParser(argparse.ArgumentParser):
    """A parser that says which option was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Prints what is wrong to stderr, and exits with status 2."""
        near = ""
        if unknown := re.fullmatch(r"unrecognized arguments: (\S+).*", message):
            name = unknown[1].partition("=")[0]
            near = did_you_mean(name, self._option_string_actions)
        elif choice := re.match(
            r"argument ([^\s:/]+).*: invalid choice: '(.*?)'", message
        ):
            choices = self._option_string_actions[choice[1]].choices or ()
            near = did_you_mean(choice[2], map(str, choices))
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
        epilog=USAGE_EXAMPLES,
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        choices=tuple(EXAMPLES),
        help=f"{'; '.join(f'{n}: {x.description}' for n, x in EXAMPLES.items())} "
        "(default: mlp, or the one that --layouts is for)",
    )
    model.add_argument(
        "--flax",
        choices=("nnx", "linen"),
        help="Flax's interface that the model is written in, if it is in both "
        "(default: nnx)",
    )
    mesh = parser.add_argument_group("devices and layouts")
    mesh.add_argument(
        "--mesh",
        metavar="AXES",
        help="the axes of the mesh and their sizes, as 'batch=2,model=4'; the batch is "
        "sharded over 'batch', parameters over 'batch' or 'model' by --layouts; one "
        "size may be -1 for the devices that are left (default: 'batch=-1', or what "
        "--layouts needs, as 'batch=2,model=-1' for tensor)",
    )
    mesh.add_argument(
        "--layouts",
        choices=tuple(LAYOUTS),
        help="how parameters and optimizer state are sharded, by meshlayout.parallel: "
        "not at all, over 'batch' (fsdp), over 'model' as the model's operations allow "
        "(tensor), or both; sequences over 'seq', too (fsdp+context); layers in stages "
        "over 'stage' (pipeline); experts over 'expert'; images over 'height' and "
        "'width' (spatial); names in capitals are the layout maps at the foot of the "
        "model's file (default: tensor if --mesh has an axis 'model', else "
        "data_parallel)",
    )
    mesh.add_argument(
        "--virtual-devices",
        type=int,
        metavar="N",
        help="number of virtual devices on a CPU (default: 8); on GPU and TPU the real "
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
        "emnist/letters ... (default: fashion_mnist); language models read the topics "
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
        "--batch-size",
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
        help="what the backward pass recomputes instead of storing it (default: "
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
        help="continue after the newest epoch saved in --checkpoint-dir",
    )
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Raises OptionError for the first option with an invalid value."""
    models = LAYOUTS[options.layouts].models if options.layouts else ()
    options.model = options.model or (*models, "mlp")[0]
    if models and options.model not in models:
        raise OptionError(
            f"argument --layouts: {options.layouts} is for --model {models[0]}, which "
            f"{options.model} is not: name another one, or leave --model out"
        )
    if options.layouts == "pipeline" and options.remat == "blocks":
        raise OptionError(
            "argument --remat: with --layouts pipeline, the backward pass computes "
            "every stage again in any case; leave --remat out"
        )
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
    check_variant(options)
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


def check_variant(options: argparse.Namespace) -> None:
    """Sets `options.flax` if it was left out.

    Raises:
        OptionError: If the model has no such variant, or has a step of its own that
            does not know an option.
    """
    name, variants = options.model, EXAMPLES[options.model].variants
    if options.flax is None:
        options.flax = "linen" if "nnx" not in variants and variants else "nnx"
    elif len(variants) < 2:
        raise OptionError(f"argument --flax: {name} has one variant; leave --flax out")
    if variants:
        return
    for option, default in (
        ("precision", "float32"),
        ("accumulate", 1),
        ("remat", "none"),
    ):
        if getattr(options, option) != default:
            raise OptionError(
                f"argument --{option}: {name} has a train step of its own, without "
                f"this; leave --{option} out"
            )
