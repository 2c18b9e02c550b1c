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
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax

from meshlayout import _checks
from meshlayout._annotations import Batch
from meshlayout.errors import LayoutMapError
from meshlayout.layout import Layout
from meshlayout.layout_map import LayoutMap, Rule, rules_for
from meshlayout.mesh import Mesh, as_mesh
from meshlayout.parallel.factors import Factor, leaves_of
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
        LayoutMapError: If the model cannot be called so.

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
        >>> layouts["first/kernel"].layout
        Layout([unsharded, model], Mesh(batch=2, model=4))
        >>> layouts["second/kernel"].note
        'rows for the columns of first/kernel; an all-reduce adds up the products'
    """
    mesh = as_mesh(mesh)
    num_shards = check_axis(mesh, axis, "tensor_parallel")
    params, flow = follow(model_or_build, example_inputs, call, "tensor_parallel")
    candidates = Candidates.of(params, flow, num_shards)
    specs: dict[str, Layout | Rule] = {}
    for index, param in enumerate(params):
        dim, note = candidates.decision(index)
        entries = [axis if d == dim else None for d in range(len(param.array.shape))]
        layout = Layout(entries, mesh)
        specs[param.path] = Rule(layout, note=note) if note else layout
    rules = rules_for(specs)
    return LayoutMap(mesh, rules)


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
        dims: The parameters that have it, and the dim of each.
        contractions: What sums over it, forward.
        gradient_sums: What sums over it, backward, by the array of the gradient.
        reduced: Elements that other reductions over it would send.
        refusal: Why it is not sharded, or nothing.
    """

    factor: Factor
    dims: dict[int, int] = field(default_factory=dict)
    contractions: list[Contraction] = field(default_factory=list)
    gradient_sums: dict[object, GradientSum] = field(default_factory=dict)
    reduced: int = 0
    refusal: str = ""

    @property
    def sent(self) -> int:
        """Elements that all-reduces would send in one step, forward and backward."""
        forward = sum(each.size * each.runs for each in self.contractions)
        gradient_sums = self.gradient_sums.values()
        backward = sum(each.of.size * each.runs for each in gradient_sums)
        return forward + backward + self.reduced


@dataclass(eq=False)
class Candidates:
    """The candidates of a model, and which of them are sharded.

    Attributes:
        params: The model's parameters.
        by_factor: The candidates.
        chosen: Those that are sharded, by parameter.
        multiplied: The parameters that something is multiplied with, as bits.
    """

    params: Sequence[Parameter]
    by_factor: dict[Factor, Candidate]
    chosen: dict[int, Candidate]
    multiplied: int

    @classmethod
    def of(
        cls, params: Sequence[Parameter], flow: Flow, num_shards: int
    ) -> "Candidates":
        """Finds the candidates of a model, and chooses among them."""
        candidates = _candidates(params, flow)
        for candidate in candidates.values():
            candidate.refusal = _refusal(candidate, num_shards)
            multiplies = any(flow.multiplied >> index & 1 for index in candidate.dims)
            if not candidate.refusal and not multiplies:
                candidate.refusal = "nothing in the program is multiplied with it"
        rivals = _rivals(candidates, flow)
        free = {f: each for f, each in candidates.items() if not each.refusal}
        nbytes = {
            factor: sum(params[index].nbytes for index in candidate.dims)
            for factor, candidate in free.items()
        }
        # Bytes count, and less where more is sent for each: half where it is as much as
        # on the average of all candidates, which does not depend on the batch.
        mean = sum(each.sent for each in free.values()) / max(1, sum(nbytes.values()))
        ratio = {f: free[f].sent / nbytes[f] / (mean or 1) for f in free}
        for factor in free:
            if ratio[factor] > 10:
                free[factor].refusal = _NOT_WORTH
        worth = {f: nbytes[f] / (1 + ratio[f]) for f in free if not free[f].refusal}
        # Whole experts are for `expert_parallel`, unless nothing else can be sharded.
        worth |= {f: worth[f] / 1e6 for f in leaves_of(flow.experts) if f in worth}
        chosen: dict[int, Candidate] = {}
        for factor in _heaviest(worth, rivals):
            chosen.update(dict.fromkeys(candidates[factor].dims, candidates[factor]))
            for rival, reason in rivals[factor].items():
                candidates[rival].refusal = candidates[rival].refusal or reason
        return cls(params, candidates, chosen, flow.multiplied)

    def decision(self, index: int) -> tuple[int | None, str]:
        """Returns the dim along which a parameter is sharded, and why or why not.

        Vectors that follow a matrix, and those that stay whole, have no reason.
        """
        candidate = self.chosen.get(index)
        if candidate is not None:
            is_factor = self.multiplied >> index & 1
            note = self._pairing(candidate, index) if is_factor else ""
            return candidate.dims[index], note
        dims = [
            (dim, self.by_factor[leaves_of(factors)[0]])
            for dim, factors in enumerate(self.params[index].array.dims)
            if factors
        ]
        refusals = [each.refusal for _, each in dims]
        dims = [(dim, each) for dim, each in dims if each.refusal not in _OBVIOUS]
        is_kernel = self.multiplied >> index & 1 or WINDOW in refusals
        if len(dims) < (1 if is_kernel else 2):
            return None, ""
        array = self.params[index].array
        reasons: list[str] = []
        for dim, each in dims:
            sizes = [leaf.size for leaf in leaves_of(array.dims[dim])]
            parts = f" ({' x '.join(map(str, sizes))})" if len(sizes) > 1 else ""
            reasons.append(f"dim {dim} of {array.shape[dim]}{parts}: {each.refusal}")
        return None, f"whole; {'; '.join(reasons)}"

    def _pairing(self, candidate: Candidate, index: int) -> str:
        """Returns what a matrix is in the pair that is sharded."""
        rows = lookups = 0
        for contraction in candidate.contractions:
            if contraction.operand.is_weight:
                lookups |= contraction.weights
            else:
                rows |= contraction.weights
        if lookups >> index & 1:
            return "looked up in parts; an all-reduce joins what the devices find"
        columns = self.multiplied & ~(rows | lookups)
        is_row = rows >> index & 1
        names = self._names(candidate, columns if is_row else rows)
        if is_row:
            of = f" for the columns of {names}" if names else ""
            return f"rows{of}; an all-reduce adds up the products"
        return (
            f"columns, for the rows of {names}"
            if names
            else "columns; the results stay sharded"
        )

    def _names(self, candidate: Candidate, params: int) -> str:
        """Returns the paths of some parameters, without what all have before them."""
        indices = [index for index in candidate.dims if params >> index & 1]
        matrices = [index for index in candidate.dims if self.multiplied >> index & 1]
        keys = [self.params[index].path.split("/")[:-1] for index in matrices]
        alike = [len(set(names)) == 1 for names in zip(*keys, strict=False)]
        common = len(list(itertools.takewhile(bool, alike)))
        paths = [self.params[index].path.split("/", common)[-1] for index in indices]
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        return ", ".join(paths[:3]) + more


