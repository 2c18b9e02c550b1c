"""What the processes of a job print: whole lines, each with the number of its process.

Each process writes to two pipes, and one thread copies whole lines from all of them to
the launcher's own stdout and stderr: lines are never mixed, and no process waits for
another one's output. It is a thread of its own because whoever reads the launcher's
output may stop reading (a pager, a terminal on hold), which must not keep the launcher
from forwarding signals or from ending a job.
"""

import errno
import os
import re
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


# How often a line that replaces itself, such as a progress bar, is shown.
_PROGRESS_S = 1.0

# How many lines of stderr are kept per process, and shown if there is no traceback.
_KEPT_LINES, _LAST_LINES = 2000, 20

_TRACEBACK = re.compile(
    rb"[\s+|]*(Exception Group )?Traceback \(most recent call last\)|Fatal Python error"
)
# What Gloo, the transport of JAX's CPU collectives, prints to stdout of each group of
# devices. Its threads write at once and in pieces, so lines are mixed.
_GLOO_START = b"[Gloo] Rank "
_GLOO = re.compile(
    rb"(\[Gloo\] Rank |\d+| is connected to | peer ranks\. "
    rb"|Expected number of connected peer ranks is : )*"
)
# What XLA logs in C++, such as why it ends a process that has raised.
_LOG_LINE = re.compile(rb"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ ")
_CHAIN = (b"The above exception was the direct cause", b"During handling of the above")


@dataclass(frozen=True)
class ErrorLine:
    """A line that a process wrote to stderr.

    Attributes:
        time_s: When it was read, as `time.monotonic()`.
        text: The line, without its end.
    """

    time_s: float
    text: bytes


