"""Blocks drop what they read no more, and write over it, where that lowers the step's peak."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partc.api import compile
from partc.codegen.helpers.printed import log_softmax_over
from partc.dryrun.run import dry_run
from partc.program.role import Role
from tests.codegen.emitted import Emitted, check_ranks, check_single, emitted_of


class Block(nn.Module):
    """A residual layer whose inner values are far larger than what runs through."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = activation
        self.up, self.down = nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.activation(self.up(x)))
        return out


class Stack(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor], num: int) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(activation) for _ in range(num)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def stack(activation: Callable[[Tensor], Tensor], num: int = 3) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Stack(activation, num).double(), torch.randn(24, 8, 4, dtype=torch.float64)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().mean()
    return out


def program(num: int = 3) -> Emitted:
    model, x = stack(F.gelu, num)
    return emitted_of(compile(model, {}, (x,), loss=mean_square, plan="ddp"))


def peak_bytes(source: str, helpers: str) -> int:
    return dry_run(Role.load(source, "program.py", helpers=helpers)).peak_bytes


def test_every_del_of_a_block_lowers_the_peak() -> None:
    source = program()
    helpers = source.helpers
    block = source[source.index("class Block") : source.index("class StackStep")]
    lines = re.findall(r"^ {8}(?:del .*|\w+\.clear\(\))\n", block, re.MULTILINE)
    assert "        del gelu\n" in lines
    for line in lines:
        assert peak_bytes(source.replace(line, "", 1), helpers) > peak_bytes(source, helpers)


@pytest.mark.exhaustive
def test_at_the_peak_there_is_little_beside_what_blocks_save() -> None:
    """One activation that is wide: made again for a weight's gradient, then its own gradient."""
    peaks = {num: peak_bytes(each, each.helpers) for num in (3, 4, 8) if (each := program(num))}
    wide, narrow = 24 * 8 * 64 * 8, 24 * 8 * 4 * 8
    assert peaks[4] - peaks[3] == (peaks[8] - peaks[4]) // 4 == wide + narrow
    assert peaks[3] - 3 * (wide + narrow) < 1.5 * wide


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    "activation", [F.gelu, F.silu, torch.relu, torch.tanh, torch.sigmoid], ids=lambda f: f.__name__
)
def test_gradients_of_activations_are_written_over_what_they_are_made_of(
    activation: Callable[[Tensor], Tensor],
) -> None:
    model, x = stack(activation)
    source = check_single(model, (x,), mean_square, 1e-12)
    assert len(re.findall(r"_backward\.grad_input\((\w+), .*grad_input=\1\)", source)) == 1


def test_products_of_gradients_are_written_over_them() -> None:
    model, x = stack(lambda y: y * y.detach().cos())
    source = check_single(model, (x,), mean_square, 1e-12)
    assert re.search(r"^ +d_up \*= cos\b", source, re.MULTILINE)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 40)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def classifier() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    labels = torch.randint(40, (4, 8))
    return Classifier().double(), (torch.randn(4, 8, 6, dtype=torch.float64), labels)


def test_log_probabilities_are_written_over_logits() -> None:
    model, inputs = classifier()
    assert "= log_softmax_over(" in check_single(model, inputs, None, 1e-12)
    model, inputs = classifier()
    check_ranks(model, inputs, None, "dp=2", "fsdp", 1e-12)


@pytest.mark.parametrize("shape", [(5, 40), (2, 9, 7), (40, 3)])
def test_log_probabilities_of_a_few_rows_at_a_time_are_those_of_all(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = x.log_softmax(-1)
    found = log_softmax_over(x)
    assert found is x
    assert torch.equal(found, expected)
