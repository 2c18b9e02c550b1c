"""What an error says, for tests that compare whole messages."""

from collections.abc import Callable
from typing import Any

import pytest

import meshlayout as ml


def message_of(
    call: Callable[..., Any],
    *args: Any,
    error: type[Exception] = ml.MeshLayoutError,
    **options: Any,
) -> str:
    """Returns the message of the error that a call raises, and fails if it doesn't.

    Args:
        call: What is called.
        *args: Its arguments.
        error: The class of the error.
        **options: Arguments of the call by name.
    """
    with pytest.raises(error) as caught:
        call(*args, **options)
    return str(caught.value)


def outcome_of(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Returns the class and the message of a call's error; "worked" if there is none."""
    try:
        call(*args, **options)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "worked"
