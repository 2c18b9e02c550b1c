"""`tensor_parallel` and `expert_parallel`: what the program of a model decides.

Matrices are sharded so that a block sends one all-reduce per half. What is linked
through the program is sharded together or not at all: the columns of one matrix and the
rows of the next, all heads of an attention, a vocabulary. Each such set of dims is a
candidate, with the bytes that it shards and what it would send. A parameter is sharded
along one dim, so candidates exclude each other; the set with the most bytes is taken,
where bytes that send much count less. That gives columns, then rows.

What cannot be sharded without sending more stays whole, and `explain` says why.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import jax

from meshlayout import _checks
from meshlayout._annotations import Batch
from meshlayout._batches import BATCH_AXES, batch_axes
from meshlayout.errors import LayoutMapError, MeshError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap, Rule, activate, rules_for
from meshlayout.layout_map.report import GROUPED
from meshlayout.mesh import Mesh, auto_mesh
from meshlayout.parallel.factors import (
    OF_INPUTS,
    Contraction,
    Factor,
    Flow,
    GradientSum,
    Value,
    leaves_of,
    union,
)
from meshlayout.parallel.operations import STACKED, WINDOW
from meshlayout.parallel.program import Call, Model, Parameter, follow


@_checks.user_call
def tensor_parallel(
    mesh: Mesh | jax.sharding.Mesh,
    model_or_build: Model | Callable[[], Model],
    example_inputs: Batch,
    axis: str = "model",
    *,
    call: Call | None = None,
    sequence: bool = False,
) -> LayoutMap:
    r"""Returns rules that shard a model's matrices over a mesh axis, as it uses them.

    The forward program is traced, without arrays. Layouts follow from what parameters
    are multiplied with, not from names. Matrices are sharded in pairs, the first by
    columns and the second by rows; attention by heads; embeddings by the vocabulary. So
    a transformer block sends one all-reduce for its attention and one for its MLP, and
    as many backward. Others stay whole, and `explain` says why. Use this if matrices
    are too large for a device, or the batch is too small to shard more.

    Args:
        mesh: The mesh.
        model_or_build: An NNX or Linen module (not initialized), a pytree of parameters
            with `call`, or a function that builds one; the arrays may be abstract.
        example_inputs: The inputs of the model: a tuple of arguments, or a single one.
            Only the shapes of arrays matter; other values are passed on.
        axis: The mesh axis to shard over; the others shard the batch.
        call: How the model is called, as `call(model, *inputs)`; `model(*inputs)` if
            None. A loss function works, too; for Linen variables, use `module.apply`.
        sequence: Whether to shard the features between blocks along the sequence, where
            the model calls `ml.constrain(x, "residual")` on (batch, length, features):
            an all-reduce becomes a reduce-scatter and an all-gather (Korthikanti et al.
            2022). Give the step the map, too, as `layouts=`, to gather only once.

    Raises:
        MeshError: If the mesh has no such axis.
        LayoutMapError: If the model cannot be called like this, the axis shards
            batches, or there is no residual to shard.

    Examples:
        >>> import meshlayout as ml
        >>> mesh = ml.create_mesh({"batch": 2, "model": 4})
        >>> shapes = {"up": (8, 64), "down": (64, 8)}
        >>> mlp = {k: jax.ShapeDtypeStruct(v, "float32") for k, v in shapes.items()}
        >>> x = jax.ShapeDtypeStruct((16, 8), "float32")
        >>> def call(mlp, x):
        ...     return jax.nn.relu(x @ mlp["up"]) @ mlp["down"]
        >>> resolved = tensor_parallel(mesh, mlp, x, call=call).resolve(mlp)
        >>> resolved["up"].layout
        Layout([unsharded, model], Mesh(batch=2, model=4))
        >>> resolved["down"].note
        'rows; an all-reduce adds up the products'
    """
    mesh = auto_mesh(mesh)
    hint = f"Write axis={mesh.axis_names[-1]!r}; several inputs are one tuple, (x, y)."
    where = _checks.Context(where="tensor_parallel", error=MeshError, hint=hint)
    num_shards = mesh.axis_size(_checks.choice("axis", axis, mesh.axis_names, **where))
    if axis in BATCH_AXES:
        fact = f"axis {axis!r} shards the rows of batches, which would all be gathered"
        fix = 'an axis of another name, as of create_mesh({"batch": 2, "model": 4})'
        raise LayoutMapError(f"tensor_parallel: {fact}. Give {fix}.")
    where = _checks.Context(where="tensor_parallel", error=LayoutMapError)
    _checks.choice("sequence", sequence, (True, False), **where)
    names: set[str] = set()  # of activations
    name_rules = {".": lambda name, *_: names.add(name)} if sequence else {}
    with activate(LayoutMap(mesh, name_rules)):
        params, flow = follow(model_or_build, example_inputs, call, "tensor_parallel")
    if sequence and "residual" not in names:
        fact = "sequence=True is for models that say ml.constrain(x, 'residual')"
        raise LayoutMapError(f"tensor_parallel: {fact}; this one does not.")
    rules: dict[str, Rule] = {}
    choices = _choices(params, flow, num_shards)
    for param, (dim, note, sends) in zip(params, choices, strict=True):
        entries = [axis if d == dim else None for d in range(len(param.array.shape))]
        rules[param.path] = Rule(Layout(entries, mesh), note=note or None, sends=sends)
    if not sequence:
        return LayoutMap(mesh, rules_for(rules))
    residual = Rule((batch_axes(mesh), axis, ...), is_generated=True, yields=axis)
    every = {**rules_for(rules), "^residual$": residual}
    return LayoutMap(mesh, every, unused="ignore")


@_checks.user_call
def expert_parallel(
    mesh: Mesh | jax.sharding.Mesh,
    axis: str,
    model_or_build: Model | Callable[[], Model],
    example_inputs: Batch,
    *,
    call: Call | None = None,
) -> LayoutMap:
    """Returns rules that give each device some of a model's stacked experts.

    The traced forward program tells which parameters are experts: stacks of matrices
    that each multiply inputs of their own. Biases of experts are sharded, too. Use this
    for experts that a model reaches by `dispatch`, on an axis of their own or on one
    that also shards the batch. Use `compose` to add rules for the rest of the model.

    Args:
        mesh: The mesh.
        axis: The mesh axis to shard experts over.
        model_or_build: As for `tensor_parallel`, as are the other arguments.
        example_inputs: What the model is called with.
        call: How the model is called.

    Raises:
        MeshError: If the mesh has no such axis.
        LayoutMapError: If the model cannot be called like this, or has no experts.

    Examples:
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
    mesh = auto_mesh(mesh)
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
        fact = "no parameter is a stack of matrices of which each has its own inputs"
        fix = "multiply with all at once, not in a loop, as by jnp.einsum or ragged_dot"
        rule = f"LayoutMap(mesh, {{'experts': ({axis!r}, ...)}})"
        raise LayoutMapError(f"expert_parallel: {fact}: {fix}, or write {rule}.")
    return LayoutMap(mesh, rules_for(rules))


