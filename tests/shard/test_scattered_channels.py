"""Weights of channels that sequence parallelism scatters are sharded like the channels."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.program import Program
from partc.verification.verification import verify
from tests.overlap.words import step as words

IMAGES = torch.randn(8, 4, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 4


class Net(nn.Module):
    """A product by column and one by row, the second with a norm of the channels behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        head: Tensor = self.head(F.relu(self.norm2(self.conv2(x))).mean((2, 3)))
        return head


def loss_of(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x), labels)


@cache
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@cache
def compiled(mesh: str, plan: str) -> Program:
    return partc.compile(model(), mesh, (IMAGES, LABELS), loss=loss_of, plan=plan)


@pytest.mark.parametrize("name", ["norm1.weight", "norm2.weight", "norm2.bias"])
def test_a_weight_is_stored_as_it_is_used(name: str) -> None:
    program = compiled("tp=2", "megatron-sp")
    assert f'"{name}" = {{ tp = 0 }}' in program.plan
    attribute = name.replace(".", "_")
    assert f"{attribute}.chunk(" not in program.source(0)


def test_a_sum_that_is_not_scattered_leaves_the_norm_whole() -> None:
    assert '"norm2.weight" = {}' in compiled("tp=2", "megatron").plan


def test_weights_behind_a_scattered_sequence_are_whole() -> None:
    plan = partc.compile(words(), "tp=2", plan="megatron-sp").plan
    assert '"blocks.*.down.bias" = {}' in plan


@pytest.mark.parametrize(
    ("mesh", "plan"), [("tp=2", "megatron-sp"), ("dp=2,tp=2", "fsdp+megatron-sp")]
)
def test_it_computes_what_the_model_computes(mesh: str, plan: str) -> None:
    verify(compiled(mesh, plan), model(), (IMAGES, LABELS), loss_of).check()
