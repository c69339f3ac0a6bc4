"""A script whose default dtype is float64: its model makes numbers of that, and programs too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import TraceError
from tests.mistakes.things import one_rank

ROWS, WIDTH = 8, 6


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Unnamed(nn.Module):
    """Makes numbers in the ways of scripts that name no dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        state = torch.zeros(1, len(x), WIDTH), torch.full((1, len(x), WIDTH), 0.1)
        out, _ = self.cell(x, state)
        waves = torch.exp(-torch.arange(WIDTH) / 3) * (steps[:, None] / 7)
        scaled = out[:, -1] * torch.linspace(0, 1, WIDTH) + waves + steps[:, None] * 0.3
        logits: Tensor = self.head(scaled + torch.eye(WIDTH)[steps % WIDTH])
        return logits


def loss_of(model: nn.Module, x: Tensor, steps: Tensor) -> Tensor:
    return F.cross_entropy(model(x, steps), steps % 3)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 4, WIDTH), torch.arange(ROWS)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "plan"), [("dp=2", "fsdp"), ("dp=2,tp=2", "ddp+megatron")])
def test_programs_compute_as_the_model_does(mesh: str, plan: str) -> None:
    model = Unnamed()
    program = partc.compile(model, mesh, batch(), loss=loss_of, plan=plan)
    partc.verify(program, model, batch(), loss=loss_of).check()
    assert torch.get_default_dtype() == torch.float64
    with torch.no_grad():
        forward = partc.compile(model, mesh, batch(), plan=plan)
    partc.verify(forward, model, batch()).check()


def test_a_loop_of_the_script_gives_the_same_losses() -> None:
    torch.manual_seed(0)
    alone, given = Unnamed(), batch()
    with one_rank():
        model: Any = partc.parallelize(Unnamed(), "dp=1", plan="ddp")
        model.load_state_dict(alone.state_dict())
        optimizers = [torch.optim.Adam(each.parameters(), 0.1) for each in (alone, model)]
        for _ in range(3):
            losses = []
            for each, optimizer in zip((alone, model), optimizers, strict=True):
                optimizer.zero_grad()
                losses.append(F.cross_entropy(each(*given), given[1] % 3))
                losses[-1].backward()
                optimizer.step()
            assert torch.get_default_dtype() == torch.float64
            assert losses[0].dtype == losses[1].dtype == torch.float64
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-13, atol=0)
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(*given), alone(*given), rtol=1e-12, atol=1e-13)


@torch.library.custom_op("partc_test::chances", mutates_args=())
def chances(counts: Tensor) -> Tensor:
    return counts / counts.sum()


@chances.register_fake
def _(counts: Tensor) -> Tensor:
    return torch.empty(counts.shape)


class OwnOp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        logits: Tensor = self.head(x[:, 0]) * chances(steps)[:, None]
        return logits


def test_a_line_that_cannot_be_told_is_refused_by_name() -> None:
    with pytest.raises(TraceError, match=r"chances\(steps\)[\s\S]*it makes torch.float64"):
        partc.compile(OwnOp(), "dp=2", batch(), loss=loss_of, plan="ddp")
