"""Small sums that are there before any of them is read leave in one transfer."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.program import Program
from partc.verification.verification import verify

NORMS = 2
IMAGES = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 4


class Net(nn.Module):
    """Two batch norms of different widths, each in front of an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        head: Tensor = self.head(x.mean((2, 3)))
        return head


def loss_of(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x), labels)


@cache
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@cache
def compiled(mesh: str = "dp=2", plan: str = "ddp", left_out: tuple[str, ...] = ()) -> Program:
    given = model(), mesh, (IMAGES, LABELS)
    return partc.compile(*given, loss=loss_of, plan=plan, disable=[*left_out])


def sums(program: Program) -> tuple[int, int]:
    """How many all_reduces over dp a step has, and how many bytes they move."""
    rows = [
        row
        for row in program.cost.as_json()["traffic"]
        if (row["kind"], row["axis"]) == ("all_reduce", "dp")
    ]
    return sum(row["count"] for row in rows), sum(row["sent_bytes"] for row in rows)


def test_the_two_sums_of_a_backward_share_a_transfer() -> None:
    """The bytes are the same; the forward's variance is computed from its mean, and goes alone."""
    together, apart = compiled(), compiled(left_out=("stack_sums",))
    (fewer, moved), (more, moved_apart) = sums(together), sums(apart)
    assert (fewer, moved) == (more - NORMS, moved_apart)


def test_means_are_stacked_in_one_line() -> None:
    source = re.sub(r"\s+", " ", compiled().source(0))
    stacked = (
        r"(\w*totals) = torch\.stack\(\[\w+ / \S+, \w+ / \S+\]\) "
        r"# \S+ dist\.all_reduce\(\1, "
    )
    assert re.search(stacked, source)


@pytest.mark.exhaustive
def test_it_computes_what_the_model_computes() -> None:
    for program in (compiled(), compiled("dp=2,tp=2", "fsdp+megatron-sp")):
        verify(program, model(), (IMAGES, LABELS), loss_of).check()


def test_sums_of_which_one_needs_the_other_stay_apart() -> None:
    assert "torch.stack" not in _forward(compiled().source(0))


def _forward(source: str) -> str:
    """The methods that run forward."""
    return "".join(re.findall(r"def forward.*?(?=\n    def |\n\n\n)", source, flags=re.DOTALL))
