"""Compute cheap values again in the backward instead of keeping them.

Those are sums, products, casts and views of what is kept anyway: they cost little time and most of
the activation memory. Results of ``exp``, ``tanh`` and the like are kept. A value is recomputed
only inside the block, and on the pipeline stage, that made it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from partc.graph import (
    Graph,
    block_of,
    held,
    is_tensor,
    set_held,
    set_value,
    stage_of,
    tensor_args,
    value,
)
from partc.passes.assign_stages import ANYWHERE

aten = torch.ops.aten
_VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.transpose.int,
    aten.t.default,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.select.int,
    aten.slice.Tensor,
)
_CHEAP = frozenset(
    {
        *_VIEWS,
        aten.add.Tensor,
        aten.add.Scalar,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.div.Tensor,
        aten.neg.default,
        aten._to_copy.default,
        aten.silu.default,
        aten.relu.default,
    }
)


def recompute(graph: Graph) -> Graph:
    """Give the backward its own copies of cheap forward values, in place."""
    again = recomputable(graph)
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.calls()):
        if value(node).phase == "B":
            for operand in tensor_args(node):
                if operand in again and _together(operand, node):
                    node.replace_input_with(operand, _copy(graph, operand, node, again, copies))
    return graph


def recomputable(graph: Graph) -> set[fx.Node]:
    """Forward values that the backward reads and that follow cheaply from what is kept anyway."""
    saved = {n for n in graph.calls() if value(n).phase == "F" and _read_backward(n)}
    again: set[fx.Node] = set()
    for node in graph.calls():
        if value(node).phase != "F" or node.target not in _CHEAP or not is_tensor(node):
            continue
        if all(_at_hand(o, node, saved, again) for o in tensor_args(node)):
            again.add(node)
    return {n for n in again if n not in saved or _pays(n)}


def _at_hand(operand: fx.Node, node: fx.Node, saved: set[fx.Node], again: set[fx.Node]) -> bool:
    """Whether the backward has an operand anyway, or computes it again in the same block."""
    if operand.op == "placeholder" or operand in saved:
        return True
    return operand in again and _together(operand, node)


def _together(operand: fx.Node, reader: fx.Node) -> bool:
    """Whether both stand in one block and, in a pipeline, on one stage: others are sent values."""
    stages = (ANYWHERE, stage_of(reader))
    return block_of(operand) == block_of(reader) and stage_of(operand) in stages


def _pays(node: fx.Node) -> bool:
    """Whether keeping it would cost memory, or it is a view that is written as easily again."""
    return node.target in _VIEWS or held(node).numel() > 1


def _read_backward(node: fx.Node) -> bool:
    return any(u.op == "call_function" and value(u).phase == "B" for u in node.users)


def _copy(
    graph: Graph,
    node: fx.Node,
    reader: fx.Node,
    again: set[fx.Node],
    copies: dict[fx.Node, fx.Node],
) -> fx.Node:
    """The backward's copy of a value, written before its first reader, its own cheap operands
    first.
    """
    if node not in copies:
        swap = {
            o: _copy(graph, o, reader, again, copies)
            for o in tensor_args(node)
            if o in again and _together(o, node)
        }
        with graph.fx.inserting_before(reader):
            copies[node] = graph.fx.node_copy(node, lambda n: swap.get(n, n))
        set_value(copies[node], replace(value(node), phase="B"))
        set_held(copies[node], held(node))
    return copies[node]
