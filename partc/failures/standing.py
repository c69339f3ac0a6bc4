"""Which rank stands still, by its heartbeats and by what the system says of its process.

Three rules, from the surest to the slowest. A process that is *stopped* cannot come on by itself.
One that writes no heartbeats any more, and of which no thread runs, is *silent*: they come from a
thread of their own, so that the whole process hangs. Where no rank has begun or ended a call of its
program for long, all are *stalled*, and the first that does not wait for others is at fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partc.failures.rank_processes import STOPPED, RankProcess
from partc.heartbeats import Heartbeat

STEPS = 10  # of the slowest steps are a step's time-out
LEAST_S, MOST_S = 5.0, 600.0  # between which it lies
STALL_STEPS, STALL_S = 100, 300.0  # behind so many steps, and no earlier, nothing comes any more


@dataclass(frozen=True)
class Limits:
    """Seconds that follow from the slowest of the last steps, unless they are given.

    Attributes:
        step_timeout_s: within one of these a stopped process is ended, a silent one within two.
        stall_s: so long no rank may begin or end a call.
    """

    step_timeout_s: float = LEAST_S
    stall_s: float = STALL_S

    @classmethod
    def of(cls, step_s: float, step_timeout_s: float = 0.0, stall_s: float = 0.0) -> Limits:
        """The limits for steps that take ``step_s``; 0 means what follows from it."""
        timeout_s = step_timeout_s or min(max(STEPS * step_s, LEAST_S), MOST_S)
        return cls(timeout_s, stall_s or max(STALL_STEPS * step_s, STALL_S))


@dataclass
class Seen:
    """What is known of one process, by the clock of ``time.monotonic()``.

    ``spoke_at``: when its last new heartbeat was read, or it was first seen, or a thread of it was
    about to run. ``stopped_at``: since when it is stopped.
    """

    process: RankProcess
    spoke_at: float
    beat: Heartbeat | None = None
    stopped_at: float | None = None

    def look(self, process: RankProcess, beat: Heartbeat | None, now: float) -> None:
        """Take in what there is now."""
        self.process = process
        if process.state != STOPPED:
            self.stopped_at = None
        elif self.stopped_at is None:
            self.stopped_at = now
        if beat is not None and (self.beat is None or beat.number != self.beat.number):
            self.beat, self.spoke_at = beat, now


@dataclass(frozen=True)
class Standing:
    """A rank that stands still, and why that is said."""

    seen: Seen
    why: str


def standing(known: Mapping[int, Seen], limits: Limits, now: float) -> list[Standing]:
    """The processes that are to be ended, the surest first."""
    found = []
    for seen in known.values():
        if seen.stopped_at is not None and now - seen.stopped_at > limits.step_timeout_s:
            found.append(Standing(seen, f"it is stopped, for {now - seen.stopped_at:.1f} s"))
        elif seen.beat and seen.process.state != "t" and _is_silent(seen, limits, now):
            found.append(Standing(seen, f"its process is silent, for {now - seen.spoke_at:.1f} s"))
    return sorted(found, key=lambda each: each.seen.spoke_at) or _stalled(known, limits, now)


def _is_silent(seen: Seen, limits: Limits, now: float) -> bool:
    return now - seen.spoke_at > 2 * limits.step_timeout_s


def _stalled(known: Mapping[int, Seen], limits: Limits, now: float) -> list[Standing]:
    """The first rank that stands still where all have for too long."""
    beats = [(seen.beat, seen) for seen in known.values() if seen.beat and seen.beat.moves]
    if not beats or len(beats) < len(known):
        return []  # one of them has not begun its first step
    if now - max(beat.moved_at for beat, _ in beats) < limits.stall_s:
        return []
    beat, seen = min(beats, key=lambda each: (each[0].waits or each[0].inside, each[0].moved_at))
    return [Standing(seen, f"no rank has come on for {now - beat.moved_at:.1f} s")]


def told(found: Standing, known: Mapping[int, Seen], now: float) -> str:
    """What is said of a rank that stands still: it, and where all ranks were last."""
    mine = found.seen
    lines = [f"rank {mine.process.rank} (process {mine.process.pid}) stands still: {found.why}."]
    for seen in sorted(known.values(), key=lambda each: each.process.rank):
        first = ", the first to go silent" if seen is mine else ""
        beat = seen.beat
        if beat is None:
            lines.append(f"  rank {seen.process.rank}: it has told nothing yet{first}")
            continue
        since = f"since {now - beat.moved_at:.1f} s " if beat.moves else ""
        lines.append(f"  rank {seen.process.rank}: {since}{beat.place}{first}")
    return "\n".join(lines)
