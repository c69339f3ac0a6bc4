"""Which numbers among a call's arguments may differ between blocks that one class prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from partc.graph import ops

aten = torch.ops.aten
# Of these any number; of other ops what is no whole number: those may be sizes, dims or places.
WHOLE = {
    aten.convolution.default, aten.convolution_backward.default, aten.mul.Tensor, aten.div.Tensor,
    aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.pow.Tensor_Scalar,
}  # fmt: skip
FILLS = {aten.full.default, aten.full_like.default, aten.scalar_tensor.default}


def may_vary(node: fx.Node, number: Any) -> bool:
    """Whether another block may have another number here, and still be printed by the same text."""
    is_aten = getattr(node.target, "namespace", "") == "aten"
    if node.target in FILLS or not (is_aten or node.target is ops.dropout_mask):
        return False
    return type(number) is float or (type(number) is int and node.target in WHOLE)


def names_of_arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """A call's arguments by name: the positional ones first."""
    schema: Any = getattr(node.target, "_schema", None)
    given = [argument.name for argument in schema.arguments] if schema is not None else ["x", "p"]
    yield from zip(given, node.args, strict=False)
    yield from node.kwargs.items()
