"""GPipe: all forwards, then all backwards.

Source: Huang et al., GPipe (arXiv 1811.06965). Use it when activations are recomputed or small, or
as the baseline: every rank changes from forwards to backwards only once.

Bubble ``(p - 1) / (m + p - 1)`` of the time, for ``p`` ranks and ``m`` microbatches; every rank
holds the activations of all ``m`` microbatches::

    gpipe: 3 ranks, 4 microbatches, bubble 33.3%, a column is 1
    rank 0 holds 4 | 0F0 0F1 0F2 0F3 .   .   .   .   .   .   0B0---- 0B1---- 0B2---- 0B3----
    rank 1 holds 4 | .   1F0 1F1 1F2 1F3 .   .   .   1B0---- 1B1---- 1B2---- 1B3---- .   .
    rank 2 holds 4 | .   .   2F0 2F1 2F2 2F3 2B0---- 2B1---- 2B2---- 2B3---- .   .   .   .
"""

from __future__ import annotations

from partc.schedules.blocks import Orders, numbered
from partc.schedules.named import schedule


@schedule("gpipe")
def orders(ranks: int, microbatches: int, chunks: int = 1) -> Orders:
    """The orders of all ranks; one stage per rank, so ``chunks`` is 1."""
    assert chunks == 1
    passes = ["F"] * microbatches + ["B"] * microbatches
    return [numbered([(rank, kind) for kind in passes]) for rank in range(ranks)]
