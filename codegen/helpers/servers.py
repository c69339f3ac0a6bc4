"""Printed functions of servers: islands that own parameters, and send them to all others."""
# mypy: disable-error-code="arg-type, return-value, union-attr"

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from partc.codegen.helpers.islands import buckets_of, copy_back


def served_by(params: list[Tensor], servers: range) -> dict[int, list[list[Tensor]]]:
    """The parameters that each server owns, in lists of about 100 MB, each of which is one message.

    The largest parameter first, each goes to the server that has least so far.
    """
    owned: dict[int, list[int]] = {server: [] for server in servers}
    bytes_of = dict.fromkeys(servers, 0)
    for size, i in sorted([(-x.nbytes, i) for i, x in enumerate(params)]):
        _, server = min([(num, s) for s, num in bytes_of.items()])
        owned[server].append(i)
        bytes_of[server] -= size
    return {s: buckets_of([params[i] for i in sorted(own)]) for s, own in owned.items()}


def start_messages(
    out: dict[int, list[Tensor]], into: dict[int, list[Tensor]], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Start to send and to receive tensors, by the island at the other end."""
    here, under_way = dist.get_rank(group), []
    for other in sorted({*out, *into}):
        for sends in (here < other, here > other):  # NCCL has one after the other
            for x in (out if sends else into).get(other, []):
                under_way.append(
                    dist.isend(x, group=group, group_dst=other)
                    if sends
                    else dist.irecv(x, group=group, group_src=other)
                )
    return under_way


def give_params(
    served: dict[int, list[list[Tensor]]], islands: range, group: dist.ProcessGroup
) -> None:
    """Give islands the parameters as their servers have them."""
    here = dist.get_rank(group)
    flats = {
        server: [torch.cat([x.detach().flatten() for x in bucket]) for bucket in buckets]
        for server, buckets in served.items()
        if server == here or here in islands
    }
    mine = flats.pop(here, [])
    out = {island: mine for island in islands if island != here} if mine else {}
    for done in start_messages(out, flats, group):
        done.wait()
    for server, arrived in flats.items():
        for bucket, flat in zip(served[server], arrived, strict=True):
            copy_back(flat, bucket)


def take_gradients(
    served: dict[int, list[list[Tensor]]], workers: range, group: dist.ProcessGroup
) -> None:
    """Let the gradients of every parameter become their mean over workers, on its server alone."""
    here, out, into = dist.get_rank(group), {}, {}
    if here in workers:
        out = {
            server: [torch.cat([x.grad.flatten() for x in bucket]) for bucket in buckets]
            for server, buckets in served.items()
        }
    mine = [torch.cat([x.detach().flatten() for x in b]) for b in served.get(here, [])]
    own = out.pop(here, [])
    if mine:
        into = {w: [torch.empty_like(x) for x in mine] for w in workers if w != here}
    for done in start_messages(out, into, group):
        done.wait()
    for buckets in served.values():
        for bucket in buckets:
            for x in bucket:
                x.grad = None
    for i, bucket in enumerate(served.get(here, [])):
        arrived = [own[i] if worker == here else into[worker][i] for worker in workers]
        mean = sum(arrived[1:], arrived[0]) / len(workers)
        for x, part in zip(bucket, mean.split([x.numel() for x in bucket]), strict=True):
            x.grad = part.view(x.shape)
