"""`tensor_parallel`: shard matrices so that a block sends one all-reduce per half.

What is linked through the program is sharded together or not at all: the columns of one
matrix and the rows of the next, all heads of an attention, a vocabulary. Each such set
of dims is a candidate, with the bytes that it shards and what it would send. A
parameter is sharded along one dim, so candidates exclude each other; the set with the
most bytes is taken, where bytes that send much count less. That leaves the features
between blocks whole, and gives columns, then rows.

What cannot be sharded without sending more stays whole, and `explain` says why.
"""

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax

from meshlayout import _checks
from meshlayout._annotations import Batch
from meshlayout._batches import BATCH_AXES
from meshlayout.errors import LayoutMapError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap, Rule, rules_for
from meshlayout.mesh import Mesh, as_mesh
from meshlayout.parallel.factors import (
    OF_INPUTS,
    Factor,
    FactoredArray,
    leaves_of,
)
from meshlayout.parallel.flow import Contraction, Flow, GradientSum
from meshlayout.parallel.forward import Call, Model, Parameter, follow
from meshlayout.parallel.operations import STACKED
from meshlayout.parallel.products import WINDOW


def tensor_parallel(
    mesh: Mesh | jax.sharding.Mesh,
    model_or_build: Model | Callable[[], Model],
    example_inputs: Batch,
    axis: str = "model",
    *,
    call: Call | None = None,
) -> LayoutMap:
    r"""Returns rules that shard a model's matrices over a mesh axis, as it uses them.

    The forward program is traced, without any array: what each parameter is multiplied
    with and what becomes of the result decide, whatever it is called. Matrices are
    sharded in pairs, the first by columns and the second by rows, attention by heads,
    and embeddings by the vocabulary, so that a transformer block sends one all-reduce
    for its attention and one for its MLP, and as many backward. What has no such pair
    stays whole: `explain` shows the reason for each matrix.

    Use this where a model's matrices are too large for one device, or its batch too
    small to shard further. The batch is sharded over the other axes.

    Args:
        mesh: The mesh.
        model_or_build: An NNX module, a Linen module (not initialized), a pytree of
            parameters with `call`, or a function without arguments that builds one;
            the arrays may be `jax.ShapeDtypeStruct`.
        example_inputs: What the model is called with: a tuple of arguments, or the
            only one. Of arrays only the shapes count; other values are passed on.
        axis: The mesh axis to shard over.
        call: How the model is called, as `call(model, *inputs)`; `model(*inputs)` if
            None. A loss function will do. For a pytree `call(params, *inputs)`, for
            Linen variables `module.apply`.

    Raises:
        MeshError: If the mesh has no such axis.
        LayoutMapError: If the model cannot be called so, or the axis shards batches.

    Example:
        >>> import meshlayout as ml
        >>> from flax import nnx
        >>> class MLP(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.first = nnx.Linear(8, 64, rngs=rngs)
        ...         self.second = nnx.Linear(64, 8, rngs=rngs)
        ...
        ...     def __call__(self, x):
        ...         return self.second(nnx.relu(self.first(x)))
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> inputs = jax.ShapeDtypeStruct((16, 8), "float32")
        >>> layouts = tensor_parallel(mesh, lambda: MLP(nnx.Rngs(0)), inputs)
        >>> shapes = nnx.eval_shape(lambda: MLP(nnx.Rngs(0)))
        >>> layouts.resolve(shapes)["first/kernel"].layout
        Layout([unsharded, model], Mesh(batch=2, model=4))
        >>> layouts.resolve(shapes)["second/kernel"].note
        'rows; an all-reduce adds up the products'
    """
    mesh = as_mesh(mesh)
    where = "tensor_parallel"
    num_shards = check_axis(mesh, axis, where)
    if axis in BATCH_AXES:
        msg = (
            f"{where}: axis {axis!r} shards the rows of batches, and matrices sharded "
            "over it would gather all of them. Give an axis of another name, as of "
            'create_mesh({"batch": 2, "model": 4}).'
        )
        raise LayoutMapError(msg)
    params, flow = follow(model_or_build, example_inputs, call, where)
    specs: dict[str, Layout | Rule] = {}
    for param, decision in zip(
        params, _decisions(params, flow, num_shards), strict=True
    ):
        entries = [axis if d == decision.dim else None for d in range(param.rank)]
        note = decision.note or None
        specs[param.path] = Rule(Layout(entries, mesh), note=note, sends=decision.sends)
    return LayoutMap(mesh, rules_for(specs))


