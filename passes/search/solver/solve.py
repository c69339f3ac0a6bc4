"""The way in: solve a problem exactly where that is possible, else well, and say how well."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from partc.passes.search.solver.condition import condition
from partc.passes.search.solver.eliminate import MAX_CELLS, MAX_TABLE, Elimination, eliminate
from partc.passes.search.solver.limit import Priced, solve_within
from partc.passes.search.solver.milp import milp
from partc.passes.search.solver.problem import Assignment, Problem

ASKED_CELLS = 200_000  # of all tables: up to here HiGHS closes a gap within seconds
_NODES = 1000  # of HiGHS's tree: a count, since seconds would differ from machine to machine

How = Literal["exact", "conditioned", "lagrangian", "milp"]


@dataclass(frozen=True)
class Stats:
    """``cells`` and ``width`` of the last elimination (0 where it was too wide), ``rounds`` of
    prices or draws, ``seconds`` in all.
    """

    cells: float
    width: int
    rounds: int
    seconds: float


@dataclass(frozen=True)
class Solution:
    """What was found: no assignment that is allowed and fits costs less than ``bound``.

    ``cost`` is inf if nothing was found, and ``violations`` then says what ``assignment``, the
    nearest one seen, breaks. ``bound`` is inf if it is proven that there is nothing.
    """

    assignment: Assignment
    cost: float
    bound: float
    how: How
    violations: tuple[str, ...]
    stats: Stats

    @property
    def gap(self) -> float:
        """By what part of its cost the assignment may be dearer than the optimum; 0 if proven."""
        if self.cost == self.bound:
            return 0.0
        return (self.cost - self.bound) / abs(self.cost) if self.cost else math.inf

    @property
    def infeasible(self) -> bool:
        """Whether it is proven that no assignment is allowed and fits."""
        return self.bound == math.inf


def solve(
    problem: Problem,
    limit: Mapping[str, float] | None = None,
    *,
    seed: int = 0,
    max_cells: float = MAX_CELLS,
    max_table: float = MAX_TABLE,
    asked_cells: int = ASKED_CELLS,
    milp_seconds: float = 0.0,
) -> Solution:
    """A cheapest assignment that takes no more of each resource in ``limit`` (name to units).

    By elimination if its tables fit ("exact"), else by conditioning search, which ``seed`` makes
    repeatable ("conditioned"); where a limit binds, with prices on resources ("lagrangian"). HiGHS
    is asked last: for a few nodes if nothing was found nor proven impossible, or if a problem of
    at most ``asked_cells`` has a gap; for up to ``milp_seconds`` if any has. The result is the same
    on every machine unless ``milp_seconds`` is set.
    """
    unknown = [name for name in limit or {} if name not in problem.resources]
    assert not unknown, f"limits on what nothing weighs: {unknown}"
    began = time.perf_counter()
    solver = _Solver(problem, dict(limit or {}), seed, max_cells, max_table)
    found = solver.unlimited()
    if limit and not problem.fits(found.assignment, limit) and math.isfinite(found.cost):
        found = solver.limited(found)
    nothing = math.isinf(found.cost) and not found.infeasible
    small = sum(factor.table.size for factor in problem.factors) <= asked_cells
    if nothing or ((milp_seconds > 0 or small) and found.gap > 0):
        found = solver.last_resort(found, milp_seconds)
    return replace(found, stats=replace(found.stats, seconds=time.perf_counter() - began))


@dataclass(frozen=True)
class _Solver:
    problem: Problem
    limit: dict[str, float]
    seed: int
    max_cells: float
    max_table: float

    def unlimited(self, prices: Mapping[str, float] | None = None) -> Solution:
        """Without limits; with ``prices``, the bound is on cost and prices together."""
        problem = self.problem
        exact = eliminate(problem, prices, max_cells=self.max_cells, max_table=self.max_table)
        if isinstance(exact, Elimination):
            stats = Stats(exact.cells, exact.width, 1, exact.seconds)
            paid = self._paid(exact.assignment, prices or {})
            return self._solution(exact.assignment, exact.cost, exact.cost + paid, "exact", stats)
        found = condition(problem, prices, seed=self.seed)
        stats = Stats(0.0, 0, found.draws, found.seconds)
        return self._solution(found.assignment, found.cost, found.bound, "conditioned", stats)

    def limited(self, first: Solution) -> Solution:
        """With prices on the resources; ``first`` is the solution without."""
        last = first

        def minimise(prices: Mapping[str, float]) -> Priced:
            nonlocal last
            last = self.unlimited(prices) if any(prices.values()) else first
            return Priced(last.assignment, last.bound)

        found = solve_within(self.problem, self.limit, minimise)
        assignment = found.closest if found.assignment is None else found.assignment
        stats = replace(last.stats, rounds=found.rounds)
        return self._solution(assignment, found.cost, found.bound, "lagrangian", stats)

    def last_resort(self, before: Solution, seconds: float) -> Solution:
        """What HiGHS finds or proves beyond ``before``."""
        found = milp(
            self.problem,
            self.limit,
            seconds=seconds or math.inf,
            nodes=None if seconds else _NODES,
        )
        bound = max(before.bound, found.bound)
        if found.assignment is None or found.cost >= before.cost:
            how: How = "milp" if bound > before.bound else before.how
            return replace(before, bound=min(bound, before.cost), how=how)
        bound = min(bound, found.cost)
        return self._solution(found.assignment, found.cost, bound, "milp", before.stats)

    def _paid(self, assignment: Assignment, prices: Mapping[str, float]) -> float:
        weights = [price * self.problem.weight(assignment, name) for name, price in prices.items()]
        return math.fsum(weights)

    def _solution(
        self, assignment: Assignment, cost: float, bound: float, how: How, stats: Stats
    ) -> Solution:
        """With what the assignment violates."""
        broken = [f"forbidden: {names}" for names in self.problem.forbidden(assignment)]
        for name, most in self.limit.items():
            weight = self.problem.weight(assignment, name)
            if weight > most:
                broken.append(f"{name}: {weight:.6g} of at most {most:.6g}")
        return Solution(assignment, cost, bound, how, tuple(broken), stats)
