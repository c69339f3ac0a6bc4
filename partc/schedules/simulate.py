"""Simulate the rank programs of a step at given costs: the time of every event, or the deadlock.

A transfer between two ranks is a rendezvous without a buffer: the transfer begins when it is first
in its communicator's queue on both ranks. A queue has the transfers in the order of their starts. A
collective begins when it is first in the queues of all members. Computing runs in program order and
stops at the program's waits. Transfers of different communicators do not slow each other down. The
work is linear in the number of events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

from partc.schedules.deadlock import Stuck, explain
from partc.schedules.held import Curve, memory_curve
from partc.schedules.programs import COMPUTE, FINISHED, RECEIVED, SENT, RankProgram, Wiring
from partc.schedules.queues import NOT_YET, NOTHING, Queues, operation
from partc.schedules.step_costs import StepCosts

_WAITS = frozenset((RECEIVED, SENT, FINISHED))


class Simulated:
    """The simulated times and memory of a step, in the units of its costs; time 0 is the start."""

    def __init__(self, run: _Run) -> None:
        self.programs, self.costs, self.queues = run.programs, run.costs, run.queues
        self.ends = run.ends  # per rank and event: when the computing goes on behind the event
        self.busy = run.busy  # per rank: time in which it computes
        self.exposed = run.exposed  # per rank: time in which it waits while its transfer runs

    @cached_property
    def makespan(self) -> float:
        """The time until the last action and the last transfer are over."""
        computing = [ends[-1] for ends in self.ends if ends]
        return max(computing + [queue.free for queue in self.queues.everyone()], default=0.0)

    @property
    def bubbles(self) -> list[float]:
        """Per rank, the fraction of the step in which it does not compute."""
        if not self.makespan:
            return [0.0] * len(self.busy)
        return [1 - busy / self.makespan for busy in self.busy]

    def working(self) -> Iterator[tuple[float, int]]:
        """Intervals of the step as (length, number of ranks at work).

        A rank is at work while it computes and while a transfer that it waits for runs.
        """
        changes = sorted(
            change
            for rank in range(len(self.programs))
            for begin, end in self._spans(rank)
            for change in ((begin, 1), (end, -1))
        )
        num = 0
        for (here, change), (there, _) in pairwise(changes):
            num += change
            yield there - here, num

    def _spans(self, rank: int) -> Iterator[tuple[float, float]]:
        """The (begin, end) of every span in which a rank is at work."""
        before = 0.0
        for (code, number), end in zip(self.programs[rank].events, self.ends[rank], strict=True):
            if end > before:
                waits = code in _WAITS
                begin = self.queues.begin[operation(code, number)] if waits else before
                yield max(before, begin), end
            before = end

    @cached_property
    def peaks(self) -> list[float]:
        """Per rank, the peak memory of activations, posted receives and sends under way."""
        return [
            max((held for _, held in self.memory(rank)), default=0.0)
            for rank in range(len(self.programs))
        ]

    def memory(self, rank: int) -> Curve:
        """A rank's memory over time: (time, memory from then on), in time order."""
        return memory_curve(self.programs[rank], self.costs, self.ends[rank])

    def __str__(self) -> str:
        """A table with one row per rank."""
        rows = [f"step {self.makespan:g}", "rank  bubble    exposed  peak memory"]
        table = zip(self.bubbles, self.exposed, self.peaks, strict=True)
        rows += [f"{r:4}  {b:6.3f}  {e:9.4g}  {m:11.4g}" for r, (b, e, m) in enumerate(table)]
        return "\n".join(rows)


def simulate(programs: Sequence[RankProgram], costs: StepCosts) -> Simulated:
    """Run the programs of all ranks in simulated time; CheckError explains a deadlock.

    The programs may be written by hand, but each must have passed ``check_programs``.
    """
    run = _Run(programs, costs)
    ready = list(range(len(programs)))
    while ready:
        run.advance(ready.pop())
        ready += run.queues.woken
        run.queues.woken.clear()
    if any(run.done[p.rank] < len(p.events) for p in programs) or run.queues.unfinished():
        raise explain(Stuck(run.programs, run.done, run.queues))
    return Simulated(run)


class _Run:
    """The state of a simulation: the events that every rank has done, and their times."""

    def __init__(self, programs: Sequence[RankProgram], costs: StepCosts) -> None:
        self.programs, self.costs = list(programs), costs
        wiring = programs[0].wiring if programs else Wiring((), 1, (), ())
        self.queues = Queues(wiring, len(programs), costs)
        self.lengths = costs.of_actions()
        self.count = wiring.microbatches
        self.done = [0] * len(programs)
        self.ends: list[list[float]] = [[] for _ in programs]
        self.busy = [0.0] * len(programs)
        self.exposed = [0.0] * len(programs)

    def advance(self, rank: int) -> None:
        """Run a rank's events up to a wait for a transfer that cannot end yet."""
        events, ends, queues = self.programs[rank].events, self.ends[rank], self.queues
        now = ends[-1] if ends else 0.0
        busy = exposed = 0.0
        for index in range(self.done[rank], len(events)):
            code, number = events[index]
            if code == COMPUTE:
                length = self.lengths[number // self.count]
                now += length
                busy += length
            elif code in _WAITS:
                awaited = operation(code, number)
                end = queues.end[awaited]
                if end == NOT_YET:
                    queues.awaited[rank] = awaited
                    break
                queues.awaited[rank] = NOTHING
                if end > now:
                    exposed += end - max(now, queues.begin[awaited])
                    now = end
            else:
                queues.start(rank, operation(code, number), now)
            ends.append(now)
        self.done[rank] = len(ends)
        self.busy[rank] += busy
        self.exposed[rank] += exposed
