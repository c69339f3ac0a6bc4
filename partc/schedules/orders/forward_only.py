"""Forward only: for evaluation and inference; no backward follows.

The bubble is ``(p - 1) / (v m + p - 1)`` of the time if ``m >= p``, for ``p`` ranks, ``m``
microbatches and ``v`` stages per rank. No activations are held, as no backward needs them. With
several stages per rank, microbatches go through in rounds as in interleaved 1F1B: so a microbatch
leaves the pipeline early, and few are under way at a time.
"""

from __future__ import annotations

from partc.schedules.actions import Action
from partc.schedules.blocks import Orders
from partc.schedules.named import schedule
from partc.schedules.orders.interleaved import rounds


@schedule("forward-only", chunks=(1, None))
def orders(ranks: int, microbatches: int, chunks: int = 1) -> Orders:
    """The orders of all ranks, each with ``chunks`` stages."""
    turns = rounds(ranks, microbatches)
    stages = [range(rank, ranks * chunks, ranks) for rank in range(ranks)]
    return [tuple(Action(s, "F", i) for turn in turns for s in own for i in turn) for own in stages]
