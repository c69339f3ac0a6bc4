"""A `Problem` as an integer program for HiGHS: a check of other methods, and the last resort."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partc.passes.search.solver.problem import Assignment, Costs, Problem

_SCALE = 1e4  # HiGHS stops at an absolute gap of 1e-6, so the largest cost is scaled to this


@dataclass(frozen=True)
class Milp:
    """The answer of HiGHS: ``assignment`` is None if it found none, ``bound`` is inf if it proved
    that every assignment is forbidden.
    """

    assignment: Assignment | None
    cost: float
    bound: float
    seconds: float


def milp(
    problem: Problem,
    *,
    seconds: float = math.inf,
    nodes: int | None = None,
) -> Milp:
    """Minimise with HiGHS.

    There is a column in {0, 1} per choice of a variable, and one in [0, 1] per allowed cell of a
    factor. Along each dim the cells of a choice add up to the choice's column (the local polytope
    of the pairwise relaxation). HiGHS stops after ``seconds``, where the result depends on the
    machine, or after ``nodes`` nodes of the branch-and-bound tree, where it does not.
    """
    from scipy import optimize  # a third of a second that most searches need not pay

    began = time.perf_counter()
    program = _program(problem)
    options: dict[str, float] = {"mip_rel_gap": 0.0}
    if math.isfinite(seconds):
        options["time_limit"] = seconds
    if nodes is not None:
        options["node_limit"] = nodes
    size = float(np.abs(program.costs).max(initial=0.0)) or 1.0
    found = optimize.milp(
        program.costs * (_SCALE / size),
        integrality=program.integral,
        bounds=optimize.Bounds(0.0, program.upper),
        constraints=optimize.LinearConstraint(program.rows, program.low, program.high),
        options=options,
    )
    return _read(problem, found, size / _SCALE, time.perf_counter() - began)


def _read(problem: Problem, found: Any, unit: float, seconds: float) -> Milp:
    """The answer of HiGHS as an assignment and a bound in the problem's unit of cost."""
    if found.status == 2:
        return Milp(None, math.inf, math.inf, seconds)
    bound = -math.inf if found.mip_dual_bound is None else float(found.mip_dual_bound) * unit
    bound += math.fsum(float(factor.table) for factor in problem.factors if not factor.variables)
    if found.x is None:
        return Milp(None, math.inf, bound, seconds)
    starts = np.cumsum([0, *problem.sizes])
    assignment = tuple(
        int(np.argmax(found.x[start:end])) for start, end in itertools.pairwise(starts)
    )
    cost = problem.cost(assignment)
    return Milp(assignment, cost, min(bound, cost), seconds)


@dataclass(frozen=True, eq=False)
class _Program:
    """Minimise costs @ x where low <= rows @ x <= high and 0 <= x <= upper."""

    costs: Costs
    integral: Costs
    upper: Costs
    rows: Any  # a scipy.sparse matrix
    low: Costs
    high: Costs


def _program(problem: Problem) -> _Program:
    """The integer program; columns are all variables' choices, then all factors' allowed cells."""
    from scipy import sparse

    own = np.concatenate([each.costs for each in problem.variables])
    starts = np.cumsum([0, *problem.sizes])
    entries, costs = _Entries(), [np.where(np.isinf(own), 0.0, own)]
    for v, size in enumerate(problem.sizes):
        entries.row(np.arange(starts[v], starts[v] + size), np.ones(size), 1.0, 1.0)
    column = len(own)
    for factor in problem.factors:
        if factor.variables:
            cells = np.argwhere(np.isfinite(factor.table))
            costs.append(factor.table[tuple(cells.T)])
            for dim, v in enumerate(factor.variables):
                for choice in range(problem.sizes[v]):
                    members = column + np.flatnonzero(cells[:, dim] == choice)
                    columns = np.append(members, starts[v] + choice)
                    entries.row(columns, np.append(np.ones(len(members)), -1.0), 0.0, 0.0)
            column += len(cells)
    upper = np.ones(column)
    upper[: len(own)][np.isinf(own)] = 0.0
    integral = np.zeros(column)
    integral[: len(own)] = 1.0
    return _Program(
        np.concatenate(costs), integral, upper, entries.matrix(sparse, column), *entries.sides()
    )


class _Entries:
    """Collects the rows of a sparse matrix, each with its lower and upper limit."""

    def __init__(self) -> None:
        self._columns: list[NDArray[np.int64]] = []
        self._values: list[Costs] = []
        self._sides: list[tuple[float, float]] = []

    def row(self, columns: NDArray[np.int64], values: Costs, low: float, high: float) -> None:
        self._columns.append(columns)
        self._values.append(values)
        self._sides.append((low, high))

    def matrix(self, sparse: Any, num_columns: int) -> Any:
        ends = np.cumsum([0, *map(len, self._columns)])
        values, columns = np.concatenate(self._values), np.concatenate(self._columns)
        return sparse.csr_array((values, columns, ends), shape=(len(self._sides), num_columns))

    def sides(self) -> tuple[Costs, Costs]:
        low, high = np.array(self._sides, np.float64).T
        return low, high