@dataclass(eq=False)
class Candidate:
    """Dims that are sharded together, or not at all."""

    factor: Factor  # that all of them have as their major one
    num_shards: int  # into which it is to divide
    above: int = 1  # key heads, which do not divide, sharded with those of each
    dims: dict[int, int] = field(default_factory=dict)  # parameter -> its dim
    contractions: list[Contraction] = field(default_factory=list)  # sum over it
    gradient_sums: dict[object, GradientSum] = field(default_factory=dict)  # by array
    reduced: int = 0  # bytes that other reductions over it would send
    refusal: str = ""  # why it is not sharded

    def sent(self) -> dict[int, int]:
        """Returns the bytes that all-reduces send in one step, by parameter."""
        # What several parameters cause counts for the first.
        sent: dict[int, int] = defaultdict(int, {min(self.dims): self.reduced})
        for each in (*self.contractions, *self.gradient_sums.values()):
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

# Which candidates each excludes, and why.
_Rivals: TypeAlias = dict[Factor, dict[Factor, str]]


def _choices(
    params: Sequence[Parameter], flow: Flow, num_shards: int
) -> Iterator[tuple[int | None, str, int | None]]:
    """Yields along which dim each is sharded, why or why not, and what it sends."""
    candidates = _candidates(params, flow, num_shards)
    for candidate in candidates.values():
        multiplies = any(flow.multiplied >> index & 1 for index in candidate.dims)
        unused = "" if multiplies else "nothing in the program is multiplied with it"
        candidate.refusal = _refusal(candidate) or unused
    chosen: dict[int, Candidate] = {}
    for candidate in _chosen(params, flow, candidates):
        chosen.update(dict.fromkeys(candidate.dims, candidate))
    for index, param in enumerate(params):
        is_factor = bool(flow.multiplied >> index & 1)
        dim, note, sends = None, "", None
        if index not in chosen:
            # A vector that follows a matrix needs no reason.
            note = _whole(param.array, candidates, 1 if is_factor else 2)
        else:
            dim = chosen[index].dims[index]
            if is_factor:
                note = _sharded(chosen[index], index)
                sends = chosen[index].sent().get(index)
        for group in (group for bits, group in flow.grouped if bits >> index & 1):
            majors = [leaves_of(factors)[:1] for factors in param.array.dims]
            major = leaves_of(group)[:1]
            # Of the example inputs themselves, XLA gets no sharded gradient right.
            is_even = major in majors and major[0].size % num_shards == 0
            if dim is None and is_even and major[0].refusal() != OF_INPUTS:
                dim, note = majors.index(major), "channels"
            note = f"{note}; {GROUPED}" if note else GROUPED
        yield dim, note, sends


