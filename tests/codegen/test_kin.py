"""Blocks that differ in sizes share a class; blocks that differ in anything else do not."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc

IMAGES = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 4
NAMES = ["down1", "down2", "up"]


class Block(nn.Module):
    """As in a residual network: two convolutions, and one beside them where sizes change."""

    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.norm, self.scale = nn.BatchNorm2d(out), nn.GroupNorm(2, out)
        self.second, self.drop = nn.Conv2d(out, out, 3, padding=1), nn.Dropout(0.0)
        self.act: Callable[[Tensor], Tensor] = torch.relu
        self.beside = nn.Conv2d(width, out, 1, stride) if (width, stride) != (out, 1) else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale(self.second(F.relu(self.norm(self.first(x)))))
        return self.act(self.drop(y) + (x if self.beside is None else self.beside(x)))


class Net(nn.Module):
    """Blocks of other sizes each, none in a list, of which ``changes`` make some special."""

    def __init__(self, *changes: Callable[[Block], object]) -> None:
        super().__init__()
        self.stem, self.head, self.names = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4), NAMES[:]
        self.down1, self.down2, self.up = Block(8, 16), Block(16, 24, 2), Block(24, 8)
        for change in changes:
            block = Block(8, 8, 2)
            change(block)
            setattr(self, change.__name__, block)
            self.names.append(change.__name__)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(x)
        for name in self.names:
            x = F.interpolate(getattr(self, name)(x), 8)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Stages(nn.Module):
    """Lists of blocks, each list of its own width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(16, 4)
        self.narrow = nn.ModuleList(Block(8, 8) for _ in range(3))
        self.wide = nn.ModuleList([Block(8, 16, 2), Block(16, 16), Block(16, 16), Block(16, 16)])

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (*self.narrow, *self.wide):
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def loss_of(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(x, labels)
    return loss


def checked(model: nn.Module, mesh: str = "dp=1", plan: str = "ddp") -> str:
    """The source of a program, after it was compared with the model."""
    program = partc.compile(model, mesh, (IMAGES, LABELS), loss=loss_of, plan=plan)
    report = partc.verify(program, model, (IMAGES, LABELS), loss=loss_of)
    assert report.ok(), report.worst
    return program.source()


def instances(source: str) -> list[str]:
    """The blocks that are printed as the class of ``down1``."""
    found = re.search(r"self\.down1 = (\w+)\(", source)
    assert found, "down1 stands in line"
    return re.findall(rf"self\.(\w+) = {found[1]}\(", source)


@pytest.mark.exhaustive
def test_modules_of_several_sizes_share_a_class() -> None:
    assert instances(checked(Net())) == NAMES


@pytest.mark.exhaustive
def test_lists_of_several_widths_share_a_class() -> None:
    source = checked(Stages(), "dp=2", "fsdp")
    assert len(re.findall(r"nn\.ModuleList\(\s*\[Block\(", source)) == 2
    assert source.count("\nclass Block(") == 1


# changes that are no size --------------------------------------------------------------------
def frozen(block: Block) -> None:
    block.second.weight.requires_grad_(False)


def frozen_norm(block: Block) -> None:
    block.norm.weight.requires_grad_(False)


def all_frozen(block: Block) -> None:
    block.requires_grad_(False)


def with_bias(block: Block) -> None:
    block.first = nn.Conv2d(8, 8, 3, 2, 1)


def other_op(block: Block) -> None:
    block.act = torch.tanh


def untracked(block: Block) -> None:
    block.norm = nn.BatchNorm2d(8, track_running_stats=False)


def without_scale(block: Block) -> None:
    block.scale = nn.GroupNorm(2, 8, affine=False)


def shifted(block: Block) -> None:
    block.register_buffer("shift", torch.arange(8.0)[:, None, None])
    block.act = lambda x: torch.relu(x + block.get_buffer("shift"))


def other_dtype(block: Block) -> None:
    block.act = lambda x: torch.relu(x.double()).to(x.dtype)


def tied(block: Block) -> None:
    block.scale.weight = block.norm.weight


def hooked(block: Block) -> None:
    block.scale.register_forward_hook(lambda module, args, out: out * 2)


@pytest.mark.exhaustive
def test_what_is_no_size_makes_another_class() -> None:
    changes = [
        frozen, frozen_norm, all_frozen, with_bias, other_op, untracked, without_scale, shifted,
        other_dtype, tied, hooked,
    ]  # fmt: skip
    assert instances(checked(Net(*changes))) == NAMES


# numbers -------------------------------------------------------------------------------------
def eps(block: Block) -> None:
    block.norm.eps = 0.1


def momentum(block: Block) -> None:
    block.norm.momentum = 0.5


def kernel(block: Block) -> None:
    block.first = nn.Conv2d(8, 8, 5, 2, padding=4, dilation=2, groups=4, bias=False)


@pytest.mark.exhaustive
def test_numbers_are_arguments() -> None:
    changes = [eps, momentum, kernel]
    named = [change.__name__ for change in changes]
    assert instances(checked(Net(*changes))) == NAMES + named


def test_rates_of_dropout_are_arguments() -> None:
    model = Net()
    for block, rate in ((model.down1, 0.1), (model.down2, 0.2), (model.up, 0.3)):
        block.drop = nn.Dropout(rate)
    assert instances(checked(model)) == NAMES


class Up(nn.Module):
    """As in a U-Net: what comes from below, made larger, beside what was kept on the way down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.conv = nn.ConvTranspose2d(width, width // 2, 2, 2), nn.Sequential()
        for number, size in enumerate((width, width // 2)):
            self.conv.append(nn.Conv2d(size, width // 2, 3, padding=1, bias=False))
            self.conv.append(nn.GroupNorm(2, width // 2))
            self.conv.append(nn.ReLU(inplace=number > 0))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        y: Tensor = self.conv(torch.cat([kept, self.up(x)], 1))
        return y


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4)
        self.downs = nn.ModuleList(nn.Conv2d(w, 2 * w, 3, 2, 1) for w in (4, 8, 16))
        self.up1, self.up2, self.up3 = Up(32), Up(16), Up(8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        kept = [self.stem(x)]
        for down in self.downs:
            kept.append(F.relu(down(kept[-1])))
        x = kept.pop()
        for up in (self.up1, self.up2, self.up3):
            x = up(x, kept.pop())
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


@pytest.mark.exhaustive
def test_parts_of_a_concatenation_are_named_where_each_block_has_its_own_places() -> None:
    source = checked(UNet())
    assert re.findall(r"self\.(up\d) = Up\(", source) == ["up1", "up2", "up3"]
    assert "self.start" in source
