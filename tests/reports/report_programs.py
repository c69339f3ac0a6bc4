"""Small programs of several plans for the tests of reports, each compiled once."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc

PLANS = ("megatron-sp", "megatron", "ddp", "zero1", "fsdp", "fsdp+megatron-sp")
MESHES = {"ddp": "dp=2", "zero1": "dp=2", "fsdp": "dp=2"}
WIDTH, LAYERS = 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


@cache
def step() -> partc.Traced:
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (8, 16))
    return partc.Traced(Net(), (ids,), loss_of)


@cache
def compiled(plan: str, mesh: str = "", microbatches: int = 1) -> partc.Program:
    axes = mesh or MESHES.get(plan, "dp=2,tp=2")
    return partc.compile(step(), axes, plan=plan, microbatches=microbatches)
