"""What a replica function uses besides its arguments.

A function is traced once and compiled, so what it reads from Python is fixed then, and
what it does to Python is done then. `find` walks the nonlocals, globals and attributes
that its code names, and those of the functions it calls. With what it finds, models and
optimizers become state of the program, a name that stands for something else causes a
new trace, and a side effect that would happen only once is refused.

It reads bytecode rather than watch the function run, because models have to be known
before the first trace. What code does not show is not seen: `eval`, attributes whose
names are computed, objects that are neither the user's nor plain containers. Code of
installed packages is not followed, as they keep caches that change during a trace.

Attributes are matched by name alone: if any of this code says `x.rate`, `rate` counts
for every object within reach. So a program may be traced again without need, but never
computes with an old value.

Other threads that change what a function reaches while it is traced cannot be told
apart from the function: the call is refused, and works when it is repeated.
"""

import contextlib
import functools
import inspect
import itertools
import types
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from meshlayout import _checks, _paths
from meshlayout.distribute.bytecode import (
    AttributeNames,
    is_users_class,
    is_users_file,
    is_users_module,
    references,
)
from meshlayout.distribute.nnx_graph import NnxObject, is_bookkeeping, iter_graph
from meshlayout.distribute.places import (
    MOST_ENTRIES,
    RANDOM,
    Cells,
    Contents,
    Place,
    Slots,
    container_place,
    names_place,
    object_place,
)
from meshlayout.errors import StrategyError


_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, jax.Array)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
# Classes of the standard library that hold what is the user's.
_NAMESPACES = (types.SimpleNamespace, Namespace)
# Methods that Python calls by itself, but hardly inside of a replica function.
_UNRELATED = frozenset({"__init__", "__new__", "__repr__", "__str__", "__del__"})


def find(fn: Callable[..., Any], arguments: Sequence[NnxObject] = ()) -> "Bindings":
    """Returns what a function uses besides its arguments.

    Args:
        fn: A function, bound method, `functools.partial` or other callable.
        arguments: NNX objects that it is called with. They are not among the objects
            that are returned, but what their methods use is of interest as well.

    Example:
        >>> class Trainer:
        ...     def __init__(self):
        ...         self.weight = nnx.Param(np.ones(2))
        ...
        ...     def step(self, x):
        ...         return self.weight[...] * x
        >>> [name for name, _ in find(Trainer().step).objects]
        ['self.weight']
    """
    names = AttributeNames()
    while True:
        walk = _Walk(names)
        walk.start(fn, arguments)
        # Code that is reached through an attribute may name further ones.
        if walk.names <= names:
            # Arrays last: if the name stands for another one, the old one may change.
            places = tuple(sorted(walk.places(), key=lambda place: place.is_fixed))
            contents = tuple(x.read() if x.is_input else () for x in places)
            return Bindings((fn, *arguments), tuple(walk.objects), places, contents)
        names = names | walk.names


def identity(fn: Callable[..., Any]) -> tuple[Any, ...]:
    """Returns what a function consists of, equal for one that was made anew.

    A lambda in a loop is a new object each time, with the same code and nonlocals; so
    is a function, with those it calls, that another one defines at each epoch. The ids
    in here are those of parts of the function and of what its nonlocals stand for.
    They hold as long as it is alive and `Bindings.is_current`.

    Example:
        >>> def scaled(factors):
        ...     return lambda x: x * factors[0]
        >>> factors = [2]
        >>> identity(scaled(factors)) == identity(scaled(factors))
        True
        >>> identity(scaled(factors)) == identity(scaled([3]))
        False
    """
    return _identity(fn, frozenset())


