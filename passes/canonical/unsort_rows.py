"""Replace scatters by a permutation with look-ups by the inverse permutation.

A mixture of experts sorts its tokens by expert and restores their order afterwards; autograd
scatters the gradients of both. A permutation names every row once, so that
``zeros[order] += rows`` is ``rows[inverse_order(order)]``: no zeros are made and nothing is added.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from partc.graph import Graph, is_call, ops, shape_of
from partc.graph.graph_edits import call_before, drop_dead, replace_by
from partc.rules.rows import ascends, mark, quotient

aten = torch.ops.aten
SORTS = (aten.sort.default, aten.sort.stable)
SCATTERS = (aten.index_put.default, aten._unsafe_index_put.default)
ZEROS = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)


def unsort_rows(graph: Graph) -> None:
    """Replace inverse permutations by ``partc.ops.inverse_order``, and scatters by look-ups."""
    for rewrite in (_name_inverse, _gather, _gather_sums):
        for node in list(graph.calls()):
            rewrite(node)
    drop_dead(graph)
    mark(graph.fx)


def is_order(node: Any) -> bool:
    """Whether a value is a permutation of row numbers: the indices of a sort, or an inverse."""
    if is_call(node, operator.getitem):
        return node.args[1] == 1 and is_call(node.args[0], *SORTS) and len(shape_of(node)) == 1
    if is_call(node, aten.argsort.default, aten.argsort.stable):
        return len(shape_of(node)) == 1
    return is_call(node, ops.inverse_order)


def _name_inverse(node: Any) -> None:
    """``empty[order] = arange`` and ``argsort(order)`` become ``inverse_order(order)``."""
    if is_call(node, *SCATTERS):
        order, places = _only_index(node), node.args[2]
        counts = is_call(places, aten.arange.default) and len(places.args) == 1
        if counts and is_order(order) and shape_of(node) == shape_of(places) == shape_of(order):
            replace_by(node, call_before(node, ops.inverse_order, order))
    elif is_order(node) and not is_call(node, ops.inverse_order):
        sort = node.args[0] if is_call(node, operator.getitem) else node
        if is_order(sort.args[0]) and ascends(sort):
            replace_by(node, call_before(node, ops.inverse_order, sort.args[0]))


def _gather(node: fx.Node) -> None:
    """``zeros[order] += rows`` becomes ``rows[inverse]``."""
    order = _only_index(node)
    if is_order(order) and _adds_to_zeros(node, order) and shape_of(node)[:1] == shape_of(order):
        rows = node.args[2]
        replace_by(node, call_before(node, aten.index.Tensor, rows, [inverse_of(order)]))


def _gather_sums(node: fx.Node) -> None:
    """``zeros[order // k] += rows`` becomes the sum of each ``k`` neighbours of ``rows[inverse]``.

    With ``k`` experts per token, each token has ``k`` rows.
    """
    found = quotient(_only_index(node))
    if found is None or not is_order(found[0]) or not _adds_to_zeros(node, found[0]):
        return
    order, times = found
    (num,) = shape_of(order)
    if node.args[3:4] != (True,) or shape_of(node)[0] * times != num:
        return
    rows = call_before(node, aten.index.Tensor, node.args[2], [inverse_of(order)])
    apart = call_before(
        node, aten.reshape.default, rows, [num // times, times, *shape_of(node)[1:]]
    )
    replace_by(node, call_before(node, aten.sum.dim_IntList, apart, [1]))


def _only_index(node: fx.Node) -> Any:
    """The index of ``x[index] = values``; None for another call or for several indices."""
    if not is_call(node, *SCATTERS):
        return None
    indices: Any = node.args[1]
    return indices[0] if len(indices) == 1 else None


def _adds_to_zeros(node: fx.Node, order: fx.Node) -> bool:
    """Whether a scatter writes into zeros, one row of values per entry of ``order``."""
    base, _, rows = node.args[:3]
    one_each = (*shape_of(order), *shape_of(node)[1:])
    return isinstance(rows, fx.Node) and shape_of(rows) == one_each and is_call(base, *ZEROS)


def inverse_of(order: fx.Node) -> fx.Node:
    """The node with the inverse of ``order``; a new one is written right after ``order``."""
    if is_call(order, ops.inverse_order):
        return order.args[0]  # type: ignore[return-value]
    known = next((user for user in order.users if is_call(user, ops.inverse_order)), None)
    return known or call_before(order.next, ops.inverse_order, order)
