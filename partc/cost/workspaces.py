"""The temporary memory (workspace) of CPU kernels that need much of it.

The formulas were measured with torch's profiler on 2.13. Convolutions in float32 choose a blocked
layout by the machine, so their workspaces are estimates, good to about a quarter.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from partc.cost.flops import target_name
from partc.registry import Registry

Workspace = Callable[..., int]  # called with the results and the arguments, tensors among them

WORKSPACES: Registry[Workspace] = Registry("kernel workspace")


def workspace_of(target: Any, result: Any, args: Any, kwargs: Any) -> int:
    """Workspace of one call's kernel in bytes; 0 for unknown kernels and for tensors on a GPU."""
    name = target_name(target)
    if name not in WORKSPACES or any(isinstance(a, Tensor) and a.is_cuda for a in args):
        return 0
    return WORKSPACES[name](result, *args, **kwargs)


def _for(*names: str) -> Callable[[Workspace], Workspace]:
    def add(workspace: Workspace) -> Workspace:
        for name in names:
            WORKSPACES.add(name, workspace)
        return workspace

    return add


def _bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _copies(*tensors: Tensor) -> int:
    """Bytes of the contiguous copies that a kernel makes of operands that are not contiguous."""
    return _bytes(*(t for t in tensors if not t.is_contiguous()))


@_for("aten.convolution")
def _convolution(
    y: Tensor, x: Tensor, weight: Tensor, bias: Any, stride: list[int], *rest: Any
) -> int:
    return _unfolded(x, weight, y, stride, rest[-1]) or max(_bytes(x, weight), _bytes(y))


@_for("aten.convolution_backward")
def _convolution_backward(
    out: Any, d_y: Tensor, x: Tensor, weight: Tensor, sizes: Any, stride: list[int], *rest: Any
) -> int:
    return _unfolded(x, weight, d_y, stride, rest[-2]) or max(_bytes(x, d_y), _bytes(weight))


def _unfolded(x: Tensor, weight: Tensor, y: Tensor, stride: list[int], groups: int) -> int:
    """Bytes of the column matrix (im2col) of a convolution that runs as a matrix product.

    0 for dtypes other than float64, which other kernels compute.
    """
    kernel = weight.shape[2:]
    if prod(kernel) == 1 and prod(stride) == 1:
        return 1  # the image is its own column matrix
    if x.dtype != torch.float64:
        return 0
    if groups > 1:
        return _bytes(y)
    return x.shape[1] * prod(kernel) * y.shape[0] * prod(y.shape[2:]) * x.element_size()


@_for("aten.native_batch_norm_backward")
def _batch_norm_backward(out: Any, d_y: Tensor, *rest: Any) -> int:
    return _bytes(d_y)


@_for("aten.native_layer_norm")
def _layer_norm(out: Any, x: Tensor, *rest: Any) -> int:
    return _copies(x)


@_for("aten.native_layer_norm_backward")
def _layer_norm_backward(out: Any, d_y: Tensor, x: Tensor, *rest: Any) -> int:
    return _copies(d_y, x)


@_for("aten._safe_softmax")
def _safe_softmax(y: Tensor, *rest: Any) -> int:
    """One bool per score: whether the score is minus infinity."""
    return y.numel()


@_for("aten.roll")
def _roll(y: Tensor, x: Tensor, shifts: list[int], *rest: Any) -> int:
    """A roll over several dims goes dim by dim, with a temporary as large as the result."""
    return _bytes(y) if len(shifts) > 1 else 0
