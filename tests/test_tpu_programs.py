"""What train steps send on a TPU slice: programs of the real compiler, with no TPU."""

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import meshlayout as ml
from benchmarks import fsdp_rules
from meshlayout.hlo import read_communication
from models import transformer
from tests.tpu import Collective, abstract, create_slice_mesh, read_collectives


pytest.importorskip("libtpu")

ROWS = 64
LENGTH = 32
CONFIG = transformer.TransformerConfig(
    vocab_size=256, max_length=LENGTH, features=128, mlp_features=256
)
FLOAT = 4  # bytes; what is summed over the batch is float32


# Small matrices, of a model that compiles in seconds.
SMALL = dataclasses.replace(
    fsdp_rules.WORKS["transformer"],
    build=lambda: transformer.Transformer(CONFIG, rngs=nnx.Rngs(0)),
    example={"tokens": ((LENGTH,), "int32")},
)
WORKS = {**fsdp_rules.WORKS, "transformer": SMALL}
EIGHT = {"batch": 8}
TWO_BY_FOUR = {"batch": 2, "model": 4}
FOUR_BY_TWO = {"batch": 4, "model": 2}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


# Several tests look at one program, and JAX does not load it from its cache.
PROGRAMS: dict[tuple[Any, ...], tuple[Any, Any, list[str]]] = {}


class Slice:
    """Compiles steps for a v5e:2x4 slice, and reads what the compiler says."""

    def __init__(self, capfd):
        self._capfd = capfd

    def compile(self, lowered, options=None):
        """Returns a compiled program, and the compiler's lines on rematerialization."""
        self._capfd.readouterr()
        compiled = lowered.compile(options)
        log = self._capfd.readouterr().err.splitlines()
        return compiled, [line for line in log if "rematerializ" in line.lower()]

    def program(self, name, layouts, axes, **options):
        """Returns a model's abstract state and its compiled step, which was quiet."""
        key = (name, layouts, *axes.items(), *options.items())
        if key not in PROGRAMS:
            step, state, batch = train_step(name, layouts, axes, **options)
            PROGRAMS[key] = state, *self.compile(step.lower(state, batch))
        state, compiled, warned = PROGRAMS[key]
        assert warned == []
        return state, compiled

    def sent(self, *given, **options):
        """Returns a model's abstract state and the collectives of its step."""
        state, compiled = self.program(*given, **options)
        return state, read_collectives(compiled.as_text())


def train_step(
    name, layouts, axes, rows=ROWS, has_weights=False, mesh=None, rules=(), **options
):
    """Returns a train step, and the abstract state and batch that it takes."""
    work = WORKS[name]
    example = {**work.example, **({"weight": ((), "float32")} if has_weights else {})}
    mesh = mesh or create_slice_mesh(**axes)
    layout_map = ml.LayoutMap(mesh, {**getattr(work.module, layouts), **dict(rules)})
    optimizer = optax.adam(1e-3)
    state = ml.TrainState.describe(work.build, optimizer, layout_map).abstract
    batch = {
        key: abstract((rows, *shape), dtype, mesh.layout("batch", *[None] * len(shape)))
        for key, (shape, dtype) in example.items()
    }
    step = ml.make_train_step(work.loss_fn, **options)
    return step, state, batch


@pytest.fixture
def tpu(capfd):
    return Slice(capfd)


def kinds(sent: list[Collective]) -> Counter[str]:
    return Counter(one.kind for one in sent)


def of_kind(sent: list[Collective], kind: str) -> list[Collective]:
    return [one for one in sent if one.kind == kind]


def gradient_bytes(state) -> int:
    """Returns the bytes of the gradients of what each chip holds, and of the loss."""
    shards = (x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(state.params))
    return FLOAT * (sum(map(math.prod, shards)) + 1)


def elements(sent: list[Collective]) -> Counter[int]:
    """Counts arrays by their number of elements: the compiler may reshape them."""
    return Counter(math.prod(shape) for one in sent for shape in one.shapes)


def gathered_sizes(state) -> Counter[int]:
    """Counts by elements what each chip's matrices are once gathered over `batch`."""
    return Counter(
        math.prod(x.sharding.shard_shape(x.shape)) * x.sharding.mesh.shape["batch"]
        for x in jax.tree.leaves(state.params)
        if x.ndim > 1 and "batch" in str(x.sharding.spec)
    )


# What the reading of programs rests on.


def test_a_rematerialization_is_seen(tpu):
    mesh = create_slice_mesh(a=2, b=2, c=2).jax_mesh
    rows = NamedSharding(mesh, PartitionSpec(("b", "c", "a"), None, None))
    columns = NamedSharding(mesh, PartitionSpec(None, "b", ("c", "a")))
    x = jax.ShapeDtypeStruct((16, 16, 16), "float32", sharding=rows)
    lowered = jax.jit(lambda x: x + 1, out_shardings=columns).lower(x)
    _, [line] = tpu.compile(lowered)
    assert "Involuntary full rematerialization" in line


