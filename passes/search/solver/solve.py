"""The way in: solve a problem exactly where that is possible, else well, and say how well."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Literal

from partc.passes.search.solver.condition import condition
from partc.passes.search.solver.eliminate import MAX_CELLS, MAX_TABLE, Elimination, eliminate
from partc.passes.search.solver.milp import milp
from partc.passes.search.solver.problem import Assignment, Problem

ASKED_CELLS = 200_000  # of all tables: up to here HiGHS closes a gap within seconds
_NODES = 1000  # of HiGHS's tree: a count, since seconds would differ from machine to machine

How = Literal["exact", "conditioned", "milp"]


@dataclass(frozen=True)
class Stats:
    """``cells`` and ``width`` of the last elimination (0 where it was too wide), ``rounds`` of
    draws, ``seconds`` in all.
    """

    cells: float
    width: int
    rounds: int
    seconds: float


@dataclass(frozen=True)
class Solution:
    """What was found: no assignment that is allowed costs less than ``bound``.

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
        """Whether it is proven that no assignment is allowed."""
        return self.bound == math.inf


def solve(
    problem: Problem,
    *,
    seed: int = 0,
    max_cells: float = MAX_CELLS,
    max_table: float = MAX_TABLE,
    asked_cells: int = ASKED_CELLS,
    milp_seconds: float = 0.0,
) -> Solution:
    """A cheapest assignment.

    By elimination if its tables fit ("exact"), else by conditioning search, which ``seed`` makes
    repeatable ("conditioned"). HiGHS is asked last: for a few nodes if nothing was found nor proven
    impossible, or if a problem of at most ``asked_cells`` has a gap; for up to ``milp_seconds`` if
    any has. The result is the same on every machine unless ``milp_seconds`` is set.
    """
    began = time.perf_counter()
    solver = _Solver(problem, seed, max_cells, max_table)
    found = solver.first()
    nothing = math.isinf(found.cost) and not found.infeasible
    small = sum(factor.table.size for factor in problem.factors) <= asked_cells
    if nothing or ((milp_seconds > 0 or small) and found.gap > 0):
        found = solver.last_resort(found, milp_seconds)
    return replace(found, stats=replace(found.stats, seconds=time.perf_counter() - began))


@dataclass(frozen=True)
class _Solver:
    problem: Problem
    seed: int
    max_cells: float
    max_table: float

    def first(self) -> Solution:
        """By elimination, or by conditioning where that is too wide."""
        exact = eliminate(self.problem, max_cells=self.max_cells, max_table=self.max_table)
        if isinstance(exact, Elimination):
            stats = Stats(exact.cells, exact.width, 1, exact.seconds)
            return self._solution(exact.assignment, exact.cost, exact.cost, "exact", stats)
        found = condition(self.problem, seed=self.seed)
        stats = Stats(0.0, 0, found.draws, found.seconds)
        return self._solution(found.assignment, found.cost, found.bound, "conditioned", stats)

    def last_resort(self, before: Solution, seconds: float) -> Solution:
        """What HiGHS finds or proves beyond ``before``."""
        nodes = None if seconds else _NODES
        found = milp(self.problem, seconds=seconds or math.inf, nodes=nodes)
        bound = max(before.bound, found.bound)
        if found.assignment is None or found.cost >= before.cost:
            how: How = "milp" if bound > before.bound else before.how
            return replace(before, bound=min(bound, before.cost), how=how)
        bound = min(bound, found.cost)
        return self._solution(found.assignment, found.cost, bound, "milp", before.stats)

    def _solution(
        self, assignment: Assignment, cost: float, bound: float, how: How, stats: Stats
    ) -> Solution:
        """With what the assignment violates."""
        broken = tuple(f"forbidden: {names}" for names in self.problem.forbidden(assignment))
        return Solution(assignment, cost, bound, how, broken, stats)
