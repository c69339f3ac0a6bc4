"""Make tensors of a constant without the tensor that lends them its dtype."""

from __future__ import annotations

import torch

from partc.graph import Graph, value
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
    """``positions.new_ones([4])`` becomes ``ones([4], dtype=i64)``: nobody reads the positions.

    Only of what follows from inputs alone. A fill like an activation stays where that is, and is
    not made before the step begins.
    """
    known = input_only(graph)
    for node in list(graph.calls()):
        if node in known and node.target in FILLS:
            fill = FILLS[node.target]
            replace_by(node, call_before(node, fill, *node.args[1:], dtype=value(node).dtype))
    drop_dead(graph)
