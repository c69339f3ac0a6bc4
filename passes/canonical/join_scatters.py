"""Replace slice writes that together fill a tensor by the ``cat`` of the written pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from partc.graph import Graph, is_call, shape_of
from partc.graph.graph_edits import call_before, drop_dead, replace_by

aten = torch.ops.aten
slice_scatter = aten.slice_scatter.default


def join_scatters(graph: Graph) -> None:
    """``slice_scatter(slice_scatter(x, a, 1, 0, 3), b, 1, 3, 8)`` becomes ``cat([a, b], 1)``."""
    for node in list(graph.calls()):
        if is_call(node, slice_scatter):
            pieces, dim = _pieces(node)
            if pieces:
                replace_by(node, call_before(node, aten.cat.default, pieces, dim))
    drop_dead(graph)


def _pieces(node: fx.Node) -> tuple[list[fx.Node], int]:
    """The pieces along the dim in order, and the dim; no pieces if they leave a gap or overlap."""
    dim, written = _span(node)[0], []
    at: Any = node
    while is_call(at, slice_scatter) and _span(at)[0] == dim and _span(at)[3] == 1:
        written.append((_span(at)[1:3], at.args[1]))
        at = at.args[0]
    written.sort(key=lambda piece: piece[0])
    edges = [0] + [end for (_, end), _ in written]
    starts = [start for (start, _), _ in written]
    fills = starts == edges[:-1] and edges[-1] == shape_of(node)[dim] and len(written) > 1
    return ([piece for _, piece in written] if fills else []), dim


def _span(node: fx.Node) -> tuple[int, int, int, int]:
    """The dim, start, end and step of a slice_scatter, counted from the front."""
    given: Any = [*node.args[2:], *[None] * 4][:4]
    defaults = (0, 0, 1 << 62, 1)
    dim, start, end, step = (d if g is None else g for g, d in zip(given, defaults, strict=True))
    shape = shape_of(node)
    size = shape[dim]
    start, end = (min(max(at + size if at < 0 else at, 0), size) for at in (start, end))
    return dim % len(shape), start, end, step
