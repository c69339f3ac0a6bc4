"""Printed functions of islands, which train copies of the model apart and meet now and then."""
# mypy: disable-error-code="arg-type, union-attr"

from __future__ import annotations

from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partc.codegen.helpers.rounded_sums import RoundedSum


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


def buckets_of(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Tensors in lists of one dtype and about 100 MB, each of which is one transfer."""
    sizes = {x.dtype: 0 for x in tensors}
    buckets: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    for x in tensors:
        buckets.setdefault((x.dtype, sizes[x.dtype] // 100_000_000), []).append(x)
        sizes[x.dtype] += x.nbytes
    return [*buckets.values()]


def average_over(tensors: list[Tensor], num: int, group: dist.ProcessGroup) -> None:
    """Give tensors their mean over all islands, in a transfer for each 100 MB of a dtype."""
    buckets = buckets_of(tensors)
    flats = [torch.cat([x.flatten() for x in bucket]) for bucket in buckets]
    under_way = [dist.all_reduce(flat, group=group, async_op=True) for flat in flats]
    for bucket, flat, done in zip(buckets, flats, under_way, strict=True):
        done.wait()
        flat /= num
        copy_back(flat, bucket)


def copy_back(flat: Tensor, bucket: list[Tensor]) -> None:
    """Give the tensors of a bucket their parts of what was sent as one."""
    parts = flat.split([x.numel() for x in bucket])
    for x, part in zip(bucket, parts, strict=True):
        x.copy_(part.view(x.shape))


def average_with(others: list[int], tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Give tensors their mean over this island and others, each of which has this one among its."""
    here = dist.get_rank(group)
    for bucket in buckets_of(tensors) if others else []:
        flat = torch.cat([x.flatten() for x in bucket])
        arrived = [torch.empty_like(flat) for _ in others]
        under_way = []
        for other, x in zip(others, arrived, strict=True):
            for sends in (here < other, here > other):  # NCCL has one after the other
                under_way.append(
                    dist.isend(flat, group=group, group_dst=other)
                    if sends
                    else dist.irecv(x, group=group, group_src=other)
                )
        for done in under_way:
            done.wait()
        copy_back(sum(arrived, flat) / (1 + len(others)), bucket)


def beside(island: int, num: int) -> list[int]:
    """The islands beside one in a ring, in rising order: two, of two islands the other one."""
    return sorted({(island - 1) % num, (island + 1) % num})


def paired_with(island: int, num: int, seed: int, taken: int) -> list[int]:
    """The island that this one meets behind so many steps; of an odd number one meets nobody.

    All islands draw the same order, in which the first two are a pair, the next two, and so on.
    """
    digest = blake2b(f"{seed} {taken} pairs".encode(), digest_size=8).digest()
    numbers = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    order = torch.randperm(num, generator=numbers).tolist()
    at = order.index(island) ^ 1
    return order[at : at + 1]


def in_blocks(tensors: list[Tensor], block: int) -> Tensor:
    """Tensors one behind the other, each filled up with zeros to whole blocks.

    A block has numbers of one tensor, so that ranks which all have the tensor round it alike.
    """
    flats = [x.flatten() for x in tensors]
    return torch.cat([nn.functional.pad(x, (0, -x.numel() % block)) for x in flats])


def average_rounded(tensors: list[Tensor], num: int, total: RoundedSum) -> None:
    """Give tensors their mean over all islands, by the sum of their blocks that has begun."""
    total.pass_on()
    total.wait()
    sizes = [x.numel() + -x.numel() % total.block for x in tensors]
    for x, part in zip(tensors, (total.flat / num).split(sizes), strict=True):
        x.copy_(part[: x.numel()].view(x.shape))
