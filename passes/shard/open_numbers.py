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

from partc.graph import fake_of, op_word, update, value
from partc.graph.graph_edits import Writer

aten = torch.ops.aten

_OF_TENSORS: dict[Any, Any] = {
    aten.add.Tensor: aten.add.Tensor, aten.add.Scalar: aten.add.Tensor,
    aten.sub.Tensor: aten.sub.Tensor, aten.sub.Scalar: aten.sub.Tensor,
    aten.rsub.Tensor: aten.rsub.Tensor, aten.rsub.Scalar: aten.rsub.Tensor,
}  # fmt: skip
_WIDE = (torch.float32, torch.float64)  # kernels compute in the dtype of the tensor itself


def adds_number(node: fx.Node) -> bool:
    """Whether a call adds a number to a tensor, or subtracts either, and a tensor can hold it."""
    if node.target not in _OF_TENSORS or len(node.args) != 2 or node.kwargs:
        return False
    (x, number), dtype = node.args, fake_of(node).dtype
    if not isinstance(number, int | float) or not isinstance(x, fx.Node):
        return False
    if dtype != fake_of(x).dtype:
        return False
    return dtype in _WIDE or torch.tensor(number, dtype=dtype).item() == number


def open_number(node: fx.Node) -> fx.Node:
    """Replace ``x + 1``, ``x - 1`` or ``1 - x`` by a call of two tensors; return the first call.

    The call keeps its name, and the number has one of its own, so that a plan's names stay valid.
    """
    x, number = node.args
    known = value(node)
    made = Writer(node.graph, node, replace(known, decomposed_from=op_word(node.target)))(
        aten.full.default, [], number, dtype=known.dtype
    )
    total = Writer(node.graph, node, known)(_OF_TENSORS[node.target], x, made)
    update(total, name=known.name or node.name)
    node.replace_all_uses_with(total)
    node.graph.erase_node(node)
    return made
