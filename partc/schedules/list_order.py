"""List scheduling: whenever a rank is free, the rank starts its most urgent ready action.

The input: costs, the rank of every stage, a memory cap per rank, and a policy that gives every
action a due time. The result: a schedule that keeps the caps. The work is nearly linear in the
number of actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from partc.schedules.actions import Action, Kind, Schedule
from partc.schedules.timing import Costs, Timeline

ROUNDING = 1e-9  # of a cap: sums of the same numbers in another order differ by rounding


@dataclass(frozen=True)
class Policy:
    """How a free rank chooses its next action: the ready action with the least due time.

    The due time of an action of microbatch ``i`` is ``age * i * T``, less the longest path from the
    action to the end of its microbatch (the upward rank of HEFT); ``T`` is the slowest rank's time
    per microbatch. So age 0 looks at the critical path alone, and a large age prefers the oldest
    microbatch.
    """

    age: float = 1
    backward_first: bool = False  # any input gradient before any forward
    fill: bool = True  # weight gradients only where nothing else can run
    patience: float = 0  # a rank idles up to this share of an action's time for a more urgent one
    pace: float = 0  # a new microbatch every `pace` times the slowest rank's time: saves memory
    split: bool = True  # backwards in two parts, I and W


class Due(NamedTuple):
    """The due times of F, I and W by ``[stage][microbatch]``; only their order matters."""

    f: list[list[float]]
    i: list[list[float]]
    w: list[list[float]]


class _Coming(NamedTuple):
    """A forward or input gradient that will be ready for a rank at ``time``, with its due time."""

    time: float
    due: float
    stage: int
    kind: Kind


def list_schedule(
    costs: Costs,
    rank_of: Sequence[int],
    microbatches: int,
    caps: Sequence[float],
    policy: Policy,
    due: Due | None = None,
) -> Schedule:
    """Make a schedule; ``caps[rank]`` must hold one microbatch's activations of all its stages.

    Every stage runs the microbatches in their order. A forward starts only if, afterwards, all
    unfinished microbatches can still finish one after the other (the banker's algorithm). So ranks
    never deadlock because their memory is full. ``due`` replaces the policy's due times.
    """
    due = due or due_by_policy(costs, rank_of, microbatches, policy)
    run = _Run(costs, rank_of, microbatches, caps, policy, due)
    run.until_done()
    orders = tuple(map(tuple, run.orders))
    return Schedule("auto", orders, tuple(rank_of), microbatches)


class _Run:
    """A run in simulated time: the actions that every stage has started, and those coming up."""

    def __init__(
        self,
        costs: Costs,
        rank_of: Sequence[int],
        microbatches: int,
        caps: Sequence[float],
        policy: Policy,
        due: Due,
    ) -> None:
        stages, ranks = len(rank_of), len(caps)
        self.costs, self.rank_of = costs, rank_of
        # Half of the rounding that `improve.fits` allows, which adds up in another order.
        self.caps = [cap * (1 + ROUNDING / 2) for cap in caps]
        self.microbatches, self.policy = microbatches, policy
        self.stages_of = [[s for s in range(stages) if rank_of[s] == r] for r in range(ranks)]
        self.transfer = transfers(costs, rank_of)
        # A stage that would hold more between I and W than before I keeps its backward whole: the
        # caps are checked at forwards only, so an I must never raise a rank's memory.
        self.splits = [
            policy.split and costs.waiting[s] <= costs.activation[s] for s in range(stages)
        ]
        self.one_microbatch = [sum(costs.activation[s] for s in own) for own in self.stages_of]
        self.due, self.pace = due, policy.pace * slowest_rank(costs, rank_of)
        # Microbatches per stage: ready for F and for I, and started F, I and W.
        self.ready_f, self.ready_i = [0] * stages, [0] * stages
        self.f, self.i, self.w = [0] * stages, [0] * stages, [0] * stages
        self.held = [0.0] * ranks
        self.busy = [False] * ranks
        self.coming: list[list[_Coming]] = [[] for _ in range(ranks)]
        self.orders: list[list[Action]] = [[] for _ in range(ranks)]
        # (time, rank, stage, kind): an action of the kind is ready, or the rank is "free" again.
        self.events: list[tuple[float, int, int, Kind | Literal["free"]]] = []

    def until_done(self) -> None:
        """Run to the end; a rank decides only after all events of the same time are noted."""
        events = self.events
        for microbatch in range(self.microbatches):
            heappush(events, (self.pace * microbatch, self.rank_of[0], 0, "F"))
        while events:
            now, touched = events[0][0], set()
            while events and events[0][0] == now:
                _, rank, stage, kind = heappop(events)
                touched.add(rank)
                if kind == "free":
                    self.busy[rank] = False
                else:
                    self.arrive(rank, stage, kind)
            for rank in sorted(touched):
                if not self.busy[rank]:
                    self.start_next(rank, now)

    def arrive(self, rank: int, stage: int, kind: Kind) -> None:
        ready = self.ready_f if kind == "F" else self.ready_i
        ready[stage] += 1
        coming = self.coming[rank]
        if coming and (stage or kind != "F"):  # no rank is kept waiting for a new microbatch
            coming.remove(next(c for c in coming if c.stage == stage and c.kind == kind))

    def start_next(self, rank: int, now: float) -> None:
        """Start the rank's most urgent ready action; start none if waiting is better."""
        due = self.due
        best, best_due = None, float("inf")
        for stage in self.stages_of[rank]:
            # Of equal due times I wins, which other ranks wait for, then W, which frees memory.
            started = self.i[stage]
            if started < self.ready_i[stage]:
                when = due.i[stage][started]
                if when < best_due:
                    best, best_due = (stage, "I"), when
            if self.splits[stage] and self.w[stage] < started:
                when = due.w[stage][self.w[stage]]
                if when < best_due:
                    best, best_due = (stage, "W"), when
            started = self.f[stage]
            if started < self.ready_f[stage]:
                when = due.f[stage][started]
                if when < best_due and self.admits(rank, stage):
                    best, best_due = (stage, "F"), when
        if not best or (self.coming[rank] and self.better_wait(rank, *best, best_due, now)):
            return
        self.start(rank, *best, now)

    def better_wait(self, rank: int, stage: int, kind: str, due: float, now: float) -> bool:
        """Whether a more urgent action becomes ready within ``patience`` times this one's time."""
        until = now + self.policy.patience * self.takes(stage, kind)
        return any(c.time < until and c.due < due for c in self.coming[rank])

    def takes(self, stage: int, kind: str) -> float:
        costs = self.costs
        if kind == "F":
            return costs.forward[stage]
        if kind == "W":
            return costs.weight_grad[stage]
        return costs.input_grad[stage] + (0 if self.splits[stage] else costs.weight_grad[stage])

    def start(self, rank: int, stage: int, kind: str, now: float) -> None:
        costs, end = self.costs, now + self.takes(stage, kind)
        if kind == "F":
            microbatch = self.f[stage]
            self.f[stage] += 1
            self.held[rank] += costs.activation[stage]
            if stage + 1 < len(self.rank_of):
                self.announce(end + self.transfer[stage], stage + 1, "F", microbatch)
            else:
                self.announce(end, stage, "I", microbatch)
        elif kind == "I":
            microbatch = self.i[stage]
            self.i[stage] += 1
            self.held[rank] -= costs.activation[stage]
            if self.splits[stage]:
                self.held[rank] += costs.waiting[stage]
            else:
                kind = "B"
            if stage:
                self.announce(end + self.transfer[stage - 1], stage - 1, "I", microbatch)
        else:
            microbatch = self.w[stage]
            self.w[stage] += 1
            self.held[rank] -= costs.waiting[stage]
        self.orders[rank].append(Action(stage, kind, microbatch))  # type: ignore[arg-type]
        self.busy[rank] = True
        heappush(self.events, (end, rank, stage, "free"))

    def announce(self, time: float, stage: int, kind: Kind, microbatch: int) -> None:
        rank = self.rank_of[stage]
        heappush(self.events, (time, rank, stage, kind))
        if self.policy.patience:
            rows = self.due.f if kind == "F" else self.due.i
            self.coming[rank].append(_Coming(time, rows[stage][microbatch], stage, kind))

    def admits(self, rank: int, stage: int) -> bool:
        """Whether the rank's memory allows the stage's next forward without a later deadlock."""
        cap, activation = self.caps[rank], self.costs.activation
        held = self.held[rank] + activation[stage]
        if held + self.one_microbatch[rank] <= cap:
            return True
        return held <= cap and self.leaves_way(rank, stage)

    def leaves_way(self, rank: int, stage: int) -> bool:
        """Whether every older microbatch could still run all its forwards on this rank.

        The activations of still older microbatches are not counted, since those finish first and
        free them. Memory that waits for ``W`` is not counted, since a ``W`` can always run. Of all
        microbatches that come next at one stage the oldest needs most, so one per stage is checked.
        """
        activation, own = self.costs.activation, self.stages_of[rank]
        new = self.f[stage]
        for position, later in enumerate(own):
            oldest = self.f[later]
            if oldest >= new:
                continue
            # What this stage's oldest microbatch has yet to run here, the new forward, and (below)
            # what it and younger ones hold already: they free nothing before it is through.
            needs = sum(activation[s] for s in own[position:]) + activation[stage]
            for s in own:
                needs += activation[s] * max(0, self.f[s] - max(oldest, self.i[s]))
            if needs > self.caps[rank]:
                return False
        return True


def due_by_policy(costs: Costs, rank_of: Sequence[int], microbatches: int, policy: Policy) -> Due:
    """The policy's due times: age times the slowest rank's time, less the longest path to the end.

    See `Policy` for the formula.
    """
    stages, transfer = len(rank_of), transfers(costs, rank_of)
    step = policy.age * slowest_rank(costs, rank_of)

    def rows(first: Sequence[float]) -> list[list[float]]:
        return [[due + step * i for i in range(microbatches)] for due in first]

    below, input_grad, forward = 0.0, [0.0] * stages, [0.0] * stages
    for stage in range(stages):
        weight = 0 if policy.split else costs.weight_grad[stage]
        below += costs.input_grad[stage] + weight + (transfer[stage - 1] if stage else 0)
        input_grad[stage] = -below
    for stage in reversed(range(stages)):
        below += costs.forward[stage] + transfer[stage]
        forward[stage] = -below
    weight_grad = [-cost for cost in costs.weight_grad]
    later = below + step * microbatches  # at least the distance of any two due times
    if policy.backward_first:
        input_grad = [due - later for due in input_grad]
    if policy.fill:
        weight_grad = [due + later for due in weight_grad]
    return Due(rows(forward), rows(input_grad), rows(weight_grad))


def due_as_in(timeline: Timeline) -> Due:
    """Due times that are the start times of a timeline.

    List scheduling with them keeps the timeline's order, but for actions that fit into gaps.
    """
    schedule = timeline.schedule
    table = {
        kind: [[0.0] * schedule.microbatches for _ in range(schedule.stages)] for kind in "FIW"
    }
    for order, starts in zip(schedule.orders, timeline.starts, strict=True):
        for (stage, kind, microbatch), start in zip(order, starts, strict=True):
            table["I" if kind == "B" else kind][stage][microbatch] = start
            if kind == "B":
                end = start + timeline.costs.input_grad[stage]
                table["W"][stage][microbatch] = end
    return Due(table["F"], table["I"], table["W"])


def transfers(costs: Costs, rank_of: Sequence[int]) -> list[float]:
    """The transfer time from each stage to the next; 0 where both are on the same rank."""
    after = [*rank_of[1:], rank_of[-1]]
    pairs = zip(costs.transfer, rank_of, after, strict=True)
    return [time if rank != other else 0 for time, rank, other in pairs]


def slowest_rank(costs: Costs, rank_of: Sequence[int]) -> float:
    """The longest computing time of any rank for one microbatch, over all its stages."""
    busy = [0.0] * (max(rank_of) + 1)
    rows = zip(rank_of, costs.forward, costs.input_grad, costs.weight_grad, strict=True)
    for rank, *times in rows:
        busy[rank] += sum(times)
    return max(busy)
