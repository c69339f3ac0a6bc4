"""Layer norms whose results the next block keeps are not computed again for their statistics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc


class Block(nn.Module):
    """Norms behind the sums, as in the first Transformer: the next block reads a norm's result."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.mix(x))
        y: Tensor = self.norm2(x + self.down(F.gelu(self.up(x))))
        return y


class Classifier(nn.Module):
    """Only the first token of the last block's result is read."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.into = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(num))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x[:, 0])
        return y.square().mean()


@pytest.mark.rows(1)
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_all_blocks_with_norms_at_their_ends_are_alike(plan: str) -> None:
    x = torch.randn(4, 3, 8)
    model = Classifier(2)
    program = partc.compile(model, "dp=2", (x,), plan=plan)
    text = program.source()
    assert "for layer in self.blocks:" in text or "for layer, following in zip(self.blocks" in text
    assert text.count("torch.native_layer_norm(") == 2  # that within a block is computed again
    longer = partc.compile(Classifier(6), "dp=2", (x,), plan=plan).source()
    assert longer.count("\n") == text.count("\n")
    assert partc.verify(program, model, (x,)).worst.error < 1e-12
