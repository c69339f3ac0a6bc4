"""How a pipeline's schedule adds up: its stages, and what its ranks wait for.

The formulas are those of even stages; ``tests/test_estimate.py`` holds them against simulated
schedules. A turn is the forward and backward of one microbatch on one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from partc.passes.search.laws import Floats

ROUNDS = 40  # halvings of an interval: stages are even to a billionth


def cut_evenly(seconds: Sequence[Floats]) -> list[tuple[int, int]]:
    """Cut a chain of units into stages, the slowest as fast as can be; ``seconds`` has for each
    stage what every unit takes there (the same array for those that are alike).

    Stages as ``(first, end)``. Where there are too few units, the last stages are empty.
    """
    num, units = len(seconds), len(seconds[0])
    sums = {id(each): np.concatenate([[0.0], np.cumsum(each)]) for each in seconds}
    ends = [sums[id(each)] for each in seconds]
    low, high = 0.0, max(float(each[-1]) for each in ends)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        fits = _greedy(ends, middle)[-1] == units
        low, high = (low, middle) if fits else (middle, high)
    edges = [0, *_greedy(ends, high)]
    if units >= num:  # none stays empty: each leaves a unit for every stage behind it
        edges = [min(end, units - num + at) for at, end in enumerate(edges)]
    return list(pairwise(edges))


def _greedy(ends: Sequence[Floats], limit: float) -> list[int]:
    """Where stages end that take as many units as the limit allows, from the first to the last."""
    cuts = [0]
    for there in ends:
        within = there[cuts[-1]] + limit * (1 + 1e-12)
        cuts.append(int(np.searchsorted(there, within, side="right")) - 1)
    return cuts[1:]


def bubble_s(schedule: str, others: float, weight_grads: float) -> float:
    """Seconds in which a rank has nothing to do.

    ``others``: the turns of the other ranks, one stage of each; ``weight_grads`` is what of them
    makes gradients of weights. 1F1B and interleaved: Narayanan et al. 2021 (arXiv 2104.04473);
    ZB-H1: Qi et al. 2024 (arXiv 2401.10241).
    """
    return max(0.0, others - 2 * weight_grads) if schedule == "zb-h1" else others


def sent_s(schedule: str, ranks: int, chunks: int, microbatches: int, send_s: float) -> float:
    """What of its messages between stages a step waits for, if sending one takes ``send_s``.

    1F1B has a microbatch under way for each stage that follows, so every message but those of the
    last stages stands in the way; interleaved stages and ZB-H1 have something else to do.
    """
    if schedule == "zb-h1":
        return 4 * (ranks - 1) * send_s
    if chunks > 1:
        return 2 * (chunks * ranks - 1) * send_s
    return (2 * (ranks - 1) / ranks * microbatches + 2 * (ranks - 2)) * send_s


def in_flight(ranks: int, chunks: int, microbatches: int, rank: int) -> float:
    """Microbatches whose activations a rank holds, in whole ranks' worth of stages times chunks."""
    if ranks == 1:
        return 1.0 if microbatches == 1 else float(chunks)
    if chunks > 1:
        most = chunks * ranks + ranks - 1 - 2 * rank + ranks - 1
        return float(min(microbatches * chunks, most))
    return float(min(microbatches, ranks - rank))
