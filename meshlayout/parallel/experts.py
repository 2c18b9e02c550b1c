"""`expert_parallel`: stacked experts, some on each device."""

from collections.abc import Callable

import jax

from meshlayout._annotations import Batch
from meshlayout.errors import LayoutMapError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap, Rule, rules_for
from meshlayout.mesh import Mesh, as_mesh
from meshlayout.parallel.factors import OF_INPUTS, leaves_of
from meshlayout.parallel.operations import STACKED
from meshlayout.parallel.program import Call, Model, follow


def expert_parallel(
    mesh: Mesh | jax.sharding.Mesh,
    axis: str,
    model_or_build: Model | Callable[[], Model],
    example_inputs: Batch,
    *,
    call: Call | None = None,
) -> LayoutMap:
    """Returns rules that give each device some of a model's stacked experts.

    The traced forward program says which parameters are experts: stacks of matrices of
    which each multiplies its own inputs. What is stacked with them is sharded too, such
    as their biases; the router stays whole. Use this for mixtures of experts, on an
    axis of their own or on one that also shards the batch; compose it with other rules
    for the rest of the model.

    Args:
        mesh: The mesh.
        axis: The mesh axis over which experts are spread.
        model_or_build: As for `tensor_parallel`, and so the other arguments.
        example_inputs: What the model is called with.
        call: How the model is called.

    Raises:
        MeshError: If the mesh has no such axis.
        LayoutMapError: If the model cannot be called so, or no parameter of it is a
            stack of experts.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "expert": 4})
        >>> experts = jax.ShapeDtypeStruct((8, 16, 32), "float32")
        >>> x = jax.ShapeDtypeStruct((4, 16), "float32")
        >>> def call(experts, x):
        ...     return jax.numpy.broadcast_to(x, (8, 4, 16)) @ experts
        >>> layouts = expert_parallel(mesh, "expert", experts, x, call=call)
        >>> layouts.resolve(experts).resolutions[0].layout
        Layout([expert, unsharded, unsharded], Mesh(batch=2, expert=4))
    """
    mesh = as_mesh(mesh)
    num_shards = mesh.axis_size((axis,))
    params, flow = follow(model_or_build, example_inputs, call, "expert_parallel")
    summed = (each.factors for each in flow.contractions if each.weights)
    stacks = {*leaves_of(flow.experts)}.difference(*map(leaves_of, summed))
    experts = {leaf for leaf in stacks if leaf.refusal() not in (OF_INPUTS, STACKED)}
    rules: dict[str, Rule] = {}
    for param in params:
        entries: list[str | None] = [None] * len(param.array.dims)
        note = None
        # In the last dim, as of a router, they are results for each expert.
        for dim, factors in enumerate(param.array.dims[:-1]):
            leaves = leaves_of(factors)
            if note is None and leaves and leaves[0] in experts:
                size = leaves[0].size
                note = f"whole; {size} experts do not divide into {num_shards} shards"
                if size % num_shards == 0:
                    entries[dim], note = axis, f"{size} experts in dim {dim}"
        rules[param.path] = Rule(Layout(entries, mesh), note=note)
    if not any(rule.note for rule in rules.values()):
        msg = (
            "expert_parallel: no parameter is a stack of matrices of which each "
            "multiplies its own inputs. Experts that a loop calls one by one are not "
            "spread: multiply with all of them at once, as by jnp.einsum or "
            "jax.lax.ragged_dot, or write the rule: "
            f"LayoutMap(mesh, {{'experts/': ({axis!r}, ...)}})."
        )
        raise LayoutMapError(msg)
    return LayoutMap(mesh, rules_for(rules))
