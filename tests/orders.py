"""Orders of pipeline actions: what has to run before what, and random ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from partc.schedules.actions import Action, Kind, Schedule


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
