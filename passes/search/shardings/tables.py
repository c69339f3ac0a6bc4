"""Collects the costs of variables and of pairs of variables, and adds them up to a `Problem`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from partc.passes.search.solver.problem import Costs, Factor, Problem, Variable

Part = tuple[Costs, int]  # a table, and how often it counts


@dataclass
class Tables:
    """Variables by key, and the cost tables of each and of each pair.

    A key that was seen before gives the same variable: equal blocks share a choice by equal keys.
    Sums of the same parts are one array, so that the solver sees that they are equal.
    """

    keys: dict[Hashable, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    labels: list[tuple[str, ...]] = field(default_factory=list)
    own: list[list[Part]] = field(default_factory=list)
    pairs: dict[tuple[int, int], list[Part]] = field(default_factory=dict)
    _turned: dict[int, tuple[Costs, Costs]] = field(default_factory=dict)
    _sums: dict[tuple[tuple[int, int], ...], tuple[list[Part], Costs]] = field(default_factory=dict)

    def variable(self, key: Hashable, name: str, labels: tuple[str, ...]) -> int:
        """The number of the variable with this key, which is made if there is none."""
        if key not in self.keys:
            self.keys[key] = len(self.names)
            self.names.append(name)
            self.labels.append(labels)
            self.own.append([])
        return self.keys[key]

    def cost(self, v: int, costs: Costs, times: int = 1) -> None:
        """Add ``times * costs[choice of v]``."""
        self.own[v].append((costs, times))

    def pair(self, v: int, w: int, table: Costs, times: int = 1) -> None:
        """Add ``times * table[choice of v, choice of w]``; v and w may be the same variable."""
        if v == w:
            self.cost(v, np.ascontiguousarray(np.diagonal(table)), times)
        elif v > w:
            self.pair(w, v, self._turn(table), times)
        else:
            self.pairs.setdefault((v, w), []).append((table, times))

    def _turn(self, table: Costs) -> Costs:
        if id(table) not in self._turned:
            self._turned[id(table)] = table, np.ascontiguousarray(table.T)
        return self._turned[id(table)][1]

    def problem(self) -> Problem:
        """The sum of all costs as a problem; tables of zeros are left out."""
        variables = []
        for v, name in enumerate(self.names):
            zeros = np.zeros(len(self.labels[v]))
            costs = self._sum(self.own[v]) if self.own[v] else zeros
            variables.append(Variable(name, self.labels[v], costs))
        factors = []
        for scope, parts in self.pairs.items():
            table = self._sum(parts)
            if table.any():
                factors.append(Factor(scope, table))
        return Problem(tuple(variables), tuple(factors))

    def _sum(self, parts: list[Part]) -> Costs:
        key = tuple((id(table), times) for table, times in parts)
        if key not in self._sums:
            total = sum((times * table for table, times in parts[1:]), parts[0][1] * parts[0][0])
            self._sums[key] = list(parts), np.asarray(total, np.float64)
        return self._sums[key][1]
