"""Interleaved 1F1B: every rank has several stages, dealt out in turns; the pipeline fills sooner.

Source: Narayanan et al., Megatron-LM (arXiv 2104.04473). Use it when microbatches are few for the
number of ranks and the links can carry ``v`` times the transfers, for ``v`` stages per rank.

The bubble is ``(p - 1) / (v m + p - 1)`` of the time if ``m >= p``, for ``p`` ranks and ``m``
microbatches: the idle time of 1F1B divided by ``v``. Rank ``r`` holds
``min(v m, (v - 1) k + 2 (p - 1 - r) + 1)`` stage activations, each ``1/v`` of the size that a stage
has in 1F1B; ``k`` is the number of microbatches of a round (``p`` in the paper).

In the paper, microbatches go through a rank's stages in rounds of ``p``, and ``p`` must divide
``m``. Here, as in torch, there are ``max(1, m // p)`` rounds, whose sizes may differ by one (larger
rounds first), so every ``m`` works. Rounds of more than ``p`` cost memory but no time. With
``m < p`` there is one round of fewer than ``p``, and all ranks wait between stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from partc.schedules.actions import Action, Kind
from partc.schedules.blocks import Orders
from partc.schedules.named import schedule


@schedule("interleaved-1f1b", chunks=(2, None))
def orders(ranks: int, microbatches: int, chunks: int) -> Orders:
    """The orders of all ranks, each with ``chunks`` stages."""
    return [_order(rank, ranks, microbatches, chunks) for rank in range(ranks)]


def rounds(ranks: int, microbatches: int) -> list[range]:
    """The microbatches of each round, in which they go through all stages of a rank.

    >>> rounds(4, 11)
    [range(0, 6), range(6, 11)]
    """
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    starts = [n * size + min(n, larger) for n in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def _order(rank: int, ranks: int, microbatches: int, chunks: int) -> tuple[Action, ...]:
    stages = [rank + ranks * chunk for chunk in range(chunks)]
    turns = rounds(ranks, microbatches)
    forwards = _in_rounds(turns, stages, "F")
    backwards = _in_rounds(turns, reversed(stages), "B")
    # The forwards before the first backward, as in Megatron-LM's warm-up: a round for each of the
    # rank's stages but the last, and two for each rank between this one and the last.
    ahead = min((chunks - 1) * len(turns[0]) + 2 * (ranks - 1 - rank), len(forwards))
    steady = zip(forwards[ahead:], backwards, strict=False)
    both = [action for pair in steady for action in pair]
    return (*forwards[:ahead], *both, *backwards[len(forwards) - ahead :])


def _in_rounds(turns: list[range], stages: Iterable[int], kind: Kind) -> list[Action]:
    stages = list(stages)
    return [Action(s, kind, i) for turn in turns for s in stages for i in turn]
