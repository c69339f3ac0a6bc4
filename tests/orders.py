"""Random orders of pipeline actions."""

from __future__ import annotations

import random
from collections.abc import Sequence

from partc.schedules.actions import Action, Kind, Schedule, dependencies


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
