"""Merge consecutive reshapes into one, or drop them where the shape ends as it began."""

from __future__ import annotations

from typing import Any

import torch

from partc.graph import Graph, is_call, shape_of
from partc.graph.graph_edits import drop_dead, replace_by

reshape = torch.ops.aten.reshape.default


def merge_reshapes(graph: Graph) -> None:
    """``reshape(reshape(x, a), b)`` becomes ``reshape(x, b)``, or ``x`` where it has that shape."""
    for node in list(graph.calls()):
        if is_call(node, reshape):
            source: Any = node.args[0]
            while is_call(source, reshape):
                source = source.args[0]
            if shape_of(source) == shape_of(node):
                replace_by(node, source)
            else:
                node.args = (source, list(shape_of(node)))
    drop_dead(graph)
