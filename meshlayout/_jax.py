"""The place for jax.experimental, private JAX and differences between versions.

Everything else in the library uses the public API that jax 0.7.2 and later share. Each
private API below says what it is for, what breaks if JAX changes it (if nothing is
said, the import of this module), and which test notices.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportAttributeAccessIssue=false

import contextlib
import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax._src import (
    cache_key,
    clusters,
    compiler,
    config as jax_config,
    core as jax_core,
    distributed,
    hardware_utils,
    mesh as jax_mesh,
    source_info_util,
    xla_bridge,
)
from jax._src.array import ArrayImpl
from jax._src.compiler import (
    register_xla_runtime_error_handler as register_xla_runtime_error_handler,
)
from jax._src.interpreters import ad, batching, mlir, partial_eval, pxla
from jax._src.lax import lax as jax_lax, parallel as jax_parallel
from jax._src.lib import xla_client
from jax.experimental import mesh_utils, multihost_utils, topologies
from jax.experimental.serialize_executable import (
    deserialize_and_load as deserialize_and_load,
    serialize as serialize,
)
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from meshlayout._annotations import DType, Equation, Leaf
from meshlayout._counts import taking_part
from meshlayout._patches import SharedPatches
from meshlayout.errors import ClusterError


Device: TypeAlias = Any  # to a type checker, `jax.Device` is a variable

# A context for how long compilations of this thread take at least that JAX's cache has.
min_cached_s: Any = jax_config.persistent_cache_min_compile_time_secs

# Whether jit can move a value to another kind of memory on CPUs.
memory_in_jit = hasattr(jax, "reshard")

# A context for any hashable value, in which JAX traces compiled functions anew.
trace_phase: Any = jax.make_user_context()


def current_trace() -> Any:
    """Returns the trace that operations are recorded in now."""
    return jax_core.trace_ctx.trace


# A context whose operations are recorded in a trace around this one. A Variable met in
# a scan needs a value of the whole function: test_distribute.py.
in_trace = jax_core.set_current_trace


def is_mapped(x: Any, axis_name: str) -> bool:
    """Returns whether a value differs along an axis of `jax.vmap`, as JAX sees it."""
    while isinstance(x, batching.BatchTracer):
        if x._trace.axis_data.name == axis_name:
            return True
        x = x.val
    return False


# What sends values between replicas, by any function of jax.lax: so that they are equal
# on all of them afterwards, or are not. tests/test_distribute_programs.py notices.
COMBINING = (
    *(jax_parallel.psum_p, jax_parallel.pmax_p),
    *(jax_parallel.pmin_p, jax_parallel.all_gather_p),
)
SENDING = (jax_parallel.ppermute_p,)


def is_transposing() -> bool:
    """Returns whether the backward pass of a gradient is under way.

    JAX says so in the names of operations alone; a test of combined losses notices.
    """
    return "transpose" in str(source_info_util.current_name_stack())


def sharding_of(value: Leaf) -> jax.sharding.Sharding | None:
    """Returns the sharding of an array, an abstract array or a traced value, or None.

    While tracing, JAX knows it only on a mesh whose axes are all Explicit.
    """
    value = concrete_value(value)
    if not isinstance(value, jax.core.Tracer):
        return getattr(value, "sharding", None)
    sharding: Any = getattr(jax.typeof(value), "sharding", None)
    if {*_axis_types(sharding)} != {AxisType.Explicit}:
        return None
    return sharding.with_memory_kind("pinned_host") if is_on_host(value) else sharding


# As a function of C, to which no call of a method compares; not of PRNG keys.
is_deleted: Any = ArrayImpl.is_deleted


def is_extended(dtype: DType) -> bool:
    """Returns whether a dtype is one that NumPy lacks, such as that of PRNG keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def is_array_dtype(dtype: DType) -> bool:
    """Returns whether JAX arrays can have a dtype."""
    kinds = (np.number, np.bool_, jax.dtypes.extended)
    is_known = any(jax.numpy.issubdtype(dtype, kind) for kind in kinds)
    return is_known and not jax.numpy.issubdtype(dtype, np.timedelta64)


