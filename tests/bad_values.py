"""What nobody can mean by a parameter, and whether it is refused in a sentence."""

import numpy as np


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
