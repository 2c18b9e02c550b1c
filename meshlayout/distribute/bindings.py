"""TEMP"""

import contextlib
import inspect

from flax import nnx


class Bindings:
    def __init__(s, o):
        s.objects = o

    def is_current(s):
        return True

    @contextlib.contextmanager
    def watch(s):
        yield


def find(fn):
    out = []
    try:
        cv = inspect.getclosurevars(fn)
    except TypeError:
        return Bindings(())
    for d in (cv.nonlocals, cv.globals):
        for k, v in d.items():
            if isinstance(v, (nnx.Pytree, nnx.Variable)):
                out.append((k, v))
    return Bindings(tuple(out))
