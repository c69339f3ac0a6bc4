"""Printed classes for rounded sums of which each rank keeps a piece: the first of two transfers."""
# mypy: disable-error-code="override, assignment, arg-type, call-overload"
# (what programs wait for, they wait for without a limit)

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partc.codegen.helpers.narrow_sums import NarrowSum
from partc.codegen.helpers.rounded_sums import (
    BFloat16Sum,
    Float8Sum,
    Float16Sum,
    Int8Sum,
    RandomInt8Sum,
    RoundedSum,
)


def in_rows(grads: dict[nn.Parameter, Tensor], num: int) -> Tensor:
    """Gradients in one tensor, in which row i has the pieces that rank i keeps."""
    return torch.cat([x.reshape(num, -1) for x in grads.values()], 1)


class ScatteredSum(RoundedSum):
    """Row i of all ranks goes to rank i, which adds what it decodes and keeps it as `total`.

    Each row is filled up to whole blocks.
    """

    def __init__(
        self, rows: Tensor, num: int, block: int, state: list[Tensor], group: dist.ProcessGroup
    ) -> None:
        self.total = rows.new_empty(rows.shape[1])
        NarrowSum.__init__(self, self.total, state, group)
        self.num, self.block = num, block
        x = nn.functional.pad(rows.to(torch.float32), (0, -rows.shape[1] % block))
        self.size = x.shape[1]
        sent = self.rounded(x)
        self.sums = torch.empty_like(sent)
        self.done = dist.all_to_all_single(self.sums, sent, group=group, async_op=True)

    def pass_on(self) -> None:
        """There is no second transfer."""
        self.passed = True

    def wait(self) -> bool:
        self.done.wait()
        self.write(self.decode(self.sums).sum(0))
        del self.sums, self.done
        return True


def scattered(
    grads: dict[nn.Parameter, Tensor], done: ScatteredSum
) -> tuple[dict[nn.Parameter, Tensor], dist.Work]:
    """This rank's pieces of gradients, parts of a sum under way."""
    num = sum(x.numel() for x in grads.values()) // done.total.numel()
    parts = done.total.split([x.numel() // num for x in grads.values()])
    pairs = zip(grads.items(), parts, strict=True)
    return {p: part.view(len(x) // num, *x.shape[1:]) for (p, x), part in pairs}, done


class BFloat16Scatter(BFloat16Sum, ScatteredSum):
    """Numbers of 16 bits, 8 of them for the exponent."""


class Float16Scatter(Float16Sum, ScatteredSum):
    """Numbers of 16 bits up to 65504; beyond, what arrives is infinite."""


class Int8Scatter(Int8Sum, ScatteredSum):
    """Whole numbers from -127 to 127."""


class RandomInt8Scatter(RandomInt8Sum, ScatteredSum):
    """Whole numbers from -127 to 127, up or down at random, so that none is off on average."""


class Float8Scatter(Float8Sum, ScatteredSum):
    """Numbers of 8 bits up to 448, 4 of them for the exponent."""
