"""Shape functions that some torch version lacks or makes too narrow, which importing registers, and
strides that it gets wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides
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

OTHER_STRIDES = (
    aten.softplus_backward.default, aten.elu_backward.default, aten.hardtanh_backward.default,
    aten.hardswish_backward.default, aten.hardsigmoid_backward.default,
    aten.logit_backward.default,
)  # fmt: skip


def with_strides(target: Any, operands: Iterable[Any], result: Any) -> Any:
    """The result with the strides that the kernel gives it: it asks its operands in their order,
    while torch's shape functions of these elementwise ops compare the second one first.
    """
    if target not in OTHER_STRIDES:
        return result
    tensors = torch.broadcast_tensors(*(x for x in operands if isinstance(x, Tensor)))
    strides = compute_elementwise_output_strides(*tensors)
    return result.new_empty_strided(result.shape, strides)
