"""Merge consecutive reshapes into one, or drop them where the shape ends as it began."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from partc.graph import Graph, is_call, shape_of
from partc.graph.graph_edits import call_before, drop_dead, replace_by
from partc.passes.canonical.cancel_transposes import SWAPS, order_of, permuted

aten = torch.ops.aten
RESHAPES = (
    aten.reshape.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims,
)  # fmt: skip


def merge_reshapes(graph: Graph) -> None:
    """``reshape(reshape(x, a), b)`` becomes ``reshape(x, b)``, or ``x`` where it has that shape.

    Dims of one entry are added behind a transpose, not before it, so that this merges with what
    follows: ``transpose(unsqueeze(x)) -> reshape(transpose(x))``.
    """
    for node in list(graph.calls()):
        if is_call(node, *SWAPS):
            _ones_behind(node)
    for node in list(graph.calls()):
        if is_call(node, *RESHAPES):
            _merge(node)
    drop_dead(graph)


def _merge(node: fx.Node) -> None:
    """Let a reshape read what the reshapes before it read; a single one stays as it is."""
    source: Any = node.args[0]
    while is_call(source, *RESHAPES):
        source = source.args[0]
    if shape_of(source) == shape_of(node):
        replace_by(node, source)
    elif source is not node.args[0] or is_call(node, aten.reshape.default):
        node.target, node.kwargs = aten.reshape.default, {}
        node.args = (source, list(shape_of(node)))


def _ones_behind(node: fx.Node) -> None:
    """``transpose(reshape(x))`` where the reshape adds dims of one entry: these are added last."""
    inner: Any = node.args[0]
    if not is_call(inner, *RESHAPES) or len(inner.users) > 1:
        return
    source: Any = inner.args[0]
    sizes = list(shape_of(inner))
    kept = _kept_dims(list(shape_of(source)), sizes)
    if kept is None and all(is_call(user, *RESHAPES) for user in node.users):  # these drop ones
        kept = [d for d, size in enumerate(sizes) if size != 1]
        if len(kept) < len(sizes):
            small = [sizes[d] for d in kept]
            source = call_before(inner, aten.reshape.default, source, small)
    if kept is None or len(kept) == len(sizes):
        return
    dims = [kept.index(d) for d in order_of(node) if d in kept]
    moved = permuted(node, source, dims)
    shape = list(shape_of(node))
    if list(shape_of(moved)) == shape:
        replace_by(node, moved)
    else:
        replace_by(node, call_before(node, aten.reshape.default, moved, shape))


def _kept_dims(old: list[int], new: list[int]) -> list[int] | None:
    """The dims of ``new`` that are those of ``old``, if all others have one entry; else None.

    >>> _kept_dims([4, 8], [4, 1, 8]), _kept_dims([4, 8], [32, 1])
    ([0, 2], None)
    """
    kept: list[int] = []
    for dim, size in enumerate(new):
        if len(kept) < len(old) and size == old[len(kept)]:
            kept.append(dim)
        elif size != 1:
            return None
    return kept if len(kept) == len(old) else None
