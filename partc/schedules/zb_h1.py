"""ZB-H1: 1F1B with split backwards; weight gradients fill the end, memory stays that of 1F1B.

Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2. Use it instead of
1F1B when backwards can be split: nothing but the order changes.

With times ``F``, ``I`` and ``W`` the idle time of a rank is ``(p - 1) (F + I - W)``, a third of the
``(p - 1) (F + I + W)`` of 1F1B when the three are equal. A rank holds at most ``p`` microbatches,
as the first rank does in 1F1B; later ranks put that off to have weight gradients left at the end.
"""

from __future__ import annotations

from partc.schedules.blocks import Orders, fill_weights, numbered
from partc.schedules.one_f_one_b import alternating


def zb_h1(ranks: int, microbatches: int, chunks: int = 1) -> Orders:
    """The orders of all ranks; one stage per rank, so ``chunks`` is 1."""
    assert chunks == 1
    orders = [
        numbered([(rank, kind) for kind in alternating(ranks - 1 - rank, microbatches, "I")])
        for rank in range(ranks)
    ]
    return fill_weights(orders, range(ranks), microbatches, limit=ranks)
