"""Printed classes for sums of gradients that ranks send in narrow numbers.

A sum takes two transfers, each with a start and a wait of its own (``partc/plan/wires.py`` has the
meaning): ``Int8Sum(...)`` starts the first one, ``pass_on`` waits for it and starts the second,
``wait`` waits for that. ``Reduced`` here stands for that of ``printed.py``.
"""
# mypy: disable-error-code="override, assignment, arg-type, call-overload"
# (what programs wait for, they wait for without a limit)

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


class NarrowSum(dist.Work):
    """A sum over ranks of rounded numbers; `flat` is overwritten with it.

    Piece i of all ranks goes to rank i, which adds what it decodes and sends its sum to all ranks.
    All of them decode what was sent. What rounding loses is added in the next step: `state` has
    that of this rank's numbers, a row of pieces, and that of its piece of the sum.
    """

    def __init__(
        self, flat: Tensor, num: int, block: int, state: list[Tensor], group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self.flat, self.num, self.block, self.group = flat, num, block, group
        self.state, self.passed = state, False
        self.lost: list[Tensor] = []
        missing = -flat.numel() % (num * block)
        x = nn.functional.pad(flat.flatten().to(torch.float32), (0, missing)).view(num, -1)
        self.size = x.shape[1]
        sent = self.rounded(x)
        self.arrived = torch.empty_like(sent)
        self.done = dist.all_to_all_single(self.arrived, sent, group=group, async_op=True)

    def pass_on(self) -> None:
        """Wait for the first transfer, add what it brought, and start the second one."""
        self.done.wait()
        sent = self.rounded(self.decode(self.arrived).sum(0, keepdim=True))
        self.arrived = sent.new_empty(self.num, sent.shape[1])
        self.done = dist.all_gather_single(self.arrived, sent, group=self.group, async_op=True)
        self.passed = True

    def rounded(self, x: Tensor) -> Tensor:
        """Numbers as they are sent; what that loses is noted, to be kept if the sum is finite."""
        if not self.state:
            return self.encode(x)
        x = x + self.state[len(self.lost)].to(torch.float32).view(x.shape)
        sent = self.encode(x)
        self.lost.append(x - self.decode(sent))
        return sent

    def wait(self) -> bool:
        if not self.passed:
            self.pass_on()
        self.done.wait()
        total = self.decode(self.arrived).flatten()[: self.flat.numel()]
        finite = total.isfinite().all()  # all ranks decode the same, so that all decide alike
        for kept, lost in zip(self.state, self.lost, strict=False):
            kept.copy_(torch.where(finite, lost.view(kept.shape), kept))
        self.flat.copy_(total.view(self.flat.shape))
        del self.arrived, self.done, self.lost
        return True

    def encode(self, x: Tensor) -> Tensor:
        """Rows of numbers as rows of what is sent."""
        return x

    def decode(self, sent: Tensor) -> Tensor:
        """The numbers in rows of what was sent."""
        return sent.to(torch.float32)


class BFloat16Sum(NarrowSum):
    """Numbers of 16 bits, 8 of them for the exponent."""

    def encode(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)


class Float16Sum(NarrowSum):
    """Numbers of 16 bits up to 65504; a sum in which one is larger is infinite."""

    def encode(self, x: Tensor) -> Tensor:
        return x.to(torch.float16)


class BlockSum(NarrowSum):
    """Numbers of one byte, and a scale for each block of them behind its row."""

    most = 127.0

    def encode(self, x: Tensor) -> Tensor:
        parts = x.unflatten(1, (-1, self.block))
        scale = parts.abs().amax(2, keepdim=True) / self.most
        scale = torch.where(scale == 0, 1, scale)
        small = self.as_bytes(parts / scale)
        return torch.cat([small.flatten(1), scale.flatten(1).view(torch.int8)], 1)

    def decode(self, sent: Tensor) -> Tensor:
        small, scale = sent[:, : self.size], sent[:, self.size :].view(torch.float32)
        numbers: Tensor = self.of_bytes(small).unflatten(1, (-1, self.block)) * scale[:, :, None]
        return numbers.flatten(1)

    def as_bytes(self, x: Tensor) -> Tensor:
        """Numbers up to `most` as bytes; here as the nearest whole ones."""
        return (x + 0.5).floor().clamp(-127, 127).to(torch.int8)

    def of_bytes(self, sent: Tensor) -> Tensor:
        """The numbers that bytes stand for."""
        return sent


class Int8Sum(BlockSum):
    """Whole numbers from -127 to 127."""


class Float8Sum(BlockSum):
    """Numbers of 8 bits up to 448, 4 of them for the exponent."""

    most = 448.0

    def as_bytes(self, x: Tensor) -> Tensor:
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.int8)

    def of_bytes(self, sent: Tensor) -> Tensor:
        return sent.contiguous().view(torch.float8_e4m3fn).to(torch.float32)


class Reduced(list[tuple[dict[nn.Parameter, Tensor], dist.Work]]):
    def pass_on(self) -> list[tuple[dict[nn.Parameter, Tensor], dist.Work]]:
        """Start the second transfers of sums, which are returned, and finish all others."""
        passed: list[tuple[dict[nn.Parameter, Tensor], dist.Work]] = []
        while self:
            grads, done = self.pop(0)
            if isinstance(done, NarrowSum) and not done.passed:
                done.pass_on()
                passed.append((grads, done))
            else:
                done.wait()
                self.add(grads)
        return passed

    def add(self, grads: dict[nn.Parameter, Tensor]) -> None:
        """Add sums that have arrived to the gradients of the parameters."""
        for param, grad in grads.items():
            param.grad = grad if param.grad is None else param.grad.add_(grad)

    def finish(self) -> None:
        """Wait for gradients that ranks are summing, and add them to those of the parameters."""
        self += self.pass_on()
        self.pass_on()
