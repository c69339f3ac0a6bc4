"""Replace ``new_ones(x, ...)`` and its like by ``ones(..., dtype=...)``, which reads no tensor."""

from __future__ import annotations

import torch
from torch import fx

from partc.graph import Graph, fake_of, value
from partc.graph.ancestors import ancestors
from partc.graph.graph_edits import call_before, drop_dead, replace_by
from partc.graph.input_only import input_only

aten = torch.ops.aten
FILLS = {
    aten.new_ones.default: aten.ones.default,
    aten.new_zeros.default: aten.zeros.default,
    aten.new_full.default: aten.full.default,
    aten.new_empty.default: aten.empty.memory_format,
}


def free_fills(graph: Graph) -> None:
    """``positions.new_ones([4])`` becomes ``ones([4], dtype=i64)``, which reads no positions.

    Only where the tensor that lends its dtype is computed from the step's inputs alone, or where a
    buffer is computed from the fill, which is no larger: like the buffer, it is then never cut. A
    fill like an activation keeps its operand, so that it is not made, and kept, from the step's
    start on.
    """
    known = input_only(graph) | _parts_of_buffers(graph)
    for node in list(graph.calls()):
        if node in known and node.target in FILLS:
            fill = FILLS[node.target]
            replace_by(node, call_before(node, fill, *node.args[1:], dtype=value(node).dtype))
    drop_dead(graph)


def _parts_of_buffers(graph: Graph) -> set[fx.Node]:
    """The fills from which new values of buffers, no smaller than they, are computed."""
    found: set[fx.Node] = set()
    for new in graph.outputs.buffers.values():
        fills = (node for node in ancestors(new) if node.target in FILLS)
        found |= {fill for fill in fills if fake_of(fill).numel() <= fake_of(new).numel()}
    return found
