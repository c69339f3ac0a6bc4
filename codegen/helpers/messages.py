"""Printed functions of programs whose gathers and scattered sums go by messages over gloo.

gloo's collectives copy all that they bring once more, in threads that take the time of processors;
messages arrive where they are needed. Where copies are little beside the rest of a step a program
has the functions of the same names in ``printed``, which take fewer lines
(``passes/overlap/messages.py``).
"""
# mypy: disable-error-code="override, assignment, arg-type, list-item, no-any-return"
# (what programs wait for, they wait for without a limit; torch may give no Work)

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partc.codegen.helpers.printed import Gathered


def by_messages(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether to send messages: gloo's collectives copy all that they bring once more."""
    return not x.is_cuda and f"{x.device.type}:gloo" in dist.get_backend_config(group)


class Messages(dist.Work):
    """Each rank sends ``sent[i]`` to rank ``i`` and receives ``arriving[i]`` from it."""

    def __init__(
        self, sent: list[Tensor], arriving: list[Tensor], group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self.works: list[dist.Work] = []
        here, num = dist.get_rank(group), len(sent)
        for step in range(1, num):
            source, target = (here - step) % num, (here + step) % num
            self.works.append(dist.irecv(arriving[source], group=group, group_src=source))
            self.works.append(dist.isend(sent[target], group=group, group_dst=target))

    def wait(self) -> bool:
        for work in self.works:
            work.wait()
        self.works = []
        return True


class SumOfPieces(Messages):
    """What each rank has for this one, added up in the order of the ranks."""

    def __init__(self, total: Tensor, pieces: list[Tensor], group: dist.ProcessGroup) -> None:
        here = dist.get_rank(group)
        first = int(here == 0)  # to arrive from another rank: the sum is written over it
        self.total = total
        self.parts = [
            total if i == first else x if i == here else torch.empty_like(x)
            for i, x in enumerate(pieces)
        ]
        super().__init__(pieces, self.parts, group)

    def wait(self) -> bool:
        super().wait()
        if self.parts:
            torch.add(self.parts[0], self.parts[1], out=self.total)
            for part in self.parts[2:]:
                self.total += part
        self.parts = []
        return True


def gather_into(flat: Tensor, mine: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to gather the pieces of all ranks, one after the other."""
    if not by_messages(mine, group):
        return dist.all_gather_single(flat, mine, group=group, async_op=True)
    pieces = flat.view(-1, *mine.shape)
    pieces[dist.get_rank(group)] = mine
    return Messages([mine] * len(pieces), [*pieces], group)


def scatter_into(total: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to sum ``x`` over the group, of which this rank keeps its piece."""
    if not by_messages(x, group):
        flat = total.view(-1), x.view(-1)  # gloo divides dim 0, which is one piece's in total
        return dist.reduce_scatter_single(*flat, group=group, async_op=True)
    return SumOfPieces(total, [*x.view(-1, *total.shape)], group)


def gather(x: Tensor, num: int, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start to gather the pieces of all ranks, one after the other on dim 0."""
    whole = x.new_empty(num * x.shape[0], *x.shape[1:])
    return whole, gather_into(whole, x.contiguous(), group)


def scatter_sum(x: Tensor, num: int, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start to sum over the group and keep this rank's piece of dim 0."""
    x = x.contiguous()
    total = torch.empty_like(x[: x.shape[0] // num])
    return total, scatter_into(total, x, group)


def gather_weights(shards: list[Tensor], num: int, group: dist.ProcessGroup) -> Gathered:
    """Start one transfer of all ranks' pieces of weights."""
    mine = torch.cat([x.flatten() for x in shards]) if len(shards) > 1 else shards[0].flatten()
    flat = mine.new_empty(num * mine.numel())
    done = gather_into(flat, mine, group)
    parts = zip(flat.view(num, -1).split([x.numel() for x in shards], 1), shards, strict=True)
    return Gathered([([part.view(num, *x.shape) for part, x in parts], done)])


def scatter_grads(
    grads: dict[nn.Parameter, Tensor], num: int, group: dist.ProcessGroup
) -> tuple[dict[nn.Parameter, Tensor], dist.Work]:
    """Start to sum gradients in one transfer, of which this rank keeps its pieces."""
    pieces = [x.reshape(num, -1) for x in grads.values()]
    sent = torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0]
    total = torch.empty_like(sent[0])
    parts = zip(grads.items(), total.split([x.shape[1] for x in pieces]), strict=True)
    mine = {p: part.view(x.shape[0] // num, *x.shape[1:]) for (p, x), part in parts}
    return mine, scatter_into(total, sent, group)
