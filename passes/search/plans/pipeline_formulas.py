"""Formulas for a pipeline's stages, bubble, exposed messages and microbatches in flight.

The formulas assume even stages; ``tests/search/test_estimate.py`` compares them with simulated
schedules. A schedule without a formula is simulated with even stages. A turn is the forward and
backward of one microbatch on one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from partc.passes.search.plans.candidate import Candidate
from partc.passes.search.plans.scaling_model import Floats
from partc.schedules import make
from partc.schedules.timing import Costs, Row, timeline

ROUNDS = 40  # of bisection: the slowest stage is then known to 2**-40 of the chain's time
HAVE_FORMULAS = ("1f1b", "interleaved-1f1b", "zb-h1")
SEND = 0.03  # the time of one send, in turns, where a schedule is simulated


def cut_evenly(seconds: Sequence[Floats]) -> list[tuple[int, int]]:
    """Cut a chain of units into stages so that the slowest stage is as fast as possible.

    ``seconds[stage]`` has every unit's seconds on the stage's devices; equal devices share an
    array. Returns a range ``(first, end)`` of units per stage; with too few units the last stages
    are empty.
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
    """The ends of stages that, from first to last, each take as many units as fit ``limit``
    seconds.
    """
    cuts = [0]
    for there in ends:
        within = there[cuts[-1]] + limit * (1 + 1e-12)
        cuts.append(int(np.searchsorted(there, within, side="right")) - 1)
    return cuts[1:]


def bubble_s(one: Candidate, others: float, weight_grads: float) -> float:
    """The bubble: seconds of a step in which a rank is idle.

    ``others`` are the seconds of one turn on one stage of each other rank, ``weight_grads`` the
    part of them that computes weight gradients. 1F1B and interleaved: Narayanan et al. 2021
    (arXiv 2104.04473); ZB-H1: Qi et al. 2024 (arXiv 2401.10241).
    """
    if one.pp == 1 or not others:
        return 0.0
    if not _has_formula(one):
        return _even_stages(one, weight_grads / others).idle * others / (one.pp - 1)
    return max(0.0, others - 2 * weight_grads) if one.schedule == "zb-h1" else others


def least_bubble_s(one: Candidate, others: float, weight_grads: float) -> float:
    """A lower bound on ``bubble_s`` that needs no simulation."""
    return bubble_s(one, others, weight_grads) if _has_formula(one) else 0.0


def sent_s(one: Candidate, send_s: float) -> float:
    """The exposed seconds of a step's messages between stages, if one send takes ``send_s``.

    Under 1F1B a rank waits for almost every message, as it has only as many microbatches in flight
    as stages follow. Interleaved stages and ZB-H1 have other work meanwhile.
    """
    ranks = one.pp
    if not _has_formula(one):
        return _even_stages(one).sends * send_s
    if one.schedule == "zb-h1":
        return 4 * (ranks - 1) * send_s
    if one.chunks > 1:
        return 2 * (one.chunks * ranks - 1) * send_s
    return (2 * (ranks - 1) / ranks * one.microbatches + 2 * (ranks - 2)) * send_s


def in_flight(one: Candidate, rank: int) -> float:
    """Microbatches in flight on a rank: the number whose activations of one stage it holds.

    With several virtual stages (chunks) per rank, a microbatch counts once for each of them.
    """
    ranks, chunks, microbatches = one.pp, one.chunks, one.microbatches
    if ranks == 1:
        return 1.0 if microbatches == 1 else float(chunks)
    if not _has_formula(one):
        return _even_stages(one).peaks[rank]
    if chunks > 1:
        most = chunks * ranks + ranks - 1 - 2 * rank + ranks - 1
        return float(min(microbatches * chunks, most))
    return float(min(microbatches, ranks - rank))


def _has_formula(one: Candidate) -> bool:
    whole_rounds = one.chunks == 1 or one.microbatches % one.pp == 0
    return one.schedule in HAVE_FORMULAS and whole_rounds


@dataclass(frozen=True)
class _Even:
    """A simulated schedule of even stages, in turns (a turn takes 1)."""

    idle: float
    sends: float  # the exposed sends, in units of one send
    peaks: Row  # most microbatches in flight per rank, counted once for each of its stages


def _even_stages(one: Candidate, weight_grads: float = 1 / 3) -> _Even:
    """Simulate a candidate's schedule.

    ``weight_grads`` is the share of a turn for weight gradients; forward and input gradients take
    half of the rest each.
    """
    twelfths = min(round(12 * weight_grads), 11)  # rounded, so that the cache is hit more often
    return _simulated(one.schedule, one.pp, one.chunks, one.microbatches, twelfths / 12)


@lru_cache(maxsize=4096)
def _simulated(
    schedule: str, ranks: int, chunks: int, microbatches: int, weight_grads: float
) -> _Even:
    order = make(schedule, ranks=ranks, microbatches=microbatches, chunks=chunks)
    each = (1 - weight_grads) / 2
    at_once, sending = (
        timeline(
            order,
            Costs.even(
                ranks * chunks, forward=each, input_grad=each, weight_grad=weight_grads,
                transfer=transfer,
            ),
        )
        for transfer in (0.0, SEND)
    )  # fmt: skip
    sends = (sending.makespan - at_once.makespan) / SEND
    return _Even(at_once.makespan - chunks * microbatches, sends, at_once.peaks)
