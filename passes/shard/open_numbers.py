"""Write a number that a call adds to a sum over microbatches as a tensor.

``1 - loss`` of a sum ``loss`` over microbatches would need all of them: each microbatch that added
the number would count it once more. As a tensor the number is a sum too: of itself in the first
microbatch, and of zeros in the others (`partc.graph.collectives.keep_first`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from partc.graph import fake_of, value
from partc.graph.graph_edits import Writer

aten = torch.ops.aten

_REVERSED = (aten.rsub.Scalar, aten.rsub.Tensor)
_DIFFERENCES = (aten.sub.Tensor, aten.sub.Scalar)
_ADDING = (*_REVERSED, *_DIFFERENCES, aten.add.Tensor, aten.add.Scalar)
_WIDE = (torch.float32, torch.float64)  # kernels compute in the dtype of the tensor itself


def adds_number(node: fx.Node) -> bool:
    """Whether a call adds a number to a tensor, or subtracts either, and a tensor can hold it."""
    if node.target not in _ADDING or len(node.args) != 2 or node.kwargs:
        return False
    (x, number), dtype = node.args, fake_of(node).dtype
    if not isinstance(number, int | float) or not isinstance(x, fx.Node):
        return False
    if dtype != fake_of(x).dtype:
        return False
    return dtype in _WIDE or torch.tensor(number, dtype=dtype).item() == number


def open_number(node: fx.Node) -> fx.Node:
    """Replace ``x + 1``, ``x - 1`` or ``1 - x`` by a call of two tensors; return the first call."""
    x, number = node.args
    known = value(node)
    write = Writer(node.graph, node, replace(known, shape=(), name=""))
    made = write(aten.full.default, [], number, dtype=known.dtype)
    operands: tuple[Any, Any] = (made, x) if node.target in _REVERSED else (x, made)
    target = aten.add.Tensor if node.target not in (*_REVERSED, *_DIFFERENCES) else aten.sub.Tensor
    node.replace_all_uses_with(Writer(node.graph, node, known)(target, *operands))
    node.graph.erase_node(node)
    return made
