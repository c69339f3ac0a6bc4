"""Measured times, and the straight line (latency, seconds per byte) that fits them best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median, quantiles

from partc.errors import RunError

NOISY = 0.5  # a spread beyond which a median says little


@dataclass(frozen=True)
class Measured:
    """Some work that was timed several times.

    ``amount``: FLOPs or bytes of the work. ``samples``: seconds of each run, equal on all ranks.
    """

    work: str
    what: str  # in words, "f32[64,64] @ f32[64,64]"
    amount: float
    samples: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return median(self.samples)

    @property
    def rate(self) -> float:
        """FLOP/s or bytes/s."""
        return self.amount / self.seconds

    @property
    def spread(self) -> float:
        """The interquartile range of the samples over their median."""
        low, _, high = quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.seconds

    @property
    def is_noisy(self) -> bool:
        return self.spread > NOISY

    def __str__(self) -> str:
        rate = f"{self.rate:.3g}/s" if self.amount else ""
        return f"{self.work} {self.what}: {self.seconds:.3g} s {rate} spread {self.spread:.0%}"


@dataclass(frozen=True)
class Line:
    """``latency_s + s_per_byte * n``; ``worst``: the factor by which the worst point is off."""

    latency_s: float
    s_per_byte: float
    worst: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + self.s_per_byte * num_bytes


def fit_line(what: str, points: Sequence[tuple[float, float]]) -> Line:
    """The line through two of the points (amount, seconds) that is nearest to all of them.

    Of the lines with a latency and a slope above 0 it has the least sum of |log(line / measured)|:
    as in least absolute deviations, a few points that are far off do not move it, and small
    amounts count as much as large ones. RunError where there is none.
    """
    fits = [
        line
        for (n, t), (more, longer) in combinations(sorted(points), 2)
        if more > n and (line := _through(n, t, more, longer))
    ]
    if not fits:
        told = ", ".join(f"{n:g}: {t:.3g} s" for n, t in sorted(points))
        raise RunError(
            where=f"calibrate, {what}",
            what="no latency and bandwidth above 0 explain what was measured",
            why=told,
            do="Measure again while nothing else runs on these machines.",
        )
    best = min(fits, key=lambda line: sum(_errors(line, points)))
    return Line(*best, worst=math.exp(max(_errors(best, points))))


def _through(n: float, t: float, more: float, longer: float) -> tuple[float, float] | None:
    slope = (longer - t) / (more - n)
    latency = t - slope * n
    return (latency, slope) if latency > 0 and slope > 0 else None


def _errors(line: tuple[float, float], points: Sequence[tuple[float, float]]) -> list[float]:
    return [abs(math.log((line[0] + line[1] * n) / t)) for n, t in points]
