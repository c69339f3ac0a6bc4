"""Mesh axes of one rank: meshes and plans may name them, programs have nothing of them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partc
from partc.program.helper_file import helpers_of
from tests.texts import roles_of

BATCH = torch.randint(24, (8, 6)), torch.randint(24, (8, 6))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(F.gelu(self.up(x)))
        return x + down


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def made(mesh: str, plan: str, microbatches: int | None = None) -> partc.Program:
    return partc.compile(
        Net(), mesh or {}, BATCH, loss=loss_of, plan=plan, microbatches=microbatches, batch="local"
    )


def computes(source: str) -> str:
    """The text behind ``MESH``, the only line in which axes of one rank may stand."""
    return source[source.index("\nMESH = ") :].partition("\n")[2].partition("\n")[2]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "bare", "plan", "microbatches"),
    [
        ("dp=1,tp=1", "", "fsdp+megatron", None),
        ("pp=1,dp=2,tp=1", "dp=2", "zero1", None),
        ("dp=1,tp=2", "tp=2", "megatron-sp", 2),
        ("pp=2,dp_replicate=1,dp_shard=2", "pp=2,dp_shard=2", "fsdp", 2),
    ],
)
def test_the_program_is_that_of_the_mesh_without_them(
    mesh: str, bare: str, plan: str, microbatches: int | None
) -> None:
    program = made(mesh, plan, microbatches)
    without = made(bare, plan if bare else "ddp", microbatches)
    assert {n: computes(s) for n, s in roles_of(program).items()} == {
        n: computes(s) for n, s in roles_of(without).items()
    }
    assert helpers_of(program.sources) == helpers_of(without.sources)
    assert f"MESH = {dict(program.mesh.axes)}".replace("'", '"') in program.source(0)
    assert str(program.mesh).replace(" ", ",") == mesh  # what the launcher makes


BY_HAND = """
[mesh]
dp = 1
tp = 1

[gather]
dp = "use"

[scatter]
tp = 1

[inputs]
"*" = { dp = 0 }

[params]
"blocks.*.up.weight" = { tp = 0, dp = 1 }

[values]
"blocks.*.up:add" = { tp = 2 }
"""


def test_what_a_plan_cuts_along_them_means_nothing() -> None:
    model = Net()
    program = partc.compile(model, "dp=1,tp=1", BATCH, loss=loss_of, plan=BY_HAND)
    assert not re.search(r"dist\.|chunk\(1\)|_rank\b", computes(program.source(0)))
    assert program.plan.count("dp = 1") == 2  # its size, and the cut
    again = partc.compile(model, "dp=1,tp=1", BATCH, loss=loss_of, plan=program.plan)
    assert (again.sources, again.plan) == (program.sources, program.plan)
    assert partc.verify(program, model, BATCH, loss=loss_of)
