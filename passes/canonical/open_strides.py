"""Write ``as_strided`` as a reshape, or as nothing, where it only says how dense memory is read.

Strides of a whole tensor mean nothing for its pieces; shapes do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from partc.graph import Graph, fake_of, is_call, shape_of
from partc.graph.graph_edits import call_before, drop_dead, replace_by

aten = torch.ops.aten


def open_strides(graph: Graph) -> None:
    """``as_strided(x, [4, 48, 1, 1], [48, 1, 1, 1])`` of 192 dense numbers becomes ``reshape``."""
    for node in list(graph.calls()):
        if is_call(node, aten.as_strided.default):
            source: Any = node.args[0]
            if _reads_all(fake_of(source), *_view(node, 1)):
                replace_by(node, _reshaped(node, source))
        elif is_call(node, aten.as_strided_scatter.default):
            base, new = (cast(fx.Node, a) for a in node.args[:2])
            if _reads_all(fake_of(base), *_view(node, 2)):
                replace_by(node, _reshaped(node, new))
    drop_dead(graph)


def _view(node: fx.Node, first: int) -> tuple[Sequence[int], Sequence[int], int]:
    """The size, stride and offset arguments of a call."""
    given: Any = node.args[first:]
    size, stride, *offset = given
    return size, stride, (offset or [0])[0] or 0


def _reads_all(source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> bool:
    """Whether a strided view shows every element of dense memory once and in its order."""
    same = tuple(size) == source.shape and _steps(size, stride) == _steps(size, source.stride())
    flat = source.is_contiguous() and _steps(size, stride) == _steps(size, _dense(size))
    return offset == 0 and (same or (flat and torch.Size(size).numel() == source.numel()))


def _steps(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The strides of dims that have more than one element."""
    return [step for length, step in zip(size, stride, strict=True) if length != 1]


def _dense(size: Sequence[int]) -> list[int]:
    return [torch.Size(size[d + 1 :]).numel() for d in range(len(size))]


def _reshaped(where: fx.Node, source: fx.Node) -> fx.Node:
    if shape_of(source) == shape_of(where):
        return source
    return call_before(where, aten.reshape.default, source, list(shape_of(where)))
