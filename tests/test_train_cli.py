"""`python -m models.train`: what it shows, what it refuses, how it ends."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from models import data, runs, train
from models.catalog import EXAMPLES
from models.runs import Run, TrainingError, compare


REPOSITORY = Path(__file__).parent.parent
SHORT = ["--epochs", "1", "--limit-train", "200", "--limit-test", "50"]


@pytest.fixture(autouse=True)
def nothing_to_be_had_from_outside(monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(data, "unreachable", lambda builder: "the server is away")


def command(*arguments, data_dir):
    """Runs the real command line where no server answers."""
    nowhere = "http://127.0.0.1:9"
    proxies = {"http_proxy": nowhere, "https_proxy": nowhere, "no_proxy": ""}
    return subprocess.run(
        [sys.executable, "-m", "models.train", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "TFDS_DATA_DIR": str(data_dir)}
        | proxies,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_without_mesh_and_layouts_two_runs_are_compared(tmp_path):
    done = command(
        "--epochs", "2", "--limit-train", "200", "--limit-test", "50", data_dir=tmp_path
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Data: fashion_mnist from the subset of it in models/, ")
    epochs = [line for line in lines if line.startswith("epoch ")]
    assert len(epochs) == 4
    shape = r"epoch \d/2  loss \d\.\d{4}  accuracy [\d.]+%  test accuracy [\d.]+%"
    assert all(re.match(shape, line) for line in epochs)
    assert lines[-1] == "Both runs agree."
    assert "Mesh(batch=8)" in done.stdout
    assert "Mesh(batch=2, model=4)" in done.stdout
    for path in ("hidden/kernel", "hidden/bias", "output/kernel", "output/bias"):
        assert done.stdout.count(path) >= 2
    assert "Traceback" not in done.stderr


TENSOR, FSDP = "tensor-parallel", "fully sharded"
BOTH = f"{FSDP} and {TENSOR}"
# What is asked for, and the title of the run; all but the first two are slow.
RUNS = {
    "--layouts fsdp+tensor --flax linen": f"{BOTH} on Mesh(batch=2, model=4)",
    "--layouts MODEL_PARALLEL --batch-size 16": (
        f"{TENSOR} by its own map on Mesh(batch=2, model=4)"
    ),
    "--mesh batch=4,model=-1": f"{TENSOR} on Mesh(batch=4, model=2)",
    "--flax linen --mesh batch=8": "data-parallel on Mesh(batch=8)",
    "--model convnet --mesh batch=2,model=4": f"{TENSOR} on Mesh(batch=2, model=4)",
    "--model resnet --flax linen --layouts fsdp": f"{FSDP} on Mesh(batch=8)",
    "--model transformer --flax linen --layouts tensor": (
        f"{TENSOR} on Mesh(batch=2, model=4)"
    ),
    "--layouts spatial": ("spatially parallel on Mesh(batch=2, height=2, width=2)"),
    "--model gpt --layouts fsdp+tensor_parallel": f"{BOTH} on Mesh(batch=2, model=4)",
    "--layouts expert": "expert-parallel on Mesh(batch=2, expert=4)",
    "--layouts pipeline": "in stages on Mesh(batch=2, stage=4)",
    "--layouts fsdp+context --flax linen": (
        f"{FSDP}, with sequences in shards on Mesh(batch=2, seq=4)"
    ),
    "--model resnet50 --layouts FSDP --limit-train 128": (
        f"{FSDP} by its own map on Mesh(batch=8)"
    ),
}


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(x, marks=[pytest.mark.slow] * (i > 1)) for i, x in enumerate(RUNS)],
)
def test_one_run_is_trained_with_what_was_asked_for(arguments, capsys):
    assert train.main([*SHORT, *arguments.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{RUNS[arguments]}, whose cpu devices are" in lines
    assert len([line for line in lines if re.match(r"epoch 1/1 .*loss ", line)]) == 1


def test_the_seed_decides_and_an_axis_that_shards_nothing_is_named(capsys):
    def numbers(seed):
        mesh = ["--mesh", "batch=2,model=4", "--layouts", "data_parallel"]
        assert train.main([*SHORT, *mesh, "--seed", seed]) == 0
        out = capsys.readouterr().out
        fact = (
            "Nothing is sharded over mesh axis 'model': its 4 devices repeat the same"
        )
        assert f"{fact} work." in out.splitlines()
        return epoch_lines(out)

    first = numbers("3")
    assert first == numbers("3")
    assert first != numbers("4")


# One of each kind of mistake.
REFUSED = {
    "--epochs 0": "argument --epochs: must be at least 1, not 0",
    "--global-batch-size 100": (
        "argument --global-batch-size: 100 does not divide into 8 shards over mesh "
        "axis 'batch'; nearest that do: 96 and 104"
    ),
    "--learning-rate nan": (
        "argument --learning-rate: must be positive and finite, not nan"
    ),
    "--data-dir does/not/exist": (
        "argument --data-dir: there is no directory 'does/not/exist'; `python -m "
        "models.prepare_data --data-dir DIR` makes and fills one"
    ),
    "--mesh batch=2,modle=4": (
        "argument --mesh: no layout here uses an axis 'modle'; the axes are "
        "'batch' and 'model'. Did you mean 'model'?"
    ),
    "--mesh batch=16": "argument --mesh: ...",
    "--mesh model=8 --layouts fsdp+tensor": (
        "argument --layouts: fsdp+tensor needs a mesh with an axis 'batch'; --mesh "
        "model=8 has none"
    ),
    "--model resnet5": "argument --model: invalid choice: 'resnet5'...",
    "--dataset fashion_mnis": (
        "TFDS has no dataset 'fashion_mnis'. Did you mean 'fashion_mnist'?"
    ),
    "--epoch 1": "unrecognized arguments: --epoch 1. Did you mean '--epochs'?",
    "--layouts FSDP_MODEL_PARALLEL": (
        "argument --layouts: mlp has no map FSDP_MODEL_PARALLEL: its own are "
        "DATA_PARALLEL, MODEL_PARALLEL, FSDP, and for every model there are "
        "data_parallel, fsdp, tensor, tensor_parallel, fsdp+tensor, "
        "fsdp+tensor_parallel"
    ),
    "--layouts spatial --mesh height=8,width=1": (
        "argument --mesh: the 28 pixels of an image's height do not divide into 8 "
        "shards over mesh axis 'height'; sizes that do: 1, 2, 4, 7, 14, 28"
    ),
    "--layouts pipeline --model mlp": (
        "argument --layouts: pipeline is for --model transformer, which mlp is not: "
        "name another one, or leave --model out"
    ),
    "--layouts pipeline --remat blocks": (
        "argument --remat: with --layouts pipeline, the backward pass computes every "
        "stage again in any case; leave --remat out"
    ),
    "--layouts pipeline --batch-size 24": (
        "argument --global-batch-size: 24 rows do not divide into 32, the microbatches "
        "of the stages and the shards of each; nearest that do: 32"
    ),
    "--layouts expert --precision float16": (
        "argument --precision: on CPU, the attention of JAX does not compute in "
        "float16; take bfloat16"
    ),
    "--model gpt --flax nnx": "argument --flax: gpt has one variant; leave --flax out",
    "--processes 3": (
        "argument --processes: 8 virtual devices do not divide among 3 processes; "
        "--virtual-devices says how many there are"
    ),
    "--resume": "argument --resume: needs --checkpoint-dir to resume from",
    "--checkpoint-dir x": (
        "argument --checkpoint-dir: without --mesh and --layouts two runs are "
        "compared; name one, as --layouts data_parallel"
    ),
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_a_bad_value_is_refused_in_one_sentence(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(arguments.split())
    printed = capsys.readouterr()
    assert (stop.value.code, printed.out) == (2, "")
    usage, message = printed.err.splitlines()
    assert usage == "usage: python -m models.train [options]"
    message = message.removeprefix("python -m models.train: error: ")
    beginning, dots, _ = REFUSED[arguments].partition("...")
    assert message.startswith(beginning) if dots else message == beginning
    assert "resnet5" not in message or message.endswith(" Did you mean 'resnet50'?")


def test_explaining_prints_layouts_memory_and_communication_and_trains_nothing(capsys):
    assert train.main(["--layouts", "fsdp", "--explain"]) == 0
    text = capsys.readouterr().out
    assert "hidden/kernel  f32[784, 128]  " in text
    assert "each device sends: " in text
    assert "peak" in text
    assert "epoch" not in text


@pytest.mark.slow
def test_what_does_not_divide_stays_whole_with_its_reason(tmp_path):
    done = command(
        *SHORT, "--virtual-devices", "3", "--mesh", "model=3", data_dir=tmp_path
    )
    assert "128 does not divide into 3 shards" in done.stdout
    assert "Nothing is sharded over mesh axis 'model'" in done.stdout
    assert done.returncode == 1
    assert "all 3 devices of Mesh(model=3) would compute the same" in done.stderr


def test_a_dataset_that_cannot_be_had_ends_with_what_to_do(tmp_path, capsys):
    assert train.main(["--dataset", "mnist"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    start = f"python -m models.train: error: mnist is not prepared in {tmp_path} and "
    assert printed.err.startswith(start)
    assert printed.err.count("\n") == 1


def test_a_loss_that_is_not_a_number_ends_the_run(capsys):
    arguments = [*SHORT, "--layouts", "data_parallel", "--learning-rate", "1e38"]
    assert train.main([*arguments, "--epochs", "2"]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(
        r"python -m models.train: error: the loss is (nan|inf) after epoch \d; try a "
        r"smaller --learning-rate\n",
        error,
    )


def epoch_lines(text):
    """The lines of epochs, without the seconds they took."""
    return [
        line[: line.index("  (")] for line in text.splitlines() if "  loss " in line
    ]


def test_a_run_is_resumed_after_its_newest_epoch(tmp_path, capsys):
    one = [*SHORT, "--layouts", "fsdp"]
    assert train.main([*one, "--epochs", "3"]) == 0
    whole = epoch_lines(capsys.readouterr().out)
    saved = [*one, "--checkpoint-dir", str(tmp_path / "run")]
    assert train.main([*saved, "--epochs", "2"]) == 0
    capsys.readouterr()
    assert train.main([*saved, "--epochs", "3", "--resume"]) == 0
    text = capsys.readouterr().out
    assert f"Resuming after epoch 2, from {tmp_path / 'run'}." in text
    assert epoch_lines(text) == whole[2:]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_several_processes_train_as_one_does(tmp_path):
    arguments = [*SHORT, "--layouts", "fsdp", "--model", "mlp"]
    one = command(*arguments, data_dir=tmp_path)
    four = command(*arguments, "--processes", "4", data_dir=tmp_path)
    assert four.returncode == 0, four.stderr
    (line,) = epoch_lines(four.stdout.replace("[0] ", ""))
    assert line == epoch_lines(one.stdout)[0]


def test_runs_that_do_not_agree_end_with_status_1(monkeypatch, capsys):
    same = {"initial_params": [np.ones(3)], "first_params": [np.ones(3)]}
    same |= {"first_losses": [2.3, 2.2], "params": [np.ones(3)]}
    same |= {"test_accuracies": [0.8]}
    one, two = (Run("", **same, epoch_losses=[x]) for x in (0.5, np.nan))
    with pytest.raises(TrainingError, match="losses of the epochs differ by nan"):
        compare(one, two, 1000)
    monkeypatch.setattr(runs, "FIRST_LOSSES_TOLERANCE", -1.0)
    assert train.main(SHORT) == 1
    printed = capsys.readouterr()
    assert "Both runs agree" not in printed.out
    assert "error: the runs do not agree: losses of the first 2 steps" in printed.err


@pytest.mark.slow
def test_a_gan_is_compared_resumed_and_agrees(tmp_path, capsys):
    assert train.main([*SHORT, "--model", "gan"]) == 0
    assert capsys.readouterr().out.endswith("Both runs agree.\n")
    one = ["--model", "gan", "--layouts", "fsdp", "--limit-train", "200"]
    assert train.main([*one, "--epochs", "2"]) == 0
    whole = capsys.readouterr().out.splitlines()[-2:]
    saved = [*one, "--checkpoint-dir", str(tmp_path / "gan")]
    assert train.main([*saved, "--epochs", "1"]) == 0
    capsys.readouterr()
    assert train.main([*saved, "--epochs", "2", "--resume"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == whole


def test_the_help_describes_every_model(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, example in EXAMPLES.items():
        assert f"{name}: {example.description}" in text
