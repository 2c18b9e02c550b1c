"""Checks of a user's arguments: one wording for each kind of mistake.

A check returns the value in the type that the caller needs, or raises the caller's own
error class. Bools and NaN are not numbers, NumPy scalars are, strings are not parsed.

`user_call` shows users their own frames of an error, and not the thirty of this library
and JAX between them; `MESHLAYOUT_TRACEBACK=full` shows all.
"""

import contextlib
import difflib
import enum
import functools
import importlib
import inspect
import math
import numbers
import operator
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, TypeVar, Unpack, cast

import jax
import numpy as np

from meshlayout.errors import MeshLayoutError, StateError, did_you_mean


T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# The first parameter of losses of arrays, as those of Keras and Optax.
_ARRAYS = {"y_true", "y_pred", "logits", "predictions", "labels", "targets"}


class Context(TypedDict, total=False):
    """The options of all checks: how a message begins and ends, and its class."""

    where: str  # the public function or class, which opens the message
    error: type[MeshLayoutError]  # the class to raise
    hint: str  # a closing sentence that says how to fix it


def shown(value: Any) -> str:
    """Returns a value as messages show it: short, and never a full array or model."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    with contextlib.suppress(MeshLayoutError):  # a PerReplica is not one array
        if hasattr(value, "shape") and np.ndim(value):
            return f"an array of shape {tuple(value.shape)}"
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, (str, bytes, numbers.Number)):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:80]}..."
    if isinstance(value, (tuple, list, dict, set)) and len(text := repr(value)) <= 40:
        return text
    return type_text(value)


def type_text(value: object) -> str:
    """Returns the name of a value's type with its article, as `"an int"`."""
    name, home = type(value).__name__, type(value).__module__
    if name in sys.modules["meshlayout"].__all__ and not home.startswith("meshlayout"):
        name = f"{home}.{name}"  # Flax has a TrainState, too
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def count(
    name: str, value: Any, *, at_least: int | None = 1, **context: Unpack[Context]
) -> int:
    """Returns a number of things: an integer of at least 1 or 0, or any for None."""
    index = None
    if not isinstance(value, (bool, np.bool_)):
        # `index`, not `int`: it takes integers of NumPy and JAX, not 2.5 or "2".
        with contextlib.suppress(TypeError):
            index = operator.index(value)
    if index is None or (at_least is not None and index < at_least):
        kinds = {None: "an integer", 0: "a non-negative integer"}
        kind = kinds.get(at_least, "a positive integer")
        raise _refusal(name, value, kind, **context)
    return index


def number(
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    **context: Unpack[Context],
) -> float:
    """Returns a finite real number within its bounds."""
    real = math.nan
    # Not of a string, which `float` would parse, nor inside jit, where it would raise.
    is_scalar = isinstance(value, (np.ndarray, jax.Array)) and not value.shape
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) == np.bool_
    if (is_scalar or isinstance(value, numbers.Real)) and not is_bool:
        with contextlib.suppress(TypeError, OverflowError):
            real = float(value)
    bounds = [
        ("of at least", at_least, real.__ge__),
        ("above", above, real.__gt__),
        ("of at most", at_most, real.__le__),
        ("below", below, real.__lt__),
    ]
    limits: Any = [bound for bound in bounds if bound[1] is not None]
    if not math.isfinite(real) or not all(holds(limit) for _, limit, holds in limits):
        text = " and ".join(f"{word} {limit:g}" for word, limit, _ in limits)
        raise _refusal(name, value, f"a finite number {text}".rstrip(), **context)
    return real


def choice(
    name: str, value: object, choices: Iterable[T], **context: Unpack[Context]
) -> T:
    """Returns a value that must be one of a few."""
    allowed = list(choices)
    value = value.item() if isinstance(value, np.generic) else value
    for known in allowed:
        # By type as well: True == 1, and == on an array returns an array.
        if type(known) is type(value) and known == value:
            return known
    *first, last = map(repr, allowed)
    what = f"{', '.join(first)} or {last}" if first else last
    if isinstance(value, str):
        near = did_you_mean(value, [x for x in allowed if isinstance(x, str)]).strip()
        context["hint"] = near or context.get("hint", "")
    raise _refusal(name, value, what, **context)


def option(where: str, name: str, known: Iterable[str]) -> None:
    """Raises an error for an option that is not known."""
    hint = _reflexes().get(f"{where}.{name}") or _reflexes().get(name)
    if hint and name not in known:
        raise MeshLayoutError(f"{where} got {name}=. {hint}")
    choice(f"an option of {where}", name, known)


