"""V-Min: two stages per rank in a V, a third of the activations of 1F1B.

Source: Qi et al., Pipeline Parallelism with Controllable Memory (arXiv 2405.15362). Use it when
V-Half still does not fit. V-Min loses most from unequal times, as every pass waits for the
previous one, at every microbatch.

A microbatch takes one slot per rank in both directions, the least possible. So the times that its
activations stay on a rank's two stages add up to about ``4 p`` slots. A microbatch starts every six
slots, so a rank holds at most ``(p + 4) // 3`` microbatches. Let forward, input gradient and weight
gradient all take ``T`` (each for half of a rank's layers, so 1F1B idles ``6 (p - 1) T``). Then for
``m >= p`` and ``p > 1`` the idle time is ``(4 p - 5) T``: the published two thirds within one
``T``. If 3 divides ``p`` the V turns two slots later, since two passes would fall into one slot
otherwise, and the idle time is ``2 T`` more.
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
