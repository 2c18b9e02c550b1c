"""`expert_parallel`: stacked experts, some on each device."""

from collections.abc import Callable

import jax

from meshlayout import _checks
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
    axis: str = "expert",
    model_or_build: Model | Callable[[], Model] | None = None,
    example_inputs: Batch = None,
    *,
    call: Call | None = None,
    pattern: str = r"(^|/)experts(/|$)",
) -> LayoutMap:
    r"""Returns rules that give each device some of a model's stacked experts.

    With a model, its traced forward program says which parameters are experts: stacks
    of matrices of which each multiplies its own inputs. What is stacked with them
    is sharded too, such as their biases; the router stays whole. Without a model,
    `pattern` says it: the leaves that it matches hold one expert after the other in
    dim 0.

    Use this for mixtures of experts, on an axis of their own or on one that also
    shards the batch; compose it with other rules for the rest of the model.

    Args:
        mesh: The mesh.
        axis: The mesh axis over which experts are spread.
        model_or_build: The model, or a function that builds it, as for
            `tensor_parallel`.
        example_inputs: As for `tensor_parallel`.
        call: As for `tensor_parallel`.
        pattern: Without a model: a regular expression for the paths of stacked experts.

    Raises:
        MeshError: If the mesh has no such axis.
        LayoutMapError: If the model cannot be called so, or no parameter of it is a
            stack of experts.

    Example:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "expert": 4})
        >>> expert_parallel(mesh, "expert")["(^|/)experts(/|$)"].layout
        Layout([expert, ...], Mesh(batch=2, expert=4))
    """
    mesh = as_mesh(mesh)
    where = "expert_parallel"
    num_shards = check_axis(mesh, axis, where)
    context = _checks.Context(where=where, error=LayoutMapError)
    pattern = _checks.pattern("pattern", pattern, **context).pattern
    if model_or_build is None:
        if example_inputs is not None or call is not None:
            msg = (
                f"{where}: example_inputs and call are for tracing a model, and there "
                "is none. Give model_or_build, or leave them out."
            )
            raise LayoutMapError(msg)
        note = "experts by name: dim 0 holds one after the other"
        rules = {pattern: Rule((axis, ...), note=note)}
        return LayoutMap(mesh, rules)
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
            "its own inputs. If the model holds its experts one by one, or calls them "
            "in another way, leave out the model and give pattern="
        )
        raise LayoutMapError(f"{msg}.")
    rules = rules_for(specs)
    return LayoutMap(mesh, rules)


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
