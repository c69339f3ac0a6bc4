"""Replace the backward of a slice by padding, and sums of them that fill a dim by ``cat``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from partc.graph import Graph, is_call, shape_of
from partc.graph.graph_edits import call_before, drop_dead, replace_by
from partc.in_order import leaves

aten = torch.ops.aten
slice_backward = aten.slice_backward.default
select_backward = aten.select_backward.default


def pad_slices(graph: Graph) -> None:
    """``slice_backward(d, sizes, dim, start, end)`` becomes ``constant_pad_nd(d, ...)``.

    ``sizes`` has the whole shape, which a rank that holds a shard could not use; padding names the
    sliced dim alone.
    """
    for node in reversed(list(graph.calls())):  # the whole sum first
        if is_call(node, aten.add.Tensor) and not node.kwargs:
            _stack(node)
    drop_dead(graph)
    for node in list(graph.calls()):
        if is_call(node, aten.add.Tensor) and not node.kwargs:
            _join(node)
    drop_dead(graph)
    for node in list(graph.calls()):
        if is_call(node, slice_backward) and node.args[5] == 1:
            _pad(node)
    drop_dead(graph)


def _stack(node: fx.Node) -> None:
    """``select_backward(a, ..., 0) + select_backward(b, ..., 1) -> stack([a, b], dim)`` where all
    places of a dim are in the sum.
    """
    parts = [*_summands(node)]
    if len(parts) < 2 or not all(is_call(p, select_backward) for p in parts):
        return
    shape = shape_of(node)
    places = {tuple(int(a) for a in p.args[2:4]): p.args[0] for p in parts}
    by_index = {(dim % len(shape), i % shape[dim]): x for (dim, i), x in places.items()}
    dim = next(iter(by_index))[0]
    if len(parts) == len(by_index) and {*by_index} == {(dim, i) for i in range(shape[dim])}:
        pieces = [x for _, x in sorted(by_index.items(), key=lambda item: item[0])]
        replace_by(node, call_before(node, aten.stack.default, pieces, dim))


def _summands(node: Any) -> Iterator[Any]:
    """What a sum of sums adds up, sums that are read elsewhere as a whole."""

    def inside(part: Any) -> tuple[Any, ...] | None:
        adds = is_call(part, aten.add.Tensor) and not part.kwargs and len(part.users) == 1
        return part.args if adds else None

    return leaves(node.args, inside)


def _join(node: fx.Node) -> None:
    """``slice_backward(a, ..., 0, 3) + slice_backward(b, ..., 3, 8) -> cat([a, b], dim)``."""
    parts: list[Any] = list(node.args)
    if not all(is_call(p, slice_backward) and p.args[5] == 1 for p in parts):
        return
    spans = [_span(p) for p in parts]
    if spans[0][0] != spans[1][0]:
        return
    (dim, start, end), (_, next_start, next_end) = sorted(spans)
    size = shape_of(node)[dim]
    if (start, end, next_end) == (0, next_start, size):
        pieces = [p.args[0] for _, p in sorted(zip(spans, parts, strict=True))]
        replace_by(node, call_before(node, aten.cat.default, pieces, dim))


def _pad(node: fx.Node) -> None:
    dim, start, end = _span(node)
    shape = shape_of(node)
    pad = [0] * (2 * (len(shape) - 1 - dim)) + [start, shape[dim] - end]
    replace_by(node, call_before(node, aten.constant_pad_nd.default, node.args[0], pad, 0.0))


def _span(node: fx.Node) -> tuple[int, int, int]:
    """The dim of a slice, its start and its end, counted from the front."""
    dim, start, end = (int(a) for a in node.args[2:5])  # type: ignore[arg-type]
    shape = shape_of(node)
    dim %= len(shape)
    start, end = (min(max(at + shape[dim] if at < 0 else at, 0), shape[dim]) for at in (start, end))
    return dim, start, max(start, end)
