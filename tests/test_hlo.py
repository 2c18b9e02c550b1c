"""What compiled programs send: closed forms on hand-written programs, loops, locks."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshlayout as ml
from meshlayout.errors import CommunicationError
from meshlayout.hlo import read_communication
from tests.error_messages import message_of


AXES = [("batch",), ("model",), ("batch", "model")]
SIZES = {"batch": 2, "model": 4}


message = functools.partial(message_of, error=CommunicationError)


def sent_by(function, *arguments):
    return read_communication(jax.jit(function).lower(*arguments).compile())


def program_of(operation):
    """Returns the text of a program of one operation on x, eight floats."""
    return f"""HloModule step, num_partitions=8

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0), metadata={{op_name="x"}}
  ROOT %y = {operation}
}}
"""


def shifted(x, axes):
    n = math.prod(SIZES[axis] for axis in axes)
    return jax.lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)])


# A collective over n devices, each with b bytes: what it results in, and what is sent.
FORMS = {
    "all_reduce": (jax.lax.psum, lambda n, b: b, lambda n, b: 2 * (n - 1) * b / n),
    "all_gather": (
        lambda x, axes: jax.lax.all_gather(x, axes, tiled=True),
        lambda n, b: n * b,
        lambda n, b: (n - 1) * b,
    ),
    "reduce_scatter": (
        lambda x, axes: jax.lax.psum_scatter(x, axes, tiled=True),
        lambda n, b: b / n,
        lambda n, b: (n - 1) * b / n,
    ),
    "all_to_all": (
        lambda x, axes: jax.lax.all_to_all(x, axes, 0, 1, tiled=True),
        lambda n, b: b,
        lambda n, b: (n - 1) * b / n,
    ),
    "collective_permute": (shifted, lambda n, b: b, lambda n, b: b),
}


@pytest.mark.parametrize(("kind", "axes"), [*itertools.product(FORMS, AXES)])
def test_a_collective_sends_what_its_formula_says(mesh, kind, axes):
    function, result_bytes, wire_bytes = FORMS[kind]

    def program(x):
        return jax.shard_map(
            lambda x: function(x, axes),
            mesh=mesh.jax_mesh,
            in_specs=P(("batch", "model")),
            out_specs=P(("batch", "model")),
            check_vma=False,
        )(x)

    x = ml.arrays.ones((8 * 16, 8), mesh.layout(("batch", "model"), None))
    [one] = sent_by(program, x).collectives
    n, b = math.prod(SIZES[axis] for axis in axes), 16 * 8 * 4
    assert (one.kind, one.axes, one.whole_axes) == (kind, axes, True)
    assert one.num_devices == (2 if kind == "collective_permute" else n)
    assert (one.nbytes, one.wire_bytes) == (result_bytes(n, b), wire_bytes(n, b))
    assert (one.times, one.times_known, one.in_loop) == (1, True, False)
    assert re.fullmatch(r"tests/test_hlo.py:\d+", one.source)


@pytest.mark.parametrize(
    ("groups", "axes", "is_whole"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("model",), True),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("model",), False),
        ("[4,2]<=[2,4]T(1,0)", ("batch",), True),
        ("[1,8]<=[8]", ("batch", "model"), True),
        ("{}", ("batch", "model"), True),
        ("mesh['a'=2,'b'=4] {'a','b'}", ("batch", "model"), True),
        ("mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}", ("model",), True),
        ("mesh['a'=8] {'a':(1)2}", ("batch",), True),
        ("mesh['a'=8] {'a':(2)4}", ("model",), True),
    ],
)
def test_every_way_to_write_groups_is_read(mesh, groups, axes, is_whole):
    text = program_of(f"f32[8]{{0}} all-reduce(%x), replica_groups={groups}")
    [one] = read_communication(text, mesh).collectives
    assert (one.axes, one.whole_axes) == (axes, is_whole)
    n = math.prod(SIZES[axis] for axis in axes) // (1 if is_whole else 2)
    assert (one.num_devices, one.wire_bytes) == (n, 2 * (n - 1) * 32 / n)
    assert [*read_communication(text, mesh).by("axes")] == [
        ", ".join(axes) + " (in part)" * (not is_whole)
    ]
    unknown = read_communication(text)
    assert unknown.collectives[0].axes is None
    assert [*unknown.by("axes")] == [f"groups of {n}"]


@pytest.mark.parametrize(
    ("operation", "wire_bytes"),
    [
        ("collective-broadcast(%x), replica_groups=[2,4]", 32),
        ("collective-broadcast(%x), replica_groups=[8,1]", 0),
        ("ragged-all-to-all(%x), replica_groups=[2,4]", 24),
        ("all-reduce(%x), replica_groups=[8,1], to_apply=%add", 0),
        ("collective-permute(%x), source_target_pairs={{1,1}}", 0),
    ],
)
def test_rarer_collectives_and_groups_are_read(mesh, operation, wire_bytes):
    text = program_of(f"f32[8]{{0}} {operation}")
    [one] = read_communication(text, mesh).collectives
    assert one.kind == operation.split("(")[0].replace("-", "_")
    assert (one.wire_bytes, one.whole_axes) == (wire_bytes, True)


NAMES = {  # JAX's name of an operation, and the module that it is of
    "jit(step)/transpose(jvp(Net))/block_0/while/body/mlp/dot_general": "Net/block_0/mlp",
    "jit(step)/(jvp(Net)/a/add:jvp(Net)/b/add)": "Net",  # merged from two
}


@pytest.mark.parametrize("name", NAMES)
def test_modules_are_the_scopes_of_the_model_without_those_of_jax(name):
    operation = f'pred[<=8]{{0}} all-reduce(%x), metadata={{op_name="{name}"}}'
    [one] = read_communication(program_of(operation)).collectives
    assert (one.module, one.arrays, one.nbytes) == (NAMES[name], ("pred[8]",), 8)


def test_the_number_of_devices_is_read_behind_any_number_of_arguments(mesh):
    text = program_of("f32[8]{0} all-reduce(%x), replica_groups={}, to_apply=%add")
    types = ",".join(["f32[8]{0}"] * 30_000)
    layout = f"step, entry_computation_layout={{({types})->f32[8]{{0}}}}"
    [one] = read_communication(text.replace("step", layout, 1), mesh).collectives
    assert (one.axes, one.wire_bytes) == (("batch", "model"), 56)


def test_nested_loops_are_counted_in_full(mesh):
    def program(w, x):
        def outer(x, _):
            x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)
            return jnp.sin(x), x.sum()

        return jax.lax.scan(outer, x, length=5)

    x = ml.arrays.ones((4, 8), mesh.layout(None, "model"))
    sent = sent_by(program, ml.arrays.ones((8, 8), mesh.layout("model", None)), x)
    times = {(one.kind, one.times, one.times_known) for one in sent.collectives}
    assert {n for _, n, _ in times} <= {1, 5, 15}
    assert any(n == 15 for _, n, _ in times)
    assert all(known for *_, known in times)
    assert sent.wire_bytes == sum(one.wire_bytes for one in sent.collectives)


def test_unknown_loops_and_branches_are_marked(mesh):
    def loop(x):
        def body(carried):
            x, i = carried
            return x + x.sum(), i + 1

        return jax.lax.while_loop(lambda c: (c[0][0] < 100) & (c[1] < 9), body, (x, 0))

    def branches(x):
        def body(total, _):
            return jax.lax.cond(total > 0, lambda: x.sum(), lambda: total), None

        return jax.lax.scan(body, 0.0, length=4)[0]

    x = ml.arrays.ones(8, mesh.layout("model"))
    for program, times in ((loop, 1), (branches, 4)):
        sent = sent_by(program, x)
        assert {(x.times, x.times_known) for x in sent.collectives} == {(times, False)}
        assert str(sent).splitlines()[-1].startswith("? marks loops of unknown length")


# As XLA writes loops for TPUs: no count, and a counter that was copied.
LOOP = """HloModule step, num_partitions=8

