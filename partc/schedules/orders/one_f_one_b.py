"""1F1B: as soon as a rank has its first backward, forwards and backwards alternate.

Source: Narayanan et al., PipeDream-Flush (arXiv 2006.09503); Megatron-LM (arXiv 2104.04473). Use it
by default: as fast as GPipe, and a rank's memory does not grow with the number of microbatches.

The bubble is ``(p - 1) / (m + p - 1)`` of the time, for ``p`` ranks and ``m`` microbatches; rank
``r`` holds the activations of ``min(m, p - r)`` microbatches::

    1f1b: 3 ranks, 4 microbatches, bubble 33.3%, a column is 1
    rank 0 holds 3 | 0F0 0F1 0F2 .   .   .   .   0B0---- 0F3 0B1---- .   0B2---- .   0B3----
    rank 1 holds 2 | .   1F0 1F1 .   .   1B0---- 1F2 1B1---- 1F3 1B2---- .   1B3---- .   .
    rank 2 holds 1 | .   .   2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3---- .   .   .   .
"""

from __future__ import annotations

from partc.schedules.blocks import Orders, numbered
from partc.schedules.named import schedule


@schedule("1f1b")
def orders(ranks: int, microbatches: int, chunks: int = 1) -> Orders:
    """The orders of all ranks; one stage per rank, so ``chunks`` is 1."""
    assert chunks == 1
    return [
        numbered([(rank, kind) for kind in alternating(ranks - 1 - rank, microbatches, "B")])
        for rank in range(ranks)
    ]


def alternating(ahead: int, microbatches: int, backward: str) -> list[str]:
    """The kinds of a rank's actions: ``ahead`` forwards first, then forward and backward in turns.

    >>> "".join(alternating(1, 3, "B"))
    'FFBFBB'
    """
    ahead = min(ahead, microbatches)
    return ["F"] * ahead + ["F", backward] * (microbatches - ahead) + [backward] * ahead
