"""Search a schedule for given costs: named schedules, list scheduling, then local improvement.

No published schedule is best if stages differ, or if the times of F, I and W differ. Under the
given costs, the schedule found is never slower than any named schedule that fits into memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from partc.errors import PlanError
from partc.schedules import NAMES, make
from partc.schedules.actions import Schedule, looped, v_shaped
from partc.schedules.improve import fits, improve, merge_whole_backwards
from partc.schedules.list_order import Policy, due_as_in, list_schedule
from partc.schedules.timing import Costs, Timeline, timeline

_ACTIONS_IN_ALL = 1_500_000  # simulated actions of the whole search, unless `evaluations` is given
_FEWEST, _MOST = 3, 1000
_REPLANS = 6

# The best set of one, two, three ... policies over randomly drawn costs, with much and with little
# memory. They stand first, since a search with few evaluations tries only the first policies.
_FIRST = (
    Policy(age=1),
    Policy(age=0.5, fill=False, patience=0.5, pace=1),
    Policy(age=0.5, patience=0.5),
    Policy(age=1, patience=0.5, pace=1),
    Policy(age=0.5, patience=1),
    Policy(age=0.25),
    Policy(age=0, pace=1),
    Policy(age=0.25, fill=False, patience=0.5),
)
_AGES, _PATIENCES, _PACES = (0, 0.25, 0.5, 1, 1e6), (0, 0.5, 1), (0, 1, 1.1, 1.25, 1.5)
_ALL = product(_AGES, (False, True), (True, False), _PATIENCES, _PACES)
POLICIES: tuple[Policy, ...] = tuple(
    dict.fromkeys([*_FIRST, *(Policy(*parameters) for parameters in _ALL)])
)


def auto(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    rank_of: Sequence[int] | None = None,
    memory_cap: float | Sequence[float] | None = None,
    evaluations: int | None = None,
) -> Schedule:
    """The shortest schedule found for ``len(costs.forward)`` stages on ``ranks`` pipeline ranks.

    ``rank_of[stage]`` fixes the rank of every stage. Without ``rank_of``, stages are dealt out in
    turns; with two stages per rank the V placement is tried as well. ``memory_cap`` limits the
    memory of a rank's activations: one number or one per rank, in the unit of
    ``costs.activation``.

    The search tries all named schedules and list schedules by several policies (``POLICIES``). Then
    it makes list schedules again with the best schedule's start times as due times, and at last
    moves actions on the critical path. At most ``evaluations`` schedules are tried beyond the
    named ones; the default is smaller for longer schedules. Of equally long schedules the one with
    fewer split backwards wins, then the one with less memory. The same arguments always give the
    same schedule. PlanError if nothing fits; the message has the least memory cap that works.
    """
    placements = [tuple(rank_of)] if rank_of is not None else _placements(costs, ranks)
    caps = _caps(memory_cap, ranks)
    possible = [placed for placed in placements if _can_fit(costs, placed, caps)]
    if not possible:
        raise _too_little(costs, placements, caps)
    if evaluations is None:
        actions = 3 * len(costs.forward) * microbatches
        evaluations = min(max(_ACTIONS_IN_ALL // actions, _FEWEST), _MOST)

    # Half of the evaluations are for list schedules, the rest for improving the best schedule.
    policies = POLICIES[: max(1, (evaluations + 1) // 2 // len(possible))]
    made = (
        schedule
        for placed in possible
        for schedule in (
            *_named(placed, ranks, microbatches),
            *(list_schedule(costs, placed, microbatches, caps, policy) for policy in policies),
        )
    )
    runs = (timeline(schedule, costs) for schedule in made)
    best = min((run for run in runs if fits(run, caps)), key=_worth)
    left = max(0, evaluations - len(policies) * len(possible))
    replans = min(left // 2, _REPLANS)
    best = improve(_replanned(best, caps, replans), caps, left - replans)
    return replace(merge_whole_backwards(best), name="auto")


def least_cap(costs: Costs, rank_of: Sequence[int]) -> list[float]:
    """Per rank, the least memory that any schedule needs: one microbatch's activations in all of
    the rank's stages.

    All these activations are alive when the microbatch starts its backward at the last stage.
    Microbatches that run one after the other need no more.
    """
    held = [0.0] * (max(rank_of) + 1)
    for rank, activation in zip(rank_of, costs.activation, strict=True):
        held[rank] += activation
    return held


def _placements(costs: Costs, ranks: int) -> list[tuple[int, ...]]:
    chunks, rest = divmod(len(costs.forward), ranks)
    if rest or not chunks:
        raise PlanError(
            where=f"schedule='auto' on {ranks} pipeline ranks",
            what=f"{len(costs.forward)} stages cannot be dealt out evenly",
            why=f"{len(costs.forward)} is not a multiple of {ranks}",
            do="Cut the model into a multiple of the ranks, or say with rank_of who runs what.",
        )
    if chunks == 2 and ranks > 1:
        return [looped(ranks, 2), v_shaped(ranks)]
    return [looped(ranks, chunks)]


def _caps(memory_cap: float | Sequence[float] | None, ranks: int) -> list[float]:
    if memory_cap is None:
        return [float("inf")] * ranks
    return [memory_cap] * ranks if isinstance(memory_cap, int | float) else list(memory_cap)


def _named(rank_of: tuple[int, ...], ranks: int, microbatches: int) -> Iterator[Schedule]:
    """All named schedules that have backwards and that place the stages as ``rank_of`` does."""
    chunks = len(rank_of) // ranks
    for name, needs in NAMES.items():
        least, most = needs.chunks
        takes = least <= chunks and (most is None or chunks <= most)
        if takes and needs.rank_of(ranks, chunks) == rank_of:
            schedule = make(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
            if schedule.kinds - {"F"}:
                yield schedule


def _worth(run: Timeline) -> tuple[float, int, float]:
    split = sum(action.kind == "W" for order in run.schedule.orders for action in order)
    return run.makespan, split, sum(run.peaks)


def _replanned(run: Timeline, caps: Sequence[float], rounds: int) -> Timeline:
    """Repeat list scheduling with every action due at its last start time; the best timeline.

    Actions that fit into an idle gap move ahead; the others keep their order.
    """
    schedule, best = run.schedule, run
    for _ in range(rounds):
        again = list_schedule(
            run.costs, schedule.rank_of, schedule.microbatches, caps, Policy(), due_as_in(run)
        )
        run = timeline(again, run.costs)
        if fits(run, caps):
            best = min(best, run, key=_worth)
    return best


def _can_fit(costs: Costs, rank_of: Sequence[int], caps: Sequence[float]) -> bool:
    return all(need <= cap for need, cap in zip(least_cap(costs, rank_of), caps, strict=True))


def _too_little(
    costs: Costs, placements: Sequence[Sequence[int]], caps: Sequence[float]
) -> PlanError:
    def missing(rank_of: Sequence[int]) -> float:
        return max(n - cap for n, cap in zip(least_cap(costs, rank_of), caps, strict=True))

    rank_of = min(placements, key=missing)
    needs = least_cap(costs, rank_of)
    rank = max(range(len(caps)), key=lambda r: needs[r] - caps[r])
    own = ", ".join(str(s) for s, owner in enumerate(rank_of) if owner == rank)
    return PlanError(
        where=f"schedule='auto', pipeline rank {rank}",
        what=f"no order fits a memory cap of {caps[rank]:,.15g}; the least that works is "
        f"{needs[rank]:,.15g}",
        why=f"when a microbatch turns around, its activations of all the rank's stages ({own}) are "
        "held",
        do="Raise the cap, make microbatches smaller, recompute activations, or cut the model over "
        "more ranks.",
    )
