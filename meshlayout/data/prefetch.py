"""Batches prepared ahead by a thread, which stops when its loop is gone.

The thread never holds the loop's iterator, so a loop that is left without closing
leaves no thread behind; and it is stopped before Python ends, since a thread that uses
devices during shutdown crashes the process. Each thread sets an event when it is done:
after an interrupted `Thread.join`, Python 3.11 and 3.12 report a live thread as ended.
"""

import atexit
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# How long closing waits for a thread. One that is inside the user's source cannot be
# stopped there, and ends when the source returns.
_JOIN_S = 0.2


class ClosableIterator(Protocol[T_co]):
    """An iterator with `close()`."""

    def __next__(self) -> T_co:
        """Returns the next item; raises StopIteration after the last."""
        ...

    def close(self) -> None:
        """Releases what it holds."""
        ...


class Prefetch(Generic[T]):
    """The items of an iterator, prepared ahead.

    Args:
        items: The iterator. It is closed in the thread that runs it.
        ahead: How many are made ready; 0 makes them when they are asked for.
        at_end: Called instead of the iterator's `close` after its last item.
    """

    def __init__(
        self,
        items: ClosableIterator[T],
        ahead: int,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        self._items: ClosableIterator[T] | None = items
        self._at_end: Callable[[], None] | None = at_end or items.close
        self._ahead = ahead
        self._room = _Room(ahead)
        self._thread: threading.Thread | None = None
        self._is_over = False

    def __next__(self) -> T:
        if self._is_over or self._items is None:
            raise StopIteration
        if not self._ahead:
            return self._next_here(self._items)
        if self._thread is None:
            self._start()
        kind, value = self._room.take()
        if kind == "item":
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
        """Stops making items and wakes waiting threads; the iterator stays open."""
        self._room.stop()

    def close(self) -> None:
        """Stops the thread, and closes the iterator."""
        self._is_over = True
        self._room.stop()
        if self._thread is not None:
            self._join()
        elif self._items is not None:
            self._items.close()
        self._forget()

    def _next_here(self, items: ClosableIterator[T]) -> T:
        try:
            return next(items)
        except StopIteration:
            self._is_over = True
            if self._at_end is not None:
                self._at_end()
            self._forget()
            raise
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=_run,
            args=(self._items, self._room, self._at_end),
            name="meshlayout-data",
            daemon=True,
        )
        _running.add(self._room)
        # A loop that is left without closing leaves no thread behind.
        weakref.finalize(self, self._room.stop).atexit = False
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not threading.current_thread():
            self._room.is_done.wait(_JOIN_S)
        self._forget()

    def _forget(self) -> None:
        self._items = self._at_end = None


class _Room:
    """Items that were made ready and not taken, of bounded number.

    Two `SimpleQueue`s cost less Python time per item than a condition, which matters
    where both sides have little else to do.

    Attributes:
        is_done: Set once the thread has nothing more to do.
    """

    def __init__(self, size: int) -> None:
        self._ready: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_stopped = False
        self.is_done = threading.Event()
        for _ in range(size):
            self._free.put(None)

    def wait_for_room(self) -> bool:
        """Waits until one more may be made; False means never."""
        self._free.get()
        return not self._is_stopped

    def put(self, kind: str, value: object) -> None:
        self._ready.put((kind, value))
        if self._is_stopped:
            self._clear()

    def take(self) -> tuple[str, Any]:
        item = self._ready.get()
        if item is _STOPPED:
            self._ready.put(_STOPPED)  # for other waiting threads
        else:
            self._free.put(None)
        return item

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
    rooms = list(_running)
    for room in rooms:
        room.stop()
    for room in rooms:
        room.is_done.wait(_JOIN_S)


def _run(items: ClosableIterator[Any], room: _Room, at_end: Callable[[], None]) -> None:
    """Makes items while there is room; what the thread runs."""
    finish = items.close
    end: tuple[str, Any] = ("ended", None)
    try:
        while room.wait_for_room():
            room.put("item", next(items))
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
    room.is_done.set()
