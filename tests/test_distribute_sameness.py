"""What is the same on all replicas: each rule, and random programs on real values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, reject, settings, strategies as st
from jax import lax
from jax.experimental import io_callback  # noqa: TID251 -- what users import
from jax.sharding import PartitionSpec as P
from meshlayout.distribute.sameness import mark, same_values

import meshlayout as ml


NUM_REPLICAS = 8
AXES = [("batch", NUM_REPLICAS)]


def sameness(function, *args, same, axes=None):
    """Analyzes a function whose args are the same on all replicas if `same` says so."""
    jaxpr = jax.make_jaxpr(function, axis_env=axes or AXES)(*args)
    flags = [
        is_same
        for arg, is_same in zip(args, same, strict=True)
        for _ in jax.tree.leaves(arg)
    ]
    return same_values(jaxpr, "batch", flags)


def outputs(function, same=(False, True)):
    """Of x, which differs, and w, which does not, unless `same` says otherwise."""
    return sameness(function, jnp.ones(8), jnp.ones(8), same=same).outputs


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: lax.psum(x, "batch"),
        lambda x: lax.pmean(x, ("batch",)),
        lambda x: lax.pmax(x, "batch"),
        lambda x: lax.pmin(x, "batch"),
        lambda x: lax.all_gather(x, "batch"),
        lambda x: lax.all_gather(x, "batch", tiled=True),
        lambda x: lax.pbroadcast(x, ("batch",), 0),
    ],
)
def test_a_collective_that_gives_all_replicas_one_value_makes_it_the_same(collective):
    assert outputs(lambda x, w: (collective(x), collective(w))) == [True, True]


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: lax.ppermute(x, "batch", [(i, (i + 1) % 8) for i in range(8)]),
        lambda x: lax.all_to_all(x, "batch", 0, 0),
        lambda x: lax.psum_scatter(x, "batch"),
        lambda x: x + lax.axis_index("batch"),
        lambda x: lax.psum(x, "batch", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]),
        lambda x: lax.pmax(x, "batch", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_a_collective_that_gives_each_replica_its_own_value_makes_it_differ(collective):
    assert outputs(lambda x, w: (collective(x), collective(w))) == [False, False]


def test_collectives_along_another_axis_leave_things_as_they_are():
    def replica(x, w):
        return lax.psum((x, w), "model"), lax.axis_index("model"), lax.psum(x, "batch")

    axes = [*AXES, ("model", 2)]
    result = sameness(replica, 1.0, 1.0, same=(False, True), axes=axes)
    assert result.outputs == [False, True, True, True]
    both = sameness(
        lambda x: lax.psum(x, ("batch", "model")), 1.0, same=(False,), axes=axes
    )
    assert both.outputs == [True]


def test_results_are_the_same_if_all_operands_are():
    def replica(x, w):
        noise = jax.random.normal(jax.random.key(0), (8,))
        return w * 2 + noise, w * x, jnp.arange(3), jnp.where(w > 0, 1.0, w), x * 0

    assert outputs(replica) == [True, False, True, True, False]


def test_random_numbers_of_a_key_that_differs_differ():
    def replica(x, w):
        key = jax.random.fold_in(jax.random.key(0), lax.axis_index("batch"))
        return jax.random.normal(key), jax.random.normal(jax.random.key(w[0] > 0))

    assert outputs(replica) == [False, True]


def test_what_the_host_or_a_generator_of_the_device_returns_differs():
    def replica(x, w):
        shape = jax.ShapeDtypeStruct((8,), "float32")
        jax.debug.print("{}", w)
        pure = jax.pure_callback(np.sin, shape, w)
        with_effect = io_callback(np.sin, shape, w)
        return pure, with_effect, lax.rng_uniform(0.0, 1.0, (2,)), w

    assert outputs(replica) == [False, False, False, True]


def test_a_scan_is_followed_from_carry_to_carry_until_nothing_changes():
    def replica(x, w):
        def body(carry, row):
            a, b, c, d = carry
            return (a + row, a, b, d * 2), (c, d)

        (a, b, c, d), (c_rows, d_rows) = lax.scan(body, (w[0],) * 4, x)
        total, sums = lax.scan(lambda s, r: (s + lax.psum(r, "batch"),) * 2, 0.0, x)
        return a, b, c, d, c_rows, d_rows, total, sums

    assert outputs(replica) == [
        False, False, False, True, False, True, True, True,
    ]  # fmt: skip
    assert all(outputs(replica, same=(True, True)))


def test_a_loop_that_replicas_leave_at_different_times_makes_all_it_carries_differ():
    def loop(limit):
        return lax.while_loop(
            lambda c: c[0] < limit, lambda c: (c[0] + 1, c[1] * 2), (0.0, 1.0)
        )

    def limit_on_the_way(x):
        # The condition differs only after the first round.
        return lax.while_loop(
            lambda c: c[0] < 4, lambda c: (c[0] + c[1], x[0], c[2] + 1), (0.0, 1.0, 0)
        )

    assert outputs(lambda x, w: loop(x[0])) == [False, False]
    assert outputs(lambda x, w: loop(w[0])) == [True, True]
    assert outputs(lambda x, w: loop(lax.psum(x[0], "batch"))) == [True, True]
    assert outputs(lambda x, w: limit_on_the_way(x)) == [False] * 3
    assert outputs(lambda x, w: limit_on_the_way(w)) == [True] * 3


def test_a_cond_whose_predicate_differs_makes_all_its_results_differ():
    def choose(pred, x, w):
        return lax.cond(pred, lambda: (w, w, 1.0), lambda: (w * 2, x, 1.0))

    assert outputs(lambda x, w: choose(x[0] > 0, x, w)) == [False] * 3
    assert outputs(lambda x, w: choose(w[0] > 0, x, w)) == [True, False, True]
    index = lax.switch
    branches = [lambda: 1.0, lambda: 2.0, lambda: 3.0]
    assert outputs(lambda x, w: index(x[0].astype(int), branches)) == [False]
    assert outputs(lambda x, w: index(w[0].astype(int), branches)) == [True]


@jax.custom_vjp
def doubled(x, w):
    return x * 2, w * 2


doubled.defvjp(
    lambda x, w: (doubled(x, w), None),
    lambda _, grads: (mark(grads[0], "cotangent") * 2, lax.psum(grads[1], "batch")),
)


@jax.custom_jvp
def tripled(x, w):
    return x * 3, w * 3


@tripled.defjvp
def _(primals, tangents):
    return tripled(*primals), (tangents[0] * 3, tangents[1] * 3)


@pytest.mark.parametrize(
    "call",
    [jax.jit, jax.checkpoint, jax.named_call, lambda f: f, functools.partial],
    ids=["jit", "checkpoint", "named_call", "plain", "partial"],
)
def test_functions_inside_are_followed_operand_by_operand(call):
    def replica(x, w):
        inner = call(lambda x, w: (doubled(*tripled(x, w)), lax.psum(x, "batch")))
        return inner(x, w)

    assert outputs(replica) == [False, True, True]


def test_gradients_of_custom_rules_are_followed():
    def replica(x, w):
        def loss(x, w):
            a, b = doubled(*tripled(x, w))
            return a.sum() + (b * w).sum()

        return jax.grad(loss, argnums=(0, 1))(x, w)

    assert outputs(replica, same=(False, True)) == [True, True]  # both are linear in x

    def replica_of_products(x, w):
        return jax.grad(lambda w: doubled(x, x * w)[0] @ w)(w)

    assert outputs(replica_of_products) == [False]


def test_an_unknown_operation_is_the_same_only_if_all_that_goes_in_is():
    def solve(x, w):
        return lax.custom_linear_solve(
            lambda v: v * w, x, solve=lambda _, b: b / w, symmetric=True
        )

    def divergent_solve(x, w):
        return lax.custom_linear_solve(
            lambda v: v * w, x, lambda _, b: b / lax.axis_index("batch"), symmetric=True
        )

    assert outputs(solve) == [False]
    assert outputs(solve, same=(True, True)) == [True]
    assert outputs(divergent_solve, same=(True, True)) == [False]
    maximum = lambda x, w: lax.reduce(x, w[0], lambda a, b: a, (0,))  # noqa: E731
    assert outputs(maximum) == [False]
    assert outputs(maximum, same=(True, False)) == [False]


def test_references_are_as_different_as_what_was_written_to_them():
    def replica(x, w):
        ref, other = jax.new_ref(w), jax.new_ref(w)
        before = ref[...]
        ref[0] = x[0]

        def body(i, carry):
            other[i] = w[0] * 2
            return carry

        lax.fori_loop(0, 3, body, 0)
        return before, ref[...], other[...]

    def divergent_loop(x, w):
        ref = jax.new_ref(w)

        def body(i, carry):
            ref[i] = 0.0
            return carry

        lax.fori_loop(0, x[0].astype(int), body, 0)
        return ref[...]

    def by_index(x, w):
        ref = jax.new_ref(w)
        ref[x[0].astype(int)] = 0.0
        return ref[...]

    assert outputs(replica) == [True, False, True]
    assert outputs(divergent_loop) == [False]
    assert outputs(by_index) == [False]


@pytest.mark.parametrize("is_same", [True, False])
def test_marks_are_found_under_every_transformation(is_same):
    def replica(x, w):
        value = w if is_same else x
        w = (
            mark(w, "top")
            + lax.scan(lambda c, r: (c + mark(r, "scan"), None), 0.0, value)[0]
        )
        w += lax.cond(w[0] > 0, lambda v: mark(v, "cond"), lambda v: v, value)
        w += lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, mark(c[1], "while")), (0, value)
        )[1]
        w += jax.jit(lambda v: mark(v, "jit"))(value)
        w += jax.vmap(lambda v: mark({"a": v}, "vmap")["a"])(value)

        def loss(value):
            inner = jax.checkpoint(lambda v: jnp.sin(mark(v, "remat")) * v)
            return doubled(inner(value), value)[0] @ value

        grads = mark(jax.grad(loss)(value), "grads")
        return w, grads, mark(3, "number"), mark(None, "none")

    # The predicates hold what is marked "scan", so they must be the same, too.
    marks = sameness(replica, jnp.ones(8), jnp.ones(8), same=(is_same, True)).marks
    expected = dict.fromkeys(
        ["scan", "cond", "while", "jit", "vmap", "remat", "cotangent", "grads"], is_same
    )
    assert marks == {"top": True, **expected}


def test_a_mark_is_the_same_only_if_all_values_of_that_name_are():
    def replica(x, w):
        return mark(w, "a") + mark(x, "a"), mark(x, "b") + mark(w, "b"), mark([w], "c")

    result = sameness(replica, 1.0, 1.0, same=(False, True))
    assert result.marks == {"a": False, "b": False, "c": True}


def test_nothing_marked_in_a_branch_that_some_replicas_take_is_the_same():
    def replica(x, w):
        def branch(w):
            doubled = lax.scan(lambda c, _: (mark(c * 2, "scan"), None), w, None, 2)[0]
            return doubled + mark(jnp.float32(1), "constant")

        return lax.cond(x > 0, branch, lambda w: w, w)

    result = sameness(replica, 1.0, 1.0, same=(False, True))
    assert result.marks == {"scan": False, "constant": False}


def test_marks_cost_nothing_and_change_no_derivative():
    def function(tree):
        return sum(jnp.sin(leaf).sum() for leaf in mark(tree, "x").values())

    tree = {"a": jnp.arange(3.0), "b": jnp.float32(2)}
    grads = jax.grad(function)(tree)
    np.testing.assert_array_equal(grads["a"], jnp.cos(tree["a"]))
    marked = jax.jit(function).lower(tree).compile().as_text()
    assert "custom-call" not in marked
    key = jax.jit(lambda key: mark(key, "key"))(jax.random.key(3))
    assert jnp.all(jax.random.key_data(key) == jax.random.key_data(jax.random.key(3)))


def test_collectives_that_only_some_replicas_get_to_are_listed():
    def branch(x):
        return lax.psum(x, "batch") + lax.axis_index("batch") + lax.psum(x, "model")

    def in_cond(x, w):
        return lax.cond(x > 0, branch, lambda x: x, x)

    def in_loop(x, w):
        return lax.while_loop(lambda c: c < x, lambda c: c + lax.pmax(c, "batch"), w)

    def in_step(x, w):
        same = lax.cond(w > 0, branch, lambda x: x, x)
        return same + lax.cond(lax.psum(x, "batch") > 0, branch, lambda x: x, x)

    axes = [*AXES, ("model", 2)]
    check = functools.partial(sameness, same=(False, True), axes=axes)
    assert check(in_cond, 1.0, 1.0).unmatched == ["psum"]
    assert check(in_loop, 1.0, 1.0).unmatched == ["pmax"]
    assert check(in_step, 1.0, 1.0).unmatched == []


def test_a_shard_map_gives_each_replica_its_own_part_of_an_operand():
    mesh = ml.create_mesh({"batch": 8}).jax_mesh
    specs = {"in_specs": (P("batch"), P()), "out_specs": (P(), P(), P("batch"))}

    def replica(x, w):
        return lax.psum(x, "batch"), w * 2, x

    mapped = jax.shard_map(replica, mesh=mesh, check_vma=False, **specs)
    jaxpr = jax.make_jaxpr(mapped)(jnp.ones(8), jnp.ones(8))
    assert same_values(jaxpr, "batch", [True, True]).outputs == [True, True, False]


OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "multi_steps": optax.MultiSteps(optax.adam(1e-3), 2),
    "if_finite": optax.apply_if_finite(optax.sgd(1e-2, momentum=0.9), 3),
    "adafactor": optax.adafactor(1e-3),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(1e-2)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_the_same_exactly_if_its_gradients_are(name):
    optimizer = OPTIMIZERS[name]
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    state = optimizer.init(params)

    def loss(params, rows):
        hidden = jax.checkpoint(jnp.tanh)(rows @ params["w"] + params["b"][None])
        return (hidden**2).sum()

    def step(params, state, rows, *, reduce):
        def microbatch(total, part):
            value, grads = jax.value_and_grad(loss)(params, part)
            return jax.tree.map(jnp.add, total, grads), value

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, losses = lax.scan(microbatch, zeros, rows)
        grads = mark(reduce(grads), "grads")
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, losses

    reduced = functools.partial(step, reduce=lambda grads: lax.pmean(grads, "batch"))
    local = functools.partial(step, reduce=lambda grads: grads)
    args = (params, state, jnp.ones((2, 3, 2)))
    result = sameness(reduced, *args, same=(True, True, False))
    assert result.marks == {"grads": True}
    assert result.outputs[:-1] == [True] * len(jax.tree.leaves((params, state)))
    assert not result.outputs[-1]
    result = sameness(local, *args, same=(True, True, False))
    assert result.marks == {"grads": False}
    assert result.outputs[:2] == [False, False]


# Random programs: instructions on a growing list of scalars, some with programs inside.
LEAVES = [
    "add", "where", "sin", "constant", "psum", "pmax", "gather", "permute", "scatter",
    "to_all", "index", "random",
]  # fmt: skip
NESTED = ["scan", "cond", "while", "jit", "remat", "ref"]
POSITIONS = st.tuples(*[st.integers(0, 7)] * 3)
LEAF = st.tuples(st.sampled_from(LEAVES), POSITIONS, st.just(()))
PROGRAMS = st.recursive(
    st.lists(LEAF, min_size=1, max_size=4),
    lambda inner: st.lists(
        st.one_of(LEAF, st.tuples(st.sampled_from(NESTED), POSITIONS, inner)),
        min_size=1,
        max_size=5,
    ),
    max_leaves=8,
)


def execute(program, values):
    """Runs a program; returns its inputs and all that it computed."""
    values = list(values)
    for index, (name, positions, inner) in enumerate(program):
        operands = [values[-1 - position % len(values)] for position in positions]
        if name in NESTED:
            inside = functools.partial(execute, inner)
            values += run_nested(name, inside, *operands)
        else:
            values.append(run_leaf(name, index, positions[1], *operands))
    return values


def run_leaf(name, index, position, x, y, z):
    spread = x * jnp.arange(8.0)
    match name:
        case "add":
            return x * 0.5 + y
        case "where":
            return jnp.where(x > y, z, y)
        case "sin":
            return jnp.sin(x)
        case "constant":
            return jnp.float32(index)
        case "psum":
            return lax.psum(x, "batch") / 8
        case "pmax":
            return lax.pmax(x, "batch")
        case "gather":
            return lax.all_gather(x, "batch")[position]
        case "permute":
            return lax.ppermute(x, "batch", [(i, i ^ 1) for i in range(8)])
        case "scatter":
            return lax.psum_scatter(spread, "batch") / 8
        case "to_all":
            # Under vmap, JAX gives what replicas share a wrong shape here.
            spread += 0 * lax.axis_index("batch")
            return lax.all_to_all(spread, "batch", 0, 0)[2]
        case "index":
            return lax.axis_index("batch").astype("float32") - 3
        case "random":
            key = jax.random.fold_in(jax.random.key(0), (x * 8).astype("int32"))
            return jax.random.normal(key)


def run_nested(name, inside, x, y, z):
    match name:
        case "scan":

            def body(carry, row):
                *_, a, b, c = inside([*carry, row])
                return (a, b), c

            carry, rows = lax.scan(body, (x, y), jnp.stack([y, z]))
            return [*carry, rows.sum()]
        case "cond":
            return lax.cond(
                x > 0.25,
                lambda *args: inside(args)[-2:],
                lambda *args: list(args[:2]),
                *(x, y, z),
            )
        case "while":
            *carry, _ = lax.while_loop(
                lambda carry: carry[2] < 1 + 2 * (x > 0),
                lambda carry: (*inside(carry[:2])[-2:], carry[2] + 1),
                (y, z, 0),
            )
            return carry
        case "jit":
            return jax.jit(lambda *args: inside(args)[-2:])(x, y)
        case "remat":
            return jax.grad(jax.checkpoint(lambda x, y: (x * y) ** 2), (0, 1))(x, y)
        case "ref":
            ref = jax.new_ref(x)
            ref[...] = inside([x, y])[-1]
            return [ref[...]]


def check_program(program, run):
    """Asserts that what is said to be the same has one value on all replicas."""

    def replica(x, w):
        return execute(program, [x, w, x * w])

    result = sameness(replica, 1.0, 1.0, same=(False, True))
    try:
        values = run(replica, result)
    except NotImplementedError:  # JAX cannot compile a reference in every loop
        reject()
    for is_same, column in zip(result.outputs, values, strict=True):
        if is_same:
            np.testing.assert_array_equal(column, np.broadcast_to(column[0], (8,)))
    return result, values


X = np.linspace(-1, 1, 8, dtype=np.float32)


def run_vectorized(replica, result):
    # Collectives in branches that only some replicas take do not hang here.
    mapped = jax.vmap(replica, in_axes=(0, None), out_axes=0, axis_name="batch")
    return jax.jit(mapped)(X, np.float32(0.5))


def run_on_devices(replica, result):
    if result.unmatched:
        return [np.zeros(8)] * len(result.outputs)
    mapped = jax.shard_map(
        lambda x, w: [value[None] for value in replica(x[0], w)],
        mesh=ml.create_mesh({"batch": 8}).jax_mesh,
        in_specs=(P("batch"), P()),
        out_specs=P("batch"),
        check_vma=False,
    )
    return jax.jit(mapped)(X, np.float32(0.5))


@given(PROGRAMS)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_what_is_said_to_be_the_same_is_so_in_random_programs(program):
    check_program(program, run_vectorized)


@pytest.mark.slow
@given(PROGRAMS)
@settings(max_examples=60, deadline=None)
def test_what_is_said_to_be_the_same_is_so_on_every_device(program):
    check_program(program, run_on_devices)


@pytest.mark.slow
@given(PROGRAMS)
@settings(max_examples=100, deadline=None)
def test_what_is_said_to_be_the_same_is_so_in_many_random_programs(program):
    check_program(program, run_vectorized)
