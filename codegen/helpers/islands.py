"""Printed functions of islands, which train copies of the model apart and meet now and then."""
# mypy: disable-error-code="arg-type"

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def start_sums(
    tensors: list[Tensor], into: list[Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:  # fmt: skip
    """Start the sums over all islands of tensors, in a transfer for each 100 MB of a dtype.

    The memory of `into` becomes that in which the sums arrive.
    """
    sizes = {x.dtype: 0 for x in tensors}
    buckets: dict[tuple[torch.dtype, int], list[tuple[Tensor, Tensor]]] = {}
    for x, place in zip(tensors, into, strict=True):
        buckets.setdefault((x.dtype, sizes[x.dtype] // 100_000_000), []).append((x, place))
        sizes[x.dtype] += x.nbytes
    under_way = []
    for bucket in buckets.values():
        flat = torch.cat([x.flatten() for x, _ in bucket])
        parts = flat.split([x.numel() for x, _ in bucket])
        for (x, place), part in zip(bucket, parts, strict=True):
            place.set_(part.view(x.shape))
        under_way.append(dist.all_reduce(flat, group=group, async_op=True))
    return under_way


def average_over(tensors: list[Tensor], num: int, group: dist.ProcessGroup) -> None:
    """Give tensors their mean over all islands, in a transfer for each 100 MB of a dtype."""
    sizes = {x.dtype: 0 for x in tensors}
    buckets: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    for x in tensors:
        buckets.setdefault((x.dtype, sizes[x.dtype] // 100_000_000), []).append(x)
        sizes[x.dtype] += x.nbytes
    flats = [torch.cat([x.flatten() for x in bucket]) for bucket in buckets.values()]
    under_way = [dist.all_reduce(flat, group=group, async_op=True) for flat in flats]
    for bucket, flat, done in zip(buckets.values(), flats, under_way, strict=True):
        done.wait()
        flat /= num
        parts = flat.split([x.numel() for x in bucket])
        for x, mean in zip(bucket, parts, strict=True):
            x.copy_(mean.view(x.shape))