%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %j = s32[] copy(%i)
  %step = s32[] constant(STEP)
  %next = s32[] add(%j, %step)
  %x = f32[8]{0} get-tuple-element(%t), index=1
  %sum = f32[8]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %out = (s32[], f32[8]{0}) tuple(%next, %sum)
}

%cond (t: (s32[], f32[8])) -> pred[] {
  %t = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(BOUND)
  ROOT %lt = pred[] compare(%i, %n), direction=DIRECTION
}

ENTRY %main (x: f32[8], s: s32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %s = s32[] parameter(1)
  %start = s32[] constant(START)
  %begin = s32[] copy(FIRST)
  %t = (s32[], f32[8]{0}) tuple(%begin, %x)
  %w = (s32[], f32[8]{0}) while(%t), condition=%cond, body=%body
  ROOT %y = f32[8]{0} get-tuple-element(%w), index=1
}
"""


@pytest.mark.parametrize(
    ("start", "step", "bound", "direction", "first", "times"),
    [
        (3, 2, 10, "LT", "%start", 4),
        (0, 1, 0, "LT", "%start", 0),
        (0, 2, 10, "NE", "%start", None),
        (0, 0, 7, "LT", "%start", None),
        (0, 1, 7, "LT", "%s", None),  # an argument is not guessed
    ],
)
def test_turns_are_read_off_the_loop_itself(
    start, step, bound, direction, first, times
):
    text = LOOP
    values = {"START": start, "STEP": step, "BOUND": bound, "DIRECTION": direction}
    for name, value in {**values, "FIRST": first}.items():
        text = text.replace(name, str(value))
    [one] = read_communication(text).collectives
    count = 1 if times is None else times
    assert (one.times, one.times_known) == (count, times is not None)
    assert (one.in_loop, one.wire_bytes) == (True, count * 48)


# Asynchronous forms; those of TPUs are in test_tpu_programs.

ASYNCHRONOUS = """HloModule step, num_partitions=8

