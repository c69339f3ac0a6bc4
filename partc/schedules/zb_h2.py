"""ZB-H2: twice the forwards of 1F1B before the first backward, so that no rank ever idles between.

Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2. Use it when there
is memory for twice the activations of 1F1B.

With times ``F``, ``I`` and ``W`` a rank idles ``(p - 1) (F + I - 2 W)`` between its own first start
and its own end: not at all when the three are equal. (The ``p - 1`` slots by which the last rank
starts later remain, unless the next step follows without a barrier.) A rank holds at most ``2 p -
1`` microbatches. For this ``m >= 2 p - 1`` is needed; fewer microbatches leave a bubble.
"""

from __future__ import annotations

from partc.schedules.blocks import Orders, fill_weights, numbered
from partc.schedules.one_f_one_b import alternating


def zb_h2(ranks: int, microbatches: int, chunks: int = 1) -> Orders:
    """The orders of all ranks; one stage per rank, so ``chunks`` is 1."""
    assert chunks == 1
    orders = [
        numbered([(rank, kind) for kind in alternating(2 * (ranks - 1 - rank), microbatches, "I")])
        for rank in range(ranks)
    ]
    return fill_weights(orders, range(ranks), microbatches, limit=2 * ranks - 1)
