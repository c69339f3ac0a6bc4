"""Orders of pipeline actions: what has to run before what; named, torch's and random ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from partc.schedules import make
from partc.schedules.actions import Action, Kind, Schedule
from partc.schedules.timing import Costs, Timeline, timeline

Times = tuple[int, int, int]  # of forward, input gradient and weight gradient
EQUAL: Times = (1, 1, 1)


def dependencies(action: Action, stages: int) -> Iterator[tuple[Action, ...]]:
    """What has to run first; each tuple holds alternatives, of which a schedule has one.

    The last stage's backward follows its own forward; every other waits for the stage behind it.
    """
    stage, kind, microbatch = action
    if kind == "F":
        if stage > 0:
            yield (Action(stage - 1, "F", microbatch),)
    elif kind == "W":
        yield (Action(stage, "I", microbatch),)
    else:
        yield (Action(stage, "F", microbatch),)
        if stage + 1 < stages:
            yield (Action(stage + 1, "B", microbatch), Action(stage + 1, "I", microbatch))


def random_order(
    rank_of: Sequence[int], microbatches: int, *, split: bool, chance: random.Random
) -> list[Action]:
    """All actions in an order in which one process could run them."""
    kinds = _kinds("FIW" if split else "FB")
    left = [
        Action(s, kind, m)
        for s in range(len(rank_of))
        for kind in kinds
        for m in range(microbatches)
    ]
    order: list[Action] = []
    while left:
        order.append(chance.choice([a for a in left if _can_run(a, order, len(rank_of))]))
        left.remove(order[-1])
    return order


def _can_run(action: Action, done: Sequence[Action], stages: int) -> bool:
    return all(any(a in done for a in needed) for needed in dependencies(action, stages))


def by_rank(order: Sequence[Action], rank_of: Sequence[int], microbatches: int) -> Schedule:
    """The schedule in which every rank runs its own actions in the order given for all."""
    orders = tuple(
        tuple(action for action in order if rank_of[action.stage] == rank)
        for rank in range(max(rank_of) + 1)
    )
    return Schedule("random", orders, tuple(rank_of), microbatches)


def _kinds(kinds: str) -> list[Kind]:
    return list(kinds)  # type: ignore[arg-type]


def run(name: str, p: int, m: int, times: Times = EQUAL, chunks: int | None = None) -> Timeline:
    """A named schedule of ``p`` ranks and ``m`` microbatches in its time, all stages alike."""
    schedule = make(name, ranks=p, microbatches=m, chunks=chunks)
    forward, input_grad, weight_grad = times
    costs = Costs.even(
        schedule.stages, forward=forward, input_grad=input_grad, weight_grad=weight_grad
    )
    return timeline(schedule, costs)


def torch_rows(kind: Any, p: int, m: int, chunks: int) -> list[list[Any]]:
    """Each rank's actions as torch computes them, without the process group that it asks for."""
    fields = SimpleNamespace(
        pp_group_size=p, _num_stages=p, num_stages=p * chunks, n_local_stages=chunks,
        _n_microbatches=m, microbatches_per_round=m // max(1, m // p), _stages=[None] * chunks,
    )  # fmt: skip
    if hasattr(kind, "_calculate_single_rank_operations"):
        return [kind._calculate_single_rank_operations(fields, rank) for rank in range(p)]
    return list(kind._get_pipeline_order(fields).values())


def actions_of(cell: Any) -> tuple[Action, ...]:
    """The actions in a cell of torch's grid, which may stand for two that run together."""
    if cell is None or "REDUCE_GRAD" in str(cell.computation_type):  # sums of gradients, and waits
        return ()
    return tuple(Action.parse(str(action)) for action in cell.sub_actions or (cell,))