%wrapped (p: f32[8]) -> f32[16] {
  %p = f32[8]{0} parameter(0)
  ROOT %ag = f32[16]{0} all-gather(%p), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %as = ((f32[8]{0}), f32[16]{0}, u32[]) async-start(%x), calls=%wrapped
  %ad = f32[16]{0} async-done(%as)
  %cp = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%ad), source_target_pairs={{0,1},{1,0}}
  %cpd = f32[8]{0} collective-permute-done(%cp)
  %ars = f32[8]{0} all-reduce-start(%cpd), replica_groups=[2,4]<=[8], to_apply=%add, metadata={op_name="jit(step)/transpose(jvp(Net))/head/dot_general"}, backend_config={"collective_backend_config":{"is_sync":true}}
  ROOT %ard = f32[8]{0} all-reduce-done(%ars)
}
"""


def test_asynchronous_collectives_are_counted_once_each(mesh):
    sent = read_communication(ASYNCHRONOUS, mesh)
    rows = [
        (one.kind, one.axes, one.arrays, one.wire_bytes, one.is_async)
        for one in sent.collectives
    ]
    assert rows == [
        ("all_gather", ("batch",), ("f32[16]",), 32, True),
        ("collective_permute", ("model",), ("f32[8]",), 32, True),
        ("all_reduce", ("model",), ("f32[8]",), 48, False),
    ]
    by_kind = {kind: part.wire_bytes for kind, part in sent.by("kind").items()}
    assert [*by_kind] == ["all_reduce", "all_gather", "collective_permute"]
    assert sent.by("module")["Net/head"].wire_bytes == 48
    assert str(sent).splitlines()[-4:] == [
        "each device sends: 3 collectives, 112 B",
        "by kind: all_reduce 1 collective, 48 B; all_gather 1 collective, 32 B; "
        "collective_permute 1 collective, 32 B",
        "by axes: model 2 collectives, 80 B; batch 1 collective, 32 B",
        "by module: none 2 collectives, 64 B; Net/head 1 collective, 48 B",
    ]
    assert "head/dot_general (backward)" in sent._repr_html_()


def squares(model, batch):
    return jnp.square(model(batch["x"])).mean(-1)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 128, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(128, 64, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def train_arguments(mesh, rules, build=Net):
    layouts = ml.LayoutMap(mesh, rules)
    state = ml.TrainState.create(lambda: build(nnx.Rngs(0)), optax.adam(0.1), layouts)
    return state, {"x": ml.arrays.ones((16, 64), mesh.layout("batch", None))}


@pytest.mark.parametrize("options", [{"ema": 0.9}, {"clip_norm": 1.0}])
def test_gradients_are_named_by_their_parameters(mesh, options):
    arguments = train_arguments(mesh, {})
    sent = ml.make_train_step(squares, **options).communication(*arguments)
    moved = [leaf for one in sent.collectives for leaf in one.leaves]
    assert sorted(moved) == ["down/kernel", "up/kernel"]
    [gradients] = [one for one in sent.collectives if one.leaves]
    assert gradients.kind == "all_reduce"
    # Two lines of the model, and that of the loss; older versions note Flax's own.
    file = "tests/test_hlo.py" if jax.__version_info__ >= (0, 8) else "nn/linear.py"
    assert re.fullmatch(rf"{file}:\d+ and [12] more", gradients.source)


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = Net(rngs), Net(rngs)

    def __call__(self, x):
        return self.second(self.first(x))


def test_layers_of_an_nnx_model_are_told_apart(mesh):
    rules = {"up/kernel": (None, "model"), "down/kernel": ("model", None)}
    arguments = train_arguments(mesh, rules, Stack)
    sent = ml.make_eval_step(squares).communication(*arguments).by("module")
    assert {"first/down", "second/down"} <= {*sent}


def test_moved_weights_are_named_and_activations_are_not(mesh):
    rules = {"up/kernel": ("batch", None), "down/kernel": ("model", None)}
    state, batch = train_arguments(mesh, rules)
    for step in (ml.make_train_step(squares), ml.make_eval_step(squares)):
        every = step.communication(state, batch).collectives
        # How the kernel gets to where its products are is the compiler's choice.
        moved = {one.leaves for one in every if one.kind != "all_reduce"}
        assert ("up/kernel",) in moved
        assert all(leaf.endswith("up/kernel") for leaves in moved for leaf in leaves)
        sums = [one.leaves for one in every if one.arrays == ("f32[8, 64]",)]
        assert sums == [()]


def whole(mesh, w):
    return jax.lax.with_sharding_constraint(w, mesh.layout(None, None).sharding)


def test_weights_that_a_scan_slices_are_named(mesh):
    @ml.compile_step
    def step(state, batch):
        def layer(x, w):
            return jnp.tanh(x @ whole(mesh, w)), None

        x, _ = jax.lax.scan(layer, batch, state["layers"])
        return state, x.sum()

    state = {"layers": ml.arrays.ones((5, 64, 64), mesh.layout(None, "model", None))}
    batch = ml.arrays.ones((256, 64), mesh.layout("batch", None))
    gathers = step.communication(state, batch).by("kind")["all_gather"].collectives
    assert {(one.leaves, one.times) for one in gathers} == {(("layers",), 5)}


def test_arguments_of_any_program_have_jaxs_names(mesh):
    def program(params, x):
        return x @ whole(mesh, params["layers"][0].T)

    params = {"layers": [ml.arrays.ones((64, 64), mesh.layout("model", None))]}
    x = ml.arrays.ones((256, 64), mesh.layout("batch", None))
    [one] = sent_by(program, params, x).collectives
    assert (one.kind, one.leaves) == ("all_gather", ("params/layers/0",))


@pytest.fixture
def column_sum():
    @ml.compile_step
    def column_sum(state, batch):
        return state, jnp.sin(batch @ state["w"]).sum()

    return column_sum


def arguments_of(mesh, *specs):
    state = {"w": ml.arrays.ones((8, 16), mesh.layout(*specs))}
    return state, ml.arrays.ones((4, 8), mesh.layout("batch", None))


def test_a_diff_and_a_lock_show_what_other_layouts_send(mesh, column_sum):
    rows = column_sum.communication(*arguments_of(mesh, None, None))
    assert rows.diff(rows) == "Both programs send the same."
    both = column_sum.communication(*arguments_of(mesh, "model", None))
    # The kernel's rows are on four devices, which add up their parts of 2 x 16 floats.
    assert re.search(r"\n\+ +all_reduce +model +f32\[2, 16\] +192 B ", rows.diff(both))
    assert re.search(r"\n- +all_reduce +model +f32\[2, 16\] +192 B ", both.diff(rows))
    assert rows.diff(both).endswith("\neach device sends: 4 B -> 196 B")
    lock = rows.to_lock()
    assert lock == (
        "# 4 bytes sent by each device\n"
        "1 x all_reduce over batch: f32[], 4 bytes sent, times 1\n"
    )
    rows.check_lock(lock)
    assert message(lambda: both.check_lock(lock)) == (
        "the program does not send what is locked (- locked, + now):\n"
        "  -# 4 bytes sent by each device\n"
        "  +# 196 bytes sent by each device\n"
        "  +1 x all_reduce over model: f32[2, 16], 192 bytes sent, times 1\n"
        "If this is intended, write a new lock with to_lock()."
    )


def test_a_report_and_a_call_share_one_compilation(mesh, column_sum):
    compiled = []

    def listen(name, *_, **__):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(name)

    state, batch = arguments_of(mesh, None, "model")
    # It listens on: JAX 0.7 has no way to stop it.
    jax.monitoring.register_event_duration_secs_listener(listen)
    column_sum.communication(state, batch)
    before = len(compiled)
    state, _ = column_sum(state, batch)
    column_sum.communication(state, batch)
    assert (before, len(compiled)) == (1, 1)


@pytest.mark.parametrize(
    "bad", [None, "func.func main\n", jax.jit(lambda x: x).lower(1.0)]
)
def test_what_is_not_a_compiled_program_is_refused(bad):
    text = message(lambda: read_communication(bad))
    start = "read_communication takes a compiled program or its text, which begins with"
    assert text.startswith(f"{start} HloModule, got ")
