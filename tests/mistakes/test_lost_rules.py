"""Rules that nobody will read: of misspelt ops, and of ops that a program does not call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from partc.rules.table import RULES, rule
from tests.mistakes.things import compiled


@torch.library.custom_op("partc_lost::gated", mutates_args=())
def gated(x: Tensor, gate: Tensor) -> Tensor:
    return torch.softmax(x * gate, -1)


@gated.register_fake
def _(x: Tensor, gate: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor
) -> None:
    ctx.save_for_backward(output, *inputs)


def _backward(ctx: torch.autograd.function.FunctionCtx, d_y: Tensor) -> tuple[Tensor, Tensor]:
    y, x, gate = ctx.saved_tensors  # type: ignore[attr-defined]
    d_z = y * (d_y - (d_y * y).sum(-1, keepdim=True))
    return d_z * gate, d_z * x


gated.register_autograd(_backward, setup_context=_keep)


class Gated(nn.Module):
    """``f32[8,4] -> f32[8,4]`` through an op of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = gated(self.up(x), self.gate(x))
        return result


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = dict(RULES._entries)
    yield
    RULES._entries.clear()
    RULES._entries.update(before)


def test_a_rule_of_an_op_that_is_opened_is_told() -> None:
    rule("partc_lost.gated", "b!k,b!k->b!k")
    with pytest.warns(
        UserWarning, match=r"partc_lost.gated', .*is not read: .*Leave this rule out"
    ):
        compiled(model=Gated())


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("partc_lost.gatd", "there is no such op .*has gated.*Did you mean 'gated'"),
        ("partc_lots.gated", "no library has these.*import before partc.compile"),
        ("partc_lost.gated.defualt", "Did you mean 'default'"),
    ],
)
def test_a_rule_of_no_op_is_told(name: str, told: str) -> None:
    rule(name, "b!k,b!k->b!k")
    with pytest.warns(UserWarning, match=told):
        compiled()


def test_a_rule_of_an_op_that_the_model_does_not_call_is_nobodys_fault() -> None:
    rule("partc_lost.gated", "b!k,b!k->b!k")
    compiled()
