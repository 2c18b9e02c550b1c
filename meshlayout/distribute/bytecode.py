"""What a function's bytecode names, and whose code it is."""

import dis
import functools
import sys
import sysconfig
from dataclasses import dataclass
from types import CodeType, FunctionType

from meshlayout import errors


_DYNAMIC = frozenset({"getattr", "setattr", "hasattr", "delattr"})

_LIBRARIES = (
    sysconfig.get_path("stdlib"),
    errors.__file__.removesuffix("errors.py"),
    "<frozen",
)


@dataclass(frozen=True)
class AttributeNames:
    """The names of attributes in code: all of them, and those that it sets."""

    used: frozenset[str] = frozenset()
    set: frozenset[str] = frozenset()

    def __or__(self, other: "AttributeNames") -> "AttributeNames":
        return AttributeNames(self.used | other.used, self.set | other.set)

    def __le__(self, other: "AttributeNames") -> bool:
        return self.used <= other.used and self.set <= other.set


@dataclass(frozen=True)
class References:
    """What a function's bytecode names, and that of the functions inside it.

    Attributes:
        names: Globals.
        set_names: Those that it rebinds.
        attributes: Attributes, of whatever object.
        chains: Names with the attributes that follow: `("np", "random", "normal")`.
    """

    names: frozenset[str] = frozenset()
    set_names: frozenset[str] = frozenset()
    attributes: AttributeNames = AttributeNames()
    chains: frozenset[tuple[str, ...]] = frozenset()

    def __or__(self, other: "References") -> "References":
        return References(
            self.names | other.names,
            self.set_names | other.set_names,
            self.attributes | other.attributes,
            self.chains | other.chains,
        )


@functools.lru_cache(maxsize=1024)
def references(code: CodeType) -> References:
    """Returns what a function's bytecode names.

    Example:
        >>> def draw(shape):
        ...     return random.normal(shape) * scale
        >>> sorted(references(draw.__code__).names)
        ['random', 'scale']
        >>> references(draw.__code__).chains
        frozenset({('random', 'normal')})
    """
    names: set[str] = set()
    set_names: set[str] = set()
    used: set[str] = set()
    set_attributes: set[str] = set()
    chains: set[tuple[str, ...]] = set()
    chain: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        action, _, kind = instruction.opname.partition("_")
        name = instruction.argval
        if kind in ("GLOBAL", "NAME", "FROM_DICT_OR_GLOBALS", "DEREF"):
            chain = (name,)
            if kind != "DEREF":
                (names if action == "LOAD" else set_names).add(name)
        elif kind in ("ATTR", "METHOD", "SUPER_ATTR"):
            used.add(name)
            if action != "LOAD":
                set_attributes.add(name)
            if chain:
                chain = (*chain, name)
                chains.add(chain)
        elif instruction.opname not in ("EXTENDED_ARG", "PUSH_NULL"):
            chain = ()
    if names & _DYNAMIC:
        texts = {x for x in code.co_consts if isinstance(x, str) and x.isidentifier()}
        used |= texts
        set_attributes |= texts if names & {"setattr", "delattr"} else set()
    result = References(
        frozenset(names),
        frozenset(set_names),
        AttributeNames(frozenset(used), frozenset(set_attributes)),
        frozenset(chains),
    )
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            result |= references(constant)
    return result


def is_users_file(file: str) -> bool:
    """Returns whether a file of code is the user's, and not of an installed package."""
    return not (
        "site-packages" in file
        or "dist-packages" in file
        or file.startswith(_LIBRARIES)
    )


def is_users_class(kind: type) -> bool:
    """Returns whether a class is the user's, by its module and the files of methods."""
    methods = (x for x in vars(kind).values() if isinstance(x, FunctionType))
    # The classes of doctests have the name of the library's module that they are in.
    return is_users_module(kind.__module__) or any(
        method.__code__.co_filename.startswith("<doctest") for method in methods
    )


def is_users_module(name: str) -> bool:
    """Returns whether a module is the user's, by its name in `sys.modules`."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:  # a notebook, or a module that is part of Python
        return name.partition(".")[0] not in sys.stdlib_module_names
    return is_users_file(file)
