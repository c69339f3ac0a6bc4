"""Shape functions that some torch version lacks or makes too narrow; importing registers them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_impls import op_implementations_dict, register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten


def grouped_mm(
    mode: FakeTensorMode,
    func: Any,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Any dtype that the CPU kernel takes; torch before 2.15 lets only bf16 through."""
    if a.dim() == 2 and b.dim() == 2:
        assert offs is not None
        shape: tuple[int, ...] = (offs.shape[0], a.shape[0], b.shape[1])
    elif a.dim() == 3 and b.dim() == 2:
        shape = (a.shape[1], b.shape[1])
    else:
        shape = (*a.shape[:-1], b.shape[-1])
    with mode:
        return a.new_empty(shape, dtype=out_dtype or a.dtype)


if aten._grouped_mm.default not in op_implementations_dict:
    register_op_impl(aten._grouped_mm.default)(grouped_mm)