def whole_bytes(collective):
    """Returns a collective's bytes as the independent reader counts them."""
    is_scatter = collective.kind == "reduce_scatter"
    return collective.nbytes * (collective.num_devices if is_scatter else 1)


@pytest.mark.parametrize(
    ("name", "layouts", "axes"),
    [
        slow("mlp", "MODEL_PARALLEL", TWO_BY_FOUR),
        slow("resnet", "FSDP", EIGHT),
        ("transformer", "FSDP", EIGHT),
        slow("transformer", "FSDP_MODEL_PARALLEL", FOUR_BY_TWO),
    ],
)
def test_the_report_agrees_with_an_independent_reader(tpu, name, layouts, axes):
    _, compiled = tpu.program(name, layouts, axes)
    sent = ml.hlo.read_communication(compiled)
    expected = read_collectives(compiled.as_text())
    assert Counter((x.kind, whole_bytes(x), x.in_loop) for x in sent.collectives) == (
        Counter((x.kind, x.nbytes, x.in_loop) for x in expected)
    )
    for one in sent.collectives:
        n = math.prod(axes[axis] for axis in one.axes or ())
        assert one.whole_axes
        assert one.times_known
        share = {"all_reduce": 2 * (n - 1) / n, "reduce_scatter": n - 1}
        share |= {"collective_permute": 1}
        wire = one.times * math.ceil(share.get(one.kind, (n - 1) / n) * one.nbytes)
        assert one.wire_bytes == wire


def test_fsdp_gathers_asynchronously_and_names_the_lines_it_serves(tpu):
    _, compiled = tpu.program("transformer", "FSDP", EIGHT)
    gathers = [
        one
        for one in ml.hlo.read_communication(compiled).collectives
        if one.kind == "all_gather"
    ]
    assert sum(one.is_async for one in gathers) > 0.8 * len(gathers)
    files = ["models/transformer.py:"]
    if jax.__version_info__ < (0, 8):  # only the innermost line is in the program
        files.append("nn/linear.py:")
    assert all(one.source.startswith(tuple(files)) for one in gathers)


def test_loops_without_a_count_in_the_text_are_counted(tpu):
    mesh = create_slice_mesh(batch=2, model=4)

    def program(ws, x):
        def outer(x, w):
            return jax.lax.scan(lambda x, _: (jax.numpy.tanh(x @ w), None), x, length=3)

        return jax.lax.scan(outer, x, ws)[0]

    ws = abstract((5, 256, 256), "float32", mesh.layout(None, "model", None))
    x = abstract((64, 256), "float32", mesh.layout("batch", "model"))
    compiled, _ = tpu.compile(jax.jit(program).lower(ws, x))
    assert "known_trip_count" not in compiled.as_text()
    sent = ml.hlo.read_communication(compiled)
    assert {(one.times, one.times_known) for one in sent.collectives} == {(15, True)}


# Model-parallel: the activations that the layouts speak of, and the gradients.


