"""The pages of docs/: their programs run, and name what exists."""

import functools
import importlib.util
import inspect
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import pytest

import meshlayout as ml
from tests.processes import ROOT


DOCS = ROOT / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "```python" in page.read_text()]
# A block of code, what it needs besides the library, and what it prints.
BLOCK = r"(?:<!-- needs (\w+) -->\n)?```python\n(.*?)```(?:\n\n```text\n(.*?)```)?"
REPOSITORY = re.compile(
    r"https://(?:github\.com|raw\.githubusercontent\.com)/meshlayout/meshlayout/"
    r"(?:(?:blob|tree)/)?main/([^)\"#\s]+)"
)

# What the tutorial on DTensor and Keras uses, without what it takes from Python.
OF_DTENSOR = """
tf.config.list_physical_devices tf.config.set_logical_device_configuration
tf.config.LogicalDeviceConfiguration tf.config.list_logical_devices
tf.experimental.dtensor dtensor.create_mesh mesh.num_local_devices dtensor.UNSHARDED
dtensor.Layout Layout.replicated Layout.batch_sharded dtensor.pack dtensor.copy_to_mesh
tf.keras.backend.experimental.enable_tf_random_generator
tf.keras.utils.set_random_seed tf.keras.Model tf.keras.Model.fit tf.keras.Model.eval
tf.keras.Sequential tf.keras.models.Sequential tf.keras.Input tf.keras.layers.Dense
tf.keras.layers.Dropout tf.keras.layers.Flatten kernel_layout bias_layout
tf.keras.dtensor.experimental.LayoutMap layout_map.scope
tf.keras.dtensor.experimental.optimizers.Adam
tf.keras.losses.sparse_categorical_crossentropy
tf.keras.metrics.SparseCategoricalAccuracy tf.keras.utils.Progbar reset_state
update_state result apply_gradients tf.GradientTape tf.function tf.split tf.reduce_sum
tf.cast tf.zeros tfds.load tf.data tf.data.AUTOTUNE weight.layout kernel.layout
tf.distribute.MirroredStrategy
"""

# What the pages on tf.distribute name: its API page, the custom-training tutorial, the
# talk, and asynchronous training.
OF_TF_DISTRIBUTE = """
tf.distribute.Strategy tf.distribute.MirroredStrategy tf.distribute.OneDeviceStrategy
tf.distribute.MultiWorkerMirroredStrategy tf.distribute.TPUStrategy
tf.distribute.experimental.MultiWorkerMirroredStrategy
tf.distribute.experimental.CentralStorageStrategy
tf.distribute.experimental.ParameterServerStrategy
tf.distribute.coordinator.ClusterCoordinator schedule join done fetch RemoteValue
create_per_worker_dataset FixedShardsPartitioner MinSizePartitioner MaxSizePartitioner
cross_device_ops tf.distribute.NcclAllReduce CollectiveCommunication TF_CONFIG
cluster_resolver tf.distribute.cluster_resolver.TPUClusterResolver
tf.distribute.StrategyExtended strategy.extended worker_devices reduce_to batch_reduce_to
strategy.num_replicas_in_sync strategy.scope strategy.run strategy.reduce strategy.gather
strategy.distribute_datasets_from_function strategy.experimental_distribute_dataset
strategy.experimental_distribute_values_from_function
strategy.experimental_local_results tf.distribute.RunOptions tf.distribute.InputOptions
tf.distribute.InputContext tf.distribute.ValueContext tf.distribute.DistributedValues
tf.distribute.DistributedDataset element_spec tf.distribute.ReduceOp.SUM MEAN
tf.distribute.get_strategy tf.distribute.has_strategy
tf.distribute.in_cross_replica_context tf.distribute.get_replica_context
tf.distribute.ReplicaContext all_reduce all_gather merge_call replica_id_in_sync_group
tf.data.Dataset.from_tensor_slices shuffle batch repeat drop_remainder prefetch
tf.data.Dataset.range tf.data.experimental.AutoShardPolicy
tf.data.experimental.DistributeOptions iter next tf.device tf.function tf.Variable
tf.variable_creator_scope tf.Tensor tf.constant tf.identity tf.TypeSpec tf.cast tf.range
tf.reshape tf.reduce_sum tf.reduce_prod tf.math.reduce_mean tf.add_n tf.shape
tf.nn.compute_average_loss tf.nn.scale_regularization_loss CompositeTensor
tf.IndexedSlices tf.keras.datasets.fashion_mnist tf.keras.regularizers.L2
tf.keras.losses.SparseCategoricalCrossentropy tf.keras.losses.Reduction.NONE
Model.losses add_loss activity_regularizer tf.GradientTape tape.gradient
trainable_variables trainable_weights apply_gradients tf.keras.optimizers.Adam SGD
tf.keras.metrics.Mean tf.keras.metrics.SparseCategoricalAccuracy update_state result
reset_states tf.train.Checkpoint save restore tf.train.latest_checkpoint
tf.saved_model.save model.save tf.keras.Sequential tf.keras.Model tf.keras.Input
tf.keras.layers Layer Conv2D MaxPooling2D Flatten Dense model.compile model.fit
model.evaluate model.predict Model.train_step tf.estimator.Estimator RunConfig
"""


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_programs_of_a_page_run_and_print_what_it_shows(page: Path, tmp_path: Path):
    blocks = [
        (code, shown)
        for package, code, shown in re.findall(BLOCK, page.read_text(), re.DOTALL)
        if not package or importlib.util.find_spec(package)
    ]
    script = tmp_path / f"page_{page.stem}.py"
    script.write_text("\n".join(code for code, _ in blocks))
    run = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env=None,
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    if jax.__version_info__[:2] == (0, 10):  # with which the pages were written
        printed = [lasting(line) for line in run.stdout.splitlines()]
        shown = [lasting(line) for _, text in blocks for line in text.splitlines()]
        missing = [x for x in shown if not any(y.startswith(x) for y in printed)]
        assert missing == []


