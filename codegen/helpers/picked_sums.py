"""Printed classes for sums of a few numbers of each rank: the largest ones, those that are large
enough, or some at random.
"""
# mypy: disable-error-code="override, assignment, arg-type, call-overload"
# (what programs wait for, they wait for without a limit)

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from partc.codegen.helpers.narrow_sums import NarrowSum


class TopSum(NarrowSum):
    """Every rank sends its `k` largest numbers, and their places, to all ranks, which add them."""

    def __init__(
        self, flat: Tensor, num: int, k: int, state: list[Tensor], group: dist.ProcessGroup
    ) -> None:
        super().__init__(flat, state, group)
        x = self.with_rest(flat.flatten().to(torch.float32))
        self.k = k
        at = self.largest(x.abs())
        self.lost = [x.index_fill(0, at, 0.0)]
        sent = torch.cat([x[at].view(torch.int8), at.to(torch.int32).view(torch.int8)])[None]
        self.sums = sent.new_empty(num, sent.shape[1])
        self.done = dist.all_gather_single(self.sums, sent, group=group, async_op=True)
        self.passed = True

    def wait(self) -> bool:
        self.done.wait()
        places = self.sums[:, -4 * self.k :].contiguous().view(torch.int32)
        numbers = self.sums[:, : -4 * self.k].contiguous().view(torch.float32)
        total = numbers.new_zeros(self.flat.numel())
        for at, each in zip(places, numbers, strict=True):  # all ranks add in the same order
            total.index_add_(0, at, each)
        self.write(total)
        del self.done, self.sums
        return True

    def largest(self, sizes: Tensor) -> Tensor:
        """The places of the `k` largest sizes; of equal ones those of the first."""
        sizes = sizes.nan_to_num(torch.inf, torch.inf)
        least = sizes.topk(self.k).values[-1]
        above, equal = sizes > least, sizes == least
        taken = above | (equal & (equal.cumsum(0) <= self.k - above.sum()))
        return taken.to(torch.int32).topk(self.k).indices


class ThresholdSum(NarrowSum):
    """Every rank sends those of its numbers that are `least` or larger, and their places, to all.

    The sign does not count, and what is not finite is sent too. `k` of them are expected. Ranks
    first tell each other how many they have, and all send as many as the one that has most, filled
    up with zeros. `log` has these counts, of each rank, for the last sums.
    """

    log: list[list[int]] = []  # noqa: RUF012

    def __init__(
        self, flat: Tensor, num: int, k: int, state: list[Tensor], group: dist.ProcessGroup,
        least: float,
    ) -> None:  # fmt: skip
        super().__init__(flat, state, group)
        self.k = k
        self.x = self.with_rest(flat.flatten().to(torch.float32))
        self.picked = ~(self.x.abs() < least)
        self.lost = [self.x.masked_fill(self.picked, 0.0)]
        mine = self.picked.sum(dtype=torch.int32).view(1)
        self.counts = mine.new_empty(num)
        self.done = dist.all_gather_single(self.counts, mine, group=group, async_op=True)

    def pass_on(self) -> None:
        """Wait for all ranks' counts, and start to send numbers and places."""
        self.done.wait()
        counts = self.read(self.counts)
        self.log.append(counts)
        del self.log[:-1024]
        self.most = max(counts)
        at = torch.nonzero_static(self.picked, size=self.most).flatten()  # filled up with -1
        numbers = torch.where(at < 0, 0.0, self.x[at])
        places = at.clamp(min=0).to(torch.int32)
        sent = torch.cat([numbers.view(torch.int8), places.view(torch.int8)])[None]
        self.sums = sent.new_empty(len(self.counts), sent.shape[1])
        if self.most:
            self.done = dist.all_gather_single(self.sums, sent, group=self.group, async_op=True)
        del self.x, self.picked
        self.passed = True

    def wait(self) -> bool:
        self.done.wait()
        split = self.sums.shape[1] - 4 * self.most
        places = self.sums[:, split:].flatten().view(torch.int32).split(self.most)
        numbers = self.sums[:, :split].flatten().view(torch.float32).split(self.most)
        total = numbers[0].new_zeros(self.flat.numel())
        for at, each in zip(places, numbers, strict=True):  # all ranks add in the same order
            total.index_add_(0, at, each)
        self.write(total)
        del self.done, self.sums
        return True

    def read(self, counts: Tensor) -> list[int]:
        """How many numbers each rank sends."""
        return counts.tolist()


class RandomSum(NarrowSum):
    """All ranks send the same `k` of their numbers, which are others in every step."""

    def __init__(
        self, flat: Tensor, num: int, k: int, state: list[Tensor], group: dist.ProcessGroup,
        rng: torch.Generator,
    ) -> None:  # fmt: skip
        super().__init__(flat, state, group)
        x = self.with_rest(flat.flatten().to(torch.float32))
        self.at = torch.randperm(len(x), generator=rng, device=x.device)[:k]
        self.lost = [x.index_fill(0, self.at, 0.0)]
        self.sums = torch.where(x.isfinite().all(), x[self.at], torch.nan)  # for all to know
        self.done = dist.all_reduce(self.sums, group=group, async_op=True)
        self.passed = True

    def wait(self) -> bool:
        self.done.wait()
        total = self.sums.new_zeros(self.flat.numel())
        self.write(total.index_copy_(0, self.at, self.sums))
        del self.done, self.sums, self.at
        return True
