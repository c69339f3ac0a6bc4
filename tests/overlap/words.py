"""A small model of many words, whose step is traced once for all tests of a file."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partc.traced import Traced

WIDTH, WORDS, LAYERS = 64, 2048, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(x)))
        return result


class Words(nn.Module):
    """Most is live in the head, where every token has a logit for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


IDS = torch.arange(8 * 64).view(8, 64) % WORDS


@cache
def model() -> nn.Module:
    torch.manual_seed(0)
    return Words()


@cache
def step() -> Traced:
    return Traced(model(), (IDS,), lambda m, x: m(x))
