"""The timeline of a schedule: start and end of every action, makespan, and peak memory per rank.

Each rank runs its actions in the given order, each action as soon as its inputs are there.
Transfers take time, but no rank's computing time. Costs that are integers give integer times.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from partc.errors import PlanError
from partc.schedules.actions import Action, Schedule

Row = tuple[float, ...]
_NOT_YET = -1.0  # every real time is at least 0, and comparing numbers is cheaper than with None


@dataclass(frozen=True)
class Costs:
    """The costs of one microbatch per stage; any unit of time and any unit of memory.

    A whole backward ``B`` takes ``input_grad + weight_grad``. ``transfer[s]`` is the transfer time
    from stage ``s`` to ``s + 1`` and of the gradient back; 0 between stages on the same rank.
    A stage holds ``activation`` memory from the start of its forward to the end of ``B`` or ``I``,
    and ``waiting`` memory from the end of ``I`` to the end of ``W``. A schedule without backwards
    holds no memory.
    """

    forward: Row
    input_grad: Row
    weight_grad: Row
    transfer: Row
    activation: Row
    waiting: Row

    @classmethod
    def even(
        cls,
        stages: int,
        *,
        forward: float = 1,
        input_grad: float = 1,
        weight_grad: float = 1,
        transfer: float = 0,
        activation: float = 1,
        waiting: float | None = None,
    ) -> Costs:
        """Equal costs for all stages; without ``waiting``, ``W`` needs the whole activation."""
        waiting = activation if waiting is None else waiting
        per_stage = (forward, input_grad, weight_grad, transfer, activation, waiting)
        return cls(*((cost,) * stages for cost in per_stage))


@dataclass(frozen=True)
class Timeline:
    """A schedule with the start and end of every action, in the time unit of the costs.

    ``starts[rank][i]`` and ``ends[rank][i]`` are the times of ``schedule.orders[rank][i]``.
    """

    schedule: Schedule
    costs: Costs
    starts: tuple[Row, ...]
    ends: tuple[Row, ...]
    peaks: Row  # most memory of activations held at once, per rank

    @cached_property
    def makespan(self) -> float:
        """The length of the step: the last end of any rank."""
        return max((row[-1] for row in self.ends if row), default=0)

    @cached_property
    def busy(self) -> Row:
        """The time in which each rank computes."""
        pairs = zip(self.starts, self.ends, strict=True)
        return tuple(sum(ends) - sum(starts) for starts, ends in pairs)

    @property
    def bubbles(self) -> Row:
        """The idle fraction of the makespan, per rank."""
        return tuple(_idle(busy, self.makespan) for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The idle fraction of all ranks' time, ``1 - sum(busy) / (makespan * ranks)``."""
        return _idle(sum(self.busy), self.makespan * self.schedule.ranks)


def timeline(schedule: Schedule, costs: Costs) -> Timeline:
    """Run a schedule with every action as early as possible.

    PlanError shows a cycle of waits, or says that there are too few costs.

    The work is linear in the number of actions. The schedule must have passed ``check_schedule``.
    """
    _check_costs(schedule, costs)
    run = _Run(schedule, costs)
    ready = list(range(schedule.ranks))
    while ready:
        ready.extend(run.advance(ready.pop()))
    if any(len(run.ends[r]) < len(order) for r, order in enumerate(schedule.orders)):
        raise _deadlock(schedule, [len(ends) for ends in run.ends])
    starts, ends = (tuple(map(tuple, rows)) for rows in (run.starts, run.ends))
    return Timeline(schedule, costs, starts, ends, tuple(run.peaks))


def _check_costs(schedule: Schedule, costs: Costs) -> None:
    """PlanError for a row of costs that is too short for the stages; as long rows are not read."""
    for name in (each.name for each in fields(Costs)):
        row = getattr(costs, name)
        needed = schedule.stages - (name == "transfer")
        if len(row) < needed:
            raise PlanError(
                where=f"Costs, {name}", what=f"there are {len(row)} of {needed} numbers",
                why=f"{schedule.name} has {schedule.stages} stages, and costs are those of a stage",
                do=f"Give one for each stage: Costs.even({schedule.stages}).",
            )  # fmt: skip


