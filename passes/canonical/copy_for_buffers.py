"""Copy what a buffer takes over from another tensor, as that may have changed when it is written.

A step writes new values over its buffers one after the other: after ``previous.copy_(current)`` and
``current.copy_(new)`` in a model, the new value of ``previous`` is the old value of ``current``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from partc.graph import Graph, Value, value
from partc.graph.graph_edits import Writer
from partc.passes.canonical.functionalize import viewed

aten = torch.ops.aten


def copy_for_buffers(graph: Graph) -> None:
    """``buffer previous = current`` becomes ``buffer previous = clone(current)``.

    So does every new value, or result of a step, that is a view of a buffer which the step
    updates, or a tensor given to the step; and every result that is a buffer's new value.
    """
    outputs, placed = graph.outputs, graph.buffers
    updated = {placed[name] for name in outputs.buffers}
    made = {*outputs.buffers.values()}
    news = {
        name: _copy(new, name.rpartition(".")[0])
        if new.op == "placeholder" or _memory(new) in updated
        else new
        for name, new in outputs.buffers.items()
    }
    results = {
        name: _copy(result, value(result).module)
        if result.op == "placeholder" or result in made or _memory(result) in updated
        else result
        for name, result in outputs.results.items()
    }
    if news != outputs.buffers or results != outputs.results:
        graph.set_outputs(replace(outputs, buffers=news, results=results))


def _memory(node: fx.Node) -> fx.Node:
    """The node whose memory a value lies in."""
    while node.op == "call_function" and (before := viewed(node, node.args)) is not None:
        node = before
    return node


def _copy(node: fx.Node, module: str) -> fx.Node:
    """A copy of a value, made in the forward right behind its last reader there."""
    readers = [u for u in node.users if u.op == "call_function" and value(u).phase == "F"]
    behind = max([node, *readers])
    while behind.next.op == "placeholder":
        behind = behind.next
    like = Value(module=module, source=value(node).source)
    return Writer(node.graph, behind.next, like)(aten.clone.default, node)
