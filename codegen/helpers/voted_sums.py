"""A printed class for sums of which only a direction arrives: the sign that most ranks have."""
# mypy: disable-error-code="override, assignment, arg-type, call-overload"
# (what programs wait for, they wait for without a limit)

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partc.codegen.helpers.narrow_sums import NarrowSum


class MajoritySum(NarrowSum):
    """Each number becomes +1 or -1, the sign that most ranks have of it; zero and a tie are +1.

    Signs of piece i of all ranks go to rank i, which counts votes and sends the outcome to all. A
    byte behind each piece says whether a number of any rank is not finite: then all become NaN.
    """

    def __init__(
        self, flat: Tensor, num: int, size: int, state: list[Tensor], group: dist.ProcessGroup
    ) -> None:
        super().__init__(flat, state, group)
        self.num = num
        missing = -flat.numel() % (8 * num)
        votes = nn.functional.pad(flat.flatten() >= 0, (0, missing)).view(num, -1)
        sent = self.encode(votes, ~flat.isfinite().all())
        self.sums = torch.empty_like(sent)
        self.done = dist.all_to_all_single(self.sums, sent, group=group, async_op=True)

    def pass_on(self) -> None:
        """Wait for the votes, count them, and start to send the outcome."""
        self.done.wait()
        above = self.decode(self.sums).sum(0, keepdim=True, dtype=torch.int32)
        sent = self.encode(2 * above >= self.num, self.unfit())
        self.sums = sent.new_empty(self.num, sent.shape[1])
        self.done = dist.all_gather_single(self.sums, sent, group=self.group, async_op=True)
        self.passed = True

    def wait(self) -> bool:
        self.done.wait()
        signs = 2.0 * self.decode(self.sums) - 1
        self.write(torch.where(self.unfit(), torch.nan, signs))
        del self.done, self.sums
        return True

    def encode(self, votes: Tensor, unfit: Tensor) -> Tensor:
        """Rows of votes as rows of bits, and the byte behind each."""
        bits = votes.to(torch.uint8).unflatten(1, (-1, 8)) << self.places(votes)
        last = unfit.to(torch.uint8).expand(len(votes), 1)
        return torch.cat([bits.sum(2, dtype=torch.uint8), last], 1)

    def decode(self, sent: Tensor) -> Tensor:
        """Rows of zeros and ones, in rows of what was sent."""
        return (sent[:, :-1].unsqueeze(2) >> self.places(sent) & 1).flatten(1)

    def unfit(self) -> Tensor:
        """Whether a number of any rank is not finite, by the bytes behind what has arrived."""
        return (self.sums[:, -1] > 0).any()

    def places(self, x: Tensor) -> Tensor:
        """Of eight bits in a byte."""
        return torch.arange(8, dtype=torch.uint8, device=x.device)