def pattern(name: str, value: Any, **context: Unpack[Context]) -> re.Pattern[str]:
    """Returns a compiled regular expression."""
    try:
        return re.compile(value)
    except (re.error, TypeError) as problem:
        fact = f"{name}={shown(value)} is not a regular expression: {problem}."
        raise _error(fact, **context) from None


def function(
    name: str,
    value: object,
    *args: str,
    keywords: Iterable[str] = (),
    **context: Unpack[Context],
) -> Callable[..., Any]:
    """Returns a function that can be called with these positional arguments.

    Checked before anything is traced, so that a wrong signature is not a TypeError from
    deep inside JAX. `keywords` are passed if it has such parameters. A callable without
    a signature (some built-ins) passes.
    """
    if not callable(value):
        call = f"a function of ({', '.join(args)})" if args else "a function"
        raise _refusal(name, value, call, **context)
    try:
        # Of a class, its __init__: the metaclass of NNX modules takes anything.
        is_class = isinstance(value, type)
        call = functools.partial(value.__init__, None) if is_class else value
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return value
    try:
        passed = dict.fromkeys(set(keywords).intersection(signature.parameters))
        signature.bind(*args, **passed)
        names = [*signature.parameters][: len(args)]
        is_of_arrays = args[:1] == ("model",) and names[0] in _ARRAYS
        if is_of_arrays or (names != [*args] and {*names} == {*args}):  # or swapped
            raise TypeError
    except TypeError:
        names = ", ".join(signature.parameters)
        called = f"{name} is called as {name}({', '.join(args)}), but takes ({names})."
        if keywords and len(signature.parameters) > len(args):
            called += f" Parameters named {' and '.join(keywords)} are passed, too."
        raise _error(called, **context) from None
    return value


