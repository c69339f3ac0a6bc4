"""The problem that the solver minimises: variables with a few choices, and tables of costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
Assignment = tuple[int, ...]  # the index of every variable's choice


@dataclass(frozen=True, eq=False)
class Variable:
    """One decision; ``costs`` (f64[choices]) are the costs of each choice alone, inf forbids it."""

    name: str
    choices: tuple[str, ...]
    costs: Costs

    def __post_init__(self) -> None:
        shape = (len(self.choices),)
        assert self.choices, f"{self.name} has no choice"
        assert self.costs.shape == shape, f"{self.name}: costs {self.costs.shape}, not {shape}"
        _check_costs(self.name, self.costs)


@dataclass(frozen=True, eq=False)
class Factor:
    """The cost of several variables' choices together: ``table[choice of variables[0], ...]``.

    ``variables`` are indices into `Problem.variables`; inf forbids a combination. Factors with
    equal tables should share one array: the solver then finds them equal without reading them.
    """

    variables: tuple[int, ...]
    table: Costs


@dataclass(frozen=True, eq=False)
class Problem:
    """Minimise the sum of all variables' costs and all factors' entries."""

    variables: tuple[Variable, ...]
    factors: tuple[Factor, ...] = ()

    def __post_init__(self) -> None:
        sizes = [len(variable.choices) for variable in self.variables]
        checked: set[int] = set()  # by identity: the problem keeps every array alive
        for number, factor in enumerate(self.factors):
            where, scope = f"factor {number}", factor.variables
            assert len(scope) == len(set(scope)), f"{where} names a variable twice"
            assert all(0 <= v < len(sizes) for v in scope), f"{where} names an unknown variable"
            shape = tuple([sizes[v] for v in scope])
            assert factor.table.shape == shape, f"{where}: {factor.table.shape}, not {shape}"
            if id(factor.table) not in checked:
                checked.add(id(factor.table))
                _check_costs(where, factor.table)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of choices of every variable."""
        return tuple(len(variable.choices) for variable in self.variables)

    def cost(self, assignment: Sequence[int]) -> float:
        """The cost of an assignment, an exact sum rounded once; inf if it is forbidden."""
        own = [each.costs[c] for each, c in zip(self.variables, assignment, strict=True)]
        shared = [f.table[tuple([assignment[v] for v in f.variables])] for f in self.factors]
        return math.fsum(own + shared)

    def forbidden(self, assignment: Sequence[int]) -> list[str]:
        """The names of the variables of each forbidden cell that an assignment uses: ``a, b``."""
        chosen = zip(self.variables, assignment, strict=True)
        alone = [each.name for each, c in chosen if math.isinf(each.costs[c])]
        names = [variable.name for variable in self.variables]
        shared = [
            ", ".join(names[v] for v in factor.variables)
            for factor in self.factors
            if math.isinf(factor.table[tuple([assignment[v] for v in factor.variables])])
        ]
        return alone + shared


def _check_costs(where: str, costs: Costs) -> None:
    """Assert that costs are float64, and no nan or -inf, which would spoil every comparison."""
    assert costs.dtype == np.float64, f"{where}: costs are {costs.dtype}, not float64"
    assert (costs > -np.inf).all(), f"{where}: a cost is nan or -inf"
