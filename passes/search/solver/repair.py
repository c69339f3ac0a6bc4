"""Make an assignment fit its limits, and make one that fits cheaper, by local changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from partc.passes.search.solver.problem import Assignment, Costs, Problem

_ROUNDING = 1e-12  # relative: what is cheaper by less is as dear


class Repair:
    """Local changes to assignments of one problem within ``limit`` (resource to units)."""

    def __init__(self, problem: Problem, limit: Mapping[str, float]) -> None:
        self.problem, self.limit = problem, limit
        self.uses: list[list[int]] = [[] for _ in problem.variables]
        for number, factor in enumerate(problem.factors):
            for v in factor.variables:
                self.uses[v].append(number)
        self.most = np.array(list(limit.values()))
        self.unit = np.where(self.most > 0, self.most, 1.0)
        self.weights = [  # f64[choices, resources]
            np.stack([each.taken(name) for name in limit], axis=1) for each in problem.variables
        ]

    def load(self, assignment: Sequence[int]) -> Costs:
        """f64[resources]: the units that the choices take."""
        return np.array([self.problem.weight(assignment, name) for name in self.limit])

    def excess(self, load: Costs) -> float:
        """By how much the limits are exceeded, as a sum of parts of them."""
        return float((np.maximum(load - self.most, 0.0) / self.unit).sum())

    def squeeze(self, assignment: Assignment) -> Assignment | None:
        """Change single choices, those first that cost least for what they free, until all fits;
        None if no single change brings it closer.
        """
        chosen, load = list(assignment), self.load(assignment)
        while (excess := self.excess(load)) > 0:
            for _, v, choice in self._freeing(chosen, load):
                after = load + self.weights[v][choice] - self.weights[v][chosen[v]]
                if self.excess(after) < self.excess(load) and np.isfinite(
                    self.row(v, chosen)[choice]
                ):
                    chosen[v], load = choice, after
            load = self.load(chosen)
            if self.excess(load) >= excess:
                return None
        return tuple(chosen)

    def _freeing(self, chosen: list[int], load: Costs) -> list[tuple[float, int, int]]:
        """Single changes that lower the excess: cost for what they free, variable, choice."""
        found, excess = [], self.excess(load)
        for v, weights in enumerate(self.weights):
            if weights.any():
                row = self.row(v, chosen)
                for choice, weight in enumerate(weights):
                    freed = excess - self.excess(load + weight - weights[chosen[v]])
                    if freed > 0 and np.isfinite(row[choice]):
                        found.append(((row[choice] - row[chosen[v]]) / freed, v, choice))
        return sorted(found)

    def improve(self, assignment: Assignment) -> Assignment:
        """Take cheaper choices that fit, one variable at a time, until there is none."""
        chosen, load, changed = list(assignment), self.load(assignment), True
        while changed:
            changed = False
            for v, weights in enumerate(self.weights):
                row = self.row(v, chosen)
                room = self.most - load + weights[chosen[v]]
                row[(weights > room).any(axis=1)] = np.inf
                choice, present = int(np.argmin(row)), row[chosen[v]]
                if row[choice] < present - _ROUNDING * abs(present):
                    load = load + weights[choice] - weights[chosen[v]]
                    chosen[v], changed = choice, True
        fits = self.problem.fits(chosen, self.limit)  # the running sum is rounded
        return tuple(chosen) if fits else assignment

    def row(self, v: int, chosen: Sequence[int]) -> Costs:
        """f64[choices]: what each choice of v costs beside the others' present choices."""
        row = self.problem.variables[v].costs.copy()
        for number in self.uses[v]:
            factor = self.problem.factors[number]
            place = [slice(None) if w == v else chosen[w] for w in factor.variables]
            row += factor.table[tuple(place)]
        return row

    def mix(self, fits: Assignment, cheap: Assignment) -> Assignment:
        """As much of ``cheap`` in ``fits`` as still fits, the best bargains first.

        Where the two differ falls into parts that share no factor: equal layers, say. Each part
        can be taken over by itself, and costs and weights of parts add up.
        """
        bargains = []
        for part in self._parts(fits, cheap):
            gain, more = self._difference(part, fits, cheap)
            if gain > 0:
                share = float((more / self.unit).clip(min=0.0).sum())
                bargains.append((-gain / share if share else -math.inf, part, more))
        chosen, load = list(fits), self.load(fits)
        for _, part, more in sorted(bargains, key=lambda bargain: bargain[:2]):
            if (load + more <= self.most).all():
                load = load + more
                for v in part:
                    chosen[v] = cheap[v]
        return tuple(chosen) if self.problem.fits(chosen, self.limit) else fits

    def _parts(self, one: Assignment, other: Assignment) -> list[list[int]]:
        """The variables that differ, those together that factors connect."""
        different = dict.fromkeys(v for v in range(len(one)) if one[v] != other[v])
        parts = []
        while different:
            part = [next(iter(different))]
            del different[part[0]]
            for v in part:  # it grows
                for number in self.uses[v]:
                    for w in self.problem.factors[number].variables:
                        if w in different:
                            del different[w]
                            part.append(w)
            parts.append(sorted(part))
        return parts

    def _difference(
        self, part: list[int], before: Assignment, after: Assignment
    ) -> tuple[float, Costs]:
        """What taking the part over saves, and f64[resources]: what it takes more."""
        gains, more = [], np.zeros(len(self.most))
        for v in part:
            costs = self.problem.variables[v].costs
            gains.append(float(costs[before[v]] - costs[after[v]]))
            more += self.weights[v][after[v]] - self.weights[v][before[v]]
        for number in dict.fromkeys(number for v in part for number in self.uses[v]):
            factor = self.problem.factors[number]
            places = [tuple([chosen[v] for v in factor.variables]) for chosen in (before, after)]
            gains.append(float(factor.table[places[0]] - factor.table[places[1]]))
        return math.fsum(gains), more