# NumPy's dtypes, in this machine's byte order, that JAX has in all of its settings.
_PLAIN = frozenset(map(np.dtype, ("?", *"bhiBHIefF")))


def is_plain(x: Leaf) -> bool:
    """Returns, fast, whether a value surely is a NumPy array that a device can hold."""
    return type(x) is np.ndarray and x.dtype in _PLAIN


def itemsize(dtype: DType) -> int:
    """Returns the bytes of one element on a device; for PRNG keys, of a key's words."""
    return int(canonical_dtype(dtype).itemsize)


def canonical_dtype(dtype: DType) -> Any:
    """Returns the dtype that values of a NumPy dtype have on a device."""
    return dtype if is_extended(dtype) else jax.dtypes.canonicalize_dtype(dtype)


def memory_kinds(device: Any) -> tuple[tuple[str, ...], str | None]:
    """Returns the kinds of memory of a device, and its default one, if it is known."""
    try:
        kinds = tuple(memory.kind for memory in device.addressable_memories())
        return kinds, device.default_memory().kind
    except (AttributeError, jax.errors.JaxRuntimeError, NotImplementedError):
        return (), None


def scan_counts(eqn: Equation) -> tuple[int, int]:
    """Returns how many operands of a scan are constants, and how many are carried next.

    jax 0.12 keeps a tree of all operands instead of the two numbers;
    tests/test_tensor_parallel.py notices.
    """
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].update(eqn.invars).unpack()
    return len(list(constants)), len(list(carry))


def _params(eqn: Equation) -> Iterator[Any]:
    """Yields the parameters of an operation, also those in tuples and lists."""
    for value in eqn.params.values():
        yield from value if isinstance(value, (tuple, list)) else (value,)


def inner_jaxprs(eqn: Equation) -> list[Any]:
    """Returns the jaxprs inside an operation, such as the bodies of jit and scan."""
    inner = [getattr(param, "jaxpr", param) for param in _params(eqn)]
    return [jaxpr for jaxpr in inner if hasattr(jaxpr, "eqns")]


def operands_of(jaxpr: Any, index: int | None = None) -> list[bool]:
    """Returns for each operand of a jaxpr whether a result, or any, depends on it."""
    is_used = [index in (None, number) for number in range(len(jaxpr.outvars))]
    return partial_eval.dce_jaxpr(jaxpr, is_used)[1]


def inner_constants(jaxpr: Any) -> Iterator[Any]:
    """Yields arrays that functions inside a jaxpr close over, which its text lacks."""
    for eqn in equations(jaxpr):
        for param in _params(eqn):
            yield from getattr(param, "consts", ())


def equations(jaxpr: Any, *, except_in: str = "") -> Iterator[Any]:
    """Yields the operations of a jaxpr, also inner ones but those of one operation."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn) if eqn.primitive.name != except_in else ():
            yield from equations(inner, except_in=except_in)


def concrete_mesh() -> jax.sharding.Mesh | None:
    """Returns the mesh of `jax.set_mesh`, or None.

    The public `jax.sharding.get_mesh` (jax 0.8) raises inside jit: tests/test_mesh.py.
    """
    mesh = jax_mesh.get_concrete_mesh()
    return mesh if isinstance(mesh, jax.sharding.Mesh) and mesh.size else None


def device_grid(
    devices: Sequence[Any],
    sizes: Sequence[int],
    slow_sizes: Sequence[int],
    *,
    by_process: bool,
) -> np.ndarray[Any, Any]:
    """Returns devices in the order that suits their networks, one dim per axis.

    `sizes` are those inside of a slice or process, `slow_sizes` how many of them each
    axis crosses. Where JAX finds no order, its errors are of several classes.
    """
    # make_mesh also splits the axes of the torus on these chips alone.
    is_v5e = devices[0].device_kind in ("TPU v5 lite", "TPU v5e")
    options: Any = {"allow_split_physical_axes": is_v5e}
    if math.prod(slow_sizes) == 1:
        return mesh_utils.create_device_mesh(sizes, devices, **options)
    options["process_is_granule"] = by_process
    return mesh_utils.create_hybrid_device_mesh(sizes, slow_sizes, devices, **options)


def no_mesh() -> AbstractContextManager[None]:
    """Returns a context in which no mesh is set: JAX would refuse arrays on others."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def without_set_mesh() -> AbstractContextManager[Any]:
    """As `no_mesh`, but for arrays on other devices, too; not for use inside jit."""
    return jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))


