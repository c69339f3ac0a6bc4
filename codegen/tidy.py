"""A copy of the graph to print from, without what a program need not do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx

from partc import collectives
from partc.codegen.blocks import Item, Loop, gathers_param
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


def share_gathers(items: Iterable[Item]) -> list[Item]:
    """Gather a parameter once between two loops, where forward and backward meet."""
    kept: list[Item] = []
    here: dict[object, fx.Node] = {}
    waits: dict[fx.Node, fx.Node] = {}
    for item in items:
        if isinstance(item, Loop):
            here, waits = {}, {}
        elif gathers_param(item):
            first = here.setdefault((item.args, *sorted(item.kwargs.items())), item)
            if first is not item:
                _merge(item, first)
                continue
        elif item.target is collectives.wait and gathers_param(item.all_input_nodes[0]):
            first = waits.setdefault(item.all_input_nodes[0], item)
            if first is not item:
                _merge(item, first)
                continue
        kept.append(item)
    return kept


def _merge(node: fx.Node, first: fx.Node) -> None:
    node.replace_all_uses_with(first)
    node.graph.erase_node(node)