def _chosen(
    params: Sequence[Parameter], flow: Flow, candidates: dict[Factor, Candidate]
) -> Iterator[Candidate]:
    """Yields the candidates that are sharded, and refuses those that they exclude."""
    rivals = _rivals(candidates, flow)
    free = {f: each for f, each in candidates.items() if not each.refusal}
    nbytes = {f: sum(params[i].nbytes for i in each.dims) for f, each in free.items()}
    # Bytes count, and less where more is sent for each: half where it is as much as on
    # the average of all candidates, which does not depend on the batch.
    sent = {factor: sum(each.sent().values()) for factor, each in free.items()}
    mean = sum(sent.values()) / max(1, sum(nbytes.values())) or 1
    worth: dict[Factor, float] = {}
    experts = {*leaves_of(flow.experts)}
    for factor, candidate in free.items():
        ratio = sent[factor] / nbytes[factor] / mean
        if ratio > _NOT_WORTH_FROM:
            candidate.refusal = _NOT_WORTH
        else:
            scale = _EXPERTS_WORTH if factor in experts else 1
            worth[factor] = scale * nbytes[factor] / (1 + ratio)
    for factor in _heaviest(worth, rivals):
        yield candidates[factor]
        for rival, reason in rivals[factor].items():
            candidates[rival].refusal = candidates[rival].refusal or reason


def _whole(array: Value, candidates: dict[Factor, Candidate], least: int) -> str:
    """Says why a parameter stays whole, if there are so many reasons at least."""
    reasons: list[str] = []
    for dim, factors in enumerate(array.dims):
        leaves = leaves_of(factors)
        refusal = candidates[leaves[0]].refusal if leaves else STACKED
        if refusal not in _OBVIOUS:
            sizes = " x ".join(str(leaf.size) for leaf in leaves)
            parts = f" ({sizes})" if len(leaves) > 1 else ""
            reasons.append(f"dim {dim} of {array.shape[dim]}{parts}: {refusal}")
    if len(reasons) < least:
        return ""
    own = [text for text in reasons if not text.endswith(_STREAM)]
    return f"whole; {'; '.join(own or reasons)}"