def apply_operation(
    primitive: Any, params: dict[str, Any], context: Any, operands: Sequence[Any]
) -> list[Any]:
    """Runs one operation of a jaxpr in the context that it was traced in.

    But without its mesh: the operands have layouts, perhaps on another one. If JAX
    binds operations in another way, tests/test_create.py notices.
    """
    bound = primitive.get_bind_params(params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with context.manager, no_mesh():
        results = primitive.bind(*functions, *operands, **params)
    return list(results) if primitive.multiple_results else [results]


# Flax asks every value of a Variable for its sharding. For a traced value, JAX answers
# with an AttributeError whose text names its origin, for which it walks all operations
# so far: quadratic in the size of a model. Inside this, the text is short. Once Flax or
# JAX fix it, test_describing_takes_time_in_proportion_to_the_layers passes without it.
short_sharding_errors = SharedPatches(
    (jax_core.Tracer, "sharding", lambda _: property(_no_sharding))
)


def _no_sharding(tracer: jax.core.Tracer) -> Any:
    msg = f"the 'sharding' attribute is not available on {type(tracer).__name__}."
    raise AttributeError(msg)


@contextlib.contextmanager
def ambient_mesh(mesh: jax.sharding.Mesh | AbstractMesh | None) -> Iterator[None]:
    """A context inside a trace in which a mesh is the one of `jax.set_mesh`."""
    with contextlib.ExitStack() as stack:
        if mesh is not None:
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
        # jax 0.7 also asks for the devices where a PartitionSpec stands alone.
        if isinstance(mesh, jax.sharding.Mesh) and not hasattr(jax, "reshard"):
            stack.enter_context(mesh)
        yield


def put(x: Leaf, sharding: Any, **options: Any) -> Any:
    """Moves a value outside jit as `jax.device_put` does, to several processes, too.

    There, JAX (0.7 to 0.12) refuses PRNG keys, whose words can be moved, and gathers
    the host arrays of all processes to compare them, for which callers have another
    way. tests/test_several_processes.py notices. A host array takes `device_put` twice
    as long as `make_array_from_callback`, or longer.
    """
    if jax.process_count() == 1 or getattr(sharding, "is_fully_addressable", True):
        if not options and is_plain(x) and isinstance(sharding, NamedSharding):
            return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
        return jax.device_put(x, sharding, **options)
    if isinstance(x, jax.Array) and is_extended(x.dtype):
        words = put(jax.random.key_data(x), sharding, **options)
        return jax.random.wrap_key_data(words, impl=key_impl(x.dtype))
    is_shared = isinstance(x, jax.Array) and not x.is_fully_addressable
    if is_shared or not isinstance(sharding, NamedSharding):
        return jax.device_put(x, sharding, **options)
    # Copied: a CPU device would use the memory that it is given.
    values = np.array(x, canonical_dtype(jax.typeof(x).dtype))
    main = NamedSharding(sharding.mesh, sharding.spec)
    placed = jax.make_array_from_callback(values.shape, main, values.__getitem__)
    return put(with_weak_type(placed, weak_type=jax.typeof(x).weak_type), sharding)


def concrete_value(x: Leaf) -> Any:
    """Returns the array of a traced value, as in eager grad: tests/test_arrays.py."""
    if not isinstance(x, jax.core.Tracer):
        return x
    value = jax_core.to_concrete_value(x)
    return x if value is None else value


def is_manual(x: Leaf) -> bool:
    """Returns whether a value is the shard of one device, as inside shard_map."""
    return AxisType.Manual in _axis_types(getattr(jax.typeof(x), "sharding", None))


def is_staged(x: Leaf) -> bool:
    """Returns whether an operation on a value is recorded instead of run, as in jit.

    A value under vmap counts as recorded: its dims are not those of the array. Under
    eager grad, arrays can be placed. tests/test_arrays.py notices.
    """
    if isinstance(x, jax.core.Tracer):
        return isinstance(concrete_value(x), jax.core.Tracer)
    trace, of_jit = current_trace(), partial_eval.DynamicJaxprTrace
    while hasattr(trace, "parent_trace") and not isinstance(trace, of_jit):
        trace = trace.parent_trace  # of grad or vmap: look at what is around them
    return not isinstance(trace, jax_core.EvalTrace)


def is_tracing() -> bool:
    """Returns whether this runs inside jit, grad, vmap or another transformation.

    If JAX renames its traces, all calls are refused: tests/test_checkpoint.py fails.
    """
    return not isinstance(current_trace(), jax_core.EvalTrace)


# A constraint with a priority, for which Shardy has a word and JAX has none. It has the
# name of JAX's, for readers of programs. Should what it calls in JAX change,
# tests/test_sequence_parallel.py fails.
yielding: Any = jax_core.Primitive("sharding_constraint")
yielding.def_impl(lambda x, *, sharding, axis: jax.device_put(x, sharding))
yielding.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(yielding, lambda x, _, **params: [yielding.bind(x, **params)])


class _YieldingDim(NamedTuple):
    dim: Any

    def build(self) -> Any:
        """Returns Shardy's attribute for the axes of a dim."""
        plain, is_closed = self.dim.build(), not self.dim.is_open
        return type(plain).get(plain.axes, is_closed=is_closed, priority=1)


def _lower_yielding(ctx: Any, x: Any, *, sharding: Any, axis: str) -> list[Any]:
    (aval,) = ctx.avals_out
    array = sharding._to_sdy_sharding(aval.ndim)
    dims = (_YieldingDim(x) if axis in x.axes else x for x in array.dim_shardings)
    array, specs = replace(array, dim_shardings=(*dims,)), enumerate(sharding.spec)
    free = {dim for dim, entry in specs if entry is PartitionSpec.UNCONSTRAINED}
    return [mlir.wrap_with_sharding_op(ctx, x, aval, array, unspecified_dims=free)]


def _batch_yielding(xs: Any, dims: Any, *, sharding: Any, axis: str) -> Any:
    entries = [*sharding.spec, *[None] * (xs[0].ndim - len(sharding.spec) - 1)]
    entries.insert(dims[0], PartitionSpec.UNCONSTRAINED)
    sharding = sharding.update(spec=entries)
    return yielding.bind(*xs, sharding=sharding, axis=axis), *dims


mlir.register_lowering(yielding, _lower_yielding)
batching.primitive_batchers[yielding] = _batch_yielding


def constrain(x: Leaf, sharding: NamedSharding, *, yields: str | None = None) -> Any:
    """Constrains a value inside jit to a sharding, on Auto axes or on Explicit ones.

    Dims that are `PartitionSpec.UNCONSTRAINED` keep their sharding on Explicit axes,
    and are left to the compiler on Auto axes. What JAX cannot express is a ValueError.
    Over an axis that yields it spreads only where the shardings of arguments do not.
    """
    mesh, current = sharding.mesh, getattr(jax.typeof(x), "sharding", None)
    if is_explicit(sharding):
        # `reshard` takes no UNCONSTRAINED: it stands for the present entry.
        present = [*(current.spec if current else ()), *[None] * np.ndim(x)]
        entries = [
            old if entry is PartitionSpec.UNCONSTRAINED else entry
            for entry, old in zip(sharding.spec, present, strict=False)
        ]
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*entries)))
    if is_explicit(current):
        # JAX confuses the two specs, or refuses, unless the Explicit one is removed.
        x = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec()))
    if yields and jax.config.jax_use_shardy_partitioner:
        return yielding.bind(x, sharding=sharding, axis=yields)
    return jax.lax.with_sharding_constraint(x, sharding)


