"""A toy of residual blocks between an embedding and a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mlp(nn.Module):
    """One residual block."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.w1 = nn.Linear(6, inner)
        self.w2 = nn.Linear(inner, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.w2(F.gelu(self.w1(self.norm(x))))
        return out


class Toy(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, num_blocks: int = 2, inner: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(14, 6)
        self.blocks = nn.ModuleList(Mlp(inner) for _ in range(num_blocks))
        self.head = nn.Linear(6, 14, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def toy(num_blocks: int = 2, inner: int = 10) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Toy(num_blocks, inner).double()
    return model, (torch.randint(14, (4, 8)), torch.randint(14, (4, 8)))
