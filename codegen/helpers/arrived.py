"""Printed functions that take over reduced gradients which arrive as sums, not as pieces to add up.

So they do over NCCL (``nccl.py``), and over gloo by messages (``messages.py``).
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from partc.codegen.helpers.links import add_partial


def finish(reduced: list[tuple[dict[nn.Parameter, Tensor], dist.Work]]) -> None:
    """Wait for reduced gradients and add them to their parameters; the list is left empty."""
    while reduced:
        reduced[0][1].wait()
        grads = reduced.pop(0)[0]  # without the handle, which holds what was sent
        while grads:
            param, grad = grads.popitem()
            param.grad = grad if param.grad is None else param.grad.add_(grad)


def finish_partials(reduced: list[tuple[dict[nn.Parameter, Tensor], dist.Work]]) -> None:
    """Wait for reduced parts of gradients and add them up; the list is left empty."""
    while reduced:
        reduced[0][1].wait()
        grads = reduced.pop(0)[0]  # without the handle, which holds what was sent
        while grads:
            add_partial(*grads.popitem())
