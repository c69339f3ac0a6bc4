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
    """Products by column, by row and by column, each with a norm of the channels behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16)
        self.conv3, self.norm3 = nn.Conv2d(16, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        head: Tensor = self.head(F.relu(self.norm3(self.conv3(x))).mean((2, 3)))
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["norm1.weight", "norm2.weight", "norm2.bias"])
def test_a_weight_is_stored_as_it_is_used(name: str) -> None:
    program = compiled("tp=2", "megatron-sp")
    assert f'"{name}" = {{ tp = 0 }}' in program.plan
    attribute = name.replace(".", "_")
    assert f"{attribute}.chunk(" not in program.source(0)


@pytest.mark.exhaustive
def test_a_sum_that_is_not_scattered_leaves_the_norm_whole() -> None:
    assert '"norm2.weight" = {}' in compiled("tp=2", "megatron").plan


def test_weights_behind_a_scattered_sequence_are_whole() -> None:
    plan = partc.compile(words(), "tp=2", plan="megatron-sp").plan
    assert '"blocks.*.down.bias" = {}' in plan


@pytest.mark.rows(1)
@pytest.mark.parametrize("size", [6, 24])
def test_a_sum_is_scattered_before_the_gradient_of_an_activation(size: int) -> None:
    """To pass the sum on saves no transfer: small images are cut as large ones are."""
    images = torch.zeros(8, 4, size, size)
    program = partc.compile(model(), "tp=2", (images, LABELS), loss=loss_of, plan="megatron-sp")
    lines = [line for line in program.source(0).splitlines() if "threshold_backward" in line]
    assert lines
    assert not any("{U:tp}" in line for line in lines)


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("mesh", "plan"), [("tp=2", "megatron-sp"), ("dp=2,tp=2", "fsdp+megatron-sp")]
)
def test_it_computes_what_the_model_computes(mesh: str, plan: str) -> None:
    verify(compiled(mesh, plan), model(), (IMAGES, LABELS), loss_of).check()
