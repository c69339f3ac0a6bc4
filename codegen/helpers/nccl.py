"""Printed functions of programs for NCCL, whose reduce-scatter sends no more than it has to.

They stand in for those of the same names in ``printed``, which are gloo's.
"""
# mypy: disable-error-code="arg-type, assignment"
# (what programs wait for, they wait for without a limit; torch may give no Work)

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


def scatter_sum(x: Tensor, num: int, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start to sum over the group and keep this rank's piece of dim 0."""
    x = x.contiguous()
    total = torch.empty_like(x[: x.shape[0] // num])
    return total, dist.reduce_scatter_single(total, x, group=group, async_op=True)


def scatter_grads(
    grads: dict[nn.Parameter, Tensor], num: int, group: dist.ProcessGroup
) -> tuple[dict[nn.Parameter, Tensor], dist.Work]:
    """Start to sum gradients in one transfer, of which this rank keeps its pieces."""
    pieces = [x.reshape(num, -1) for x in grads.values()]
    sent = torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0]
    total = torch.empty_like(sent[0])
    done = dist.reduce_scatter_single(total, sent, group=group, async_op=True)
    parts = zip(grads.items(), total.split([x.shape[1] for x in pieces]), strict=True)
    return {p: part.view(x.shape[0] // num, *x.shape[1:]) for (p, x), part in parts}, done