def check_axis(mesh: Mesh, axis: object, where: str) -> int:
    """Returns the size of the one axis to shard over.

    Raises:
        MeshError: If the mesh has no such axis.
        LayoutMapError: If it is not a name.
    """
    if not isinstance(axis, str):
        msg = (
            f"{where}: axis must be the name of one mesh axis, got "
            f"{_checks.shown(axis)}. {mesh!r} has {', '.join(mesh.axis_names)}."
        )
        raise LayoutMapError(msg)
    return mesh.axis_size(axis)


@dataclass(eq=False)
class Candidate:
    """Dims that are sharded together, or not at all.

    Attributes:
        factor: The factor that all of them have as their major one.
        above: The factor above it, if both are sharded together: heads that share keys
            and values, where these do not divide. Otherwise 1.
        num_shards: Into how many parts the factor is to divide.
        dims: The parameters that have it, and the dim of each.
        contractions: What sums over it, forward.
        gradient_sums: What sums over it, backward, by the array of the gradient.
        reduced: Bytes that other reductions over it would send.
        refusal: Why it is not sharded, or nothing.
    """

    factor: Factor
    num_shards: int
    above: int = 1
    dims: dict[int, int] = field(default_factory=dict)
    contractions: list[Contraction] = field(default_factory=list)
    gradient_sums: dict[object, GradientSum] = field(default_factory=dict)
    reduced: int = 0
    refusal: str = ""

    def sent(self) -> dict[int, int]:
        """Returns the bytes that all-reduces send in one step, by parameter.

        Forward and backward; what several parameters cause counts for the first.
        """
        sums = [*self.contractions, *self.gradient_sums.values()]
        sent: dict[int, int] = defaultdict(int, {min(self.dims): self.reduced})
        for each in sums:
            causes = [index for index in self.dims if each.weights >> index & 1]
            sent[min(causes or self.dims)] += each.nbytes
        return sent


# A candidate that sends this many times the mean per byte that it shards is refused.
_NOT_WORTH_FROM = 10
# Whole experts are for `expert_parallel`, unless nothing else can be sharded.
_EXPERTS_WORTH = 1e-6
# So many candidates that exclude each other are tried in all combinations.
_MOST_COMBINED = 14

_OBVIOUS = (STACKED, WINDOW)
_STREAM = "features that pass between layers: each would send all that it makes"
_OTHER_DIM = "a matrix with the same dim is sharded along another one"
_NOT_WORTH = "it would send more than ten times as much per byte as the others"
_ADDED = "its rows are added to those of a larger table, which is sharded"
_GROUPED = (
    "kernel of a grouped convolution: XLA may multiply its gradient by the size of an "
    "axis that shards no rows; a train step refuses that, jax.jit of your own does not"
)


class _Choice(NamedTuple):
    """The dim along which a parameter is sharded, why or why not, and what it sends."""

    dim: int | None
    note: str
    sends: int | None = None


def _decisions(
    params: Sequence[Parameter], flow: Flow, num_shards: int
) -> Iterator[_Choice]:
    """Finds the candidates of a model, chooses among them, and says why."""
    candidates = _candidates(params, flow, num_shards)
    for candidate in candidates.values():
        multiplies = any(flow.multiplied >> index & 1 for index in candidate.dims)
        candidate.refusal = _refusal(candidate)
        if not candidate.refusal and not multiplies:
            candidate.refusal = "nothing in the program is multiplied with it"
    chosen: dict[int, Candidate] = {}
    for candidate in _chosen(params, flow, candidates):
        chosen.update(dict.fromkeys(candidate.dims, candidate))
    grouped = {
        index: leaves_of(group)[:1]
        for bits, group in flow.grouped
        for index in range(len(params))
        if bits >> index & 1
    }
    for index, param in enumerate(params):
        is_factor = bool(flow.multiplied >> index & 1)
        if index in chosen:
            decision = _sharded(chosen[index], index, is_factor=is_factor)
        else:
            decision = _whole(param.array, candidates, is_factor=is_factor)
        if index in grouped:
            dim, note, sends = decision
            majors = [leaves_of(factors)[:1] for factors in param.array.dims]
            major = grouped[index]
            # Of the example inputs themselves, XLA gets no sharded gradient right.
            is_even = major in majors and major[0].size % num_shards == 0
            if dim is None and is_even and major[0].blocked != OF_INPUTS:
                dim, note = majors.index(major), "channels"
            note = f"{note}; {_GROUPED}" if note else _GROUPED
            decision = _Choice(dim, note, sends)
        yield decision