@dataclass
class PipedLines:
    r"""Makes prefixed lines of the pieces that come out of a pipe.

    Only whole lines are passed on; the last one is completed at the end. Of a line that
    replaces itself with `\r`, the newest state is passed on once a second, and the
    last one.

    Attributes:
        prefix: What each line begins with.
        target: The file descriptor to write to.
        kept: Where to note the lines; None for lines that nobody asks for later.

    Example:
        >>> lines = PipedLines(b"[1] ", target=1)
        >>> lines.feed(b"step 1\nst", now_s=0), lines.feed(b"ep 2\n", now_s=0)
        (b'[1] step 1\n', b'[1] step 2\n')
        >>> lines.feed(b"10%\r20%\r30%\r4", now_s=0), lines.feed(b"0%\r", now_s=0.5)
        (b'[1] 30%\n', b'')
        >>> lines.feed(b"100%\ndone", now_s=0.9), lines.end(now_s=0.9)
        (b'[1] 100%\n', b'[1] done\n')
    """

    prefix: bytes
    target: int
    kept: deque[ErrorLine] | None = None
    _rest: bytes = field(default=b"", init=False)
    _gloo_messages: int = field(default=0, init=False)
    _progress: bytes = field(default=b"", init=False)
    _progress_s: float = field(default=-_PROGRESS_S, init=False)

    def feed(self, piece: bytes, now_s: float) -> bytes:
        """Returns the lines that a piece completes, ready to be written."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        texts = []
        for line in lines:
            text = _last_state(line)
            is_shown = b"\r" in line and text == self._progress
            if not is_shown and not self._is_gloo(text):
                texts.append(text)
            self._progress = b""
        if b"\r" in self._rest:
            states, _, partial = self._rest.rpartition(b"\r")
            state = _last_state(states)
            # Kept until the end of the line: "\r" may turn out to be half of "\r\n".
            self._rest = state + b"\r" + partial
            is_due = now_s - self._progress_s >= _PROGRESS_S
            if is_due and state not in (b"", self._progress):
                self._progress, self._progress_s = state, now_s
                texts.append(state)
        if self.kept is not None:
            self.kept.extend(ErrorLine(now_s, text) for text in texts)
        return b"".join(self.prefix + text + b"\n" for text in texts)

    def _is_gloo(self, text: bytes) -> bool:
        """Returns whether a line consists of messages of Gloo, or pieces of them."""
        is_first = text.startswith(_GLOO_START)
        if not (is_first or self._gloo_messages) or not _GLOO.fullmatch(text):
            return False
        # Each has one beginning and one end of line, whatever is between them.
        self._gloo_messages += text.count(_GLOO_START) - 1
        return True

    def end(self, now_s: float) -> bytes:
        """Returns the last line, which its process did not complete."""
        return self.feed(b"\n", now_s) if self._rest else b""


def _last_state(line: bytes) -> bytes:
    """Returns what a terminal finally shows of a line that overwrites itself."""
    return next((text for text in reversed(line.split(b"\r")) if text.strip()), b"")


class ProcessOutput:
    """Copies what processes write to the launcher's own stdout and stderr.

    Args:
        on_broken: Called, in another thread, when nobody reads stdout any more.
    """

    def __init__(self, on_broken: Callable[[], None]) -> None:
        self._on_broken = on_broken
        self._selector = selectors.DefaultSelector()
        self._errors: dict[int, deque[ErrorLine]] = {}
        self._broken_targets: set[int] = set()
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._notes = self._pipe(PipedLines(b"launch: ", target=2))

    def pipes(self, index: int) -> tuple[int, int]:
        """Returns the file descriptors that a process writes to: stdout, stderr."""
        prefix = f"[{index}] ".encode()
        kept = self._errors[index] = deque(maxlen=_KEPT_LINES)
        return (
            self._pipe(PipedLines(prefix, target=1)),
            self._pipe(PipedLines(prefix, target=2, kept=kept)),
        )

    def _pipe(self, lines: PipedLines) -> int:
        read_end, write_end = os.pipe()
        self._selector.register(read_end, selectors.EVENT_READ, lines)
        return write_end

    def start(self) -> None:
        """Starts copying, when all pipes exist."""
        self._thread.start()

    def note(self, sentence: str) -> None:
        """Prints a line of the launcher's own to stderr, without waiting for it."""
        os.write(self._notes, f"{sentence}\n".encode())

    def end(self) -> None:
        """Says that no notes will come, and so lets the copying end."""
        os.close(self._notes)

    def wait(self, timeout_s: float) -> bool:
        """Waits until all is copied; returns whether it is."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def show_end(self, index: int, sentences: Iterable[str]) -> None:
        """Prints how a process failed, and once more its traceback, if it had time."""
        head = b"".join(f"launch: {text}\n".encode() for text in sentences)
        prefix = f"[{index}] ".encode()
        lines = last_words(list(self._errors[index]))
        self._write(2, head + b"".join(prefix + line.text + b"\n" for line in lines))

    def traceback_s(self, index: int) -> float | None:
        """Returns when a process began to print its last traceback; None if never."""
        lines = list(self._errors[index])
        is_traceback = any(_TRACEBACK.match(line.text) for line in lines)
        return last_words(lines)[0].time_s if is_traceback else None

    def lines_about(self, index: int, since_s: float) -> list[str]:
        """Returns the first lines on stderr in which another process names this one.

        That is a line with its name, and the next one if it is indented.
        """
        about = re.compile(rb"\bprocess %d\b" % index)
        texts = []
        for other, kept in self._errors.items():
            lines = list(kept)
            for at, line in enumerate(lines):
                if (
                    other != index
                    and line.time_s >= since_s
                    and about.search(line.text)
                ):
                    more = [x.text for x in lines[at + 1 : at + 2]]
                    said = [line.text, *(x for x in more if x.startswith(b"  "))]
                    texts.append((line.time_s, other, said))
                    break
        return [
            f"[{other}] {text.decode(errors='replace')}"
            for _, other, said in sorted(texts)[:1]
            for text in said
        ]

    def _copy(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                lines: PipedLines = key.data
                piece = os.read(key.fd, 1 << 16)
                now_s = time.monotonic()
                data = lines.feed(piece, now_s) if piece else lines.end(now_s)
                self._write(lines.target, data)
                if not piece:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
        self._selector.close()

    def _write(self, target: int, data: bytes) -> None:
        """Writes all of the data; what nobody can read any more is dropped."""
        while data and target not in self._broken_targets:
            try:
                data = data[os.write(target, data) :]
            except BlockingIOError:  # somebody made the terminal non-blocking
                time.sleep(0.01)
            except OSError as error:
                self._broken_targets.add(target)
                if target == 1 and error.errno == errno.EPIPE:
                    self._on_broken()


def last_words(lines: list[ErrorLine]) -> list[ErrorLine]:
    """Returns the traceback at the end, with what it was caused by; or a few lines.

    Example:
        >>> texts = [b"a warning", b"Traceback (most recent call last):", b"ValueError"]
        >>> [line.text for line in last_words([ErrorLine(0, text) for text in texts])]
        [b'Traceback (most recent call last):', b'ValueError']
    """
    starts = [at for at, line in enumerate(lines) if _TRACEBACK.match(line.text)]
    if not starts:
        return lines[-_LAST_LINES:]
    first = starts.pop()
    while starts and any(
        line.text.startswith(_CHAIN) for line in lines[starts[-1] : first]
    ):
        first = starts.pop()
    logs = [at for at, line in enumerate(lines) if _LOG_LINE.match(line.text)]
    return lines[first : next((at for at in logs if at > first), None)]
