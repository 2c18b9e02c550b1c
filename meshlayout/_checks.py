"""Checks of a user's arguments: one wording for each kind of mistake.

A check returns the value in the type that the caller needs, or raises the caller's own
error class with a sentence. They are in one file because the same question ("is this a
number of steps?") was once answered differently in nine places: True counted as 1 in
one, NaN passed a `< 0` in another, and a third refused NumPy integers.

The rules, the same everywhere: a bool is not a number, NaN is not a number, NumPy
scalars are as good as Python's, and a string is never parsed.
"""

import contextlib
import difflib
import functools
import inspect
import math
import numbers
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypedDict, TypeVar, Unpack

import jax
import numpy as np
from jax.core import Tracer

from meshlayout.errors import MeshLayoutError, did_you_mean


T = TypeVar("T")

_LONGEST_REPR = 80


class Context(TypedDict, total=False):
    """The options of all checks: how a message begins and ends, and its class."""

    where: str  # the public function or class, which opens the message
    error: type[MeshLayoutError]  # the class to raise
    hint: str  # a closing sentence that says how to fix it


def shown(value: Any) -> str:
    """Returns a value as messages show it: short, and never a full array or model.

    Example:
        >>> shown("3"), shown(None), shown(2.5), shown(dict)
        ("'3'", 'None', '2.5', 'the class dict')
        >>> shown(np.zeros((2, 3)))
        'an array of shape (2, 3)'
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    with contextlib.suppress(MeshLayoutError):  # a PerReplica is not one array
        if hasattr(value, "shape") and np.ndim(value):
            return f"an array of shape {tuple(value.shape)}"
    if value is None or isinstance(
        value, (str, bytes, bool, numbers.Number, np.generic)
    ):
        text = repr(value.item() if isinstance(value, np.generic) else value)
        return text if len(text) <= _LONGEST_REPR else f"{text[:_LONGEST_REPR]}..."
    if isinstance(value, (tuple, list, dict, set)) and len(text := repr(value)) <= 40:
        return text
    return type_text(value)


def type_text(value: Any) -> str:
    """Returns the name of a value's type with its article, as `"an int"`."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def count(
    name: str, value: Any, *, at_least: int | None = 1, **context: Unpack[Context]
) -> int:
    """Returns a number of things: an integer that is large enough.

    Args:
        name: The parameter, as the user writes it.
        value: What the user gave.
        at_least: The smallest number allowed; None for any integer.
        **context: As in `Context`.

    Raises:
        MeshLayoutError: As `error`, if it is a bool, not an integer, or too small.

    Example:
        >>> count("top_k", np.int64(5))
        5
        >>> count("epochs", 0, where="fit")
        Traceback (most recent call last):
        meshlayout.errors.MeshLayoutError: fit: epochs must be a positive integer, got
            0.
    """
    index = _as_int(value)
    if index is None or (at_least is not None and index < at_least):
        words = {
            None: "an integer",
            0: "a non-negative integer",
            1: "a positive integer",
        }
        what = words.get(at_least, f"an integer of at least {at_least}")
        raise _refusal(name, value, what, **context)
    return index


def _as_int(value: Any) -> int | None:
    """Returns an integer as an int; None for anything else."""
    if isinstance(value, (bool, np.bool_)):
        return None
    # `index`, not `int`: it takes integers of NumPy and JAX, and neither 2.5 nor "2".
    with contextlib.suppress(TypeError):
        return operator.index(value)
    return None