def _chosen(
    params: Sequence[Parameter], flow: Flow, candidates: dict[Factor, Candidate]
) -> Iterator[Candidate]:
    """Yields the candidates that are sharded, and refuses those that they exclude."""
    rivals = _rivals(candidates, flow)
    free = {f: each for f, each in candidates.items() if not each.refusal}
    nbytes = {
        factor: sum(params[index].nbytes for index in candidate.dims)
        for factor, candidate in free.items()
    }
    # Bytes count, and less where more is sent for each: half where it is as much as on
    # the average of all candidates, which does not depend on the batch.
    sent = {factor: sum(each.sent().values()) for factor, each in free.items()}
    mean = sum(sent.values()) / max(1, sum(nbytes.values())) or 1
    ratio = {factor: sent[factor] / nbytes[factor] / mean for factor in free}
    for factor in free:
        if ratio[factor] > _NOT_WORTH_FROM:
            free[factor].refusal = _NOT_WORTH
    worth = {f: nbytes[f] / (1 + ratio[f]) for f in free if not free[f].refusal}
    experts = leaves_of(flow.experts)
    worth |= {f: worth[f] * _EXPERTS_WORTH for f in experts if f in worth}
    for factor in _heaviest(worth, rivals):
        yield candidates[factor]
        for rival, reason in rivals[factor].items():
            candidates[rival].refusal = candidates[rival].refusal or reason


def _whole(
    array: FactoredArray, candidates: dict[Factor, Candidate], *, is_factor: bool
) -> _Choice:
    """Says why a parameter stays whole; vectors that follow a matrix have no reason."""
    reasons: list[str] = []
    for dim, factors in enumerate(array.dims):
        leaves = leaves_of(factors)
        refusal = candidates[leaves[0]].refusal if leaves else STACKED
        if refusal not in _OBVIOUS:
            sizes = " x ".join(str(leaf.size) for leaf in leaves)
            parts = f" ({sizes})" if len(leaves) > 1 else ""
            reasons.append(f"dim {dim} of {array.shape[dim]}{parts}: {refusal}")
    if len(reasons) < (1 if is_factor else 2):
        return _Choice(None, "")
    own = [text for text in reasons if not text.endswith(_STREAM)]
    return _Choice(None, f"whole; {'; '.join(own or reasons)}")


def _sharded(candidate: Candidate, index: int, *, is_factor: bool) -> _Choice:
    """Says what a parameter is in the set that is sharded."""
    dim = candidate.dims[index]
    if not is_factor:  # a vector that follows a matrix
        return _Choice(dim, "")
    sends = candidate.sent().get(index)
    sums = [each for each in candidate.contractions if each.weights >> index & 1]
    above = f", {candidate.above} x {candidate.factor.size} together"
    heads = above if candidate.above > 1 else ""
    if any(each.operand.weights for each in sums):
        note = "looked up in parts; an all-reduce joins what the devices find"
    elif sums:
        note = f"rows{heads}; an all-reduce adds up the products"
    else:
        note = f"columns{heads}; the results stay sharded"
    return _Choice(dim, note, sends)


def _heaviest(
    worth: dict[Factor, float], rivals: dict[Factor, dict[Factor, str]]
) -> list[Factor]:
    """Returns candidates that do not exclude each other, of the largest worth.

    Exact for some that are tied together, as the layers of a deep MLP are in a chain;
    of more, the most valuable come first.
    """
    rest = list(worth)
    chosen: list[Factor] = []
    while rest:
        group, todo = set[Factor](), [rest[0]]
        while todo:
            factor = todo.pop()
            if factor not in group:
                group.add(factor)
                todo += [rival for rival in rivals[factor] if rival in worth]
        tied = [factor for factor in rest if factor in group]
        if len(tied) <= _MOST_COMBINED:
            chosen += _heaviest_of(tied, worth, rivals)[1]
        else:
            excluded = set[Factor]()
            for factor in sorted(tied, key=lambda f: -worth[f]):
                if factor not in excluded:
                    chosen.append(factor)
                    excluded |= rivals[factor].keys()
        rest = [factor for factor in rest if factor not in group]
    return chosen


def _heaviest_of(
    tied: list[Factor],
    worth: dict[Factor, float],
    rivals: dict[Factor, dict[Factor, str]],
) -> tuple[float, list[Factor]]:
    if not tied:
        return 0.0, []
    first, *others = tied
    apart = [factor for factor in others if factor not in rivals[first]]
    weight, chosen = _heaviest_of(apart, worth, rivals)
    taken = weight + worth[first], [first, *chosen]
    if len(apart) == len(others):
        return taken
    left = _heaviest_of(others, worth, rivals)
    return taken if taken[0] >= left[0] else left