def _identity(fn: Any, callers: frozenset[int]) -> tuple[Any, ...]:
    if isinstance(fn, types.MethodType):
        return id(fn.__self__), *_identity(fn.__func__, callers)
    if isinstance(fn, functools.partial):
        arguments = (*fn.args, *fn.keywords.values())
        return *fn.keywords, *map(id, arguments), *_identity(fn.func, callers)
    if not isinstance(fn, types.FunctionType) or vars(fn):
        return (id(fn),)
    if id(fn) in callers:  # of itself
        return ()
    named = fn.__kwdefaults__ or {}
    parts = (*(fn.__defaults__ or ()), *named.values())
    cells = fn.__closure__ or ()
    nonlocals = [_identity_in(cell, callers | {id(fn)}) for cell in cells]
    return id(fn.__code__), id(fn.__globals__), *map(id, parts), *nonlocals


def _identity_in(cell: types.CellType, callers: frozenset[int]) -> object:
    try:
        value = cell.cell_contents
    except ValueError:  # not bound yet
        return id(cell)
    # What functions of libraries refer to is not watched.
    if isinstance(value, types.FunctionType) and is_users_file(
        value.__code__.co_filename
    ):
        return _identity(value, callers)
    if isinstance(value, (bool, int, float, complex, str)):
        return type(value), repr(value)  # 0.0 == -0.0
    # An array that is another one at each call must not fill the cache.
    return id(cell) if isinstance(value, (jax.Array, np.ndarray)) else id(value)