def _heaviest(
    worth: dict[Factor, float], rivals: dict[Factor, dict[Factor, str]]
) -> list[Factor]:
    """Returns candidates that do not exclude each other, of the largest worth.

    Exact for up to 14 that are tied together, as the layers of a deep MLP are in a
    chain; of more, the most valuable come first.
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
        if len(tied) <= 14:
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


_OBVIOUS = (STACKED, WINDOW)
_OTHER_DIM = "a matrix with the same dim is sharded along another one"
_NOT_WORTH = "it would send more than ten times as much per byte as the others"
_ADDED = "its rows are added to those of a larger table, which is sharded"


def _candidates(params: Sequence[Parameter], flow: Flow) -> dict[Factor, Candidate]:
    candidates: dict[Factor, Candidate] = {}
    for index, param in enumerate(params):
        for dim, factors in enumerate(param.array.dims):
            if not factors:
                continue
            major = leaves_of(factors)[0]
            candidate = candidates.setdefault(major, Candidate(major))
            if index in candidate.dims:
                candidate.refusal = f"it is on two dims of {param.path}"
            candidate.dims[index] = dim
    for contraction in flow.contractions:
        for leaf in set(leaves_of(contraction.factors)) & candidates.keys():
            candidates[leaf].contractions.append(contraction)
    for gradient_sum in flow.gradient_sums:
        for leaf in gradient_sum.factor.leaves:
            if leaf in candidates:
                candidates[leaf].gradient_sums[gradient_sum.of] = gradient_sum
    for factor, size in flow.reductions:
        for leaf in factor.leaves:
            if leaf in candidates:
                candidates[leaf].reduced += size
    return candidates


def _refusal(candidate: Candidate, num_shards: int) -> str:
    """Returns why a candidate cannot be sharded at all, or nothing."""
    size = candidate.factor.size
    if candidate.factor.blocked or candidate.refusal:
        return candidate.factor.blocked or candidate.refusal
    if size % num_shards:
        return f"{size} does not divide into {num_shards} shards"
    for contraction in candidate.contractions:
        is_small = contraction.size * num_shards <= contraction.operand.size
        if not contraction.weights and not is_small:
            return "a product of two activations sums over it"
    for gradient_sum in candidate.gradient_sums.values():
        of = gradient_sum.of
        is_small = of.size * num_shards <= gradient_sum.other_size
        if of.of_inputs and not gradient_sum.by_weight and not is_small:
            return "the gradient of an activation that all shards read sums over it"
    if _is_stream(candidate):
        return "features that pass between layers: each would send all that it makes"
    return ""


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
