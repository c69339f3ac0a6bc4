"""Printed classes for sums of rounded numbers: two transfers, of pieces and of their sums."""
# mypy: disable-error-code="override, assignment, arg-type, call-overload"
# (what programs wait for, they wait for without a limit)

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partc.codegen.helpers.narrow_sums import NarrowSum


class RoundedSum(NarrowSum):
    """Piece i of all ranks goes to rank i, which adds what it decodes and sends its sum to all.

    All of them decode what was sent. `state` has what rounding loses of this rank's numbers, a row
    of pieces, and of its piece of the sum.
    """

    def __init__(
        self, flat: Tensor, num: int, block: int, state: list[Tensor], group: dist.ProcessGroup
    ) -> None:
        super().__init__(flat, state, group)
        self.num, self.block = num, block
        missing = -flat.numel() % (num * block)
        x = nn.functional.pad(flat.flatten().to(torch.float32), (0, missing)).view(num, -1)
        self.size = x.shape[1]
        sent = self.rounded(x)
        self.sums = torch.empty_like(sent)
        self.done = dist.all_to_all_single(self.sums, sent, group=group, async_op=True)

    def pass_on(self) -> None:
        """Wait for the first transfer, add what it brought, and start the second one."""
        self.done.wait()
        sent = self.rounded(self.decode(self.sums).sum(0, keepdim=True))
        self.sums = sent.new_empty(self.num, sent.shape[1])
        self.done = dist.all_gather_single(self.sums, sent, group=self.group, async_op=True)
        self.passed = True

    def rounded(self, x: Tensor) -> Tensor:
        """Numbers as they are sent; what that loses is noted."""
        x = self.with_rest(x)
        sent = self.encode(x)
        self.lost += [x - self.decode(sent)] if self.state else []
        return sent

    def wait(self) -> bool:
        self.done.wait()
        self.write(self.decode(self.sums))
        del self.sums, self.done
        return True

    def encode(self, x: Tensor) -> Tensor:
        """Rows of numbers as rows of what is sent."""
        return x

    def decode(self, sent: Tensor) -> Tensor:
        """The numbers in rows of what was sent."""
        return sent.to(torch.float32)


class BFloat16Sum(RoundedSum):
    """Numbers of 16 bits, 8 of them for the exponent."""

    def encode(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)


class Float16Sum(RoundedSum):
    """Numbers of 16 bits up to 65504; a sum in which one is larger is infinite."""

    def encode(self, x: Tensor) -> Tensor:
        return x.to(torch.float16)


class BlockSum(RoundedSum):
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


class RandomInt8Sum(Int8Sum):
    """Whole numbers from -127 to 127, up or down at random, so that none is off on average."""

    def __init__(
        self, flat: Tensor, num: int, block: int, state: list[Tensor], group: dist.ProcessGroup,
        rng: torch.Generator,
    ) -> None:  # fmt: skip
        self.rng = rng
        super().__init__(flat, num, block, state, group)

    def as_bytes(self, x: Tensor) -> Tensor:
        up = torch.rand(x.shape, generator=self.rng, dtype=x.dtype, device=x.device)
        return (x + up).floor().clamp(-127, 127).to(torch.int8)


class Float8Sum(BlockSum):
    """Numbers of 8 bits up to 448, 4 of them for the exponent."""

    most = 448.0

    def as_bytes(self, x: Tensor) -> Tensor:
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.int8)

    def of_bytes(self, sent: Tensor) -> Tensor:
        return sent.contiguous().view(torch.float8_e4m3fn).to(torch.float32)


class SignSum(BlockSum):
    """A bit for each number, its sign, and for each block the mean size of its numbers.

    The zeros that fill up the last pieces count for nothing.
    """

    def encode(self, x: Tensor) -> Tensor:
        first = 0 if len(x) == self.num else dist.get_rank(self.group) * self.size
        at = torch.arange(first, first + x.numel(), device=x.device).view(x.shape)
        real = at < self.flat.numel()
        sizes = torch.where(real, x.abs(), 0).unflatten(1, (-1, self.block)).sum(2)
        scale = sizes / real.unflatten(1, (-1, self.block)).sum(2).clamp(1)
        bits = (x >= 0).to(torch.uint8).unflatten(1, (-1, 8)) << self.places(x)
        signs = bits.sum(2, dtype=torch.uint8).view(torch.int8)
        return torch.cat([signs, scale.view(torch.int8)], 1)

    def decode(self, sent: Tensor) -> Tensor:
        signs = sent[:, : self.size // 8].view(torch.uint8).unsqueeze(2) >> self.places(sent) & 1
        scale = sent[:, self.size // 8 :].flatten().clone().view(torch.float32)
        numbers: Tensor = (2.0 * signs - 1).view(-1, self.block) * scale[:, None]
        return numbers.view(len(sent), -1)

    def places(self, x: Tensor) -> Tensor:
        """Of eight bits in a byte."""
        return torch.arange(8, dtype=torch.uint8, device=x.device)
