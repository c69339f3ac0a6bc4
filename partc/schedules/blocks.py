"""Orders from building blocks: repeat the block of one microbatch, then fill in ``W``.

A building block gives the time slot of every forward and backward of one microbatch on every rank.
Every following microbatch runs the same block six slots later (Qi et al., arXiv 2405.15362). A
rank's memory follows from the block: the longer a microbatch stays on a rank, the more microbatches
the rank holds at once.
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
    """Number a rank's steps (stage, kind): the n-th step of a stage and kind is microbatch n.

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
    """The orders without the actions of microbatches from ``microbatches`` on.

    Orders that can run stay runnable, since no microbatch needs a later one.
    """
    return [tuple(a for a in order if a.microbatch < microbatches) for order in orders]


def v_block(ranks: int, down: int, up: int, turns: tuple[int, int, int]) -> Block:
    """The building block of a V placement: two stages per rank, through the ranks and back.

    From one rank to the next, a microbatch takes ``down`` slots on the way to the last rank and
    ``up`` slots on the way back. ``turns`` are the slots between two passes on the rank where the
    microbatch turns: forward to forward at the last rank, forward to backward at the first, and
    backward to backward at the last. ``turns`` must be such that no two passes of a rank fall into
    the same slot modulo ``SLOTS``: the microbatches of the repeated block would collide.
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
    """The orders of ``F`` and ``I`` if each microbatch runs the block ``SLOTS`` after the last."""
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
    """Add the ``W`` actions to orders of ``F`` and ``I``: each ``W`` where its rank would idle.

    Every action lasts one slot. A rank runs the next action of its order as soon as its inputs are
    there, else the oldest ``W`` that is left. A rank holds at most ``limit`` stage activations,
    each from ``F`` to ``W``: a forward beyond the limit waits until a ``W`` has run. The orders
    must be able to keep the limit if each ``W`` directly follows its ``I``.
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
            # No other rank waits for a W, so it costs nothing in a slot that the order leaves idle.
            # Where memory holds a forward up, it is also what frees the memory.
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
