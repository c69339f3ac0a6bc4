"""Blocks that compute the same have one class, wherever they stand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.codegen.helpers.links import Partials

X = torch.randn(8, 4, 16)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after, self.up = Norm(), Norm(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.after(self.up(self.before(x)))
        return y


class Net(nn.Module):
    """The last stage of a pipeline has a norm more than the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList([Block() for _ in range(8)]), Norm()
        self.more = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        for block in self.more:
            x = block(x)
        y: Tensor = self.norm(x)
        return y


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum()
    return loss


def classes(program: partc.Program) -> list[str]:
    texts = program.source(0).split("One of ")[1:]
    return [text.partition('."""')[0] for text in texts]


@pytest.mark.exhaustive
def test_blocks_of_two_lists() -> None:
    model = Net()
    program = partc.compile(model, "dp=2", (X,), loss=loss_of, plan="fsdp")
    assert len(classes(program)) == 1
    assert "blocks." in classes(program)[0]
    assert "more." in classes(program)[0]
    partc.verify(program, model, (X,), loss=loss_of).check()


@pytest.mark.exhaustive
def test_stages_of_one_rank_have_the_functions_that_either_needs() -> None:
    model = Net()
    program = partc.compile(
        model, "pp=2,dp=2", (X,), loss=loss_of, plan="ddp", microbatches=2, schedule="zb-v",
        stages=["blocks.3", "blocks.6", "more.0"],
    )  # fmt: skip
    assert len(classes(program)) == 1, "stages 0 and 3"
    partc.verify(program, model, (X,), loss=loss_of).check()


def test_parts_of_gradients_leave_in_buckets() -> None:
    partials, params = Partials(), [nn.Parameter(torch.ones(n)) for n in (2, 1, 4, 1)]
    for param in [*params[:3], params[0]]:
        partials.add(param, torch.ones_like(param))
    assert partials.buckets(params, 12) == [params[:2], [params[2]]]
    taken = partials.take(params[:2])
    assert [x.tolist() for x in taken.values()] == [[2.0, 2.0], [1.0]]
    assert [*partials] == [params[2]]
