"""Gathers the costs of variables and pairs of them, many adding up, into one `Problem`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from partc.passes.search.solver.problem import Costs, Factor, Problem, Variable

Part = tuple[Costs, int]  # a table, and how often it counts


@dataclass
class Tables:
    """Variables by key: asking again for a key gives the same one, so equal blocks are tied by
    having equal keys. Tables are kept by identity: the same parts give the same sum, one array.
    """

    keys: dict[Hashable, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    labels: list[tuple[str, ...]] = field(default_factory=list)
    own: list[list[Part]] = field(default_factory=list)
    pairs: dict[tuple[int, int], list[Part]] = field(default_factory=dict)
    _turned: dict[int, tuple[Costs, Costs]] = field(default_factory=dict)
    _sums: dict[tuple[tuple[int, int], ...], tuple[list[Part], Costs]] = field(default_factory=dict)

    def variable(self, key: Hashable, name: str, labels: tuple[str, ...]) -> int:
        """The variable of a key, made if there is none."""
        if key not in self.keys:
            self.keys[key] = len(self.names)
            self.names.append(name)
            self.labels.append(labels)
            self.own.append([])
        return self.keys[key]

    def cost(self, v: int, costs: Costs, times: int = 1) -> None:
        self.own[v].append((costs, times))

    def pair(self, v: int, w: int, table: Costs, times: int = 1) -> None:
        """Add ``table[choice of v, choice of w]``; v and w may be the same variable."""
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
        """All that was gathered; tables of zeros are left out."""
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
