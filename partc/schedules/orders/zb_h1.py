"""ZB-H1: 1F1B with split backwards; weight gradients fill the end, memory stays that of 1F1B.

Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2. Use it instead of
1F1B when backwards can be split: nothing but the order changes.

With times ``W <= F, I`` and ``m >= p`` a rank idles ``(p - 1) (F + I - W)``, a third of the
``(p - 1) (F + I + W)`` of 1F1B if F, I and W take equal times. A rank holds at most ``p``
microbatches, as the first rank does in 1F1B; later ranks delay weight gradients, which then fill
the idle time at the end::

    zb-h1: 3 ranks, 4 microbatches, bubble 14.3%, a column is 1
    rank 0 holds 3 | 0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1 holds 3 | .   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2 holds 3 | .   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
"""

from __future__ import annotations

from partc.schedules.blocks import Orders, fill_weights, numbered
from partc.schedules.named import schedule
from partc.schedules.orders.one_f_one_b import alternating


@schedule("zb-h1", split=True)
def orders(ranks: int, microbatches: int, chunks: int = 1) -> Orders:
    """The orders of all ranks; one stage per rank, so ``chunks`` is 1."""
    assert chunks == 1
    passes = [
        numbered([(rank, kind) for kind in alternating(ranks - 1 - rank, microbatches, "I")])
        for rank in range(ranks)
    ]
    return fill_weights(passes, range(ranks), microbatches, limit=ranks)