def shape(value: Any, **context: Unpack[Context]) -> tuple[int, ...]:
    """Returns a shape as a tuple of ints.

    Raises:
        MeshLayoutError: As `error`, if it is not a sequence of non-negative integers.

    Example:
        >>> shape([np.int64(2), 3])
        (2, 3)
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        fact = f"a shape must be a tuple of sizes, one per dim, got {shown(value)}."
        raise _error(fact, **context)
    entries = tuple(value)
    sizes = tuple(map(_as_int, entries))
    for dim, size in enumerate(sizes):
        if size is None or size < 0:
            fact = (
                f"dim {dim} of the shape has size {shown(entries[dim])}; a size must "
                "be a non-negative integer."
            )
            raise _error(fact, **context)
    return tuple(size for size in sizes if size is not None)


def number(
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    finite: bool = True,
    **context: Unpack[Context],
) -> float:
    """Returns a finite real number within its bounds.

    Args:
        name: The parameter, as the user writes it.
        value: What the user gave; a NumPy or JAX scalar is a number, too.
        at_least: The smallest allowed value.
        above: The largest value that is too small.
        at_most: The largest allowed value.
        below: The smallest value that is too large.
        finite: Whether NaN and infinities are refused, as they nearly always should
            be; False for measurements.
        **context: As in `Context`.

    Raises:
        MeshLayoutError: As `error`, if it is a bool, not a real number, NaN, infinite
            or out of bounds.

    Example:
        >>> number("decay", 0.5, at_least=0, below=1)
        0.5
        >>> number("atol", float("nan"), at_least=0, where="verify")
        Traceback (most recent call last):
        meshlayout.errors.MeshLayoutError: verify: atol must be a finite number of at
            least 0, got nan.
    """
    bounds = {
        "of at least": at_least,
        "above": above,
        "of at most": at_most,
        "below": below,
    }
    real = _as_float(value)
    fits = (
        real is not None
        and (not finite or math.isfinite(real))
        and (at_least is None or real >= at_least)
        and (above is None or real > above)
        and (at_most is None or real <= at_most)
        and (below is None or real < below)
    )
    if real is None or not fits:
        words = [f"{word} {at:g}" for word, at in bounds.items() if at is not None]
        kind = "a finite number" if finite else "a number"
        what = f"{kind} {' and '.join(words)}".rstrip()
        raise _refusal(name, value, what, **context)
    return real


def _as_float(value: Any) -> float | None:
    """Returns a real scalar as a float; None for anything else."""
    # `float` would parse "1e-3", and raise its own error inside jit.
    if isinstance(value, (bool, np.bool_, str, bytes, Tracer)):
        return None
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:  # an int or a fraction beyond all floats
            return math.inf
    is_scalar = (
        isinstance(value, (np.ndarray, np.generic, jax.Array)) and not value.shape
    )
    if is_scalar and jax.numpy.issubdtype(value.dtype, jax.numpy.number):
        return None if np.iscomplexobj(value) else float(value)
    return None


def flag(name: str, value: Any, **context: Unpack[Context]) -> bool:
    """Returns True or False; refuses other truth values, as `"no"` would mean yes.

    Raises:
        MeshLayoutError: As `error`, if it is anything else.

    Example:
        >>> flag("verify", "no")
        Traceback (most recent call last):
        meshlayout.errors.MeshLayoutError: verify must be True or False, got 'no'.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise _refusal(name, value, "True or False", **context)
    return bool(value)


def choice(
    name: str, value: Any, choices: Iterable[T], **context: Unpack[Context]
) -> T:
    """Returns a value that must be one of a few.

    Raises:
        MeshLayoutError: As `error`, if it is none of them.

    Example:
        >>> choice("mode", "mxa", ["max", "min"])
        Traceback (most recent call last):
        meshlayout.errors.MeshLayoutError: mode must be 'max' or 'min', got 'mxa'. Did
            you mean 'max'?
    """
    allowed = list(choices)
    for allowed_value in allowed:
        # By type as well: True == 1, and == on an array returns an array.
        if type(allowed_value) is type(value) and allowed_value == value:
            return allowed_value
    *first, last = map(repr, allowed)
    what = f"{', '.join(first)} or {last}" if first else last
    if isinstance(value, str):
        texts = [text for text in allowed if isinstance(text, str)]
        near = did_you_mean(value, texts).strip()
        context["hint"] = near or context.get("hint", "")
    raise _refusal(name, value, what, **context)


def pattern(name: str, value: Any, **context: Unpack[Context]) -> re.Pattern[str]:
    """Returns a compiled regular expression.

    Raises:
        MeshLayoutError: As `error`, if it is not a string or does not compile.

    Example:
        >>> pattern("where", "a(")
        Traceback (most recent call last):
        meshlayout.errors.MeshLayoutError: where='a(' is not a regular expression:
            missing ), unterminated subpattern at position 1.
    """
    if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
        return value
    if not isinstance(value, str):
        raise _refusal(name, value, "a regular expression", **context)
    try:
        return re.compile(value)
    except re.error as problem:
        fact = f"{name}={value!r} is not a regular expression: {problem}."
        raise _error(fact, **context) from None