def lasting(line: str) -> str:
    """Returns a printed line without times, source files, and the width of columns."""
    line = re.sub(r"\(\d+\.\d s, .*\)|[\w/-]+\.py:\d+.*", "", line)
    return " ".join(re.sub("[─]+", "─", line).split())


def test_links_into_the_repository_are_to_files_that_exist():
    pages = [ROOT / "README.md", *DOCS.rglob("*.md"), *ROOT.glob("notebooks/*.ipynb")]
    files = {file for page in pages for file in REPOSITORY.findall(page.read_text())}
    assert {"docs/guides/your_data.md", "docs/pictures/overview-dark.svg"} <= files
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []


def test_the_pictures_are_those_that_the_script_draws():
    drawings = runpy.run_path(str(DOCS / "draw.py"))["drawings"]()
    folder = DOCS / "pictures"
    assert drawings == {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("page", "names"), [("dtensor", OF_DTENSOR), ("tf_distribute", OF_TF_DISTRIBUTE)]
)
def test_every_name_of_the_pages_that_people_come_from_has_its_row(page, names):
    lines = (DOCS / "coming_from" / f"{page}.md").read_text().splitlines()
    known = [line.split("|")[1] for line in lines if line.startswith("| ")]
    missing = [
        name
        for name in names.split()
        if not any(re.search(rf"\b{re.escape(name)}\b", cell) for cell in known)
    ]
    assert missing == []


def test_every_block_of_code_on_the_site_is_of_a_kind_that_runs():
    # The reference has its examples from docstrings, which are doctests.
    languages = {
        language
        for page in DOCS.rglob("*.md")
        for language in re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE)
    }
    assert languages <= {"python", "bash", "text"}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_commands_of_a_page_run():
    commands = [
        command
        for page in DOCS.rglob("*.md")
        for command in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    assert commands
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for command in commands:
        environment = {**os.environ, "PATH": path, "JAX_PLATFORMS": "cpu"}
        subprocess.run(
            ["bash", "-e", "-c", command], cwd=ROOT, env=environment, check=True
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_names_in_a_table_exist(page: Path):
    names = set(re.findall(r"\bml((?:\.\w+)+)", page.read_text()))
    assert names
    for name in names:
        functools.reduce(getattr, name[1:].split("."), ml)


def test_the_reference_has_every_public_name():
    text = "".join(path.read_text() for path in DOCS.glob("reference/*.md"))
    listed = set(re.findall(r"^::: meshlayout\.(\S+)", text, re.MULTILINE))
    modules = {name for name in ml.__all__ if inspect.ismodule(getattr(ml, name))}
    assert {name for name in listed if "." not in name} == {*ml.__all__} - modules
    for name in listed:
        functools.reduce(getattr, name.split("."), ml)
    strategies = {f"distribute.{name}" for name in _public_names(ml.distribute)}
    assert strategies - listed == set()
    # Every module that users import has its page.
    assert modules <= {*(path.stem for path in DOCS.glob("reference/*.md"))} | {
        name.split(".")[0] for name in listed
    }


def test_the_page_of_metrics_has_their_settings():
    text = (DOCS / "reference" / "metrics.md").read_text()
    text = re.sub(r"\(\s+", "(", re.sub(r"\s+", " ", text))
    for kind in (ml.metrics.Accuracy, ml.metrics.Mean, ml.metrics.F1):
        signature = inspect.signature(kind)
        settings = [
            x.replace(annotation=x.empty)
            for name, x in signature.parameters.items()
            if name not in ("sums", "_kind")
        ]
        own = signature.replace(parameters=settings, return_annotation=None)
        assert f"{kind.__name__}{own}".removesuffix(" -> None") in text


def _public_names(module: ModuleType) -> set[str]:
    names = {name for name in vars(module) if not name.startswith("_")}
    return {name for name in names if not inspect.ismodule(getattr(module, name))}
