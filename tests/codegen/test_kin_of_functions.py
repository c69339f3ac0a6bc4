"""A function that takes the place of calls in one block and not in its kin: they share no class."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """As in a U-Net of a diffusion model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return x + y


class Net(nn.Module):
    """Two blocks; the size of the first one is that of norms outside, whose backward repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.between = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 24, 3, 2, 1)
        self.conv1, self.conv3, self.conv5, self.conv7 = (
            nn.Conv2d(16, 16, k, padding=k // 2) for k in (1, 3, 5, 7)
        )
        self.norm1, self.norm3, self.norm5, self.norm7 = (nn.GroupNorm(4, 16) for _ in range(4))
        self.into, self.first, self.second = nn.Conv2d(16, 16, 1), Block(16), Block(24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for k in (1, 3, 5, 7):
            x = F.silu(getattr(self, f"norm{k}")(getattr(self, f"conv{k}")(x)))
        y: Tensor = self.second(self.between(self.first(self.into(x))))
        return y


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def test_blocks_of_which_one_alone_calls_a_function_have_no_class_in_common() -> None:
    torch.manual_seed(0)
    model = Net()
    program = partc.compile(model, "dp=2", (IMAGES,), loss=loss_of, plan="ddp")
    text = program.source(rank=0)
    assert "def group_norm_backward_1(" in text
    assert "class Block" not in text
    partc.verify(program, model, (IMAGES,), loss=loss_of).check()
