"""ZB-H2: twice the forwards of 1F1B before the first backward, so that no rank ever idles between.

Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2. Use it when there
is memory for twice the activations of 1F1B.

With times ``W <= F, I`` a rank idles ``(p - 1) (F + I - 2 W)`` between its own first start
and its own end: not at all if F, I and W take equal times. (The ``p - 1`` slots by which the last
rank starts later remain, unless the next step follows without a barrier.) A rank holds at most
``2 p - 1`` microbatches. All this needs ``m >= 2 p - 1``; fewer microbatches leave a bubble::

    zb-h2: 3 ranks, 4 microbatches, bubble 14.3%, a column is 1
    rank 0 holds 4 | 0F0 0F1 0F2 0F3 .   0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 .
    rank 1 holds 4 | .   1F0 1F1 1F2 1I0 1F3 1I1 1W0 1I2 1W1 1I3 1W2 1W3 .
    rank 2 holds 4 | .   .   2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2W1 2W2 2W3
"""

from __future__ import annotations

from partc.schedules.blocks import Orders, fill_weights, numbered
from partc.schedules.named import schedule
from partc.schedules.orders.one_f_one_b import alternating


@schedule("zb-h2", split=True)
def orders(ranks: int, microbatches: int, chunks: int = 1) -> Orders:
    """The orders of all ranks; one stage per rank, so ``chunks`` is 1."""
    assert chunks == 1
    passes = [
        numbered([(rank, kind) for kind in alternating(2 * (ranks - 1 - rank), microbatches, "I")])
        for rank in range(ranks)
    ]
    return fill_weights(passes, range(ranks), microbatches, limit=2 * ranks - 1)
