"""ZB-V: two stages per rank in a V, no idle time inside a rank's span, and the memory of 1F1B.

Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section on ZB-V; called V-ZB
in arXiv 2405.15362. Use it when links carry twice the transfers of 1F1B easily and forward, input
gradient and weight gradient take about the same time.

If these times are equal and ``m >= 2 p - 1``, no rank idles between its own first start and its own
end; the only idle time is the ``p - 1`` slots by which the last rank starts later. With fewer
microbatches the order comes from the building block of arXiv 2405.15362 instead: from ``m = p`` on
a rank also idles ``p - 1`` slots, but not all of them at the ends. Every rank holds at most ``2 p``
stage activations, the memory of ``p`` microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator

from partc.schedules.actions import v_shaped
from partc.schedules.blocks import Orders, fill_weights, numbered, repeated, v_block
from partc.schedules.named import schedule


@schedule("zb-v", chunks=(2, 2), split=True, placement="v")
def orders(ranks: int, microbatches: int, chunks: int = 2) -> Orders:
    """The orders of all ranks; two stages per rank, so ``chunks`` is 2."""
    assert chunks == 2
    if microbatches < 2 * ranks - 1:
        passes = repeated(v_block(ranks, down=4, up=2, turns=(1, 1, 1)), microbatches)
        return fill_weights(passes, v_shaped(ranks), microbatches, limit=2 * ranks)
    return [numbered(_steps(rank, ranks, microbatches)) for rank in range(ranks)]


def _steps(rank: int, ranks: int, microbatches: int) -> Iterator[tuple[int, str]]:
    """The actions (stage, kind) of one rank.

    ``down`` is the rank's stage on the way to the last rank, ``up`` its stage on the way back.
    """
    down, up = rank, 2 * ranks - 1 - rank
    after = ranks - rank  # ranks from here to the turn, this one included
    yield from [(down, "F")] * (2 * after - 1)
    yield from [(up, "F"), (down, "F")] * rank
    yield from [(up, "F"), (up, "I"), (up, "W")] * after
    started = 2 * after - 1 + rank  # forwards of `down` that are under way by now
    for turn in range(microbatches - ranks):
        if started + turn < microbatches:
            yield down, "F"
        yield from [(down, "I"), (down, "W"), (up, "F"), (up, "I"), (up, "W")]
    yield from [(down, "I"), (up, "I")] * rank
    yield from [(down, "I"), (down, "W")] * after
    yield from [(up, "W")] * rank
    yield from [(down, "W")] * rank
