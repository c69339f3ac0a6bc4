"""Seconds that the search's solver takes beside HiGHS, on graphs of the shapes that models have.

Run ``python -m benchmarks.solver``; ``--no-highs`` leaves out what takes minutes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partc.passes.search.problem import Factor, Problem, Variable


def chain(num: int, choices: int, skips: Sequence[int] = (1,)) -> Problem:
    """Every variable shares a table with those so many places behind it; all tables differ."""
    random = np.random.default_rng(0)
    factors = [
        Factor((v, v + skip), random.random((choices, choices)))
        for v in range(num)
        for skip in skips
        if v + skip < num
    ]
    return Problem(_variables(num, choices, random), tuple(factors))


def ladder(num: int, choices: int) -> Problem:
    """A forward chain with skips, a backward chain, and a rung from each value to its gradient."""
    random = np.random.default_rng(0)
    half = num // 2
    pairs = [(v, v + half) for v in range(half)]
    pairs += [(v, v + 1) for v in range(num - 1) if v + 1 != half]
    pairs += [(v, v + 3) for v in range(0, half - 3, 3)]
    factors = [Factor(pair, random.random((choices, choices))) for pair in pairs]
    return Problem(_variables(num, choices, random), tuple(factors))


def _variables(num: int, choices: int, random: np.random.Generator) -> tuple[Variable, ...]:
    names = tuple(f"choice {c}" for c in range(choices))
    return tuple(Variable(f"v{v}", names, random.random(choices)) for v in range(num))
