"""What users see of an error: their own frames, and the sentence.

A loss function is called through some thirty frames of this library and JAX. So the
public calls that run a user's functions cut them out, as JAX does with its own;
`MESHLAYOUT_TRACEBACK=full` shows all.
"""

import contextlib
import functools
import inspect
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from meshlayout.errors import MeshLayoutError, did_you_mean


P = ParamSpec("P")
T = TypeVar("T")

_INSIDE = (f"{Path(__file__).parent}/", contextlib.__file__, functools.__file__)
_NOTE_OF_JAX = "JAX has removed its internal frames"  # a test notices other words


def user_call(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a function show errors as users need them, and name misspelled options."""
    parameters = inspect.signature(function).parameters.values()
    names = {parameter.name for parameter in parameters}
    takes_any = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters)
    where = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            for name in () if takes_any or names.issuperset(kwargs) else kwargs:
                if name not in names:
                    hint = did_you_mean(name, names) or " There is no such option."
                    raise MeshLayoutError(f"{where} got {name}=.{hint}")
            return function(*args, **kwargs)
        except Exception as error:
            show_user_frames(error)
            raise  # bare, so that this frame is not added again

    return called


def show_user_frames(error: BaseException | None) -> None:
    """Removes this library's frames, and JAX's note on its own, from an error.

    Call it in an `except` that ends in a bare `raise`. An error in the library's own
    code stays whole, as it is no mistake of the user.
    """
    while error is not None and os.environ.get("MESHLAYOUT_TRACEBACK") != "full":
        frames = [*traceback.walk_tb(error.__traceback__)]
        users = [x for x in frames if not x[0].f_code.co_filename.startswith(_INSIDE)]
        if users or isinstance(error, MeshLayoutError):
            shown: TracebackType | None = None
            for frame, line in reversed(users):
                shown = TracebackType(shown, frame, frame.f_lasti, line)
            error.__traceback__ = shown
        notes = getattr(error, "__notes__", [])
        notes[:] = [note for note in notes if _NOTE_OF_JAX not in note]
        error = error.__cause__ or error.__context__
