"""Orders from building blocks: number the steps, repeat one microbatch's block, fill in ``W``.

A building block says in which slot of time each rank runs each pass of one microbatch; every
following microbatch does the same some slots later (Qi et al., arXiv 2405.15362). How long a
microbatch lives on a rank then decides what the rank holds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from partc.schedules.actions import Action

Order = tuple[Action, ...]
Orders = list[Order]
Block = list[dict[tuple[int, str], int]]  # per rank: slot of each of its stages' F and I
SLOTS = 6  # between one microbatch and the next: two stages, each with F, I and W


def numbered(steps: Iterable[tuple[int, str]]) -> Order:
    """Give the steps (stage and kind) of a rank their microbatches, counted from 0 for each.

    >>> " ".join(map(str, numbered([(0, "F"), (0, "F"), (0, "B"), (0, "B")])))
    '0F0 0F1 0B0 0B1'
    """
    seen: Counter[tuple[int, str]] = Counter()
    order = []
    for stage, kind in steps:
        order.append(Action(stage, kind, seen[stage, kind]))  # type: ignore[arg-type]
        seen[stage, kind] += 1
    return tuple(order)


def first_microbatches(orders: Iterable[Order], microbatches: int) -> Orders:
    """Leave out later microbatches; what can run with them can run without."""
    return [tuple(a for a in order if a.microbatch < microbatches) for order in orders]


def v_block(ranks: int, down: int, up: int, turns: tuple[int, int, int]) -> Block:
    """A V's block: its passes take ``down`` slots from rank to rank on the way down, ``up`` back.

    ``turns`` are the slots from a pass to the next one on the rank where the way turns: forwards
    at the last rank, forward to backward at the first, backwards at the last. No two passes may
    fall into one slot modulo ``SLOTS``, which is what ``turns`` are chosen for.
    """
    first = [down * rank for rank in range(ranks)]
    second = [first[-1] + turns[0] + up * (ranks - 1 - rank) for rank in range(ranks)]
    third = [second[0] + turns[1] + down * rank for rank in range(ranks)]
    fourth = [third[-1] + turns[2] + up * (ranks - 1 - rank) for rank in range(ranks)]
    block: Block = []
    for rank, slots in enumerate(zip(first, second, third, fourth, strict=True)):
        back = 2 * ranks - 1 - rank
        passes = [(rank, "F"), (back, "F"), (back, "I"), (rank, "I")]
        block.append(dict(zip(passes, slots, strict=True)))
        assert len({slot % SLOTS for slot in slots}) == 4
    return block


def repeated(block: Block, microbatches: int) -> Orders:
    """The block for every microbatch, ``SLOTS`` later each: the orders of ``F`` and ``I``."""
    orders = []
    for passes in block:
        timed = [
            (slot + SLOTS * i, Action(stage, kind, i))  # type: ignore[arg-type]
            for (stage, kind), slot in passes.items()
            for i in range(microbatches)
        ]
        orders.append(tuple(action for _, action in sorted(timed)))
    return orders


def fill_weights(
    orders: Sequence[Order], rank_of: Sequence[int], microbatches: int, limit: int
) -> Orders:
    """Squeeze orders of ``F`` and ``I``, and put each ``W`` where its rank would idle.

    All passes are taken to last one slot. A rank runs the next pass of its order as soon as it
    can; else the oldest ``W`` that is left. It holds at most ``limit`` stage activations, from
    ``F`` to ``W``: a forward that would be one more lets a ``W`` go first. The limit must be one
    that the orders can keep when each ``W`` follows its ``I``.
    """
    late = len(rank_of) * microbatches * 6  # later than any slot
    done = {
        kind: [[late] * microbatches for _ in rank_of] + [[0] * microbatches] for kind in "FI"
    }  # stage -1 (no forward before the first) and stage `stages` (no backward behind the last)
    left = [deque(order) for order in orders]
    pending: list[deque[Action]] = [deque() for _ in orders]
    filled: list[list[Action]] = [[] for _ in orders]
    held = [0] * len(orders)
    slot = 0
    while any(left) or any(pending):
        before = sum(map(len, filled))
        for rank, order in enumerate(filled):
            if left[rank] and _ready(left[rank][0], done, slot, held[rank] < limit):
                action = left[rank].popleft()
                done[action.kind][action.stage][action.microbatch] = slot + 1
                if action.kind == "F":
                    held[rank] += 1
                else:
                    pending[rank].append(action)
            elif pending[rank]:
                action = pending[rank].popleft()._replace(kind="W")
                held[rank] -= 1
            else:
                continue
            order.append(action)
        assert sum(map(len, filled)) > before, "the orders cannot run within the limit"
        slot += 1
    return [tuple(order) for order in filled]


def _ready(action: Action, done: dict[str, list[list[int]]], slot: int, room: bool) -> bool:
    stage, kind, microbatch = action
    if kind == "F":
        return room and done["F"][stage - 1][microbatch] <= slot
    ready = max(done["F"][stage][microbatch], done["I"][stage + 1][microbatch])
    return ready <= slot
