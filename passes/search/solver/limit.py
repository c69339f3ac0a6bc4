"""Minimise within limits on resources: a price per unit, raised until the choices fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from partc.passes.search.solver.network import network
from partc.passes.search.solver.problem import Assignment, Costs, Problem
from partc.passes.search.solver.repair import Repair

ROUNDS = 40
_CLOSE = 1e-7  # relative: the prices are as good as the linear program can tell
# Prices are looked for up to this; it is raised so often by so much. The unit is the price at
# which the whole limit costs as much as the problem without one.
_HIGHEST, _WIDER, _TIMES = 10.0, 1e3, 2


@dataclass(frozen=True)
class Priced:
    """A cheapest assignment at some prices. No assignment costs less than ``bound``, what it pays
    for resources included; inf if all are forbidden.
    """

    assignment: Assignment
    bound: float


Minimise = Callable[[Mapping[str, float]], Priced]


@dataclass(frozen=True)
class Limited:
    """``assignment`` fits the limits, or is None if none was found. None that fits costs less than
    ``bound``, which is inf if it is proven that none fits. ``prices`` (cost per unit, by resource)
    give this bound; ``closest`` exceeds the limits least of all that were seen.
    """

    assignment: Assignment | None
    cost: float
    bound: float
    prices: Mapping[str, float]
    closest: Assignment
    rounds: int


def solve_within(
    problem: Problem, limit: Mapping[str, float], minimise: Minimise, rounds: int = ROUNDS
) -> Limited:
    """Minimise the problem with every resource in ``limit`` (name to units) within its limit.

    ``minimise`` solves the problem with prices on resources and no limit. At any prices p >= 0
    its optimum minus p @ limit is a lower bound; the prices that raise it most are found by
    cutting planes (Kelley, The cutting-plane method, SIAM Journal 8, 1960), which for one resource
    is a secant method. What fits is mixed with what is cheap and does not fit (`Repair.mix`).
    """
    search = _Search(problem, limit)
    prices: dict[str, float] | None = dict.fromkeys(limit, 0.0)
    done = 0
    while prices is not None and done < rounds:
        search.visit(prices, minimise(prices))
        prices, done = search.next_prices(), done + 1
    best, cost = search.best, math.inf
    if best is not None:
        best = search.repair.improve(best)
        cost = problem.cost(best)
    return Limited(best, cost, min(search.bound, cost), search.prices, search.closest(), done)


class _Search:
    """What is known: a cut per assignment seen, the best bound, the best assignment that fits."""

    def __init__(self, problem: Problem, limit: Mapping[str, float]) -> None:
        self.problem, self.limit = problem, limit
        self.repair = Repair(problem, limit)
        self.best: Assignment | None = None
        self.bound, self.prices = -math.inf, dict.fromkeys(limit, 0.0)
        self._dearest = network(problem).most
        self._seen: list[Assignment] = []
        self._cuts: list[tuple[float, Costs]] = []  # cost, parts of the limits beyond the limits
        self._highest = _HIGHEST

    def visit(self, prices: Mapping[str, float], found: Priced) -> None:
        """Learn from the optimum at these prices."""
        paid = math.fsum(price * self.limit[name] for name, price in prices.items())
        if found.bound - paid > self.bound:
            self.bound, self.prices = found.bound - paid, dict(prices)
        if self.bound > self._dearest + _CLOSE * abs(self._dearest):
            self.bound = math.inf  # more than any allowed assignment costs
        if found.assignment in self._seen:
            return
        self._seen.append(found.assignment)
        over = (self.repair.load(found.assignment) - self.repair.most) / self.repair.unit
        self._cuts.append((self.problem.cost(found.assignment), over))
        self._find_fitting(found.assignment)

    def _find_fitting(self, new: Assignment) -> None:
        """A better assignment that fits, made of the new one and of the earlier ones."""
        if math.isinf(self.problem.cost(new)):
            return
        fitting = self.repair.squeeze(new)
        if fitting is not None:
            self._keep(self.repair.improve(fitting))
        if self.best is not None:
            for other in self._seen:
                if math.isfinite(self.problem.cost(other)):
                    self._keep(self.repair.mix(self.best, other))

    def _keep(self, fitting: Assignment) -> None:
        if self.best is None or self.problem.cost(fitting) < self.problem.cost(self.best):
            self.best = fitting

    def closest(self) -> Assignment:
        """The best that fits, else what exceeds the limits least."""
        if self.best is not None:
            return self.best
        return min(self._seen, key=lambda seen: self.repair.excess(self.repair.load(seen)))

    def next_prices(self) -> dict[str, float] | None:
        """Where the bound may rise most; None if it cannot rise, or need not."""
        cuts = [cut for cut in self._cuts if math.isfinite(cut[0])]
        if self.bound == math.inf or not cuts:
            return None
        unit = max(abs(cost) for cost, _ in cuts) or 1.0
        room = _CLOSE * unit
        if self.best is not None and self.problem.cost(self.best) <= self.bound + room:
            return None
        for _ in range(_TIMES + 1):
            prices, top = _highest_point(cuts, self._highest, unit)
            if top > self.bound + room:
                return self._between(prices * unit / self.repair.unit)
            if prices.max() < 0.999 * self._highest:
                return None
            self._highest *= _WIDER
        return None

    def _between(self, prices: Costs) -> dict[str, float]:
        """Half way from the best prices so far, where there are several: far out, where the cuts
        know little, they would swing (Ben-Ameur and Neto, Networks 49, 2007).
        """
        named = dict(zip(self.limit, prices.tolist(), strict=True))
        if len(named) == 1:
            return named
        return {name: (price + self.prices[name]) / 2 for name, price in named.items()}


def _highest_point(
    cuts: list[tuple[float, Costs]], highest: float, unit: float
) -> tuple[Costs, float]:
    """The prices p, at most ``highest``, at which min over cuts of cost + p @ over is largest, and
    how large; costs in ``unit``.
    """
    from scipy import optimize  # only problems with limits pay for it

    num = len(cuts[0][1])
    slopes = np.array([[*(-over), 1.0] for _, over in cuts])
    found = optimize.linprog(
        np.array([0.0] * num + [-1.0]),
        A_ub=slopes,
        b_ub=np.array([cost / unit for cost, _ in cuts]),
        bounds=[(0.0, highest)] * num + [(None, None)],
    )
    assert found.status == 0, found.message  # 0 is feasible, and the cuts bound it from above
    prices: Costs = found.x[:num]
    return prices, float(found.x[num]) * unit
