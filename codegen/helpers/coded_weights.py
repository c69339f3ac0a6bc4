"""Printed classes for weights that ranks gather with fewer bytes, and decode alike."""
# mypy: disable-error-code="override, assignment, arg-type, call-overload"
# (what programs wait for, they wait for without a limit)

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partc.codegen.helpers.printed import Gathered


class CodedWeights(dist.Work):
    """Weights on their way in fewer bytes: `pieces` has them behind `wait`, as all ranks get them.

    They are decoded from what was sent, this rank's own pieces too. Each shard has blocks of its
    own, so that a weight is the same whatever it is gathered with.
    """

    most = 127.0

    def __init__(
        self, shards: list[Tensor], num: int, block: int, group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self.block = block
        self.pieces = [x.expand(num, *x.shape) for x in shards]  # stand for those that come
        sent = self.encode([x.flatten().to(torch.float32) for x in shards])[None]
        self.arrived = sent.new_empty(num, sent.shape[1])
        self.done = dist.all_gather_single(self.arrived, sent, group=group, async_op=True)

    def wait(self) -> bool:
        self.done.wait()
        sizes = [x[0].numel() for x in self.pieces]
        numbers = self.arrived[:, : sum(sizes)].split(sizes, 1)
        scales = self.scales(self.arrived[:, sum(sizes) :], sizes)
        for i, like in enumerate(self.pieces):
            self.pieces[i] = self.decode(numbers[i], scales[i]).to(like.dtype).view(like.shape)
        del self.arrived, self.done
        return True

    def blocks(self, x: Tensor) -> Tensor:
        """Rows of numbers as blocks, of which the last one is filled up with zeros."""
        x = nn.functional.pad(x, (0, -x.shape[-1] % self.block))
        return x.reshape(*x.shape[:-1], -1, self.block)

    def encode(self, shards: list[Tensor]) -> Tensor:
        """All numbers as bytes, and behind them the scales of their blocks."""
        numbers, scales = [], []
        for x in shards:
            blocks = self.blocks(x)
            scale = blocks.abs().amax(-1, keepdim=True) / self.most
            scale = torch.where(scale == 0, 1, scale)
            numbers.append(self.as_bytes(blocks / scale).flatten()[: len(x)])
            scales.append(scale.flatten())
        return torch.cat([*numbers, torch.cat(scales).view(torch.int8)])

    def scales(self, arrived: Tensor, sizes: list[int]) -> list[Tensor]:
        """The scales of the blocks of each weight, a row of each rank."""
        counts = [-(-size // self.block) for size in sizes]
        return [*arrived.clone().view(torch.float32).split(counts, 1)]

    def decode(self, x: Tensor, scales: Tensor) -> Tensor:
        """Rows of numbers of one weight as they were sent."""
        numbers: Tensor = self.blocks(self.of_bytes(x)) * scales.unsqueeze(2)
        return numbers.flatten(1)[:, : x.shape[1]]

    def as_bytes(self, x: Tensor) -> Tensor:
        """Numbers up to `most` as bytes."""
        return x.to(torch.int8)

    def of_bytes(self, sent: Tensor) -> Tensor:
        """The numbers that bytes stand for."""
        return sent.to(torch.float32)


class Int8Weights(CodedWeights):
    """Whole numbers from -127 to 127, and a scale for each block."""

    def as_bytes(self, x: Tensor) -> Tensor:
        return (x + 0.5).floor().clamp(-127, 127).to(torch.int8)


class Float8Weights(CodedWeights):
    """Numbers of 8 bits up to 448, 4 of them for the exponent, and a scale for each block."""

    most = 448.0

    def as_bytes(self, x: Tensor) -> Tensor:
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.int8)

    def of_bytes(self, sent: Tensor) -> Tensor:
        return sent.contiguous().view(torch.float8_e4m3fn).to(torch.float32)


class BFloat16Weights(CodedWeights):
    """Numbers of 16 bits, 8 of them for the exponent, without scales."""

    def encode(self, shards: list[Tensor]) -> Tensor:
        return torch.cat([x.to(torch.bfloat16) for x in shards])

    def scales(self, arrived: Tensor, sizes: list[int]) -> list[Tensor]:
        return [arrived] * len(sizes)

    def decode(self, x: Tensor, scales: Tensor) -> Tensor:
        return x.to(torch.float32)


def gathered_from(done: CodedWeights) -> Gathered:
    """Weights that are being gathered."""
    return Gathered([(done.pieces, done)])
