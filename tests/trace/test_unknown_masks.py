"""Masks that a transformer is given as an input: their values do not decide what is traced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partc


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(8, 2, 1, 1, 8, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.both(source, target, tgt_mask=mask)
        return y


def loss_of(model: nn.Module, source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    found: Tensor = (model(source, target, mask) - target).square().mean()
    return found


@pytest.mark.rows(1)
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_a_transformer_reads_the_mask_that_it_is_given(mode: bool) -> None:
    model = Translator().train(mode)
    causal = nn.Transformer.generate_square_subsequent_mask(3)
    batch = torch.randn(4, 5, 8), torch.randn(4, 3, 8), causal
    plan = partc.plan.Plan.parse('preset = "ddp"\n[inputs]\n"mask" = {}\n')
    program = partc.compile(model, "dp=2", batch, loss=loss_of, plan=plan)
    partc.verify(program, model, batch, loss=loss_of).check()
    window = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).tril(-2).bool(), float("-inf"))
    partc.verify(program, model, (*batch[:2], window), loss=loss_of).check()
