"""What follows from a run's lines: the pace beside the prediction, and who is slow and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from partc.amounts import counted, time_text
from partc.live.run_files import DATA_S, LOSSES, MEMORY, STEP_S, WAITS_S, RankLog, Run

RECENT = 20  # lines that say how fast a run is now
NOTABLE = 0.05  # of a step: a smaller difference between ranks is none
GIB = 1 << 30
QUIET_S, QUIET_LINES = 60.0, 5  # without a line: so long, and so many times what a line takes


@dataclass(frozen=True)
class Pace:
    """How fast a rank has been lately; medians over its last lines, None for what none tells."""

    rank: int
    step_s: float | None
    data_s: float | None
    waits_s: float | None
    memory_bytes: float | None

    @property
    def own_s(self) -> float | None:
        """Seconds of a step in which the rank waits for no other rank."""
        if self.step_s is None or self.waits_s is None:
            return None
        return max(self.step_s - self.waits_s, 0.0)


def paces(run: Run) -> list[Pace]:
    """The pace of every rank that writes lines."""
    return [_pace(each) for each in run.ranks]


def _pace(log: RankLog) -> Pace:
    memory = next((found[-1] * GIB for name in MEMORY if (found := log.last(name))), None)
    each = [_median(log.last(name, RECENT)) for name in (STEP_S, DATA_S, WAITS_S)]
    return Pace(log.rank, each[0], each[1], each[2], memory)


def _median(numbers: Sequence[float]) -> float | None:
    return median(numbers) if numbers else None


def losses(run: Run) -> list[tuple[int, float]]:
    """The loss by step, of the rank that tells it."""
    steps = sorted(run.leader.steps.items())
    name = next((n for n in LOSSES if any(n in each for _, each in steps)), "")
    return [(step, each[name]) for step, each in steps if name in each]


def slowest(found: Sequence[Pace]) -> str:
    """Which rank all others wait for, and what it does meanwhile, in a sentence."""
    known = [(each, each.own_s) for each in found if each.own_s is not None]
    if len(known) < 2:
        return (
            "Which rank is the slowest is not known: let each rank write its own file, with what "
            "partc.measure.step_waits measures."
        )
    late, most = max(known, key=lambda pair: pair[1] or 0.0)
    usual = median(own or 0.0 for _, own in known)
    more = (most or 0.0) - usual
    if more < NOTABLE * (late.step_s or 1.0):
        return "No rank is notably slower than the others."
    said = f"Rank {late.rank} is the slowest: it takes {_time(more)} of a step longer than others"
    return f"{said}, {_why(late, found, more)}."


def _why(late: Pace, found: Sequence[Pace], more: float) -> str:
    """What the slowest rank does in the time in which the others wait."""
    loads = [each.data_s for each in found if each.data_s is not None and each is not late]
    if late.data_s is None or not loads:
        return "in computing or in reading data"
    data = late.data_s - median(loads)
    if data > 0.5 * more:
        return f"and waits {_time(late.data_s)} for data"
    return "in computing, as its data come no later"


def promised(run: Run) -> str:
    """The pace of the slowest rank beside the prediction, in a sentence."""
    measured = [each.step_s for each in paces(run) if each.step_s is not None]
    if run.promise is None:
        return "No program is in the run's folder, so nothing was predicted: name it by --program."
    if not measured:
        return f"Predicted: {_time(run.promise.step_s)} a step; no line has {STEP_S}."
    slow = max(measured)
    ratio = slow / run.promise.step_s if run.promise.step_s else 0.0
    beside = f"{_time(slow)} a step, {ratio:.2f} times the predicted {_time(run.promise.step_s)}"
    return f"{beside}; the loop's other work counts too."


def state(run: Run, now: float) -> str:
    """Whether the run goes on, as far as its files tell."""
    since = max(now - run.written_at, 0.0)
    said = f"step {run.step}, last line {duration(since)} ago"
    if since > max(QUIET_S, QUIET_LINES * _line_s(run)):
        return f"{said}: over, or stuck"
    return said


def _line_s(run: Run) -> float:
    """Seconds from one line of the leader to the next."""
    steps = sorted(run.leader.steps)
    gaps = [after - before for before, after in pairwise(steps)]
    step_s = _median(run.leader.last(STEP_S, RECENT)) or 0.0
    return step_s * (median(gaps) if gaps else 1)


def restarts(run: Run) -> str:
    """How often the run began again, and from which steps."""
    found = run.leader.restarts
    if not found:
        return "no restart"
    steps = ", ".join(map(str, found[-5:]))
    return f"{counted(len(found), 'restart')}, from step{'s' * (len(found) > 1)} {steps}"


def duration(seconds: float) -> str:
    """``12 s``, ``5 min``, ``3.2 h``, ``2.1 days``."""
    for size, unit in ((86400.0, "days"), (3600.0, "h")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def _time(seconds: float) -> str:
    return time_text(float(f"{seconds:.3g}"))
