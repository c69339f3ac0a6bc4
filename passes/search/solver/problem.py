"""What the search minimises: variables with a few choices each, and tables of what they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
Assignment = tuple[int, ...]  # the index of every variable's choice


@dataclass(frozen=True, eq=False)
class Variable:
    """One decision. ``costs`` (f64[choices]) is what each choice costs by itself; inf forbids it.

    ``weights`` is what each choice takes of a limited resource, such as bytes of memory: resource
    to f64[choices], finite and not negative. A resource that is not named is not used.
    """

    name: str
    choices: tuple[str, ...]
    costs: Costs
    weights: Mapping[str, Costs] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (len(self.choices),)
        assert self.choices, f"{self.name} has no choice"
        assert self.costs.shape == shape, f"{self.name}: costs {self.costs.shape}, not {shape}"
        _check_costs(self.name, self.costs)
        for resource, weights in self.weights.items():
            assert weights.shape == shape, f"{self.name}: {resource} {weights.shape}, not {shape}"
            assert np.isfinite(weights).all(), f"{self.name}: {resource} is not finite"
            assert (weights >= 0).all(), f"{self.name}: {resource} is negative"

    def taken(self, resource: str) -> Costs:
        """f64[choices]: what each choice takes of the resource."""
        taken = self.weights.get(resource)
        return np.zeros(len(self.choices)) if taken is None else taken


@dataclass(frozen=True, eq=False)
class Factor:
    """What the choices of several variables cost together: ``table[choice of variables[0], ...]``.

    ``variables`` are indices into `Problem.variables`; inf forbids a combination. Factors that
    cost the same should share one array: equal tables are then found without reading them.
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

    @property
    def resources(self) -> tuple[str, ...]:
        """The names of all limited resources, in order of first use."""
        return tuple(dict.fromkeys(name for each in self.variables for name in each.weights))

    def cost(self, assignment: Sequence[int]) -> float:
        """The exact sum (rounded once) of everything that the choices cost; inf if forbidden."""
        own = [each.costs[c] for each, c in zip(self.variables, assignment, strict=True)]
        shared = [f.table[tuple([assignment[v] for v in f.variables])] for f in self.factors]
        return math.fsum(own + shared)

    def weight(self, assignment: Sequence[int], resource: str) -> float:
        """How much of the resource the choices take together."""
        assert len(assignment) == len(self.variables)
        chosen = zip(self.variables, assignment, strict=True)
        return math.fsum(
            each.weights[resource][c] for each, c in chosen if resource in each.weights
        )

    def fits(self, assignment: Sequence[int], limit: Mapping[str, float]) -> bool:
        """Whether no resource is taken beyond its limit."""
        return all(self.weight(assignment, name) <= most for name, most in limit.items())

    def forbidden(self, assignment: Sequence[int]) -> list[str]:
        """The names of the variables of each thing that the choices violate, such as ``a, b``."""
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
    """A cost is a number or inf; nan and -inf would make every comparison meaningless."""
    assert costs.dtype == np.float64, f"{where}: costs are {costs.dtype}, not float64"
    assert (costs > -np.inf).all(), f"{where}: a cost is nan or -inf"
