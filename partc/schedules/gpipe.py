"""GPipe: all forwards, then all backwards.

Source: Huang et al., GPipe (arXiv 1811.06965). Use it when activations are recomputed or small, or
as the baseline: nothing is simpler, and every rank turns round once only.

Bubble ``(p - 1) / (m + p - 1)`` of the time, for ``p`` ranks and ``m`` microbatches; every rank
holds the activations of all ``m`` microbatches. Three ranks, four microbatches::

    rank 0  F0 F1 F2 F3                   B0    B1    B2    B3
"""

from __future__ import annotations

from partc.schedules.blocks import Orders, numbered


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Orders:
    """The orders of all ranks; one stage per rank, so ``chunks`` is 1."""
    assert chunks == 1
    passes = ["F"] * microbatches + ["B"] * microbatches
    return [numbered([(rank, kind) for kind in passes]) for rank in range(ranks)]
