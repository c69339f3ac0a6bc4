"""Which numbers among a call's arguments may differ between blocks that one class prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from partc.graph import ops
from partc.graph.places import PIECES

aten = torch.ops.aten
# Of these any number; of other ops what is no whole number: those may be sizes, dims or places.
WHOLE = {
    aten.convolution.default, aten.convolution_backward.default, aten.mul.Tensor, aten.div.Tensor,
    aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.pow.Tensor_Scalar,
}  # fmt: skip
FILLS = {aten.full.default, aten.full_like.default, aten.scalar_tensor.default}


# Arguments that say which dims or elements a call is about, and not how large something is.
PLACES = {"dim", "dims", "dim0", "dim1", "start_dim", "end_dim", "reduction", "ignore_index"}


def may_vary(
    node: fx.Node, name: str, number: Any, *, sizes: bool = False, calls: bool = False
) -> bool:
    """Whether another block may have another number here, and still be printed by the same text.

    ``name`` is the argument in which it stands. With ``sizes`` that may be a size as well. With
    ``calls``, where the blocks are calls of one module, also what says which piece a call takes:
    ``x[:, t]`` of time step ``t``.
    """
    if calls and type(number) is int and (node.target, name) in PIECES:
        return True
    is_aten = getattr(node.target, "namespace", "") == "aten"
    if sizes and is_aten and type(number) is int and name not in PLACES:
        return node.target not in FILLS or name == "size"
    if node.target in FILLS or not (is_aten or node.target is ops.dropout_mask):
        return False
    return type(number) is float or (type(number) is int and node.target in WHOLE)


def names_of_arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """A call's arguments by name: the positional ones first."""
    schema: Any = getattr(node.target, "_schema", None)
    given = [argument.name for argument in schema.arguments] if schema is not None else ["x", "p"]
    given += [str(i) for i in range(len(given), len(node.args))]
    yield from zip(given, node.args, strict=False)
    yield from node.kwargs.items()
