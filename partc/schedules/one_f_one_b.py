"""1F1B: as soon as a rank has its first backward, forwards and backwards alternate.

Source: Narayanan et al., PipeDream-Flush (arXiv 2006.09503); Megatron-LM (arXiv 2104.04473). Use it
by default: as fast as GPipe, and what a rank holds does not grow with the microbatches.

Bubble ``(p - 1) / (m + p - 1)`` of the time; rank ``r`` holds ``min(m, p - r)`` microbatches.
"""

from __future__ import annotations

from partc.schedules.blocks import Orders, numbered


def one_f_one_b(ranks: int, microbatches: int, chunks: int = 1) -> Orders:
    """The orders of all ranks; one stage per rank, so ``chunks`` is 1."""
    assert chunks == 1
    return [
        numbered([(rank, kind) for kind in alternating(ranks - 1 - rank, microbatches, "B")])
        for rank in range(ranks)
    ]


def alternating(ahead: int, microbatches: int, backward: str) -> list[str]:
    """Kinds of a rank's actions if ``ahead`` forwards come before forward and backward alternate.

    >>> "".join(alternating(1, 3, "B"))
    'FFBFBB'
    """
    ahead = min(ahead, microbatches)
    return ["F"] * ahead + ["F", backward] * (microbatches - ahead) + [backward] * ahead
