"""A loss that divides by a number of the script's, as many as one rank's rows: ``total / 32``.

Where ranks have rows of their own, a compiled loss is of the rows of all of them. Such a number is
then too small, and the gradients too large, by the number of data ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from math import isclose, prod
from typing import Any

import torch
from torch import fx

from partc.graph import Graph, fake_of, is_tensor, value
from partc.plan import Plan
from partc.plan.batch import ONE_RANKS, data_axes
from partc.plan.mesh import Mesh

aten = torch.ops.aten

_DIVIDES = {aten.div.Tensor, aten.div.Scalar}
_MULTIPLIES = {aten.mul.Tensor, aten.mul.Scalar}
_ADDS = {aten.add.Tensor, aten.sub.Tensor, aten.neg.default, operator.getitem}
_SUMS = {aten.sum.default, aten.sum.dim_IntList}
_SUM = 2  # of torch's three reductions of a criterion


def notes_on_rows(graph: Graph, plan: Plan, mesh: Mesh) -> list[str]:
    """A note on each line that divides a sum over all rows by the number of one rank's."""
    ranks = prod(mesh.size(axis) for axis in data_axes(mesh))
    if plan.batch != "local" or ranks < 2 or graph.loss is None:
        return []
    found = [
        f"{ONE_RANKS}{number:g} ({value(node).source}), as many as the rows of one rank, what it "
        "sums over the rows of all ranks"
        for by, summed in _divided(graph.loss)
        for node, number in _of_one_rank(by, summed, ranks)
    ]
    return [*dict.fromkeys(found)]


Divisions = tuple[tuple[fx.Node, float], ...]  # each with its number


def _of_one_rank(by: Divisions, summed: fx.Node, ranks: int) -> Divisions:
    """The divisions by one rank's rows, unless another one makes it a mean."""
    shape = fake_of(summed).shape
    rows = {shape[0], prod(shape)} if shape else set()
    if any(isclose(number, each) for _, number in by for each in rows):
        return ()
    return tuple(
        (node, number)
        for node, number in by
        if number > 1 and any(isclose(number * ranks, each) for each in rows)
    )


def _divided(loss: fx.Node) -> Iterator[tuple[Divisions, fx.Node]]:
    """What a loss is a sum of, each with the divisions of that sum by a number."""
    left: list[tuple[fx.Node, Divisions]] = [(loss, ())]
    seen = set[fx.Node]()
    while left:
        node, by = left.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        operands = [x for x in node.all_input_nodes if is_tensor(x) or x.op == "call_function"]
        if _sums(node):
            yield by, operands[0]
        elif node.target in _DIVIDES and len(operands) > 1:
            continue  # by a count of rows
        elif node.target in (_DIVIDES | _MULTIPLIES | _ADDS):
            number = _divisor(node)
            by = by if number is None else (*by, (node, number))
            left += [(x, by) for x in operands]


def _divisor(node: fx.Node) -> float | None:
    number: Any = node.args[1] if len(node.args) > 1 else None
    if not isinstance(number, int | float) or not number:
        return None
    if node.target in _DIVIDES:
        return float(number)
    return 1 / number if node.target in _MULTIPLIES else None


def _sums(node: fx.Node) -> bool:
    """Whether a call adds up what it is given: a sum, or a criterion that is told to."""
    if node.target in _SUMS:
        return True
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if "reduction" not in names:
        return False
    at = names.index("reduction")
    said = node.kwargs.get("reduction", node.args[at] if len(node.args) > at else None)
    return bool(said == _SUM)
