"""Sizes among a call's arguments that its printed text reads off the tensors.

Blocks that differ in these alone are printed by one text, and need no attribute for them. The
texts are those of ``codegen/helpers/kernels.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from partc.codegen.repeats.may_vary import names_of_arguments
from partc.graph import fake_of
from partc.quoting import literal

aten = torch.ops.aten
GROUP_NORMS = {aten.native_group_norm.default, aten.native_group_norm_backward.default}


def read_sizes(node: fx.Node) -> set[str]:
    """The names of the arguments that the text of a call has not, as a helper reads them."""
    given = dict(names_of_arguments(node))
    if node.target in GROUP_NORMS and _has_own_sizes(given):
        return {"N", "C", "HxW"}
    is_norm = node.target is aten.native_layer_norm_backward.default
    if is_norm and given.get("weight") is not None:
        alike = tuple(given["normalized_shape"]) == tuple(fake_of(given["weight"]).shape)
        return {"normalized_shape"} if alike else set()
    is_conv = node.target is aten.convolution_backward.default
    return {"bias_sizes"} if is_conv and _is_plain(given) else set()


def _has_own_sizes(given: dict[str, Any]) -> bool:
    """Whether a group norm's sizes are those of the tensor that it normalizes, and it scales."""
    fake = fake_of(given["input"])
    num, channels = fake.shape[:2]
    known = num, channels, fake.numel() // max(num * channels, 1)
    scales = given.get("weight") is not None and given.get("bias", "") is not None
    return scales and tuple(given[name] for name in ("N", "C", "HxW")) == known


def _is_plain(given: dict[str, Any]) -> bool:
    """Whether a convolution has one stride, padding and dilation for all dims."""
    names = ("stride", "padding", "dilation", "output_padding")
    texts = ({*map(literal, given[name])} for name in names)
    return all(len(each) == 1 for each in texts)  # a number of the block's own equals no other
