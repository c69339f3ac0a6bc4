"""Compute on tensors before they are expanded, and leave out an expand that broadcasting does."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from partc.graph import Graph, is_call, shape_of, value
from partc.graph.graph_edits import call_before, drop_dead, replace_by

aten = torch.ops.aten
BINARY = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
UNARY = (
    aten.neg.default, aten.mul.Scalar, aten.div.Scalar, aten.add.Scalar, aten.sub.Scalar,
    aten.pow.Tensor_Scalar, aten.exp.default, aten.rsqrt.default, aten._to_copy.default,
)  # fmt: skip


def narrow_expands(graph: Graph) -> None:
    """``expand(x) / 2`` becomes ``expand(x / 2)``; ``expand(x) * y`` becomes ``x * y``."""
    for node in list(graph.calls()):
        expanded = [a for a in node.args if is_call(a, aten.expand.default)]
        if not expanded:
            continue
        tensors = [a for a in node.args if isinstance(a, fx.Node)]
        if node.target in UNARY or (node.target in BINARY and len(tensors) == 1):
            _expand_after(node, expanded[0])
        elif node.target in BINARY:
            _broadcast(node)
    drop_dead(graph)


def _expand_after(node: fx.Node, expanded: Any) -> None:
    """``op(expand(x)) -> expand(op(x))`` for an op on one tensor."""
    small = tuple(a.args[0] if a is expanded else a for a in node.args)
    result = call_before(node, node.target, *small, **node.kwargs)
    replace_by(node, call_before(node, aten.expand.default, result, list(shape_of(node))))


def _broadcast(node: fx.Node) -> None:
    """``op(expand(x), y) -> op(x, y)`` where ``y`` alone has the shape of the result."""
    for i, operand in enumerate(node.args[:2]):
        other: Any = node.args[1 - i]
        if not is_call(operand, aten.expand.default) or shape_of(other) != shape_of(node):
            continue
        small: Any = operand.args[0]  # type: ignore[union-attr]
        if value(small).shape == () and value(small).dtype != value(other).dtype:
            continue  # a 0-d operand does not take part in type promotion
        if not all(user.target in (*UNARY, *BINARY) for user in operand.users):  # type: ignore[union-attr]
            continue  # it is expanded anyhow: blocks stay alike, whatever stands behind them
        node.args = tuple(small if j == i else a for j, a in enumerate(node.args))
        return
