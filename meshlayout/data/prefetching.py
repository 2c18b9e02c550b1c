"""Batches made ready ahead, by a thread that stops when nobody waits for it."""

import atexit
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol


# How long closing waits for a thread. One that is inside the user's source cannot be
# stopped there, and ends when the source returns.
_JOIN_S = 0.2

_NAME = "meshlayout-data"


class Makes(Protocol):
    """What makes one thing after another, and may hold something open."""

    def __next__(self) -> Any:
        """Returns the next one; raises StopIteration after the last."""
        ...

    def close(self) -> None:
        """Lets go of what it holds."""
        ...


class Prefetched:
    """What a maker makes, made ready ahead.

    Args:
        maker: What makes things. It is closed in the thread that runs it.
        ahead: How many are made ready; 0 makes them where they are asked for.
        at_end: Called instead of the maker's `close` after its last one.
    """

    def __init__(
        self, maker: Makes, ahead: int, at_end: Callable[[], None] | None = None
    ) -> None:
        self._maker, self._at_end = maker, at_end or maker.close
        self._ahead = ahead
        self._room = _Room(ahead)
        self._thread: threading.Thread | None = None
        self._is_over = False

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        if not self._ahead:
            return self._made_here()
        if self._thread is None:
            self._start()
        kind, value = self._room.take()
        if kind == "made":
            return value
        self._is_over = True
        self._join()
        if kind != "failed":
            raise StopIteration
        try:
            raise value
        finally:
            del value  # a cycle with its traceback would keep the source's frames

    def stop(self) -> None:
        """Makes nothing more, and wakes who waits; what is held open stays open."""
        self._room.stop()

    def close(self) -> None:
        """Stops the thread, and closes the maker."""
        self._is_over = True
        self._room.stop()
        if self._thread is not None:
            self._join()
        elif self._maker is not None:
            self._maker.close()
        self._forget()

    def _made_here(self) -> Any:
        try:
            return next(self._maker)
        except StopIteration:
            self._is_over = True
            self._at_end()
            self._forget()
            raise
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=_make,
            args=(self._maker, self._room, self._at_end),
            name=_NAME,
            daemon=True,
        )
        _running.add(self._room)
        # A loop that is left without closing leaves no thread behind.
        weakref.finalize(self, self._room.stop).atexit = False
        self._thread.start()

    def _join(self) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
        self._forget()

    def _forget(self) -> None:
        self._maker: Any = None
        self._at_end: Any = None


class _Room:
    """What was made and not taken, of bounded number.

    Two queues of the standard library hand things over with less work for Python than
    a condition, which matters where both sides have little else to do.
    """

    def __init__(self, size: int) -> None:
        self._ready: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_stopped = False
        for _ in range(size):
            self._free.put(None)

    def wait_for_room(self) -> bool:
        """Waits until one more may be made; False means never."""
        self._free.get()
        return not self._is_stopped

    def put(self, kind: str, value: Any) -> None:
        self._ready.put((kind, value))
        if self._is_stopped:
            self._clear()

    def take(self) -> tuple[str, Any]:
        found = self._ready.get()
        if found is _STOPPED:
            self._ready.put(_STOPPED)  # for whoever else waits
        else:
            self._free.put(None)
        return found

    def stop(self) -> None:
        self._is_stopped = True
        self._free.put(None)
        self._clear()

    def _clear(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        self._ready.put(_STOPPED)


_STOPPED: tuple[str, Any] = ("ended", None)

_running: weakref.WeakSet[_Room] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stops the threads: one that uses devices while Python ends would crash it."""
    for room in list(_running):
        room.stop()
    for thread in threading.enumerate():
        if thread.name == _NAME:
            thread.join(_JOIN_S)


def _make(maker: Makes, room: _Room, at_end: Callable[[], None]) -> None:
    """Makes things while there is room; what the thread runs."""
    finish = maker.close
    end: tuple[str, Any] = ("ended", None)
    try:
        while room.wait_for_room():
            room.put("made", next(maker))
    except StopIteration:
        finish = at_end
    except BaseException as error:  # raised again in the loop
        end = ("failed", error)
    try:
        finish()
    except BaseException as error:  # from a `finally` clause of the source
        end = ("failed", error) if end[0] == "ended" else end
    room.put(*end)
    del end  # a cycle with an exception's traceback would keep the source's frames
