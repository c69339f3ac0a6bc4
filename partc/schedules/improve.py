"""Local improvement of a schedule: move actions on the critical path within their rank's order.

The input is a timeline and a memory cap per rank; the result is a timeline that is at least as
good and keeps the caps. The search is limited by a number of evaluations, not by a clock, so the
same input always gives the same result.
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
    """Whether no rank's peak memory is above its cap, up to rounding."""
    pairs = zip(run.peaks, caps, strict=True)
    return all(peak <= cap * (1 + ROUNDING) for peak, cap in pairs)


def improve(run: Timeline, caps: Sequence[float], evaluations: int) -> Timeline:
    """Go to the first better neighbour until there is none or ``evaluations`` have been tried.

    A schedule is better if its step is shorter, or equally long and its ranks finish earlier. A
    step becomes shorter only if its critical path does, so only actions of the critical path move:
    before their predecessor, or, for a weight gradient, into a later bubble of the rank.
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
    """Merge an ``I`` and the ``W`` directly behind it into ``B`` wherever that delays no action.

    With ``B`` the previous stage gets its gradient only at the end of ``W``. That costs nothing if
    the previous stage starts its backward no earlier. So all start times stay as they are.
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
    """All schedules that differ by one moved action of the critical path."""
    for rank, at in _critical_path(run):
        order = run.schedule.orders[rank]
        if at and not _bound(order[at - 1], order[at]):
            yield _moved(run.schedule, rank, at, at - 1)
        if order[at].kind == "W":
            for bubble in _bubbles_after(run, rank, at):
                yield _moved(run.schedule, rank, at, bubble)


def _bound(first: Action, second: Action) -> bool:
    """Whether swapping two neighbouring actions of a rank is impossible or useless."""
    if first.stage != second.stage:
        return False
    return first.kind == second.kind or first.microbatch == second.microbatch


def _bubbles_after(run: Timeline, rank: int, at: int) -> Iterator[int]:
    """The positions, counted without the action, of the rank's later bubbles and of its end."""
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
    """The (rank, position) of the critical path's actions, from the last to end back to a start at
    time 0."""
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
    """The place of the neighbouring stage's action that an action waited for.

    Called for actions that did not start directly after their rank's previous action.
    """
    stage, kind, microbatch = action
    if kind == "F":
        return places[Action(stage - 1, "F", microbatch)]
    behind = Action(stage + 1, "I", microbatch)
    return places[behind] if behind in places else places[behind._replace(kind="B")]


def _by_action(schedule: Schedule, rows: Sequence[Sequence[float]]) -> dict[Action, float]:
    pairs = zip(schedule.orders, rows, strict=True)
    return {a: t for order, row in pairs for a, t in zip(order, row, strict=True)}
