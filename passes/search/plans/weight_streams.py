"""How long a microbatch's backward waits for the weights it gathers and the gradients it reduces.

A unit needs its weights, and makes their gradients, one matrix after the other: it computes beside
the gathers of its other matrices, and only the reduction of its last one is left when it ends. The
gathers of the next unit start when a unit begins. One stream has all of these transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class UnitWork(NamedTuple):
    """Seconds of one unit's backward: computing, gathering its weights, reducing its gradients.

    ``matrices``: how many weights it gathers and reduces one by one.
    """

    computing: float
    gathers: float
    reductions: float
    matrices: int = 1


class Walked(NamedTuple):
    """Seconds that computing waits for weights, and for gradients at the end; when units end."""

    waited: float
    after: float
    ends: tuple[float, ...]


def backward_waits(units: Sequence[UnitWork]) -> Walked:
    """Walk units in the order in which they run, beside the stream of their transfers.

    >>> backward_waits([UnitWork(4.0, 2.0, 2.0), UnitWork(4.0, 2.0, 2.0)])
    Walked(waited=2.0, after=2.0, ends=(6.0, 10.0))
    >>> backward_waits([UnitWork(4.0, 2.0, 2.0, 2), UnitWork(4.0, 2.0, 2.0, 2)])
    Walked(waited=1.0, after=1.0, ends=(5.0, 9.0))
    """
    now = waited = 0.0
    arrived = stream = units[0].gathers
    ends = []
    for unit, following in pairwise([*units, UnitWork(0.0, 0.0, 0.0)]):
        computing, gathers, reductions, matrices = unit
        mine, arrived = arrived, max(stream, now) + following.gathers
        stream = arrived
        for matrix in range(1, matrices + 1):
            there = mine - gathers * (1 - matrix / matrices)
            waited += max(0.0, there - now)
            now = max(now, there) + computing / matrices
            stream = max(stream, now) + reductions / matrices
        ends.append(now)
    return Walked(waited, max(0.0, stream - now), tuple(ends))