def test_a_model_parallel_mlp_sends_its_logits_and_its_gradients(tpu):
    state, sent = tpu.sent("mlp", "MODEL_PARALLEL", TWO_BY_FOUR)
    assert kinds(sent) == {"all_reduce": 2}
    logits, gradients = sorted(sent, key=lambda one: one.nbytes)
    assert logits.shapes == ((ROWS // 2, 10),)
    assert gradients.nbytes == gradient_bytes(state)


# FSDP: weights are gathered, gradients scattered.


def test_an_fsdp_transformer_gathers_each_matrix_and_scatters_its_gradient(tpu):
    state, sent = tpu.sent("transformer", "FSDP", EIGHT)
    matrices = gathered_sizes(state)
    gathers = of_kind(sent, "all_gather")
    gathered = elements(gathers)
    [scatter] = of_kind(sent, "reduce_scatter")
    assert matrices <= gathered <= matrices + matrices  # forward, and again backward
    # Positions are the same for all rows; their small gradient goes with the biases'.
    assert {*(matrices - elements([scatter]))} <= {LENGTH * 128}
    assert kinds(sent) - kinds(gathers) == {"reduce_scatter": 1, "all_reduce": 1}
    assert of_kind(sent, "all_reduce")[-1].nbytes < scatter.nbytes / 6


@pytest.mark.parametrize(
    ("name", "options"),
    [
        slow("mlp", {}),
        ("mlp", {"accumulate": 4, "has_weights": True}),
        slow("mlp", {"accumulate": 4, "precision": "bfloat16"}),
        slow("transformer", {"accumulate": 4}),
        slow("convnet", {"accumulate": 4, "has_weights": True}),
    ],
)
def test_data_parallel_sends_the_gradients_once(tpu, name, options):
    state, sent = tpu.sent(name, "DATA_PARALLEL", EIGHT, **options)
    assert set(kinds(sent)) == {"all_reduce"}
    assert not [one for one in sent if one.in_loop]
    *small, gradients = sorted(sent, key=lambda one: one.nbytes)
    # With weights, their sum too, and which microbatches hold more than padding.
    has_weights = "has_weights" in options
    assert 0 <= gradients.nbytes - gradient_bytes(state) <= FLOAT * has_weights
    assert sum(one.nbytes for one in small) <= 16 * has_weights


@pytest.mark.slow
def test_microbatches_of_batch_normalization_send_their_statistics_each(tpu):
    state, sent = tpu.sent("resnet", "DATA_PARALLEL", EIGHT, accumulate=4)
    [gradients] = [one for one in sent if not one.in_loop]
    # The gradients of scales and biases are among the sums of the backward pass.
    assert 0.99 * gradient_bytes(state) < gradients.nbytes <= gradient_bytes(state)
    assert set(kinds(sent)) == {"all_reduce"}
    assert all(one.nbytes <= 4 * 64 * FLOAT for one in sent if one.in_loop)


@pytest.mark.parametrize("options", [{}, slow({"accumulate": 4})])
def test_zero_scatters_gradients_and_gathers_parameters(tpu, options):
    rules = (("^opt_state/", ml.zero_rule(create_slice_mesh(**EIGHT))),)
    state, sent = tpu.sent("mlp", "DATA_PARALLEL", EIGHT, rules=rules, **options)
    assert not [one for one in sent if one.in_loop]
    [scatter] = of_kind(sent, "reduce_scatter")
    moments = state.opt_state[0].mu
    assert scatter.shapes == ((1024, 512),)
    assert elements(of_kind(sent, "all_gather")) == {1024 * 512: 1, 512 * 10: 1}
    assert moments["hidden"]["kernel"].sharding.spec[0] == "batch"
    small = sum(one.nbytes for one in of_kind(sent, "all_reduce"))
    assert small < gradient_bytes(state) / 32
    assert set(kinds(sent)) == {"reduce_scatter", "all_gather", "all_reduce"}


@pytest.mark.slow
def test_recomputed_blocks_take_less_memory(tpu):
    # Small activations would all lie in the chip's fast memory, which is not counted.
    everything_in_hbm = {"xla_vf_vmem_memory_space_assignment": "false"}

    def temporary_bytes(remat):
        step, state, batch = train_step(
            "transformer", "DATA_PARALLEL", EIGHT, rows=256, remat=remat
        )
        lowered = step.lower(state, batch)
        compiled, warned = tpu.compile(lowered, everything_in_hbm)
        assert warned == []
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes("blocks") < 0.8 * temporary_bytes("none")


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("mlp", "float32"),
        slow("convnet", "bfloat16"),
        slow("resnet", "float32"),
        slow("transformer", "float32"),
        slow("transformer", "bfloat16"),
    ],
)
def test_fsdp_sends_no_more_than_the_hand_written_map(name, precision):
    assert_fsdp_sends_little(create_slice_mesh(batch=8), name, precision, 36.5e6)


def assert_fsdp_sends_little(mesh, name, precision, most):
    """Compares a model's map with that in its file, and a transformer's with a number."""
    work, bytes_sent = fsdp_rules.WORKS[name], []
    for layouts in (ml.parallel.fsdp(mesh), ml.LayoutMap(mesh, work.module.FSDP)):
        compiled = fsdp_rules.compiled_step(work, layouts, precision)
        bytes_sent.append(read_communication(compiled, mesh).wire_bytes)
    is_known = (name, precision) == ("transformer", "float32")
    assert bytes_sent[0] <= min(bytes_sent[1], most if is_known else math.inf)


def test_weights_are_gathered_in_bfloat16():
    mesh = create_slice_mesh(batch=8)
    layouts, work = ml.parallel.fsdp(mesh), fsdp_rules.WORKS["mlp"]
    compiled = fsdp_rules.compiled_step(work, layouts, "bfloat16")
    sent = read_communication(compiled, mesh).collectives
    gathered = [array for x in sent if x.kind == "all_gather" for array in x.arrays]
    assert {array.partition("[")[0] for array in gathered} == {"bf16"}


def test_optimizer_state_on_the_host_is_no_argument_in_device_memory(capfd):
    work = fsdp_rules.WORKS["mlp"]
    mesh = create_slice_mesh(batch=8)

    def memory(**options):
        layouts = ml.parallel.fsdp(mesh) | {
            "^opt_state/": ml.zero_rule(mesh, **options)
        }
        return fsdp_rules.compiled_step(work, layouts, "float32").memory_analysis()

    on_device, on_host = memory(), memory(memory_kind="pinned_host")
    moved = on_device.argument_size_in_bytes - on_host.argument_size_in_bytes
    assert moved > 2 * 1024 * 512 * FLOAT / 8  # Adam's two slots, of the first kernel
    assert on_host.host_argument_size_in_bytes == moved
    assert on_host.host_alias_size_in_bytes == moved
    assert "compute in host memory" not in capfd.readouterr().err
