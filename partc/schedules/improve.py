"""Local improvement of a schedule: move actions on the critical path within their rank's order.

Goes in: when everything runs, and how much memory each rank may use. Comes out: the same for
orders that are at least as good. Only numbers decide, no clock: the result is always the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from partc.errors import PlanError
from partc.schedules.actions import Action, Schedule
from partc.schedules.list_order import ROUNDING, transfers
from partc.schedules.timing import Timeline, timeline


def fits(run: Timeline, caps: Sequence[float]) -> bool:
    """Whether no rank holds more than its cap, up to rounding."""
    pairs = zip(run.peaks, caps, strict=True)
    return all(peak <= cap * (1 + ROUNDING) for peak, cap in pairs)


def improve(run: Timeline, caps: Sequence[float], evaluations: int) -> Timeline:
    """Take the first better neighbour until there is none or ``evaluations`` were looked at.

    Better is a shorter step, or one as short whose ranks are done earlier. A step can only become
    shorter if its critical path does, so only actions on it move: past each other, or a weight
    gradient from it into a later bubble of its rank.
    """
    left = evaluations
    while left > 0:
        better = None
        for schedule in islice(_neighbours(run), left):
            left -= 1
            better = _run_if_better(schedule, run, caps)
            if better:
                break
        if better is None:
            return run
        run = better
    return run


def merge_whole_backwards(run: Timeline) -> Schedule:
    """Write ``B`` for an ``I`` and its ``W`` wherever they stand together and nobody would wait.

    The stage before gets its gradient later, at the end of ``B``; that is free where it starts its
    own backward no earlier than that. No action starts at another time afterwards.
    """
    schedule, costs = run.schedule, run.costs
    starts = _by_action(schedule, run.starts)
    transfer = transfers(costs, schedule.rank_of)
    orders = []
    for order, ends in zip(schedule.orders, run.ends, strict=True):
        merged: list[Action] = []
        for action, end in zip(order, ends, strict=True):
            stage, kind, microbatch = action
            mine = Action(stage, "I", microbatch)
            if kind == "W" and merged[-1:] == [mine]:
                before = Action(stage - 1, "I", microbatch)
                waits = starts.get(before, starts.get(before._replace(kind="B"), float("inf")))
                if end + transfer[stage - 1] <= waits:
                    merged[-1] = Action(stage, "B", microbatch)
                    continue
            merged.append(action)
        orders.append(tuple(merged))
    return replace(schedule, orders=tuple(orders))


def _run_if_better(schedule: Schedule, old: Timeline, caps: Sequence[float]) -> Timeline | None:
    try:
        new = timeline(schedule, old.costs)
    except PlanError:  # the ranks would wait for each other
        return None
    return new if _length(new) < _length(old) and fits(new, caps) else None


def _length(run: Timeline) -> tuple[float, float]:
    return run.makespan, sum(ends[-1] for ends in run.ends if ends)


def _neighbours(run: Timeline) -> Iterator[Schedule]:
    """Schedules in which one action of the critical path stands elsewhere."""
    for rank, at in _critical_path(run):
        order = run.schedule.orders[rank]
        if at and not _bound(order[at - 1], order[at]):
            yield _moved(run.schedule, rank, at, at - 1)
        if order[at].kind == "W":
            for bubble in _bubbles_after(run, rank, at):
                yield _moved(run.schedule, rank, at, bubble)


def _bound(first: Action, second: Action) -> bool:
    """Whether two neighbours have to stay in order, or nothing is gained by the other one."""
    if first.stage != second.stage:
        return False
    return first.kind == second.kind or first.microbatch == second.microbatch


def _bubbles_after(run: Timeline, rank: int, at: int) -> Iterator[int]:
    """Positions, after taking out the action, at which the rank idles before its next action."""
    starts, ends = run.starts[rank], run.ends[rank]
    for position in range(at + 1, len(starts) - 1):
        if starts[position + 1] > ends[position]:
            yield position
    if at + 1 < len(starts):
        yield len(starts) - 1


def _moved(schedule: Schedule, rank: int, source: int, target: int) -> Schedule:
    order = list(schedule.orders[rank])
    order.insert(target, order.pop(source))
    orders = [*schedule.orders]
    orders[rank] = tuple(order)
    return replace(schedule, orders=tuple(orders))


def _critical_path(run: Timeline) -> Iterator[tuple[int, int]]:
    """From the last end back: (rank, position) of what each action had to wait for."""
    schedule = run.schedule
    places = {a: (r, i) for r, order in enumerate(schedule.orders) for i, a in enumerate(order)}
    transfer = transfers(run.costs, schedule.rank_of)
    here = max(
        ((r, len(ends) - 1) for r, ends in enumerate(run.ends) if ends),
        key=lambda at: run.ends[at[0]][at[1]],
    )
    while True:
        yield here
        rank, at = here
        start = run.starts[rank][at]
        if start <= 0:
            return
        if at and run.ends[rank][at - 1] == start:
            here = rank, at - 1
        else:
            here = _arrival(places, transfer, schedule.orders[rank][at])


def _arrival(
    places: dict[Action, tuple[int, int]], transfer: Sequence[float], action: Action
) -> tuple[int, int]:
    """What an action that did not start right after its predecessor waited for."""
    stage, kind, microbatch = action
    if kind == "F":
        return places[Action(stage - 1, "F", microbatch)]
    behind = Action(stage + 1, "I", microbatch)
    return places[behind] if behind in places else places[behind._replace(kind="B")]


def _by_action(schedule: Schedule, rows: Sequence[Sequence[float]]) -> dict[Action, float]:
    pairs = zip(schedule.orders, rows, strict=True)
    return {a: t for order, row in pairs for a, t in zip(order, row, strict=True)}
