"""Add up the gradients that several products give one value before all others.

Where a block's input goes through products and past them, as under a norm behind the sum, autograd
adds to what went past::

    d_x = ((d_past + d_v @ w_v) + d_k @ w_k) + d_q @ w_q

Cut weights leave each product unfinished, and each sum with a finished one would finish it by a
transfer of its own. With the products first one transfer finishes their sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from partc.graph import Graph, innermost_block, is_backward, is_call, set_value, value
from partc.graph.graph_edits import call_before, drop_dead, replace_by
from partc.in_order import leaves

aten = torch.ops.aten
PRODUCTS = (aten.matmul.default, aten.mm.default)
FEWEST = 2


def products_first(graph: Graph) -> None:
    """``(a + x @ w) + y @ v`` in the backward becomes ``(x @ w + y @ v) + a``, in place."""
    for node in reversed(list(graph.calls())):
        if node.users and adds(node):
            _reorder(node)
    drop_dead(graph)


def adds(node: Any) -> bool:
    """Whether a call adds two values; twice the same one, or a number, is one summand."""
    adds = is_call(node, aten.add.Tensor) and is_backward(node) and not node.kwargs
    return adds and len(node.all_input_nodes) == 2


def _reorder(node: fx.Node) -> None:
    parts = [*summands(node)]
    here = innermost_block(node)
    if any(innermost_block(part) != here for part in parts):
        return  # what all blocks add to is summed alike in each (`start_sums`)
    products = [p for p in parts if is_call(p, *PRODUCTS)]
    others = [p for p in parts if p not in products]
    ordered = [*products, *others]
    if len(products) < FEWEST or not others or parts[: len(products)] == products:
        return
    total = ordered[0]
    for part in ordered[1:]:
        last = max(total, part)
        total = call_before(last.next, aten.add.Tensor, total, part)
        set_value(total, replace(value(node), shape=value(total).shape, dtype=value(total).dtype))
    replace_by(node, total)


def summands(node: fx.Node) -> Iterator[fx.Node]:
    """What a sum of sums adds up; a sum that is read elsewhere too is one summand."""
    return leaves(
        node.all_input_nodes,
        lambda part: part.all_input_nodes if adds(part) and len(part.users) == 1 else None,
    )