def is_explicit(sharding: object) -> bool:
    """Returns whether a sharding, if it is one, has Explicit axes."""
    return AxisType.Explicit in _axis_types(sharding)


def _axis_types(sharding: object) -> tuple[AxisType, ...]:
    return getattr(getattr(sharding, "mesh", None), "axis_types", ())


def in_device_memory(x: Leaf) -> Leaf:
    """Returns a value, which inside jit may be in the host's memory, on the device."""
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x


def is_on_host(x: Leaf) -> bool:
    """Returns whether a value, inside jit, is in the host's memory."""
    return getattr(getattr(jax.typeof(x), "memory_space", None), "name", "") == "Host"


def is_committed(x: Leaf) -> bool:
    """Returns whether an array is bound to its devices, so that jit cannot move it."""
    return isinstance(x, jax.Array) and bool(getattr(x, "committed", True))


def is_in_other_memory(sharding: jax.sharding.Sharding) -> bool:
    """Returns whether a sharding is not in the memory that its devices compute in."""
    devices = sharding.addressable_devices or sharding.device_set  # if only described
    _, main = memory_kinds(next(iter(devices)))
    return sharding.memory_kind not in (None, "device", main)


def with_shards(x: jax.Array) -> jax.Array:
    """Returns an array whose `addressable_shards` can be read.

    If each process has one device, `device_put` of a JAX array to a replicated sharding
    makes one for which JAX raises. tests/test_cluster_agreement.py notices.
    """
    try:
        _ = x.addressable_shards
    except ValueError:
        parts = [x.addressable_data(0)]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
    return x


