"""What nobody can mean by a parameter, and whether it is refused in a sentence."""

import numpy as np

import meshlayout as ml


BAD = [None, float("nan"), -1, 0, "x", object(), True, np.array([1.0]), "", [], {}, 1j]


def refusal(error, function, *args, **kwargs):
    """The message with which a call is refused; None if it works.

    Any exception that is not the library's own goes on to the test.
    """
    try:
        function(*args, **kwargs)
    except error as problem:
        message = str(problem)
        assert message[-1] in ".?)", message
        return message
    return None


def assert_refused(call, works, error=ml.MeshLayoutError):
    """Asserts that a call refuses all of these values but those that work there."""
    known = [(type(value), value) for value in works]
    for value in BAD:
        said = refusal(error, call, value)
        is_refused = all(type(value) is not kind or value != one for kind, one in known)
        assert (said is not None) == is_refused, (value, said)
