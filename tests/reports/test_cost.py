"""The cost report as text and as data."""

from __future__ import annotations

import json
from collections.abc import Callable

from partc.cost.symbolic import SymbolicCosts, symbolic_costs
from partc.reports.cost import cost_report
from tests.build import mlp


def test_table(golden: Callable[..., None]) -> None:
    golden(str(cost_report(mlp())))


def test_table_with_formulas(golden: Callable[..., None]) -> None:
    costs = symbolic_costs(mlp(), lambda sizes: mlp(), {"B": 8})
    golden(str(cost_report(mlp(), "momentum", costs)))


def test_table_without_confirmed_formulas(golden: Callable[..., None]) -> None:
    golden(
        str(cost_report(mlp(), symbolic=SymbolicCosts(why="sizes in the graph are no polynomials")))
    )


def test_json(golden: Callable[..., None]) -> None:
    costs = symbolic_costs(mlp(), lambda sizes: mlp(), {"B": 8})
    golden(json.dumps(cost_report(mlp(), symbolic=costs).as_json(), indent=2), ".json")