def function(
    name: str,
    value: Any,
    *args: str,
    keywords: Iterable[str] = (),
    **context: Unpack[Context],
) -> Callable[..., Any]:
    """Returns a function that can be called with these positional arguments.

    Checked before anything is traced, so that a wrong signature is not a TypeError from
    deep inside JAX. A callable without a signature (some built-ins) passes.

    Args:
        name: The parameter, as the user writes it.
        value: What the user gave.
        *args: The names of its positional arguments, as the user knows them.
        keywords: The names of keyword arguments, passed if it has such parameters.
        **context: As in `Context`.

    Raises:
        MeshLayoutError: As `error`, if it cannot be called, or not with these.

    Example:
        >>> function("loss_fn", lambda model: 0.0, "model", "batch")
        Traceback (most recent call last):
        meshlayout.errors.MeshLayoutError: loss_fn is called as loss_fn(model, batch),
            but takes (model).
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
        asked = {name: None for name in keywords if name in signature.parameters}
        signature.bind(*args, **asked)
    except TypeError:
        names = ", ".join(signature.parameters)
        called = f"{name} is called as {name}({', '.join(args)}), but takes ({names})."
        raise _error(called, **context) from None
    return value


def has_arrays(name: str, tree: Any, **context: Unpack[Context]) -> None:
    """Refuses a tree without arrays, which is nearly always a forgotten `return`.

    Raises:
        MeshLayoutError: As `error`, if no leaf has a shape and a dtype.

    Example:
        >>> has_arrays("state", {}, where="save")
        Traceback (most recent call last):
        meshlayout.errors.MeshLayoutError: save: state holds no arrays, got {}. A
            function that ends without `return` gives None.
    """
    for leaf in jax.tree.leaves(tree):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            return
    context.setdefault("hint", "A function that ends without `return` gives None.")
    raise _error(f"{name} holds no arrays, got {shown(tree)}.", **context)


def lock(text: Any, current: str, fact: str, **context: Unpack[Context]) -> None:
    """Refuses a lock text that is not the current one, and lists the differing lines.

    Args:
        text: What `to_lock` returned when somebody last looked at it.
        current: What it returns now.
        fact: What is wrong if they differ.
        **context: As in `Context`.

    Raises:
        MeshLayoutError: As `error`, if they differ or it is not a text.

    Example:
        >>> lock("a: f32[2]", "a: f32[3]", "the layouts are not the locked ones")
        Traceback (most recent call last):
        meshlayout.errors.MeshLayoutError: the layouts are not the locked ones
            (- locked, + now):
          -a: f32[2]
          +a: f32[3]
        If this is meant, write the lock anew with to_lock().
    """
    if not isinstance(text, str):
        msg = f"check_lock takes the text of to_lock(), got {shown(text)}."
        raise _error(msg, **context)
    locked = [line.rstrip() for line in text.strip().splitlines()]
    changes = [
        line
        for line in difflib.unified_diff(locked, current.splitlines(), n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]
    if not changes:
        return
    lines = "\n  ".join(changes[:40])
    more = f"\n  ... and {len(changes) - 40} more" * (len(changes) > 40)
    context["hint"] = "\nIf this is meant, write the lock anew with to_lock()."
    raise _error(f"{fact} (- locked, + now):\n  {lines}{more}", **context)


def real_array(name: str, value: Any, **context: Unpack[Context]) -> jax.Array:
    """Returns losses, weights or other inputs as an array of real numbers or bools.

    Integers on the host that do not fit into JAX's become floats: JAX would wrap them
    around without an error.

    Raises:
        MeshLayoutError: As `error`, if it is anything else, such as text, None or
            complex numbers.

    Example:
        >>> real_array("weights", [1, 2**40]).tolist()
        [1.0, 1099511627776.0]
        >>> real_array("weights", "abc", where="Mean")
        Traceback (most recent call last):
        meshlayout.errors.MeshLayoutError: Mean: weights must be an array of real
            numbers, got 'abc'.
    """
    array = None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        array = _device_array(value)
    kinds = (jax.numpy.floating, jax.numpy.integer, jax.numpy.bool_)
    if array is None or not any(jax.numpy.issubdtype(array.dtype, k) for k in kinds):
        dtype = f" of dtype {array.dtype}" if array is not None and array.shape else ""
        got = f"{shown(value)}{dtype}"
        fact = f"{name} must be an array of real numbers, got {got}."
        raise _error(fact, **context)
    return array


def _device_array(value: Any) -> jax.Array:
    """Returns a value as a JAX array, with large integers of the host as floats."""
    # Arrays of JAX's, also in a list, hold no such integers; tracers have no value.
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
        return jax.numpy.asarray(value)
    host = np.asarray(value)
    narrow = jax.dtypes.canonicalize_dtype(host.dtype)
    is_integer = np.issubdtype(host.dtype, np.integer) and narrow != host.dtype
    if is_integer and np.any(host.astype(narrow) != host):
        return jax.numpy.asarray(host.astype(np.float32))
    return jax.numpy.asarray(host)


@contextlib.contextmanager
def noted(note: str | Callable[[], str]) -> Iterator[None]:
    """Adds a note to an exception of the user's code: which path, row or step.

    The exception keeps its type and traceback; the note is printed below it.

    Args:
        note: The sentence, or a function that returns it if there is an exception.

    Example:
        >>> try:
        ...     with noted("in the rule '.*' at path 'kernel'"):
        ...         1 / 0
        ... except ZeroDivisionError as problem:
        ...     problem.__notes__
        ["in the rule '.*' at path 'kernel'"]
    """
    try:
        yield
    except Exception as problem:
        problem.add_note(note if isinstance(note, str) else note())
        raise


def _refusal(
    name: str, value: Any, what: str, **context: Unpack[Context]
) -> MeshLayoutError:
    return _error(f"{name} must be {what}, got {shown(value)}.", **context)


def _error(fact: str, **context: Unpack[Context]) -> MeshLayoutError:
    where = context.get("where", "")
    opening = f"{where}: " if where else ""
    hint = context.get("hint", "")
    text = f"{opening}{fact}{'' if hint.startswith(chr(10)) else ' '}{hint}"
    return context.get("error", MeshLayoutError)(text.rstrip())
