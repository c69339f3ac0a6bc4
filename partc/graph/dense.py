"""Which values lie contiguous on every device, and not only as torch says for fakes."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import fx

from partc.graph import collectives, fake_of, is_tensor, ops

aten = torch.ops.aten
_FRESH = {  # what these compute, their statistics among it, lies in order whatever they are given
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.linear.default, ops.weight_grad,
    aten.embedding.default, aten.embedding_dense_backward.default, ops.masked_embedding,
    aten.native_layer_norm.default, aten._fused_rms_norm.default, aten.native_group_norm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten.contiguous.default, aten.sum.dim_IntList, aten.mean.dim, aten.amax.default,
    aten.amin.default,
    *collectives.COLLECTIVES,
}  # fmt: skip
_ALIKE = (aten.stack.default, collectives.wait, collectives.keep_piece, collectives.keep_first)


def surely_dense(node: fx.Node) -> bool:
    """Whether a value is contiguous on every device, and not only as torch says for fakes.

    Kernels of pads, rolls, convolutions and others keep the order of ``channels_last``, which their
    fakes do not tell. Asking for a contiguous tensor costs nothing where it is one.
    """
    seen, left = {node}, [node]
    while left:
        given = _ordered_by(left.pop())
        if given is None:
            return False
        left += [n for n in given if n not in seen]
        seen.update(given)
    return True


def _ordered_by(node: fx.Node) -> list[fx.Node] | None:
    """The values with which a value is contiguous, as a sum with its terms; None if unknown."""
    if not fake_of(node).is_contiguous():
        return None
    call = node.all_input_nodes[0] if node.target is operator.getitem else node
    if call.op == "placeholder" or call.target in _FRESH or _is_folded(call):
        return []
    if call.kwargs.get("memory_format") is torch.contiguous_format:
        return []
    if _is_alike(call.target):
        return [n for n in call.all_input_nodes if is_tensor(n)]
    return [] if fake_of(node).dim() <= 1 else None


def _is_folded(call: fx.Node) -> bool:
    """Whether a call is a product of rows and a matrix; of the reverse torch gives views."""
    if call.target is not aten.matmul.default:
        return False
    rows, matrix = call.all_input_nodes[0], call.all_input_nodes[-1]
    return bool(fake_of(rows).dim() >= fake_of(matrix).dim())


@cache
def _is_alike(target: Any) -> bool:
    """Whether a result is contiguous where all operands are: of views and of pointwise ops."""
    if target in _ALIKE or torch.Tag.pointwise in getattr(target, "tags", ()):
        return True
    returns = getattr(getattr(target, "_schema", None), "returns", ())
    return any(each.alias_info for each in returns)
