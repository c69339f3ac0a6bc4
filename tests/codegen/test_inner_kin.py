"""Blocks inside of blocks, of another size, whose calls a function has taken in some alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import partc

WIDTH = 8


class Convs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(*self.one())
        self.conv = nn.Sequential(*self.one(), *self.one())

    def one(self) -> list[nn.Module]:
        return [nn.Conv2d(WIDTH, WIDTH, 3, 1, 1), nn.GroupNorm(4, WIDTH), nn.ReLU()]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(self.main(x))
        return out


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Convs(), nn.MaxPool2d(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.ConvTranspose2d(2 * WIDTH, WIDTH, 2, 2), Convs(), Convs())

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        out: Tensor = self.model(torch.cat((x, skip), 1))
        return out


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.up2, self.up1 = Down(), Down(), Up(), Up()

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(first)
        out: Tensor = self.up1(self.up2(second, second), first)
        return out


def test_they_are_printed_apart_and_right() -> None:
    """The backward of the norms stands once in the outer blocks of the lower size."""
    torch.manual_seed(0)
    model, x = UNet(), torch.randn(4, WIDTH, 16, 16)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        mean: Tensor = model(x).square().mean()
        return mean

    program = partc.compile(model, "dp=2", (x,), loss=loss_of, plan="ddp")
    partc.verify(program, model, (x,), loss=loss_of).check()
