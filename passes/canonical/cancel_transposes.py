"""Cancel transposes against each other and move them into matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from partc.graph import Graph, is_call, shape_of, value
from partc.graph.graph_edits import call_before, drop_dead, replace_by

aten = torch.ops.aten
SWAPS = (aten.t.default, aten.transpose.int, aten.permute.default)


def cancel_transposes(graph: Graph) -> None:
    """``t(t(x))`` is ``x``; ``t(mm(a, b))`` is ``mm(t(b), t(a))``; two permutations are one."""
    for node in list(graph.calls()):
        if is_call(node, *SWAPS):
            _cancel(node)
    drop_dead(graph)


def _cancel(node: fx.Node) -> None:
    """Simplify one transpose by the call that it reads."""
    inner: Any = node.args[0]
    if is_call(inner, *SWAPS):
        if _is_shared(inner, node):
            return
        source: Any = inner.args[0]
        dims = [order_of(inner)[d] for d in order_of(node)]
        replace_by(node, permuted(node, source, dims))
    # Only if nothing else reads the product: otherwise it would be computed twice.
    elif is_call(inner, aten.mm.default) and order_of(node) == [1, 0] and len(inner.users) == 1:
        left, right = (permuted(inner, operand, [1, 0]) for operand in inner.args)
        replace_by(node, call_before(inner, aten.mm.default, right, left))
    elif len(order_of(node)) == 2 and order_of(node) == [1, 0] and node.target != aten.t.default:
        replace_by(node, call_before(node, aten.t.default, inner))


def _is_shared(inner: fx.Node, node: fx.Node) -> bool:
    """Whether one module hands its transpose to another one, and to others beside that.

    It is made anyhow, and blocks stay alike: what they read does not depend on their neighbours.
    """
    modules = {value(inner).module, value(node).module}
    return len(modules - {""}) > 1 and len(inner.users) > 1


def permuted(where: fx.Node, source: fx.Node, dims: list[int]) -> fx.Node:
    """``source`` with its dims in the order ``dims``, by ``t``, ``transpose`` or ``permute``."""
    if dims == sorted(dims):
        return source
    if is_call(source, *SWAPS):
        first: Any = source.args[0]
        return permuted(where, first, [order_of(source)[d] for d in dims])
    moved = [d for i, d in enumerate(dims) if i != d]
    if len(dims) == 2:
        return call_before(where, aten.t.default, source)
    if len(moved) == 2:
        return call_before(where, aten.transpose.int, source, min(moved), max(moved))
    return call_before(where, aten.permute.default, source, dims)


def order_of(node: fx.Node) -> list[int]:
    """Per dim of the result the argument's dim: ``transpose(x, 0, 2)`` of 3 dims -> [2, 1, 0]."""
    rank = len(shape_of(node))
    order = list(range(rank))
    if node.target == aten.permute.default:
        dims: Any = node.args[1]
        return [d % rank for d in dims]
    if rank < 2:
        return order
    first, second = (0, 1) if node.target == aten.t.default else node.args[1:3]
    first, second = int(first) % rank, int(second) % rank  # type: ignore[arg-type]
    order[first], order[second] = order[second], order[first]
    return order
