"""Parameters, buffers and inputs are contiguous in a trace, as ranks hold them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from partc.errors import TraceError
from partc.graph.fake_calls import new_fake


def as_fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor on the CPU with a tensor's shape and dtype, whatever its device.

    It is contiguous, as a rank's parameters, buffers and inputs are.
    """
    fake = new_fake(tensor.shape, tensor.dtype, mode).requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        fake._is_param = True  # all that nn.Parameter would do, but for a view of it
        vars(fake).update(vars(tensor))  # what the user has noted on it
    return fake


def not_dense(tensors: Mapping[str, Tensor]) -> list[str]:
    """The tensors by name that ranks hold with other strides than the model has."""
    strided = {name: x for name, x in tensors.items() if x.layout is torch.strided}
    return [name for name, x in strided.items() if not x.is_contiguous()]


def check_dense(graph: fx.Graph, tensors: Mapping[str, Tensor]) -> None:
    """TraceError where a model that has a tensor with other strides reads memory by strides."""
    if all(node.target is not torch.ops.aten.as_strided.default for node in graph.nodes):
        return
    for name in not_dense(tensors):
        raise TraceError(
            where=name,
            what="it is not contiguous, and the step reads memory with as_strided",
            why="ranks hold contiguous tensors, in which as_strided would find other numbers",
            do="Store its .contiguous(), or use views by dims (transpose, unfold, narrow).",
        )


def check_dense_grads(grads: Mapping[str, Tensor | None]) -> None:
    """TraceError for a gradient that is a sparse tensor."""
    for name, grad in grads.items():
        if grad is not None and grad.layout is not torch.strided:
            raise TraceError(
                where=name,
                what=f"its gradient is sparse ({grad.layout})",
                why="ranks add up, shard and clip gradients with all their elements",
                do="Make the embedding with sparse=False, and take Adam or SGD for SparseAdam.",
            )
