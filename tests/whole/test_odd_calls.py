"""Calls that are easy to get wrong: each as a model, in microbatches and on two axes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import partc

BATCH, STEPS, WIDTH = 8, 6, 10


def last(x: Tensor) -> Tensor:
    """The place of each sample's last token; -1 where it has none."""
    return (x.detach()[:, :, 0] > 0).sum(1).clamp(max=STEPS) - 1


def rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


def written(x: Tensor) -> Tensor:
    """The same value for all of a row's elements."""
    y = x.clone()
    y[rows(x), last(x)] = x[:, 0, :1]
    return y


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "a piece that nobody reads": lambda x: x.split([1, 3, 2], 1)[1],
    "the last chunk": lambda x: x.chunk(4, 1)[2],
    "a higher norm": lambda x: x / x.norm(4, -1, keepdim=True),
    "a diagonal": lambda x: torch.diagonal(x, 1, 1, 2),
    "a trace": lambda x: torch.einsum("bii->b", x[:, :, :STEPS]),
    "an imaginary exponent": lambda x: torch.exp((1 + 0.5j) * x).imag,
    "polar coordinates": lambda x: torch.polar(x.abs(), x).real,
    "a token per sample": lambda x: x[rows(x), last(x)],
    "tokens in an order per sample": lambda x: x[rows(x)[:, None], x.detach()[:, :, 0].argsort(1)],
    "a token written per sample": written,
    "shifted integers": lambda x: x * ((x.detach() > 0).long() << 2 >> 1),
}


class Calling(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.call = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.down(torch.tanh(self.up(x))))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return (y * y.detach().cos() + y.square()).mean()


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", CALLS)
def test_every_layout_computes_the_same(name: str) -> None:
    torch.manual_seed(0)
    model, batch = Calling(CALLS[name]), (torch.randn(BATCH, STEPS, WIDTH),)
    step = partc.Traced(model, batch, loss_of)
    for mesh, plan, microbatches in (("dp=2", "fsdp", 2), ("dp=2,tp=2", "ddp+megatron", 1)):
        program = partc.compile(step, mesh, plan=plan, microbatches=microbatches)
        partc.verify(program, model, batch, loss_of).check(1e-11)