class _Run:
    """The state of a run: the actions that every rank has done, and the ranks that wait."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        stages, ranks = schedule.stages, schedule.ranks
        self.schedule, self.costs = schedule, costs
        self.starts: list[list[float]] = [[] for _ in range(ranks)]
        self.ends: list[list[float]] = [[] for _ in range(ranks)]
        self.held, self.peaks = [0.0] * ranks, [0.0] * ranks
        # By stage and microbatch. Only the neighbouring stage's rank waits for an action's result,
        # so one waiting rank per action is enough.
        self.forward_end = [[_NOT_YET] * schedule.microbatches for _ in range(stages)]
        self.backward_end = [[_NOT_YET] * schedule.microbatches for _ in range(stages)]
        self.forward_waiter: list[dict[int, int]] = [{} for _ in range(stages)]
        self.backward_waiter: list[dict[int, int]] = [{} for _ in range(stages)]
        self.activation = costs.activation if schedule.kinds - {"F"} else (0,) * stages
        rank_of = schedule.rank_of
        self.transfer = [
            costs.transfer[s] if s + 1 < stages and rank_of[s] != rank_of[s + 1] else 0
            for s in range(stages)
        ]

    def advance(self, rank: int) -> list[int]:
        """Run a rank until it must wait; return the ranks that waited for one of its actions."""
        order, starts, ends = self.schedule.orders[rank], self.starts[rank], self.ends[rank]
        # Local names, since the loop runs once per action and attributes are slower to read.
        forward_end, backward_end = self.forward_end, self.backward_end
        forward_waiter, backward_waiter = self.forward_waiter, self.backward_waiter
        costs, transfer, last = self.costs, self.transfer, self.schedule.stages - 1
        now = ends[-1] if ends else 0
        held, peak = self.held[rank], self.peaks[rank]
        woken: list[int] = []
        for at in range(len(ends), len(order)):
            stage, kind, microbatch = order[at]
            start = now
            if kind == "F":
                if stage > 0:
                    need = forward_end[stage - 1][microbatch]
                    if need < 0:
                        forward_waiter[stage - 1][microbatch] = rank
                        break
                    start = max(start, need + transfer[stage - 1])
                now = start + costs.forward[stage]
                forward_end[stage][microbatch] = now
                held += self.activation[stage]
                if microbatch in forward_waiter[stage]:
                    woken.append(forward_waiter[stage].pop(microbatch))
            elif kind == "W":
                # Only a later action of this rank would make it, so no other rank wakes this one:
                # `timeline` then reports a deadlock.
                if backward_end[stage][microbatch] < 0:
                    break
                now = start + costs.weight_grad[stage]
                held -= costs.waiting[stage]
            else:
                if forward_end[stage][microbatch] < 0:
                    break
                if stage < last:
                    need = backward_end[stage + 1][microbatch]
                    if need < 0:
                        backward_waiter[stage + 1][microbatch] = rank
                        break
                    start = max(start, need + transfer[stage])
                now = start + costs.input_grad[stage]
                held -= costs.activation[stage]
                if kind == "B":
                    now += costs.weight_grad[stage]
                else:
                    held += costs.waiting[stage]
                backward_end[stage][microbatch] = now
                if microbatch in backward_waiter[stage]:
                    woken.append(backward_waiter[stage].pop(microbatch))
            starts.append(start)
            ends.append(now)
            peak = max(peak, held)
        self.held[rank], self.peaks[rank] = held, peak
        return woken


def _idle(busy: float, whole: float) -> float:
    return 1 - busy / whole if whole else 0.0


def _deadlock(schedule: Schedule, done: list[int]) -> PlanError:
    """The error that names the cycle of waits, or the awaited action that no rank ever runs."""
    rank = next(r for r, order in enumerate(schedule.orders) if done[r] < len(order))
    chain: list[int] = []
    steps: dict[int, str] = {}
    while rank not in steps:
        action = schedule.orders[rank][done[rank]]
        needed = _missing(schedule, action, done)
        owner = schedule.rank_of[needed.stage]
        if done[owner] == len(schedule.orders[owner]):
            return _error(
                schedule, rank, action, f"it waits for {needed}, which rank {owner} never runs", ""
            )
        chain.append(rank)
        steps[rank] = f"rank {rank} stands at {action}, which needs {needed} of rank {owner}"
        rank = owner
    cycle = chain[chain.index(rank) :]
    if len(cycle) == 1:
        what = "it stands before an action of its own rank that it needs"
    else:
        what = f"{len(cycle)} ranks wait for each other in a circle"
    first = schedule.orders[rank][done[rank]]
    return _error(schedule, rank, first, what, "; ".join(steps[r] for r in cycle))


def _missing(schedule: Schedule, action: Action, done: list[int]) -> Action:
    """The action that a blocked action waits for."""
    stage, kind, microbatch = action
    own_backward_next = stage + 1 == schedule.stages
    if kind == "F":
        return Action(stage - 1, "F", microbatch)
    if kind == "W":
        return Action(stage, "I", microbatch)
    owner = schedule.rank_of[stage]
    forward = Action(stage, "F", microbatch)
    if own_backward_next or forward not in schedule.orders[owner][: done[owner]]:
        return forward
    behind = schedule.orders[schedule.rank_of[stage + 1]]
    whole = Action(stage + 1, "B", microbatch)
    return whole if whole in behind else Action(stage + 1, "I", microbatch)


def _error(schedule: Schedule, rank: int, action: Action, what: str, why: str) -> PlanError:
    return PlanError(
        where=f"schedule {schedule.name}, pipeline rank {rank}, action {action}",
        what=f"the order never finishes: {what}",
        why=why,
        do="Move the action that is needed before the one that needs it, or name a schedule that "
        "partc makes, for example schedule='1f1b'.",
    )
