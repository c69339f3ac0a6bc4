"""Norms, convolutions and tables with the arguments that matter to a reader.

Each is one call of the kernel that autograd calls; what autograd passes beside is filled in.
"""
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import torch
from torch import Tensor


def layer_norm_backward(
    d_y: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, *, d_x: bool = True,
    d_weight: bool = True, d_bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``x``, weight and bias; of the bias itself the kernel reads no number."""
    given = (d_y, x, weight.shape, mean, rstd, weight, weight)
    return torch.ops.aten.native_layer_norm_backward(*given, (d_x, d_weight, d_bias))


def batch_norm_backward(
    d_y: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, *, d_x: bool = True,
    d_weight: bool = True, d_bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``x``, weight and bias in training, by the batch's own mean and deviation."""
    given = (d_y, x, weight, None, None, mean, rstd, True, 0.0)
    return torch.ops.aten.native_batch_norm_backward(*given, (d_x, d_weight, d_bias))


def group_norm_and_stats(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``F.group_norm``, with each group's mean and 1 / deviation."""
    num, channels = x.shape[:2]
    size = x.numel() // (num * channels)
    return torch.native_group_norm(x, weight, bias, num, channels, size, groups, eps)


def group_norm_backward(
    d_y: Tensor, x: Tensor, groups: int, mean: Tensor, rstd: Tensor, weight: Tensor, *,
    d_x: bool = True, d_weight: bool = True, d_bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``x``, weight and bias."""
    num, channels = x.shape[:2]
    given = (d_y, x, mean, rstd, weight, num, channels, x.numel() // (num * channels), groups)
    return torch.ops.aten.native_group_norm_backward(*given, (d_x, d_weight, d_bias))


def conv_backward(
    d_y: Tensor, x: Tensor, weight: Tensor, *, stride: int = 1, padding: int = 0,
    output_padding: int = 0, dilation: int = 1, groups: int = 1, transposed: bool = False,
    d_x: bool = True, d_weight: bool = True, d_bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``x``, weight and bias in ``F.conv2d(x, weight, bias, ...)`` and its like."""
    how = ((stride,), (padding,), (dilation,), transposed, (output_padding,), groups)
    mask = (d_x, d_weight, d_bias)
    return torch.ops.aten.convolution_backward(d_y, x, weight, d_y.shape[1:2], *how, mask)


def embedding_grad(d_y: Tensor, ids: Tensor, rows: int, padding_idx: int = -1) -> Tensor:
    """Gradient of a table of ``rows`` rows, of which ``ids`` were read."""
    return torch.ops.aten.embedding_dense_backward(d_y, ids, rows, padding_idx, False)


def nll_loss_and_count(
    log_p: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """``F.nll_loss``, a sum, and the number of targets in it, each times its class's weight."""
    return torch.ops.aten.nll_loss_forward(log_p, target, weight, 2, ignore_index)


def nll_loss_backward(
    d_loss: Tensor, log_p: Tensor, target: Tensor, count: Tensor, weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Gradient of ``log_p`` in a sum of ``F.nll_loss``."""
    given = (d_loss, log_p, target, weight, 2, ignore_index, count)
    return torch.ops.aten.nll_loss_backward(*given)


def nll_loss2d_and_count(
    log_p: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """``F.nll_loss`` of a class for each place of an image, and the number of targets in it."""
    return torch.ops.aten.nll_loss2d_forward(log_p, target, weight, 2, ignore_index)


def nll_loss2d_backward(
    d_loss: Tensor, log_p: Tensor, target: Tensor, count: Tensor, weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Gradient of ``log_p`` in a sum of ``F.nll_loss`` over the places of images."""
    given = (d_loss, log_p, target, weight, 2, ignore_index, count)
    return torch.ops.aten.nll_loss2d_backward(*given)


def mse_loss_backward(d_loss: Tensor, x: Tensor, target: Tensor) -> Tensor:
    """Gradient of ``x`` in a sum of ``F.mse_loss``."""
    return torch.ops.aten.mse_loss_backward(d_loss, x, target, 2)


def smooth_l1_loss_backward(d_loss: Tensor, x: Tensor, target: Tensor, beta: float = 1.0) -> Tensor:
    """Gradient of ``x`` in a sum of ``F.smooth_l1_loss``."""
    return torch.ops.aten.smooth_l1_loss_backward(d_loss, x, target, 2, beta)


def huber_loss_backward(d_loss: Tensor, x: Tensor, target: Tensor, delta: float = 1.0) -> Tensor:
    """Gradient of ``x`` in a sum of ``F.huber_loss``."""
    return torch.ops.aten.huber_loss_backward(d_loss, x, target, 2, delta)


def binary_cross_entropy_backward(
    d_loss: Tensor, x: Tensor, target: Tensor, weight: Tensor | None = None
) -> Tensor:
    """Gradient of ``x`` in a sum of ``F.binary_cross_entropy``."""
    return torch.ops.aten.binary_cross_entropy_backward(d_loss, x, target, weight, 2)


def soft_margin_loss_backward(d_loss: Tensor, x: Tensor, target: Tensor) -> Tensor:
    """Gradient of ``x`` in a sum of ``F.soft_margin_loss``."""
    return torch.ops.aten.soft_margin_loss_backward(d_loss, x, target, 2)