def to_host(x: jax.Array) -> np.ndarray[Any, Any]:
    """Returns the full value of an array, gathered from all processes if needed."""
    if x.is_fully_addressable:
        return np.asarray(x)
    if x.is_fully_replicated:
        return np.asarray(x.addressable_data(0))
    with taking_part():
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def with_weak_type(x: Leaf, *, weak_type: bool) -> Any:
    """Returns a value with or without a weak type; JAX's own way is for strong ones.

    A step compiles twice if the weak types of its state change:
    tests/test_compile_step.py.
    """
    aval = jax.typeof(x)
    if aval.weak_type == weak_type:
        return x
    return jax_lax._convert_element_type(x, aval.dtype, weak_type=weak_type)


def manual_axis_sizes() -> dict[str, int]:
    """Returns the sizes of the axes that are manual here, as inside shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis in mesh.manual_axes}


def key_words(x: Leaf) -> Any:
    """Returns an array of PRNG keys as their words, and anything else as it is."""
    is_key = isinstance(x, jax.Array) and is_extended(x.dtype)
    return jax.random.key_data(x) if is_key else x


def key_impl(dtype: DType) -> str:
    """Returns the name of the generator of a dtype of PRNG keys."""
    return str(dtype._impl.name)


def x64_mode(*, enabled: bool) -> Any:
    """Returns a context in which arrays are 64-bit or not, for this thread."""
    return (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64(enabled)


# The state of `jax.distributed`, which has the client of its coordination service, or
# None; tests/test_cluster_faults.py notices.
coordination: Any = distributed.global_state

# Whether a process was told to stop; true at the same turn on all.
reached_preemption_sync_point = multihost_utils.reached_preemption_sync_point


def process_index() -> int:
    """Returns the index of this process, without starting a backend if possible."""
    is_alone = coordination.client is None
    return jax.process_index() if is_alone else coordination.process_id


def process_count() -> int:
    """Returns the number of processes, without starting a backend if possible."""
    is_alone = coordination.client is None
    return jax.process_count() if is_alone else coordination.num_processes


# Whether JAX has started its devices; whether a thread has begun to.
has_backend: Callable[[], bool] = xla_bridge.backends_are_initialized
is_starting_devices: Callable[[], bool] = xla_bridge._backend_lock.locked


def launcher_devices() -> int | None:
    """Returns how many CPU devices the launcher gave to this process; None if none.

    What a launched process starts inherits the variables, but not its parent's id.
    """
    is_launched = os.environ.get("MESHLAYOUT_LAUNCHER") == str(os.getppid())
    text = os.environ.get("JAX_NUM_CPU_DEVICES", "")
    return int(text) if is_launched and text.isdecimal() else None


def check_joined(where: str) -> None:
    """Refuses devices to a launched process that has not joined the others."""
    if os.environ.get("MESHLAYOUT_LAUNCHER") != str(os.getppid()):
        return
    index, count = (os.environ.get(f"JAX_{x}") for x in ("PROCESS_ID", "NUM_PROCESSES"))
    if count in (None, "1") or jax.distributed.is_initialized():
        return
    if has_backend() and jax.process_count() > 1:  # after `shutdown`
        return
    raise ClusterError(
        f"{where}: this is process {index} of {count} that meshlayout.launch started, "
        "and it does not know the others: each would train alone. Add ml.initialize() "
        "at the top of the program, before anything that uses JAX's devices."
    )


def detect_cluster(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    *,
    timeout_s: float,
) -> tuple[str, str | None, int | None, int | None, Any] | None:
    """Returns this process's place in a cluster as JAX detects it; None outside one.

    That is the name of the scheduler, the three, with what is given filled in, and the
    ids of the devices of this process or None. tests/test_cluster_settings.py notices.
    """
    types = clusters.ClusterEnv._cluster_types
    for kind in [kind for kind in types if not kind.opt_in_only_method]:
        name = getattr(kind, "name", "")  # "" is Kubernetes in jax 0.7
        # A job of SLURM, but not started by srun; jax 0.7 does not tell them apart.
        is_alone = name == "slurm" and "SLURM_STEP_NODELIST" not in os.environ
        if not is_alone and kind.is_env_present():
            return name or "k8s", *kind.auto_detect_unset_distributed_params(
                *(coordinator_address, num_processes, process_id, None),
                *(name or None, math.ceil(timeout_s)),
            )
    return None


def shard_placer(
    shape: tuple[int, ...], dtype: DType, sharding: Any
) -> Callable[[list[np.ndarray[Any, Any]]], jax.Array]:
    """Returns a function that makes a global array of one shard per device, in order.

    `jax.make_array_from_callback` is half as fast; tests/test_data_batches.py notices.
    """
    aval = jax_core.ShapedArray(shape, dtype)
    aval = jax_core.update_aval_with_sharding(aval, sharding)
    devices = list(sharding.addressable_devices_indices_map(shape))
    if not devices:
        empty = functools.partial(jax.make_array_from_single_device_arrays, dtype=dtype)
        return lambda _: empty(shape, sharding, [])
    return lambda shards: pxla.batched_device_put(aval, sharding, shards, devices)


def visible_accelerators() -> list[str]:
    """Returns what the system shows, whatever JAX uses: "tpu", "gpu"."""
    num_tpus, _ = hardware_utils.num_available_tpu_chips_and_device_id()
    return ["tpu"] * bool(num_tpus) + ["gpu"] * hardware_utils.has_visible_nvidia_gpu()


def described_devices(platform: str, name: str, **options: Any) -> list[Device]:
    """Returns the devices of a topology that need not be here."""
    return topologies.get_topology_desc(name, platform, **options).devices


def compile_module(module: bytes, devices: Sequence[Device]) -> tuple[str, Any]:
    """Compiles a lowered program's bytecode; returns the text and sizes in memory."""
    options = compiler.get_compile_options(1, len(devices), np.array([devices]))
    # What has no sharding in the text gets the compiler's, as under `jax.jit`.
    options.executable_build_options.allow_spmd_sharding_propagation_to_output = [True]
    with mlir.make_ir_context():
        arguments = mlir.ir.Module.parse(module), xla_client.DeviceList(tuple(devices))
        compile_ = compiler.backend_compile_and_load
        program = compile_(devices[0].client, *arguments, options, [])
    text = "\n\n".join(part.to_string() for part in program.hlo_modules())
    return text, program.get_compiled_memory_stats()


def hardware_key() -> str:
    """Returns what stands for this hardware, as a CPU's features, in JAX's cache."""
    digest = hashlib.sha256()
    cache_key._hash_accelerator_config(digest, np.array(jax.devices()))
    return digest.hexdigest()[:16]
