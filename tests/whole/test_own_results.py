"""Results of programs whose ranks are given samples of their own: each gets its own rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import UsageError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = x + self.second(x).tanh()
        logits: Tensor = self.head(x)
        return logits


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(x)
    right = (logits.argmax(-1) == y).float()
    extras = {"logits": logits, "by_feature": logits.T, "accuracy": right.mean(), "right": right}
    return F.cross_entropy(logits, y), extras


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("mesh", "plan", "microbatches"),
    [
        ("dp=2", "ddp", 1),
        ("dp=2", "fsdp", 2),
        ("dp=2,tp=2", "fsdp+megatron", 1),
        ("pp=2,dp=2", "ddp", 2),
        ("dp_replicate=2,dp_shard=2", "hsdp", 1),
    ],
)
def test_extras_are_those_of_the_ranks_own_rows(mesh: str, plan: str, microbatches: int) -> None:
    torch.manual_seed(0)
    model, ranks = Net(), partc.Mesh.of(mesh)
    num = 16 // (4 if "replicate" in mesh else 2)
    piece = torch.randn(num, 6), torch.randint(4, (num,))
    program = partc.compile(
        model, ranks, piece, loss=loss_of, plan=plan, batch="local", microbatches=microbatches
    )
    assert {*program.results} == {"logits", "by_feature", "right"}
    assert "this rank's rows" in program.plan
    gathered = [line for line in program.source(0).splitlines() if "logits" in line]
    assert not any("all_gather" in line for line in gathered)
    partc.verify(program, model, piece, loss=loss_of).check()


def test_results_of_a_forward_are_the_ranks_own_rows() -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(4, 6)
    with torch.no_grad():
        program = partc.compile(model, "dp=2,tp=2", (x,), plan="fsdp+megatron", batch="local")
        partc.verify(program, model, (x,)).check()
    assert program.results == {"result": (("dp", 0, 1),)}


@pytest.mark.exhaustive
def test_rows_that_the_model_cuts_over_another_axis_too_come_back_as_they_were_given() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1), nn.Tanh()
    )  # of few channels: the second layer shares the rows over tp
    x = torch.randn(4, 3, 8, 8)
    options: Any = {"plan": "fsdp+megatron", "batch": "local"}

    def loss_of(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = model(x)
        return (y**2).mean(), {"y": y}

    step = partc.compile(model, "dp=2,tp=2", (x,), loss=loss_of, **options)
    assert step.results == {"y": (("dp", 0, 1),)}
    partc.verify(step, model, (x,), loss=loss_of).check()
    with torch.no_grad():
        forward = partc.compile(model, "dp=2,tp=2", (x,), **options)
    partc.verify(forward, model, (x,)).check()
    partc.compile(model, "dp=2,tp=2", (x,), loss=partc.ScriptLoss(model), **options)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(50, 8, mode="mean")
        self.item = nn.EmbeddingBag(60, 8, mode="mean")


def contrasted(model: Towers, user: Tensor, item: Tensor) -> Tensor:
    scores = model.user(user) @ model.item(item).T
    return F.cross_entropy(scores, torch.arange(len(scores)))


def test_both_sides_of_a_contrastive_loss_are_the_ranks_own_rows() -> None:
    torch.manual_seed(0)
    model, user, item = Towers(), torch.randint(50, (8, 5)), torch.randint(60, (8, 4))
    program = partc.compile(
        model, "dp=2", (user[:4], item[:4]), loss=contrasted, plan="ddp", batch="local"
    )
    assert program.inputs == {"user": ((8, 5), "int64"), "item": ((8, 4), "int64")}
    for batch in ((user, item), (user[:4], item[:4])):
        partc.verify(program, model, batch, loss=contrasted).check()
    with pytest.raises(
        UsageError, match=r"verify: the inputs have the shapes \[\[2, 5\], \[2, 4\]\]"
    ):
        partc.verify(program, model, (user[:2], item[:2]), loss=contrasted)
