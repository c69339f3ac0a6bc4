"""Replace the calls that make a dropout mask by one op, which knows how to draw a shard of it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from partc.graph import Graph, is_call, ops, shape_of, value
from partc.graph.draws import set_site, site_of
from partc.graph.graph_edits import call_before, drop_dead, replace_by

aten = torch.ops.aten
EMPTY = (aten.empty_like.default, aten.new_empty.default)
DIVISIONS = (aten.div.Scalar, aten.div.Tensor)


def fold_dropout(graph: Graph) -> None:
    """``bernoulli(empty_like(x), 1 - p) / (1 - p)`` becomes ``dropout_mask(x, p)``."""
    for node in list(graph.calls()):
        if is_call(node, aten.bernoulli.p):
            users = sorted(node.users)  # several where a repeated draw was merged with this one
            if users and all(_undoes_share(user, node) for user in users):
                kept: Any = node.args[1]
                mask = call_before(users[0], ops.dropout_mask, _shape_source(node), _zeros(kept))
                set_site(mask, site_of(node))
                for user in users:
                    replace_by(user, mask)
    drop_dead(graph)


def _zeros(kept: float) -> float:
    """The probability of a zero, as the user wrote it: 0.1 and not 0.09999999999999998."""
    short = round(1 - kept, 12)
    return short if 1 - short == kept else 1 - kept


def _undoes_share(user: fx.Node, drawn: fx.Node) -> bool:
    """Whether ``user`` divides the Bernoulli draw by its probability of a one, as dropout does."""
    kept: Any = drawn.args[1]
    if not is_call(user, *DIVISIONS) or user.args[0] is not drawn:
        return False
    scale: Any = user.args[1]
    return not isinstance(scale, fx.Node) and kept > 0 and math.isclose(kept, scale)


def _shape_source(drawn: fx.Node) -> fx.Node:
    """The tensor with the mask's shape and dtype: the ``x`` of ``empty_like(x)`` if it has both."""
    empty: Any = drawn.args[0]
    if is_call(empty, *EMPTY):
        like: Any = empty.args[0]
        if shape_of(like) == shape_of(empty) and value(like).dtype == value(empty).dtype:
            return like  # type: ignore[no-any-return]
    return empty  # type: ignore[no-any-return]
