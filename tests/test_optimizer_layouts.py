"""An optimizer's slots are laid out as their parameters, which their paths name."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import meshlayout as ml


def array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


# Names that mislead: a match by name, or by the end of a path, would mix these up. No
# two have one shape.
PARAMS = {
    "mu": {"kernel": array(16, 32), "nu": {"kernel": array(32, 16)}},
    "kernel": array(64, 8),
    "nu": {"kernel": array(8, 64), "count": array(4)},
    "trace": array(16, 4),
    "count": array(8, 8),
    "square": {"v_row": array(32, 32)},
}
RULES = {
    "mu/kernel": ("model", "batch"),
    "mu/nu/kernel": (None, "model"),
    "kernel": ("model", None),
    "nu/kernel": ("batch", "model"),
    "nu/count": ("model",),
    "trace": (None, "model"),
    "count": ("batch", None),
    "square/v_row": ("batch", "model"),
}
ADAM, LABELS = optax.adam(1e-3), dict(zip(PARAMS, "abbaab", strict=True))
MASK = {name: name not in ("kernel", "count") for name in PARAMS}
OPTIMIZERS = {
    "adamw on a schedule": optax.adamw(optax.cosine_decay_schedule(1e-3, 10)),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), ADAM),
    "masked": optax.masked(ADAM, MASK),
    "multi_transform": optax.multi_transform(
        {"a": ADAM, "b": optax.sgd(0.1, momentum=0.9)}, LABELS
    ),
    "MultiSteps": optax.MultiSteps(ADAM, 4),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "apply_if_finite": optax.apply_if_finite(ADAM, 3),
    "ema": optax.chain(optax.ema(0.9), optax.trace(0.9)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_slot_has_its_parameters_layout(name, mesh):
    layouts = ml.LayoutMap(mesh, RULES)
    leaves = jax.tree.leaves(PARAMS)
    shapes = dict.fromkeys(leaf.shape for leaf in leaves)
    own = jax.tree.leaves(layouts.resolve(PARAMS).layouts)
    expected = dict(zip(shapes, own, strict=True))
    state = jax.eval_shape(OPTIMIZERS[name].init, PARAMS)
    resolved = layouts.resolve(state, params=PARAMS)
    assert jax.tree.structure(resolved.layouts) == jax.tree.structure(state)
    pairs = zip(*map(jax.tree.leaves, (state, resolved.layouts)), strict=True)
    slots = [(x.shape, layout) for x, layout in pairs if x.shape in expected]
    assert len(slots) >= len(expected) // 2
    assert all(layout == expected[shape] for shape, layout in slots)
    alone = [r for r in resolved.resolutions if r.reason == "belongs to no parameter"]
    assert len(alone) == len(jax.tree.leaves(state)) - len(slots)
    assert all(one.layout.is_fully_replicated for one in alone)


def test_adafactor_rows_and_columns_keep_the_dims_they_have(mesh):
    layouts = ml.LayoutMap(mesh, RULES)
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=16)
    state = jax.eval_shape(tx.init, PARAMS)
    resolved = layouts.resolve(state, params=PARAMS)
    for path, text in {
        # Rows lack the largest dim, columns the second: mu/kernel is 16x32 over
        # (model, batch), the square one 32x32 over (batch, model).
        "v_row/mu/kernel": "[model]",
        "v_col/mu/kernel": "[batch]",
        "v_row/mu/nu/kernel": "[model]",
        "v_col/mu/nu/kernel": "[unsharded]",
        "v_row/square/v_row": "[batch]",
        "v_col/square/v_row": "[model]",
        # Too small to be factored: the whole slot is there, its rows are a placeholder.
        "v/count": "[batch, unsharded]",
        "v_row/count": "[unsharded]",
        "v/mu/kernel": "[unsharded]",
    }.items():
        assert str(resolved[f"0/{path}"].layout) == text


# In a tree that holds both, nobody has to say which parameters are meant.


class Network(nnx.Module):
    """Parameters, other variables, and names that mislead."""

    def __init__(self, *, rngs):
        self.mu = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.kernel = nnx.Param(jnp.ones((32, 8)))
        self.lora = nnx.LoRA(16, 8, 16, rngs=rngs)


@pytest.mark.parametrize(
    ("wrt", "count"), [(nnx.Param, 7), (nnx.LoRAParam, 2)], ids=["all", "lora"]
)
def test_an_nnx_optimizer_follows_the_model_next_to_it(mesh, wrt, count):
    def build():
        model = Network(rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, ADAM, wrt=wrt)
        return {"model": model, "train": {"optimizer": optimizer}}

    rules = {
        "model/mu/kernel": ("batch", "model"),
        "model/lora/lora_a": (None, "batch"),
        "model/norm/scale": ("model",),
    }
    resolved = ml.LayoutMap(mesh, rules).resolve(nnx.eval_shape(build))
    start = "train/optimizer/opt_state/0/"
    for name in ("mu/", "nu/"):
        slots = [x for x in resolved.resolutions if x.path.startswith(start + name)]
        assert len(slots) == count
        for slot in slots:
            owner = resolved[f"model/{slot.path.removeprefix(start + name)}"]
            assert slot.layout == owner.layout
            assert slot.reason == f"follows parameter {owner.path!r}"
    assert resolved[f"{start}count"].reason == "belongs to no parameter"
    assert str(resolved["model/mu/kernel"].layout) == "[batch, model]"


def test_an_optax_state_is_known_by_its_type(mesh):
    params = {"dense": {"kernel": jnp.ones((8, 16))}}
    layouts = ml.LayoutMap(mesh, {r"^(0/|p/)dense/kernel$": ("batch", "model")})
    state = optax.chain(optax.ema(0.9), ADAM, optax.trace(0.9)).init(params)
    for tree, start in (((params, state), "1"), ({"p": params, "x": state}, "x")):
        resolved = layouts.resolve(tree)
        slots = [x for x in resolved.resolutions if x.path.endswith("dense/kernel")]
        assert len(slots) == 5
        assert {str(slot.layout) for slot in slots} == {"[batch, model]"}
        assert resolved[f"{start}/1/0/mu/dense/kernel"].reason.startswith("follows")


ONE = {"k": array(8, 16)}
SLOTS = jax.eval_shape(ADAM.init, ONE)
TWINS = {
    "names that begin alike": (
        {"gen": ONE, "disc": ONE, "gen_opt": SLOTS, "disc_opt": SLOTS},
        {"gen/k": (None, "model"), "disc/k": ("batch", None)},
        {"gen_opt/0/mu/k": "gen/k", "disc_opt/0/mu/k": "disc/k"},
    ),
    "the same names": (
        {"nets": {"g": ONE, "d": ONE}, "opts": {"g": SLOTS, "d": SLOTS}},
        {"nets/g/k": (None, "model"), "nets/d/k": ("batch", None)},
        {"opts/g/0/mu/k": "nets/g/k", "opts/d/0/mu/k": "nets/d/k"},
    ),
    "an average beside": (
        {"ema": ONE, "opt": SLOTS, "params": ONE, "z": ONE},
        {"ema/k": (None, "model"), "params/k": ("batch", None)},
        {"opt/0/mu/k": "params/k"},
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_parameters_of_one_structure_are_distinguished_by_name(mesh, name):
    tree, rules, owners = TWINS[name]
    # A tuple around it: else `params` would be Linen's, and no part of a path.
    rules = {f"0/{path}": spec for path, spec in rules.items()}
    resolved = ml.LayoutMap(mesh, rules).resolve((tree,))
    for slot, owner in owners.items():
        assert resolved[f"0/{slot}"].reason == f"follows parameter '0/{owner}'"
        assert resolved[f"0/{slot}"].layout == resolved[f"0/{owner}"].layout


def test_stacked_slots_as_those_of_lbfgs_follow_their_parameter(mesh):
    params = {"dense": {"kernel": array(8, 16)}, "cube": array(4, 4, 4)}
    rules = {"dense/kernel": ("batch", "model"), "cube": (None, None, "model")}
    state = jax.eval_shape(optax.scale_by_lbfgs(memory_size=4).init, params)
    resolved = ml.LayoutMap(mesh, rules).resolve(state, params=params)
    for memory in ("diff_params_memory", "diff_updates_memory"):
        kernel, cube = (resolved[f"{memory}/{x}"] for x in ("dense/kernel", "cube"))
        assert str(kernel.layout) == "[unsharded, batch, model]"
        assert str(cube.layout) == "[unsharded, unsharded, unsharded, model]"


BATCHES = ("data", "fsdp")
ZERO = {
    (64, 512): (None, BATCHES),  # the largest dim first, over all axes of batches
    (32, 32): (BATCHES, None),  # of equal ones the first
    (4097, 16): (None, BATCHES),  # the largest that divides
    (127, 9): (None, None),  # none does
    (1023,): (None,),  # too small
    (1024,): (BATCHES,),
    (): (),
}


def test_zero_rule_shards_the_largest_dim_of_large_arrays():
    mesh = ml.create_mesh({"data": 2, "model": 2, "fsdp": 2})
    layouts = ml.LayoutMap(mesh, {"x": ml.zero_rule(mesh)})
    for shape, spec in ZERO.items():
        assert layouts.resolve({"x": array(*shape)})["x"].layout.specs == spec


SHAPES = {"a": (64, 128), "b": (128, 48), "c": (8,), "d": (9, 5)}
SLOT_PARAMS = {name: array(*shape) for name, shape in SHAPES.items()}


def slots_of(layouts):
    """The moments' layouts of Adam's state as text, by parameter."""
    opt_state = jax.eval_shape(ADAM.init, SLOT_PARAMS)
    resolved = layouts.resolve({"params": SLOT_PARAMS, "opt_state": opt_state})
    assert resolved["opt_state/0/count"].layout.is_fully_replicated
    return resolved, {key: resolved[f"opt_state/0/mu/{key}"].layout for key in "abcd"}


def test_zero_rule_extends_the_layout_that_a_slot_has(mesh):
    layouts = ml.LayoutMap(mesh, {"^a": (None, "model"), "^b": ("model", None)})
    layouts |= {"^opt_state/": ml.zero_rule(mesh, min_size=16)}
    resolved, slots = slots_of(layouts)
    assert {key: str(layout) for key, layout in slots.items()} == {
        "a": "[unsharded, (model, batch)]",
        "b": "[(model, batch), unsharded]",
        "c": "[unsharded]",
        "d": "[unsharded, unsharded]",
    }
    assert resolved["a"].layout == mesh.layout(None, "model")
    note = resolved["opt_state/0/mu/c"].note
    assert note == "whole: 8 elements, fewer than min_size=16"
    assert resolved["opt_state/0/mu/d"].note == "whole: no dim divides over 'batch'"


@pytest.mark.skipif(
    jax.__version_info__ < (0, 8), reason="jax moves arrays to no other memory in jit"
)
@pytest.mark.parametrize("kind", ["fsdp", "plain", "composed"])
def test_zero_rule_keeps_slots_in_the_hosts_memory_under_any_map(mesh, kind):
    plain = ml.LayoutMap(mesh, {"^a": (None, "model")})
    fsdp = ml.parallel.fsdp(mesh, min_bytes=0)
    rule = {"^opt_state/": ml.zero_rule(mesh, (), memory_kind="pinned_host")}
    compose = ml.parallel.compose
    before, layouts = {
        "fsdp": (fsdp, fsdp | rule),
        "plain": (plain, plain | rule),
        "composed": (compose(plain, fsdp), compose(plain | rule, fsdp)),
    }[kind]
    resolved, slots = slots_of(layouts)
    for key, layout in slots.items():
        assert layout.specs == before.resolve(SLOT_PARAMS)[key].layout.specs
        assert layout.memory_kind == "pinned_host"
        assert resolved[key].layout.memory_kind is None
