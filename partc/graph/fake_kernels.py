"""Corrections of torch's fake kernels: missing or too narrow kernels, and wrong strides.

Importing this module registers the kernels.
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
    """A fake kernel for any dtype; torch's own (before 2.15) accepts only bf16."""
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


def filled(mode: FakeTensorMode, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A fake kernel of an in-place draw that takes a generator, which torch's own do not."""
    return x


for fill in (aten.exponential_, aten.geometric_, aten.cauchy_, aten.log_normal_):
    register_op_impl(fill.default)(filled)


def ctc_loss(
    mode: FakeTensorMode, func: Any, log_probs: Tensor, targets: Tensor, input_lengths: Any,
    target_lengths: Any, *args: Any, **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A fake kernel with the largest ``log_alpha`` that there can be, beside the losses.

    Its size follows from the longest target, of which fakes know that it fits into its row.
    """
    num_steps, num_samples, _ = log_probs.shape
    for lengths in (input_lengths, target_lengths):
        if len(lengths) != num_samples:
            raise RuntimeError(f"{len(lengths)} lengths for a batch of size {num_samples}")
    known = not isinstance(target_lengths, Tensor)
    longest = max(target_lengths, default=0) if known else targets.shape[-1]
    with mode:
        losses = log_probs.new_empty(num_samples)
        return losses, log_probs.new_empty(num_samples, num_steps, 2 * longest + 1)


for each in (aten._ctc_loss.default, aten._ctc_loss.Tensor):
    register_op_impl(each)(ctc_loss)

OTHER_STRIDES = (
    aten.softplus_backward.default, aten.elu_backward.default, aten.hardtanh_backward.default,
    aten.hardswish_backward.default, aten.hardsigmoid_backward.default,
    aten.logit_backward.default,
)  # fmt: skip


def with_strides(target: Any, operands: Iterable[Any], result: Any) -> Any:
    """The fake result with the strides of the real kernel's result.

    The real kernels take the strides from the operands in their order. torch's fake kernels of
    these elementwise backward ops look at the second operand first.
    """
    if target not in OTHER_STRIDES:
        return result
    tensors = torch.broadcast_tensors(*(x for x in operands if isinstance(x, Tensor)))
    strides = compute_elementwise_output_strides(*tensors)
    return result.new_empty_strided(result.shape, strides)