def _candidates(
    params: Sequence[Parameter], flow: Flow, num_shards: int
) -> dict[Factor, Candidate]:
    candidates: dict[Factor, Candidate] = {}
    pairs: dict[Factor, Candidate] = {}
    for index, param in enumerate(params):
        for dim, factors in enumerate(param.array.dims):
            if not factors:
                continue
            major, *below = leaves_of(factors)
            candidate = candidates.setdefault(major, Candidate(major, num_shards))
            if index in candidate.dims:
                candidate.refusal = f"it is on two dims of {param.path}"
            candidate.dims[index] = dim
            # Key heads that do not divide, and the queries' heads of each.
            parts, rest = divmod(num_shards, major.size)
            if below and parts > 1 and not rest and not major.blocked:
                pair = Candidate(below[0], parts, major.size)
                pairs.setdefault(below[0], pair).dims[index] = dim
    candidates |= {f: pair for f, pair in pairs.items() if f not in candidates}
    for contraction in flow.contractions:
        for leaf in set(leaves_of(contraction.factors)) & candidates.keys():
            candidates[leaf].contractions.append(contraction)
    for gradient_sum in flow.gradient_sums:
        for leaf in gradient_sum.factor.leaves:
            if leaf in candidates:
                candidates[leaf].gradient_sums[gradient_sum.of] = gradient_sum
    for factor, nbytes in flow.reductions:
        for leaf in factor.leaves:
            if leaf in candidates:
                candidates[leaf].reduced += nbytes
    return candidates


def _refusal(candidate: Candidate) -> str:
    """Returns why a candidate cannot be sharded at all, or nothing."""
    factor, num_shards = candidate.factor, candidate.num_shards
    is_pair = candidate.above > 1
    blocked = factor.blocked_with_those_above if is_pair else factor.blocked
    if blocked or candidate.refusal:
        return blocked or candidate.refusal
    if factor.size % num_shards:
        return f"{factor.size} does not divide into {num_shards} shards"
    for contraction in candidate.contractions:
        is_small = contraction.size * num_shards <= contraction.operand.size
        if not contraction.weights and not is_small:
            return "a product of two activations sums over it"
    for gradient_sum in candidate.gradient_sums.values():
        of = gradient_sum.of
        is_small = of.size * num_shards <= gradient_sum.other_size
        if of.of_inputs and not gradient_sum.weights and not is_small:
            return "the gradient of an activation that all shards read sums over it"
    return _STREAM if _is_stream(candidate) else ""


def _is_stream(candidate: Candidate) -> bool:
    """Returns whether these are features that run on from layer to layer.

    Such as those between the blocks of a residual network: summed over again and
    again, to results that are larger than what is summed.
    """
    contractions = candidate.contractions
    bits: dict[int, int] = defaultdict(int)  # of the contractions with some weights
    for each in contractions:
        bits[each.weights] |= each.bit
    every = functools.reduce(operator.or_, bits.values(), 0)
    # The same weights again are a loop that was written out.
    if not any(each.before & every & ~bits[each.weights] for each in contractions):
        return False
    operands = {id(each.operand): each.operand.size for each in contractions}
    return sum(each.size for each in contractions) > sum(operands.values())


def _rivals(
    candidates: dict[Factor, Candidate], flow: Flow
) -> dict[Factor, dict[Factor, str]]:
    """Returns which candidates exclude each other, and why."""
    by_param: dict[int, set[Factor]] = defaultdict(set)
    for factor, candidate in candidates.items():
        for index in candidate.dims:
            by_param[index].add(factor)
    groups = [(group, _OTHER_DIM) for group in by_param.values()]
    for dims in flow.together:
        majors = [leaves_of(dim)[0] for dim in dims if dim]
        group = {factor for factor in majors if factor in candidates}
        for factor in group:
            if majors.count(factor) > 1 and not candidates[factor].refusal:
                candidates[factor].refusal = "it is on two dims of one array"
        groups.append((group, _OTHER_DIM))
    for bits in flow.added_lookups:
        # One all-reduce for all of them: the others are whole on every device.
        tables = [each for each in flow.contractions if each.bit & bits]
        factors = {leaf for each in tables for leaf in leaves_of(each.factors)}
        groups.append((factors & candidates.keys(), _ADDED))
    rivals: dict[Factor, dict[Factor, str]] = defaultdict(dict)
    for group, reason in groups:
        for factor in group:
            rivals[factor] |= dict.fromkeys(group - {factor}, reason)
    return rivals