@dataclass(frozen=True)
class Bindings:
    """The names and values that a function uses besides its arguments.

    Attributes:
        roots: The function and its arguments, kept alive: their ids are used in keys.
        objects: The distinct NNX objects and bare Variables, with the names by which
            the user knows them: `model`, `self.optimizer`.
    """

    roots: tuple[Any, ...]
    objects: tuple[tuple[str, NnxObject], ...]
    _places: tuple[Place, ...]
    _contents: tuple[Contents, ...]

    def is_current(self) -> bool:
        """Returns whether every name still stands for what it stood for.

        Takes microseconds. What NNX objects hold is a question for `Variables`.

        Raises:
            StrategyError: See `change`.
        """
        return self.change() is None

    def change(self) -> str | None:
        """Returns the name of something that is not what it was, or None.

        Raises:
            StrategyError: If it is a NumPy array with other values. JAX keeps a copy of
                each that it has met, by identity, also for programs to come.
        """
        for place, contents in zip(self._places, self._contents, strict=True):
            if not place.is_input or (change := place.change(contents)) is None:
                continue
            if place.is_fixed:
                msg = (
                    f"run: the values of the NumPy array {change.label} have changed, "
                    "and compiled programs hold the old ones. Pass it as an argument, "
                    "keep it in an nnx.Variable, or create a new array."
                )
                raise StrategyError(msg)
            return change.label
        return None

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Refuses what the function does to Python while it is traced in the block.

        It sees names that are rebound, attributes that are set, containers and NumPy
        arrays that change, and random numbers and iterators that advance; not those
        that the function itself made, nor the attributes of NNX objects, which
        `Variables.bound` compares.

        Raises:
            StrategyError: If it did any of this, and did not fail otherwise.
        """
        before = [place.read() for place in self._places]
        yield
        for place, contents in zip(self._places, before, strict=True):
            if (change := place.change(contents)) is not None:
                raise StrategyError(place.refusal(change))


class _Walk:
    """One walk through everything that a function can reach, breadth first.

    Args:
        names: The attributes that code is known to name, from the walk before.

    Attributes:
        names: The attributes that the code met in this walk names.
        objects: The NNX objects that it met, with their names.
    """

    def __init__(self, names: AttributeNames) -> None:
        self.names = AttributeNames()
        self.objects: list[tuple[str, NnxObject]] = []
        self._known = names
        self._places: list[Place] = []
        self._globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._queue: deque[tuple[str, Any, bool]] = deque()
        # Holds the objects, too: the id of one that is gone may be used again.
        self._seen: dict[tuple[int, bool], object] = {}
        self._classes: set[tuple[type, bool]] = set()
        self._parts: set[int] = set()  # of NNX objects, by id

    def start(self, fn: Callable[..., Any], arguments: Sequence[NnxObject]) -> None:
        """Walks from a function, whoever wrote it, and the objects it is given."""
        for node in arguments:
            self._visit_nnx(type(node).__name__, node)
        function = getattr(fn, "__func__", fn)
        if function is not fn:
            self._add("self", getattr(fn, "__self__", None))
        if isinstance(function, types.FunctionType):
            self._seen[id(function), True] = function
            self._visit_function(function, is_users=True)
            self._visit_wrapped(function.__name__, function)
        else:
            self._add("self", function)
        while self._queue:
            name, value, is_users = self._queue.popleft()
            is_users = is_users or isinstance(value, types.FunctionType)
            if isinstance(value, _PLAIN) or (id(value), is_users) in self._seen:
                continue
            self._seen[id(value), is_users] = value
            self._visit(name, value, is_users=is_users)

    def places(self) -> Iterator[Place]:
        """Yields all that may change."""
        yield from self._places
        for scope, names in self._globals.values():
            yield names_place("", sorted(names), scope.get)

    def _add(self, name: str, value: Any, *, is_users: bool = True) -> None:
        self._queue.append((name, value, is_users))

    def _visit(self, name: str, value: Any, *, is_users: bool) -> None:
        """Looks at one object.

        Args:
            name: What the user calls it.
            value: The object.
            is_users: False for what a library's function holds: its caches may change,
                and only functions and NNX objects in there are of interest.
        """
        if _paths.is_nnx_object(value):
            if id(value) not in self._parts:
                self.objects.append((name, value))
                self._visit_nnx(name, value)
        elif isinstance(value, types.FunctionType):
            self._visit_function(
                value, is_users=is_users_file(value.__code__.co_filename)
            )
        elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
            self._add(name, value.__self__, is_users=is_users)
            self._add(name, getattr(value, "__func__", None))
        elif isinstance(value, functools.partial):
            self._add(name, value.func, is_users=is_users)
            for label, item in _partial_arguments(value):
                self._add(label, item, is_users=is_users)
        elif isinstance(value, (staticmethod, classmethod)):
            self._add(name, value.__func__)
        elif isinstance(value, property):
            self._add(name, value.fget)
            self._add(name, value.fset)
        elif isinstance(value, _CONTAINERS):
            self._visit_container(name, value, is_users=is_users)
        elif is_users:
            self._visit_object(name, value)
        self._visit_wrapped(name, value)

    def _visit_function(self, fn: types.FunctionType, *, is_users: bool) -> None:
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        cells.pop("__class__", None)  # for `super()`
        nonlocals = Cells(cells)
        for name in cells:
            self._add(name, nonlocals.get(name, None), is_users=is_users)
        if not is_users:
            return
        self._add_names("", cells, nonlocals.get)
        for name, parameter in inspect.signature(
            fn, follow_wrapped=False
        ).parameters.items():
            if parameter.default is not parameter.empty:
                self._add(name, parameter.default)
        code = references(fn.__code__)
        self.names |= code.attributes
        self._visit_attributes(fn.__name__, fn)
        scope = fn.__globals__
        present = {name for name in code.names if name in scope}
        _, names = self._globals.setdefault(id(scope), (scope, set()))
        names |= present | code.set_names
        for name in sorted(present):
            self._add(name, scope[name])
        for chain in sorted(code.chains):
            get = nonlocals.get if chain[0] in cells else scope.get
            self._visit_chain(chain, get(chain[0], None))

    def _visit_chain(self, chain: tuple[str, ...], value: Any) -> None:
        """Looks at the generator behind a function such as `np.random.normal`."""
        for name in chain[1:]:
            if not isinstance(value, types.ModuleType):
                return
            value = getattr(value, name, None)
        generator = getattr(value, "__self__", None)
        if isinstance(generator, RANDOM):
            self._add(".".join(chain[:-1]), generator)

    def _visit_container(self, name: str, value: Any, *, is_users: bool) -> None:
        if is_users and not isinstance(value, (tuple, frozenset)):
            self._places.append(container_place(name, value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in itertools.islice(items, MOST_ENTRIES):
            self._add(f"{name}[{_checks.shown(key)}]", item, is_users=is_users)

    def _visit_object(self, name: str, value: Any) -> None:
        if isinstance(value, types.ModuleType):
            if is_users_module(value.__name__):
                self._visit_attributes(name, value)
        elif isinstance(value, type):
            self._visit_class(value, is_called=True)
        elif is_users_class(type(value)) or isinstance(value, _NAMESPACES):
            self._visit_class(type(value))
            self._visit_attributes(name, value)
        elif (place := object_place(name, value)) is not None:
            self._places.append(place)

    def _visit_wrapped(self, name: str, value: Any) -> None:
        """Looks at the functions inside a compiled or decorated one."""
        if not callable(value) or isinstance(value, type):
            return
        with contextlib.suppress(Exception):  # of a user's `__getattr__`
            self._add(name, getattr(value, "__wrapped__", None))
        for item in getattr(value, "__dict__", {}).values():  # as in jax.custom_vjp
            if isinstance(item, types.FunctionType):
                self._add(name, item)

    def _visit_nnx(self, name: str, value: NnxObject) -> None:
        """Looks at the code of an NNX object's classes, and at its other attributes."""
        for path, node in iter_graph(value):
            if is_bookkeeping(path) or isinstance(node, _PLAIN):
                continue
            if _paths.is_nnx_object(node):
                self._parts.add(id(node))
                self._visit_class(type(node))
            elif not isinstance(node, (*_CONTAINERS, nnx.State)):
                self._add(".".join((name, *map(str, path))), node)

    def _visit_class(self, kind: type, *, is_called: bool = False) -> None:
        """Looks at the methods that may run, and the attributes that code names."""
        for parent in kind.__mro__:
            is_known = (parent, is_called) in self._classes
            if is_known or not is_users_class(parent):
                continue
            self._classes.add((parent, is_called))
            self._visit_attributes(parent.__name__, parent)
            for name, value in vars(parent).items():
                is_special = name.startswith("__") and name.endswith("__")
                may_run = is_called or name not in _UNRELATED
                if is_special and may_run and isinstance(value, types.FunctionType):
                    self._add(f"{parent.__name__}.{name}", value)

    def _visit_attributes(self, name: str, owner: Any) -> None:
        """Looks at the attributes of an object that code names."""
        own = getattr(owner, "__dict__", {})
        kinds = () if isinstance(owner, type) else type(owner).__mro__
        slots: set[str] = set()
        caches: set[str] = set()
        for kind in kinds:
            names = vars(kind).get("__slots__", ())
            slots.update((names,) if isinstance(names, str) else names)
            caches.update(
                attribute
                for attribute, value in vars(kind).items()
                if isinstance(value, functools.cached_property)
            )
        present = {attribute for attribute in own if attribute in self._known.used}
        may_be_set = self._known.set - slots if hasattr(owner, "__dict__") else set()
        self._add_names(f"{name}.", (present | may_be_set) - caches, own.get)
        for attribute in sorted(present):
            self._add(f"{name}.{attribute}", own[attribute])
        slotted = sorted(slots & self._known.used)
        self._add_names(f"{name}.", slotted, Slots(owner).get)
        for attribute in slotted:
            self._add(f"{name}.{attribute}", getattr(owner, attribute, None))

    def _add_names(
        self, prefix: str, names: Iterable[str], get: Callable[[str, object], Any]
    ) -> None:
        if names := sorted(names):
            self._places.append(names_place(prefix, names, get))


def _partial_arguments(
    call: "functools.partial[Any]",
) -> Iterator[tuple[str, Any]]:
    """Yields the arguments that a partial call has, with their names."""
    names: list[str] = []
    with contextlib.suppress(TypeError, ValueError):  # a function without a signature
        names = list(inspect.signature(call.func).parameters)
    for index, value in enumerate(call.args):
        yield names[index] if index < len(names) else f"argument {index}", value
    yield from call.keywords.items()
