"""How a pipeline's schedule adds up: its stages, and what its ranks wait for.

The formulas are those of even stages; ``tests/test_estimate.py`` holds them against simulated
schedules. A turn is the forward and backward of one microbatch on one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

ROUNDS = 40  # halvings of an interval: stages are even to a billionth


def cut_evenly(seconds: Sequence[float], num: int) -> list[tuple[int, int]]:
    """Cut a chain of units that take so long into ``num`` stages, the slowest as fast as can be.

    Stages as ``(first, end)``. Where there are too few units, the last stages are empty.
    """
    ends = np.concatenate([[0.0], np.cumsum(seconds)])
    low, high = max(seconds), float(ends[-1])
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        fits = len(_greedy(ends, middle)) <= num
        low, high = (low, middle) if fits else (middle, high)
    cuts = _greedy(ends, high)
    edges = [0, *cuts, *[len(seconds)] * (num - len(cuts))]
    if len(seconds) >= num:  # none stays empty: each leaves a unit for every stage behind it
        edges = [min(end, len(seconds) - num + at) for at, end in enumerate(edges)]
    return list(pairwise(edges))


def _greedy(ends: np.typing.NDArray[np.float64], limit: float) -> list[int]:
    """Where stages end that take as many units as the limit allows."""
    cuts = [0]
    while cuts[-1] < len(ends) - 1:
        within = ends[cuts[-1]] + limit * (1 + 1e-12)
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(ends, within, side="right")) - 1))
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
