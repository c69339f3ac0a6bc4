"""Write ``x[mask] = 1.5`` as a choice between two values: unlike places in order of the mask's true
elements, it may be cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from partc.graph import Graph, fake_of, shape_of
from partc.graph.graph_edits import call_before, drop_dead, replace_by

aten = torch.ops.aten
MASKS = (torch.bool, torch.uint8)
PLACES = (aten.index_put.default, aten._unsafe_index_put.default)


def open_masks(graph: Graph) -> None:
    """``index_put(x, [mask], one)`` becomes ``where(mask, one, x)``."""
    for node in list(graph.calls()):
        if node.target in PLACES:
            _open(node, *node.args)
    drop_dead(graph)


def _open(node: fx.Node, x: Any, indices: Any, values: Any, accumulate: Any = False) -> None:
    """Rewrite a call that writes one number wherever a mask over the leading dims says so."""
    mask = indices[0]
    if len(indices) > 1 or fake_of(mask).dtype not in MASKS:
        return
    if accumulate or fake_of(values).numel() != 1:
        return
    if fake_of(mask).dtype != torch.bool:
        mask = call_before(node, aten._to_copy.default, mask, dtype=torch.bool)
    shape, rank = shape_of(mask), fake_of(x).dim()
    if len(shape) < rank:
        mask = call_before(node, aten.reshape.default, mask, [*shape, *[1] * (rank - len(shape))])
    if fake_of(values).dim():
        values = call_before(node, aten.reshape.default, values, [])
    replace_by(node, call_before(node, aten.where.self, mask, values, x))
