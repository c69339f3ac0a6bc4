"""Printed classes for sums of a few numbers of each rank: the largest ones, or some at random."""
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