def has_arrays(name: str, tree: object, **context: Unpack[Context]) -> None:
    """Refuses a tree without arrays, which is nearly always a forgotten `return`."""
    leaves = jax.tree.leaves(tree)
    if not any(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        context.setdefault("hint", "A function without a `return` returns None.")
        raise _error(f"{name} holds no arrays, got {shown(tree)}.", **context)


def lock(text: object, current: str, fact: str, **context: Unpack[Context]) -> None:
    """Refuses a lock text that is not the current one; `fact` says what differs."""
    if not isinstance(text, str):
        msg = f"check_lock takes the text of to_lock(), got {shown(text)}."
        raise _error(msg, **context)
    locked = [line.rstrip() for line in text.strip().splitlines()]
    diff = difflib.unified_diff(locked, current.splitlines(), n=0, lineterm="")
    changes = [x for x in diff if not x.startswith(("---", "+++", "@@"))]
    if changes:
        more = [f"... and {len(changes) - 40} more"] * (len(changes) > 40)
        lines = "\n  ".join([*changes[:40], *more])
        context["hint"] = "\nIf this is intended, write a new lock with to_lock()."
        raise _error(f"{fact} (- locked, + now):\n  {lines}", **context)


def real_array(name: str, value: object, **context: Unpack[Context]) -> jax.Array:
    """Returns losses or weights as an array of real numbers or bools.

    Integers on the host that do not fit into JAX's become floats: JAX would wrap them.
    """
    array = None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        host = value
        # Arrays of JAX's, also in a list, hold no large integers; tracers no values.
        if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
            host = np.asarray(value)
            narrow = jax.dtypes.canonicalize_dtype(host.dtype)
            if narrow.kind in "iu" and np.any(host.astype(narrow) != host):
                host = host.astype(np.float32)
        array = jax.numpy.asarray(host)
    kinds = (jax.numpy.floating, jax.numpy.integer, jax.numpy.bool_)
    if array is None or not any(jax.numpy.issubdtype(array.dtype, k) for k in kinds):
        dtype = f" of dtype {array.dtype}" if array is not None and array.shape else ""
        fact = f"{name} must be an array of real numbers, got {shown(value)}{dtype}."
        raise _error(fact, **context)
    return array


@contextlib.contextmanager
def noted(note: str | Callable[[], str]) -> Iterator[None]:
    """Adds a note to an exception of the user's code: which path, row or step."""
    try:
        yield
    except Exception as problem:
        problem.add_note(note if isinstance(note, str) else note())
        raise


def _refusal(
    name: str, value: object, what: str, **context: Unpack[Context]
) -> MeshLayoutError:
    return _error(f"{name} must be {what}, got {shown(value)}.", **context)


def _error(fact: str, **context: Unpack[Context]) -> MeshLayoutError:
    where, hint = context.get("where", ""), context.get("hint", "")
    opening = f"{where}: " if where else ""
    text = f"{opening}{fact}{'' if hint.startswith(chr(10)) else ' '}{hint}"
    return context.get("error", MeshLayoutError)(text.rstrip())


HOME = "https://github.com/meshlayout/meshlayout"


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Imports a module of a package that an extra of this library installs."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        # Something that the package itself imports: installing it would not help.
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        fix = f"pip install 'meshlayout[{extra}] @ git+{HOME}'."
        msg = f"{purpose} needs {package}, which is not installed: {fix}"
        raise MeshLayoutError(msg) from None


_MODULES = (contextlib, enum, functools)
_INSIDE = (f"{Path(__file__).parent}/", *(str(x.__file__) for x in _MODULES))
_JAX, _LOOKUPS = f"{Path(jax.__file__).parent}/", {"called", "unknown"}
_LOOKUPS |= {"__getattr__", "__missing__"}  # which say that there is no such name
# Words of JAX; tests notice others.
_NOTE_OF_JAX, _DELETED = "JAX has removed its internal frames", "Array has been deleted"
_WHOLE_BATCH = "A model takes what its __call__ takes, such as batch['x'], not a batch."
# What the errors of JAX, by what they say, mean to users of this library.
_MEANINGS = {
    "unbound axis name": "A step is one program over the whole batch, and its means "
    "cover all devices: only code in jax.shard_map needs pmean and psum.",
    _DELETED: "A step has used up the state of this array. "
    "Continue with the state that the step returned.",
    "Shape mismatch: got (": "Of outputs of shape (batch, 1), use model(x)[:, 0].",
    "tuple indices must be": "fit(x, y) makes tuples, fit({'x': x, 'y': y}) dicts.",
    "is not supported by dot_general on CPU": "On CPUs, use precision='bfloat16'.",
    "flax.nnx.statelib.State'": "Parameters of a TrainState are nested dicts. For "
    "labels, write ml.optimizer_by_path({'head': tx, '': None}).",
    "'value_fn'": "A step has one gradient, and no line search, as optax.lbfgs has: "
    "give it optax.lbfgs(linesearch=None).",
    "should match the aval mesh": "The batch is on Explicit axes, as of jax.make_mesh, "
    "the state on Auto ones: lay it out on the mesh of the state.",
    "is incompatible with mesh_shape": "The state and the batch may be on two meshes: "
    "lay both out on one.",
    "'dict' object has no attribute 'dtype'": _WHOLE_BATCH,
    "type for array: <class 'dict'>": _WHOLE_BATCH,  # of JAX 0.7
    "entry not a 2- or 3- tuple": _WHOLE_BATCH,  # from a dtype of a dict
    "'TrainState' object is not callable": "Of a state, call state.model(x). verify "
    "takes a step, such as make_train_step(loss_fn).",
    "argument passed to an apply function": "A step's model is bound to its variables: "
    "write model(batch['x']), without apply.",
    "unexpected keyword argument 'mutable'": "A step's model is bound: leave out "
    "mutable= and rngs=.",
    '"batch_stats" is immutable': "In evaluation, write model(x, train=False); a "
    "function loss_fn(model, batch, train) is told which it is.",
    "contracting dimensions to have": "An input's last dim is not its layer's. One row "
    "is x[:1] or df.iloc[[0]], one feature df[['age']]; batch_size= counts examples.",
    "same number of dimensions": "Labels that are class numbers have shape (batch,).",
    "<class 'numpy.integer'>": "Labels that are class numbers are integers, as after "
    "y.astype('int32'). One-hot ones go to optax.softmax_cross_entropy.",
}


@functools.cache
def _reflexes() -> dict[str, str]:
    """Returns what takes the place here of what users of other libraries write."""
    lines = Path(__file__).with_name("habits.txt").read_text().splitlines()
    pairs = (line.split(": ", 1) for line in lines if line and line[0] != "#")
    return {name: hint for names, hint in pairs for name in names.split()}


def user_call(target: F) -> F:
    """Makes a function, or a class's methods, show errors as users need them."""
    if isinstance(target, type):
        for name, method in [*vars(target).items()]:
            function = getattr(method, "__func__", method)  # a classmethod's
            is_public = name == "__init__" or not name.startswith("_")
            if inspect.isfunction(function) and is_public:
                wrapped: Any = user_call(function)
                wrapped = wrapped if function is method else type(method)(wrapped)
                setattr(target, name, wrapped)
        return cast(F, target)

    @functools.wraps(target)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            try:
                return target(*args, **kwargs)
            except TypeError:
                _check_call(target, args, kwargs)
                raise
            except RuntimeError as error:
                if _DELETED not in str(error):
                    raise
                used_up = StateError(f"{error} {_MEANINGS[_DELETED]}")
                raise used_up.with_traceback(error.__traceback__) from None
        except (Exception, KeyboardInterrupt) as error:
            show_user_frames(error)
            raise  # bare, so that this frame is not added again

    return cast(F, called)


def _check_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raises an error that says what to write instead, if the arguments do not fit."""
    signature = inspect.signature(function)
    known = {k: x for k, x in signature.parameters.items() if k[0] != "_"}
    where = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    try:
        signature.bind(*args, **kwargs)
    except TypeError as problem:
        takes_any = any(x.kind is x.VAR_KEYWORD for x in known.values())
        for name in [name for name in kwargs if name not in known]:
            reflex = _reflexes().get(f"{where}.{name}") or _reflexes().get(name)
            reflex = "" if f"{name}s" in known else reflex
            hint = reflex or did_you_mean(name, known).strip()
            names = ", ".join(x for x in known if x not in ("self", "cls"))
            if hint := hint or ("" if takes_any else f"It takes {names}."):
                raise MeshLayoutError(f"{where} got {name}=. {hint}") from None
        hint = _reflexes().get(where, "")
        names = [f"{k}=" for k, x in known.items() if x.kind is x.KEYWORD_ONLY]
        if names and "too many" in str(problem):
            hint = f"{hint} Give by name: {', '.join(names[:6])}.".lstrip()
        raise MeshLayoutError(f"{where}: {problem}. {hint}".rstrip()) from None


def names_of(module: dict[str, Any]) -> Callable[[str], NoReturn]:
    """Returns a `__getattr__` for `vars()` of a module; type checkers do not see it."""
    lookup = functools.partial(unknown, f"module {module['__name__']!r}", module)
    return user_call(lookup)


def unknown(owner: str, known: Iterable[str], name: str) -> NoReturn:
    """Raises AttributeError, which says what to write instead, or where to look."""
    if name in _reflexes():
        raise AttributeError(f"{owner} has no {name!r}. {_reflexes()[name]}")
    place = f"For names of other libraries, see {HOME}/tree/main/docs/coming_from."
    near = "" if name.startswith("_") else f".{did_you_mean(name, known)} {place}"
    raise AttributeError(f"{owner} has no attribute {name!r}{near}")


class WithReflexes:
    """Base of classes whose missing attributes say what to write instead."""

    if not TYPE_CHECKING:  # to which every misspelled name would be right

        @user_call
        def __getattr__(self, name: str) -> Any:
            kind, plain = type(self), name.removeprefix("experimental_")
            hint = _reflexes().get(f"{kind.__name__}.{name}") or _reflexes().get(name)
            if plain != name and hasattr(kind, plain):
                hint = f"Write {plain}."
            # Private names are Python's to miss; a property is there, and has failed.
            if (name.startswith("_") and hint is None) or hasattr(kind, name):
                return object.__getattribute__(self, name)  # raises Python's own error
            if hint is None:
                public = [x for x in dir(kind) if x[0] != "_"]
                unknown(repr(kind.__name__), public, name)
            raise AttributeError(f"{kind.__name__} has no {name!r}. {hint}")


def show_user_frames(error: BaseException | None) -> None:
    """Leaves an error the user's frames; in an `except` that ends in a bare `raise`."""
    while error is not None and os.environ.get("MESHLAYOUT_TRACEBACK") != "full":
        frames = [*traceback.walk_tb(error.__traceback__)]
        is_own = isinstance(error, (MeshLayoutError, KeyboardInterrupt))
        inside = (*_INSIDE, _JAX) if is_own else _INSIDE
        # None in a bug of the library, which stays whole.
        users = [x for x in frames if not x[0].f_code.co_filename.startswith(inside)]
        if users or is_own or {x[0].f_code.co_name for x in frames} <= _LOOKUPS:
            rest: TracebackType | None = None
            for frame, line in reversed(users):
                rest = TracebackType(rest, frame, frame.f_lasti, line)
            error.__traceback__ = rest
        notes = getattr(error, "__notes__", [])
        said = "\n".join([str(error), *notes])
        for words, meaning in _MEANINGS.items():
            if words in said and meaning not in said:
                error.add_note(meaning)
        notes[:] = [note for note in notes if _NOTE_OF_JAX not in note]
        error = error.__cause__ or error.__context__
