"""What the processes of a run say of themselves, and the verdicts on that.

They depend on the latest beats alone: `watch` writes and reads those, and process 0
asks here whether somebody is lost, holds up the others, or is stuck.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from meshlayout.cluster.failure import Failure


# Ctrl-C in a terminal reaches all processes, but a busy one may take a while.
_INTERRUPT_S = 4.0

# How many other processes are described if a run is stuck.
_MAX_OTHERS = 16

# Beats of several processes are of different moments, so one look does not prove that
# a process waits for others that are ahead of it.
_TURNS_ALONE = 6

# Processes do not start to watch at the same moment.
_FIRST_BEAT = 10


@dataclass
class Beat:
    """What a process writes of itself.

    Attributes:
        number: Counts its beats: one that does not change is silent.
        process: Its name in messages: index, host and process id.
        doing: What it is doing.
        steps: As `Activity.steps`.
        idle_s: How long ago its activity changed.
        is_waiting: Whether it waits for other processes.
        is_compiling: Whether it compiles a step.
        status: `"running"`; `"ended"` once its program has ended; `"interrupted"` after
            Ctrl-C; `"leaving"` once it knows why it ends.
        exit_status: Of a program that has ended by `sys.exit`; else 0.
        ended: From process 0: the processes whose programs have ended.
    """

    number: int
    process: str
    doing: str
    steps: int
    idle_s: float
    is_waiting: bool
    is_compiling: bool
    status: str
    exit_status: int
    ended: list[int]


@dataclass
class Peer:
    """A process that this one judges.

    Attributes:
        beat: Its latest beat; None before the first.
        silent_s: How long ago that came.
        status_s: How long it has had its status.
        turns_alone: How many times in a row it was seen waiting for the others to
            compile the program of a call in which they were already.
    """

    beat: Beat | None = None
    silent_s: float = 0.0
    status_s: float = 0.0
    turns_alone: int = 0

    def hear(self, beat: Beat) -> None:
        """Takes the latest beat."""
        if self.beat is None or beat.number != self.beat.number:
            self.silent_s = 0.0
        if self.beat is not None and beat.status != self.beat.status:
            self.status_s = 0.0
        self.beat = beat

    def is_silent(self, limit_s: float) -> bool:
        """Returns whether it has been silent for too long."""
        limit_s *= _FIRST_BEAT if self.beat is None else 1
        return self.silent_s > limit_s


def latest_beats(peers: Mapping[int, Peer]) -> dict[int, Beat]:
    """Returns the latest beat of each process that has sent one, by index."""
    beats = {index: peer.beat for index, peer in peers.items()}
    return {index: beat for index, beat in beats.items() if beat is not None}


def doing_text(doing: str) -> str:
    """Returns a sentence about what a process was last doing."""
    return f"It was last doing: {doing or 'nothing yet'}."


def silent(peers: Mapping[int, Peer], here: int, limit_s: float) -> Failure | None:
    """Returns the failure of processes that are silent, if there are any.

    Args:
        peers: The processes that are judged, by index.
        here: The index of this process.
        limit_s: After how long a process is lost.
    """
    lost = [
        (index, peer)
        for index, peer in peers.items()
        if index != here
        and peer.is_silent(limit_s)
        # One that has come to the end of its program may have left.
        and not (peer.beat is not None and peer.beat.status == "ended")
    ]
    texts = []
    for index, peer in lost:
        name = f"process {index}" if peer.beat is None else peer.beat.process
        doing = "" if peer.beat is None else f"\n{doing_text(peer.beat.doing)}"
        texts.append(
            f"{name} is lost: it has been silent for {peer.silent_s:.1f} s, so it "
            f"was killed, stopped or cut off.{doing}"
        )
    return Failure(lost[0][0], "\n".join(texts)) if lost else None


def out_of_step(peers: Mapping[int, Peer]) -> Failure | None:
    """Returns the failure of a process for which others will wait, if any."""
    beats = latest_beats(peers)
    running = [b for b in beats.values() if b.status == "running"]
    for index, beat in beats.items():
        ahead = [other for other in running if other.steps > beat.steps]
        if beat.status == "ended" and ahead:
            text = (
                f"{beat.process} has ended its program after {beat.steps} calls of "
                f"steps, and {ahead[0].process} is in call {ahead[0].steps}, which "
                f"all must take part in.\n{doing_text(beat.doing)}"
            )
            return Failure(index, text, status=beat.exit_status or 1)
        peer = peers[index]
        waits_alone = beat.is_compiling and beat.is_waiting and bool(ahead)
        peer.turns_alone = peer.turns_alone + 1 if waits_alone else 0
        if peer.turns_alone > _TURNS_ALONE:
            text = (
                f"{beat.process} needs a new program, and {ahead[0].process} does "
                "not: it runs an earlier one, in which it waits for the others.\n"
                f"{doing_text(beat.doing)}"
            )
            return Failure(index, text)
        since_s = peer.status_s
        has_failed = beat.status == "ended" and beat.exit_status
        if has_failed and running and since_s > _INTERRUPT_S:
            text = (
                f"{beat.process} has ended its program with exit status "
                f"{beat.exit_status}, and {running[0].process} has not.\n"
                f"{doing_text(beat.doing)}"
            )
            return Failure(index, text, status=beat.exit_status)
        if beat.status == "interrupted" and running and since_s > _INTERRUPT_S:
            text = (
                f"{beat.process} was interrupted (Ctrl-C), and "
                f"{running[0].process} was not.\n{doing_text(beat.doing)}"
            )
            return Failure(index, text, is_interrupt=True)
    return None


def stuck(peers: Mapping[int, Peer], limit_s: float | None) -> Failure | None:
    """Returns the failure of the process that holds up a run that is stuck.

    Args:
        peers: All processes, by index.
        limit_s: After how long without progress a run is stuck; None for never.
    """
    beats = latest_beats(peers)
    if limit_s is None or len(beats) < len(peers):
        return None
    has_progress = any(
        beat.status != "running"
        # Before it compiles, it waits for the others to come to the same program.
        or (beat.is_compiling and not beat.is_waiting)
        or beat.idle_s < limit_s
        for beat in beats.values()
    )
    if has_progress or not any(beat.steps for beat in beats.values()):
        return None
    index, culprit = min(
        beats.items(),
        key=lambda entry: (entry[1].steps, entry[1].is_waiting, -entry[1].idle_s),
    )
    others = [beat for beat in beats.values() if beat is not culprit]
    lines = [f"{beat.process}: {beat.doing}" for beat in others[:_MAX_OTHERS]]
    if len(others) > len(lines):
        lines.append(f"and {len(others) - len(lines)} more processes")
    text = (
        f"{culprit.process} is stuck: no process has made progress for "
        f"{limit_s:g} s (step_timeout_s), and it is the one that is furthest "
        f"behind.\n{doing_text(culprit.doing)}"
    )
    text = "\n".join([text, *lines])
    return Failure(index, text)
