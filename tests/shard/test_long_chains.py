"""A shard is followed through chains of calls that are longer than Python's stack."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partc


class Chain(nn.Module):
    """Two linear layers with many calls between them."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        for _ in range(self.length):
            y = y.sin()
        out: Tensor = self.down(y).square().mean()
        return out


@pytest.mark.exhaustive
def test_a_weight_is_cut_by_what_a_long_chain_ends_in() -> None:
    step = partc.Traced(Chain(330), (torch.zeros(2, 4),))
    program = partc.compile(step, "tp=2", plan="megatron")
    cuts = partc.Plan.parse(program.plan).params
    assert (cuts["up.weight"]["tp"].dim, cuts["down.weight"]["tp"].dim) == (0, 1)
