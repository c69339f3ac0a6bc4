"""Casts, which change a floating tensor's dtype and nothing else, and the views around them."""

from __future__ import annotations

import operator

import torch
from torch import fx

from partc.graph import fake_of, first_operand, is_call

aten = torch.ops.aten
VIEWS = (
    aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default,
    aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.select.int, aten.slice.Tensor, aten.split.Tensor,
    aten.split_with_sizes.default, operator.getitem,
)  # fmt: skip
_MEANING_NOTHING = {
    "memory_format": (None, torch.preserve_format),
    "layout": (None, torch.strided),
    "non_blocking": (False,),
}


def is_cast(node: fx.Node) -> bool:
    """Whether a call changes the dtype of a floating tensor and nothing else."""
    if not is_call(node, aten._to_copy.default):
        return False
    before, after = fake_of(first_operand(node)), fake_of(node)
    plain = all(k == "dtype" or v in _MEANING_NOTHING.get(k, ()) for k, v in node.kwargs.items())
    floats = before.is_floating_point() and after.is_floating_point()
    return bool(plain and floats and before.dtype != after.dtype)


def widens(cast: fx.Node) -> bool:
    """Whether the result of a cast has more bytes than its operand: bf16 to f32."""
    return bool(fake_of(cast).element_size() > fake_of(first_operand(cast)).element_size())
