"""V-Half: two stages per rank in a V, half the activations of 1F1B and half its bubble.

Source: Qi et al., Pipeline Parallelism with Controllable Memory (arXiv 2405.15362). Use it when
activations are what keeps a larger model or batch out of memory.

A microbatch takes two slots per rank on the way to the last rank and one slot on the way back. So
the times that its activations stay on a rank's two stages add up to about ``6 p`` slots. A
microbatch starts every six slots, so a rank holds at most ``(p + 2) // 2`` microbatches. Let
forward, input gradient and weight gradient all take ``T`` (each for half of a rank's layers, so
1F1B idles ``6 (p - 1) T``). Then for ``m >= p`` and ``p > 1`` the idle time is ``3 (p - 1) T``, the
published half, and ``T`` less if ``p`` is odd. For even ``p`` the V turns three slots later, since
two passes would fall into one slot otherwise. With unequal times, ranks may wait at every
microbatch, not only at the start and the end; `timing.timeline` gives the numbers.
"""

from __future__ import annotations

from partc.schedules.actions import v_shaped
from partc.schedules.blocks import Orders, fill_weights, repeated, v_block
from partc.schedules.named import schedule


@schedule("v-half", chunks=(2, 2), split=True, placement="v")
def orders(ranks: int, microbatches: int, chunks: int = 2) -> Orders:
    """The orders of all ranks; two stages per rank, so ``chunks`` is 2."""
    assert chunks == 2
    turns = (1, 1, 2) if ranks % 2 else (1, 4, 2)
    passes = repeated(v_block(ranks, down=2, up=1, turns=turns), microbatches)
    limit = 2 * ((ranks + 2) // 2)
    return fill_weights(passes, v_shaped(ranks), microbatches, limit)
