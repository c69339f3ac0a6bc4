"""The costs of a program as formulas, found by partitioning its model at other input sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from partc.cost.prediction import Prediction
from partc.cost.symbolic import symbolic_costs
from partc.graph import Graph
from partc.lowering import partition, trace
from partc.plan import Plan
from partc.program import Program
from partc.reports.cost import CostReport, cost_report
from partc.trace.arguments import Given


def cost_with_formulas(
    program: Program,
    model: nn.Module,
    inputs: Any,
    loss: Callable[..., Any] | None = None,
) -> CostReport:
    """The costs of ``program`` as expressions of batch ``B``, sequence ``S`` and the mesh's axes.

    There is an ``S`` if all inputs are tokens, ``i64[B,S]``. Where other sizes give another
    program, the report has the reason in place of formulas. Raises the errors of ``compile``.
    """
    given = Given.of(model, inputs, loss)
    plan, inference = Plan.parse(program.plan), program.role(0).is_inference

    def at(sizes: Mapping[str, int]) -> Graph:
        with torch.set_grad_enabled(not inference):
            graph = trace(model, given.with_tensors(_resized(given.tensors, sizes)), loss)
        graph.mesh = program.mesh
        return partition(graph, plan)[1]

    sizes = _sizes(given.tensors)
    pieces = program.mesh.num_ranks * plan.microbatches
    steps = {symbol: gcd(size, pieces) for symbol, size in sizes.items()}
    local = at(sizes)
    costs = symbolic_costs(local, at, sizes, steps)
    report = cost_report(local, symbolic=costs, role=program.role(0))
    predicted = program.cost.as_json()["prediction"]  # for machines that a saved mesh does not name
    return replace(report, prediction=Prediction.of_json(predicted))


def _sizes(inputs: Sequence[Tensor]) -> dict[str, int]:
    """The sizes that get a symbol: ``B``, and ``S`` if all inputs are tokens."""
    batch = {"B": inputs[0].shape[0]} if inputs[0].dim() else {}
    shapes = {tuple(x.shape) for x in inputs}
    tokens = len(shapes) == 1 and inputs[0].dim() == 2
    if tokens and not any(x.is_floating_point() for x in inputs):
        return {**batch, "S": inputs[0].shape[1]}
    return batch


def _resized(inputs: Sequence[Tensor], sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
    """Inputs of other sizes, all zeros, as formulas depend on shapes only."""
    old = _sizes(inputs)

    def shape(x: Tensor) -> list[int]:
        new = list(x.shape)
        if "B" in old and new and new[0] == old["B"]:
            new[0] = sizes["B"]
        if "S" in old:
            new[1] = sizes["S"]
        return new

    return tuple(x.new_zeros(shape(x)) for x in inputs)
