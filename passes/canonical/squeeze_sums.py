"""Replace a sum with ``keepdim=True`` and a squeeze of the kept dims by a plain sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from partc.graph import Graph, is_call, shape_of
from partc.graph.graph_edits import call_before, drop_dead, replace_by

aten = torch.ops.aten
SQUEEZES = (
    aten.reshape.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
)  # fmt: skip


def squeeze_sums(graph: Graph) -> None:
    """``reshape(sum(x, [0, 1], keepdim=True), [48])`` becomes ``sum(x, [0, 1])``."""
    for node in list(graph.calls()):
        total: Any = node.args[0] if is_call(node, *SQUEEZES) else None
        if is_call(total, aten.sum.dim_IntList) and total.args[2:] == (True,):
            kept = _kept_shape(total)
            if shape_of(node) == kept:
                plain = call_before(node, total.target, *total.args[:2], **total.kwargs)
                replace_by(node, plain)
    drop_dead(graph)


def _kept_shape(total: fx.Node) -> tuple[int, ...]:
    """The shape of the sum with ``keepdim=False``."""
    shape, dims = shape_of(total), total.args[1]
    summed = {int(d) % len(shape) for d in dims}  # type: ignore[union-attr,arg-type]
    return tuple(size for d, size in enumerate(shape) if d not in summed)
