"""V-Min: two stages per rank in a V, a third of the activations of 1F1B.

Source: Qi et al., Pipeline Parallelism with Controllable Memory (arXiv 2405.15362). Use it when
V-Half still does not fit: it suffers most from unequal times, as every pass waits for the one
before, at every microbatch.

A microbatch takes one slot per rank both ways, the least there is, so its lives on a rank's two
stages add up to about ``4 p`` slots: as one starts every six, a rank holds ``(p + 4) // 3``
microbatches at most. With equal times ``T`` of forward, input and weight gradient (of half a rank's
layers each, so 1F1B idles ``6 (p - 1) T``), ``m >= p`` and ``p > 1`` the idle time is
``(4 p - 5) T``, and ``2 T`` more if 3 divides ``p``: the published two thirds within one ``T``. The
V then turns two slots later, as two passes would fall into one slot otherwise.
"""

from __future__ import annotations

from partc.schedules.actions import v_shaped
from partc.schedules.blocks import Orders, fill_weights, repeated, v_block
from partc.schedules.named import schedule


@schedule("v-min", chunks=(2, 2), split=True, placement="v")
def orders(ranks: int, microbatches: int, chunks: int = 2) -> Orders:
    """The orders of all ranks; two stages per rank, so ``chunks`` is 2."""
    assert chunks == 2
    turns = (1, 1, 1) if ranks % 3 else (1, 3, 1)
    passes = repeated(v_block(ranks, down=1, up=1, turns=turns), microbatches)
    limit = 2 * ((ranks + 4) // 3)
    return fill_weights(passes, v_shaped(ranks), microbatches, limit)
