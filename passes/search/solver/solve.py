"""Solve a problem exactly if its tables are small enough, else approximately with a bound."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Literal

from partc.passes.search.solver.condition import condition
from partc.passes.search.solver.eliminate import MAX_CELLS, MAX_TABLE, Elimination, eliminate
from partc.passes.search.solver.milp import milp
from partc.passes.search.solver.problem import Assignment, Problem

ASKED_CELLS = 200_000  # of all factors' tables: up to this HiGHS closes a gap within seconds
_NODES = 1000  # of HiGHS's tree: a count, since seconds would differ from machine to machine

How = Literal["exact", "conditioned", "milp"]


@dataclass(frozen=True)
class Stats:
    """Effort of a solution: ``cells`` and ``width`` of the elimination (0 where it was too wide),
    ``rounds`` of draws, ``seconds`` in all.
    """

    cells: float
    width: int
    rounds: int
    seconds: float


@dataclass(frozen=True)
class Solution:
    """The best assignment found; no allowed assignment costs less than ``bound``.

    ``cost`` is inf if no allowed assignment was found; ``assignment`` is then the nearest one seen,
    and ``violations`` lists the forbidden cells that it uses. ``bound`` is inf if every assignment
    is proven to be forbidden.
    """

    assignment: Assignment
    cost: float
    bound: float
    how: How
    violations: tuple[str, ...]
    stats: Stats

    @property
    def gap(self) -> float:
        """(cost - bound) / cost: the most by which the optimum may be cheaper; 0 if optimal."""
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
    """A cheapest assignment, or a good one with a lower bound.

    By elimination if its tables fit ("exact"), else by a conditioning search with a fixed ``seed``
    ("conditioned"). HiGHS comes last ("milp"). It gets 1000 nodes if no allowed assignment was
    found and none is proven impossible, or if a problem of at most ``asked_cells`` cells has a gap;
    with ``milp_seconds`` it gets this time for any gap, and only then does the result depend on the
    machine.
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
    """The steps of ``solve`` for one problem."""

    problem: Problem
    seed: int
    max_cells: float
    max_table: float

    def first(self) -> Solution:
        """Solve by elimination, or by conditioning where elimination is too wide."""
        exact = eliminate(self.problem, max_cells=self.max_cells, max_table=self.max_table)
        if isinstance(exact, Elimination):
            stats = Stats(exact.cells, exact.width, 1, exact.seconds)
            return self._solution(exact.assignment, exact.cost, exact.cost, "exact", stats)
        found = condition(self.problem, seed=self.seed)
        stats = Stats(0.0, 0, found.draws, found.seconds)
        return self._solution(found.assignment, found.cost, found.bound, "conditioned", stats)

    def last_resort(self, before: Solution, seconds: float) -> Solution:
        """``before`` with a better assignment or bound, if HiGHS finds one."""
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
        """The solution of an assignment, with the forbidden cells that it uses."""
        broken = tuple(f"forbidden: {names}" for names in self.problem.forbidden(assignment))
        return Solution(assignment, cost, bound, how, broken, stats)