def _sharded(candidate: Candidate, index: int) -> str:
    """Says what a parameter is in the set that is sharded."""
    sums = [each for each in candidate.contractions if each.weights >> index & 1]
    pair = f", {candidate.above} x {candidate.factor.size} together"
    heads = pair * (candidate.above > 1)
    if any(each.operand.weights for each in sums):
        return "looked up in parts; an all-reduce joins what the devices find"
    if sums:
        return f"rows{heads}; an all-reduce adds up the products"
    return f"columns{heads}; the results stay sharded"


def _heaviest(worth: dict[Factor, float], rivals: _Rivals) -> list[Factor]:
    """Returns candidates that do not exclude each other, of the largest worth."""
    left = dict(worth)
    chosen: list[Factor] = []
    while left:
        group = [next(iter(left))]
        for factor in group:  # which grows by all that are tied to it
            group += [x for x in rivals[factor] if x in left and x not in group]
        tied = sorted(group, key=lambda f: -worth[f])[:_MOST_COMBINED]
        sets: list[list[Factor]] = [[]]
        for factor in (f for f in left if f in tied):
            sets += [[*x, factor] for x in sets if not rivals[factor].keys() & {*x}]
        best = max(sets, key=lambda factors: sum(worth[f] for f in factors))
        chosen += best
        for factor in itertools.chain(best, *(rivals[f] for f in best)):
            left.pop(factor, None)
    return chosen


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
            if below and parts > 1 and not rest and not major.refusal():
                pair = Candidate(below[0], parts, major.size)
                pairs.setdefault(below[0], pair).dims[index] = dim
    candidates |= {f: pair for f, pair in pairs.items() if f not in candidates}
    for each in flow.contractions:
        for leaf in set(leaves_of(each.factors)) & candidates.keys():
            candidates[leaf].contractions.append(each)
    for each in flow.gradient_sums:
        for leaf in set(each.factor.leaves) & candidates.keys():
            candidates[leaf].gradient_sums[each.of.source] = each
    for factor, nbytes in flow.reductions:
        for leaf in set(factor.leaves) & candidates.keys():
            candidates[leaf].reduced += nbytes
    return candidates


def _refusal(candidate: Candidate) -> str:
    """Returns why a candidate cannot be sharded at all, or nothing."""
    factor, num_shards = candidate.factor, candidate.num_shards
    blocked = factor.refusal(with_those_above=candidate.above > 1)
    if blocked or candidate.refusal:
        return blocked or candidate.refusal
    if factor.size % num_shards:
        return f"{factor.size} does not divide into {num_shards} shards"
    for each in candidate.contractions:
        if not each.weights and each.size * num_shards > each.operand.size:
            return "a product of two activations sums over it"
    for each in candidate.gradient_sums.values():
        is_large = each.of.size * num_shards > each.other_size
        if each.of.of_inputs and not each.weights and is_large:
            return "the gradient of an activation that all shards read sums over it"
    return _STREAM if _is_stream(candidate.contractions) else ""


def _is_stream(contractions: Sequence[Contraction]) -> bool:
    """Returns whether these sum over features that run on from layer to layer.

    They are summed over again and again, to results larger than what is summed.
    """
    bits: dict[int, int] = defaultdict(int)  # of the contractions with some weights
    for each in contractions:
        bits[each.weights] |= each.bit
    every = union(bits.values())
    # The same weights again are a loop that was written out.
    if not any(each.before & every & ~bits[each.weights] for each in contractions):
        return False
    operands = {each.operand.source: each.operand.size for each in contractions}
    return sum(each.size for each in contractions) > sum(operands.values())


def _rivals(candidates: dict[Factor, Candidate], flow: Flow) -> _Rivals:
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
    rivals: _Rivals = defaultdict(dict)
    for group, reason in groups:
        for factor in group:
            rivals[factor] |= dict.fromkeys(group - {factor}, reason)
    return rivals
