"""`expert_parallel`: stacked experts, some on each device."""

from collections.abc import Callable

import jax

from meshlayout._annotations import Batch
from meshlayout.errors import LayoutMapError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap, Rule, rules_for
from meshlayout.mesh import Mesh, as_mesh
from meshlayout.parallel.factors import OF_INPUTS, Factor, leaves_of
from meshlayout.parallel.forward import Call, Model, Parameter, follow
from meshlayout.parallel.operations import STACKED
from meshlayout.parallel.tensor import check_axis


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
    as their biases; the router stays whole.

    Use this for mixtures of experts, on an axis of their own or on one that also
    shards the batch; compose it with other rules for the rest of the model.

    Args:
        mesh: The mesh.
        axis: The mesh axis over which experts are spread.
        model_or_build: The model, or a function that builds it, as for
            `tensor_parallel`.
        example_inputs: As for `tensor_parallel`.
        call: As for `tensor_parallel`.

    Raises:
        MeshError: If the mesh has no such axis.
        LayoutMapError: If the model cannot be called so, or no parameter of it is a
            stack of experts.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "expert": 4})
        >>> shapes = {"up": (8, 16, 32), "down": (8, 32, 16)}
        >>> experts = {k: jax.ShapeDtypeStruct(v, "float32") for k, v in shapes.items()}
        >>> def call(params, x):
        ...     hidden = jax.numpy.einsum("bd,edh->ebh", x, params["up"])
        ...     return jax.numpy.einsum("ebh,ehd->ebd", hidden, params["down"])
        >>> x = jax.ShapeDtypeStruct((4, 16), "float32")
        >>> layouts = expert_parallel(mesh, "expert", experts, x, call=call)
        >>> layouts.resolve(experts)["up"].layout
        Layout([expert, unsharded, unsharded], Mesh(batch=2, expert=4))
    """
    mesh = as_mesh(mesh)
    where = "expert_parallel"
    num_shards = check_axis(mesh, axis, where)
    params, flow = follow(model_or_build, example_inputs, call, where)
    weighted = {
        leaf
        for contraction in flow.contractions
        if contraction.weights
        for leaf in leaves_of(contraction.factors)
    }
    experts = {
        leaf
        for leaf in leaves_of(flow.experts)
        if leaf not in weighted and leaf.blocked not in (OF_INPUTS, STACKED)
    }
    specs = {
        param.path: _rule(param, experts, axis, num_shards, mesh) for param in params
    }
    if not any(isinstance(spec, Rule) for spec in specs.values()):
        msg = (
            f"{where}: no parameter is a stack of matrices of which each multiplies "
            "its own inputs. If the model calls its experts in another way, write the "
            f"rule: LayoutMap(mesh, {{'experts/': ({axis!r}, ...)}})."
        )
        raise LayoutMapError(msg)
    return LayoutMap(mesh, rules_for(specs))


def _rule(
    param: Parameter, experts: set[Factor], axis: str, num_shards: int, mesh: Mesh
) -> Layout | Rule:
    whole = Layout([None] * len(param.array.shape), mesh)
    # In the last dim, as of a router, they are results for each expert.
    for dim, factors in enumerate(param.array.dims[:-1]):
        leaves = leaves_of(factors)
        if not leaves or leaves[0] not in experts:
            continue
        size = leaves[0].size
        if size % num_shards:
            return Rule(
                whole,
                note=f"whole; {size} experts do not divide into {num_shards} shards",
            )
        entries = [axis if d == dim else None for d in range(len(whole.specs))]
        return Rule(Layout(entries, mesh), note=f"{size} experts in dim {dim}")
    return whole
