"""A piece that a later stage cuts for itself is cut anew for the backward of an earlier one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partc


class Recurrent(nn.Module):
    """Stage 1's cell cuts the state of stage 0 over tp, and so does the backward of stage 0."""

    def __init__(self, *, attends: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.cell, self.weigh = nn.GRUCell(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(16, 4)
        self.attends = attends

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        start = torch.tanh(self.down(self.up(x).relu()))
        state = self.cell(self.table(words), start)
        context = self.weigh(state) * start if self.attends else start
        result: Tensor = self.out(torch.cat([state, context], -1))
        return result


def loss_of(model: nn.Module, x: Tensor, words: Tensor) -> Tensor:
    loss: Tensor = model(x, words).square().mean()
    return loss


@pytest.mark.rows(1)
@pytest.mark.parametrize("attends", [False, True])
def test_a_piece_is_cut_on_the_stage_that_reads_it(attends: bool) -> None:
    torch.manual_seed(0)
    model = Recurrent(attends=attends)
    batch = torch.randn(8, 8), torch.randint(0, 16, (8,))
    program = partc.compile(
        model, "pp=2,tp=2", batch, loss=loss_of, plan="megatron", microbatches=2, stages=["cell"]
    )
    partc.verify(program, model, batch, loss=loss_of).check()
