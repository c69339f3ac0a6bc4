"""Drawn models over images whose values lie in memory in many orders, in drawn layouts.

``python -m tests.whole.random_images 0 60`` compares the models of these seeds with one process, in
float64, and prints each.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.verification.report import Report
from partc.verification.verification import verify

LAYOUTS = (("dp=2", "ddp"), ("dp=2", "fsdp"), ("tp=2", "megatron"), ("dp=1", "ddp"))
SIZES = ((8, 8), (4, 8), (8, 4), (16, 4))  # channels, and height and width
BLOCKS, BATCH, CLASSES = 6, 4, 2

Make = Callable[[int, int], nn.Module]  # of channels and size


class Block(nn.Module):
    """``of(x, *layers)`` with layers of its own; ``x: f64[B,C,H,H]`` keeps its shape."""

    def __init__(self, of: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.of, self.layers = of, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.of(x, *self.layers)
        return y


def channels_last(x: Tensor, norm: nn.Module) -> Tensor:
    y: Tensor = norm(x.permute(0, 2, 3, 1))
    return y.permute(0, 3, 1, 2)


def over_pixels(x: Tensor, linear: nn.Module) -> Tensor:
    y = x.flatten(2).swapaxes(1, 2)
    mixed: Tensor = y + linear(F.gelu(y))
    return mixed.swapaxes(1, 2).reshape(x.shape)


def samples_last(x: Tensor, linear: nn.Module) -> Tensor:
    y: Tensor = linear(x.permute(2, 3, 0, 1).contiguous())
    return y.permute(2, 3, 0, 1)


def attention(x: Tensor, parts: nn.Module, out: nn.Module) -> Tensor:
    y = x.flatten(2).transpose(1, 2)
    heads = parts(y).view(*y.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
    rows = F.scaled_dot_product_attention(*heads.unbind()).transpose(1, 2).reshape(y.shape)
    mixed: Tensor = y + out(rows)
    return mixed.transpose(1, 2).view(x.shape)


def laid_out_attention(x: Tensor, out: nn.Module) -> Tensor:
    y = x.reshape(len(x), 2, x.shape[1] // 2, -1).transpose(2, 3).contiguous()
    rows = F.scaled_dot_product_attention(y, y.sin(), y).permute(0, 2, 1, 3).flatten(2)
    mixed: Tensor = out(rows)
    return mixed.mT.contiguous().view(x.shape)


def pooled(x: Tensor) -> Tensor:
    return F.interpolate(F.max_pool2d(x, 2), scale_factor=2)


def pooled_both_ways(x: Tensor) -> Tensor:
    return F.interpolate(F.adaptive_avg_pool2d(x.mT, x.shape[-1] // 2).mT, size=x.shape[2:])


def gated_by_rows(x: Tensor) -> Tensor:
    return x.permute(0, 2, 1, 3).contiguous().softmax(1).permute(0, 2, 1, 3) * x


def summed_up(x: Tensor) -> Tensor:
    return x.mT.contiguous().cumsum(-1).mT / x.shape[-1]


def halves_swapped(x: Tensor) -> Tensor:
    first, second = x.chunk(2, 1)
    return torch.cat([second, first.mT], 1)


def gated(x: Tensor) -> Tensor:
    both = torch.cat([x, x.mT], 1).contiguous(memory_format=torch.channels_last)
    return F.glu(both, 1)


def rolled(x: Tensor) -> Tensor:
    return x.roll(1, 2).transpose(2, 3).clone().transpose(2, 3)


def of_length_one(x: Tensor) -> Tensor:
    return F.normalize(x.movedim(1, -1).contiguous(), dim=-1).movedim(-1, 1)


MAKE: dict[str, Make] = {
    "group norm": lambda c, h: nn.GroupNorm(2, c),
    "instance norm": lambda c, h: nn.GroupNorm(c, c),
    "batch norm": lambda c, h: nn.BatchNorm2d(c),
    "layer norm of images": lambda c, h: nn.LayerNorm([c, h, h]),
    "layer norm of pixels": lambda c, h: Block(channels_last, nn.LayerNorm(c)),
    "convolution": lambda c, h: nn.Conv2d(c, c, 3, padding=1),
    "convolution of pixels": lambda c, h: nn.Conv2d(c, c, 1),
    "over pixels": lambda c, h: Block(over_pixels, nn.Linear(c, c)),
    "samples last": lambda c, h: Block(samples_last, nn.Linear(c, c)),
    "attention": lambda c, h: Block(attention, nn.Linear(c, 3 * c), nn.Linear(c, c)),
    "laid out attention": lambda c, h: Block(laid_out_attention, nn.Linear(c, c)),
    **{
        of.__name__: lambda c, h, of=of: Block(of)  # type: ignore[misc]
        for of in (
            pooled, pooled_both_ways, gated_by_rows, summed_up, halves_swapped, gated, rolled,
            of_length_one,
        )
    },
}  # fmt: skip


class Images(nn.Module):
    """A convolution, the blocks of some names, about half of them as residuals, and a head."""

    def __init__(self, names: list[str], channels: int, size: int, draw: random.Random) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(MAKE[name](channels, size) for name in names)
        self.residual = [draw.random() < 0.5 for _ in names]
        self.head = nn.Conv2d(channels, CLASSES, draw.choice([1, 3]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block, residual in zip(self.blocks, self.residual, strict=True):
            x = x + block(x) if residual else block(x)
        scores: Tensor = self.head(x)
        return scores


def loss(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(x).mean((2, 3)), targets)


@dataclass(frozen=True)
class DrawnImages:
    """What follows from a seed, where names of blocks, sizes or layouts are not given."""

    seed: int
    names: tuple[str, ...] = ()
    sizes: Sequence[tuple[int, int]] = SIZES
    layouts: Sequence[tuple[str, str]] = LAYOUTS

    def report(self) -> tuple[str, Report]:
        """What was drawn, and how it compares with one process."""
        draw = random.Random(self.seed)
        torch.manual_seed(self.seed)
        channels, size = draw.choice(self.sizes)
        names = [*self.names] or draw.choices([*MAKE], k=BLOCKS)
        model = Images(names, channels, size, draw).double()
        mesh, plan = draw.choice(self.layouts)
        batch: Any = (torch.randn(BATCH, 3, size, size).double(), torch.randint(CLASSES, (BATCH,)))
        program = partc.compile(model, mesh, batch, loss=loss, plan=plan)
        return f"{mesh} {plan} {names}", verify(program, model, batch, loss)


if __name__ == "__main__":
    for seed in range(*map(int, sys.argv[1:3])):
        what, report = DrawnImages(seed).report()
        print(seed, "equal" if report.ok() else "UNEQUAL", report.worst, what, flush=True)
