"""A copy of the graph to print from, without what a program need not do."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from partc.graph import Graph, drop_dead

aten = torch.ops.aten


def copied(graph: Graph) -> Graph:
    """The same graph on nodes of its own.

    Running statistics that a backward ignores are left out, and what nobody reads: a view that is
    made again where it is needed.
    """
    nodes = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    result = nodes.graph_copy(graph.fx, mapping)
    nodes.output(result)
    copy = replace(graph, fx=nodes)
    for node in copy.calls():
        if node.target is aten.native_batch_norm_backward.default and node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])
    drop_dead(copy)
    return copy
