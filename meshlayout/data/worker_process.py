"""What a worker process runs: calls of one function, until its pipe closes.

The file is run by its path, in an interpreter of its own that does not import the
user's script again, so that a script needs no `if __name__ == "__main__"`.
"""

import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any


def serve(connection: Connection) -> None:
    """Answers calls: a pair of whether it went well, and the result or the error.

    The first two messages are where to import from, and the function; the first
    answer tells whether that could be loaded.

    Args:
        connection: The pipe to the process that calls.
    """
    # An interrupt from the keyboard is for the process that calls.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        sys.path[:] = connection.recv()
        packed = connection.recv_bytes()
        function, answer = _loaded(packed)
        connection.send_bytes(answer)
        while function is not None:
            connection.send_bytes(_called(function, connection.recv_bytes()))
    except (EOFError, OSError):
        return


def _loaded(packed: bytes) -> tuple[Any, bytes]:
    try:
        return pickle.loads(packed), pickle.dumps((True, None))
    except BaseException as error:  # every one is the caller's to handle
        return None, _as_bytes(error)


def _called(function: Any, message: bytes) -> bytes:
    try:
        return pickle.dumps((True, function(*pickle.loads(message))), protocol=5)
    except BaseException as error:  # every one is the caller's to handle
        return _as_bytes(error)


def _as_bytes(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error)).rstrip()
    error.add_note(f"In a worker process:\n{text}")
    try:
        if not isinstance(error, Exception):
            raise TypeError  # SystemExit is not to end the process that calls
        packed = pickle.dumps((False, error), protocol=5)
        pickle.loads(packed)
    except Exception:  # an error class that does not survive being sent
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.add_note(f"In a worker process:\n{text}")
        return pickle.dumps((False, plain), protocol=5)
    return packed


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
