"""Recognise the random mask of dropout: one op that can be told how its tensor is cut."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from partc import ops
from partc.graph import Graph, call_before, drop_dead, is_call, replace_by, shape_of, value

aten = torch.ops.aten
EMPTY = (aten.empty_like.default, aten.new_empty.default)
DIVISIONS = (aten.div.Scalar, aten.div.Tensor)


def fold_dropout(graph: Graph) -> None:
    """``bernoulli(empty_like(x), 1 - p) / (1 - p)`` becomes ``dropout_mask(x, p)``."""
    for node in list(graph.calls()):
        kept = _kept(node)
        if kept is not None:
            drawn: Any = node.args[0]
            shape = _shape_source(drawn)
            replace_by(node, call_before(node, ops.dropout_mask, shape, 1 - kept))
    drop_dead(graph)


def _kept(node: fx.Node) -> float | None:
    """The probability to keep an element, if a node is a scaled Bernoulli mask."""
    if not is_call(node, *DIVISIONS) or not is_call(node.args[0], aten.bernoulli.p):
        return None
    drawn: Any = node.args[0]
    kept, scale = drawn.args[1], node.args[1]
    if isinstance(scale, fx.Node) or len(drawn.users) != 1:
        return None
    return float(kept) if math.isclose(kept, scale) else None


def _shape_source(drawn: fx.Node) -> fx.Node:
    """The tensor whose shape the mask was given, or the empty tensor it was drawn into."""
    empty: Any = drawn.args[0]
    if is_call(empty, *EMPTY):
        like: Any = empty.args[0]
        if shape_of(like) == shape_of(empty) and value(like).dtype == value(empty).dtype:
            return like  # type: ignore[no-any-return]
    return empty  # type: ignore[no-any-return]
