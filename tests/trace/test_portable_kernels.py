"""What torch chooses by whether it is traced: chosen alike in every run of a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

import partc

NOTE = "encoder computes padded positions as in training"


class Padded(nn.Module):
    """An encoder of equal blocks, whose samples may have padding."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        result: Tensor = self.encoder(x, src_key_padding_mask=mask)
        return result


@pytest.mark.exhaustive
def test_encoder_in_eval_mode_computes_what_it_does_with_gradients() -> None:
    model, x = Padded().eval(), torch.randn(4, 6, 8)
    mask = torch.arange(6).expand(4, 6) > torch.tensor([[3], [5], [4], [2]])
    with torch.no_grad():
        program = partc.compile(model, "dp=2", (x, mask), plan="ddp")
    partc.verify(program, model, (x, mask)).check()
    assert NOTE in program.plan
    assert mha.get_fastpath_enabled()


def test_an_encoder_without_padding_has_no_note() -> None:
    with torch.no_grad():
        program = partc.compile(Padded(1).eval(), "dp=2", (torch.randn(4, 6, 8),), plan="ddp")
    assert NOTE not in program.plan


@pytest.mark.rows(1)
@pytest.mark.parametrize("kind", ["eval", "forward"])
def test_a_stage_with_attention_is_evaluated(kind: str) -> None:
    model, x = Padded(1), torch.randn(4, 6, 8)
    program = partc.compile(model, "dp=2", (x,), loss=lambda m, x: m(x).sum(), plan="ddp")
    assert program.for_shapes((x,), modes=(kind,)).others


class Asks(nn.Module):
    """Takes another op where it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x.tanh() if is_fx_symbolic_tracing() else torch.special.expit(x) * 2 - 1


def test_a_model_that_asks_whether_it_is_traced_has_one_answer() -> None:
    loss = lambda m, x: m(x).sum()  # noqa: E731
    program = partc.compile(Asks(), "dp=2", (torch.randn(4, 8),), loss=loss, plan="ddp")
    assert "tanh" in program.source(0)
