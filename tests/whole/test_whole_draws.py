"""``random="single-device"``: every plan draws the same numbers, so that losses can be compared."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import PartcError, PlanError
from partc.plan import Plan
from partc.program import Program
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from partc.verification.verification import verify
from tests.whole import test_random as every_op

ROWS, TOKENS, WIDTH = 8, 6, 16
LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "one": ("dp=1", "ddp", {}),
    "ddp": ("dp=4", "ddp", {}),
    "fsdp, recomputed": ("dp=2", "fsdp", {"recompute": "block"}),
    "megatron-sp": ("dp=2,tp=2", "fsdp+megatron-sp", {}),
    "microbatches": ("dp=2", "ddp", {"microbatches": 2}),
    "pipeline": ("pp=2,dp=2", "ddp", {"microbatches": 2}),
}


class Block(nn.Module):
    """Attention with dropout, an MLP with dropout and noise, residuals with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH) for _ in range(6)
        )
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(-2)))
        h = F.rrelu(self.up(x), training=True)
        noise = 0.1 * torch.randn_like(h) * torch.rand(WIDTH, dtype=h.dtype)
        out: Tensor = x + self.down(h + noise)
        return out


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.normal(0.0, 0.1, x.shape)  # noise of the data, which every stage may read
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, ROWS, TOKENS, WIDTH, generator=generator)
    return x, y


@cache
def net() -> Noisy:
    torch.manual_seed(0)
    return Noisy()


@cache
def step() -> partc.Traced:
    return partc.Traced(net(), batch(), loss_of)


@cache
def compiled(layout: str) -> Program:
    mesh, plan, options = LAYOUTS[layout]
    return partc.compile(step(), mesh, plan=plan, random="single-device", **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_with_the_same_numbers_agrees(layout: str) -> None:
    program = compiled(layout)
    assert program.draws.keys() == compiled("one").draws.keys()
    assert {draw.cuts for draw in program.draws.values()} == {()}
    verify(program, net(), batch(), loss_of).check()
    found = every_op.keys(program, inputs=batch())
    keys = {key for rank in found for key in rank}
    assert keys == {(1, None, site, ()) for site in program.draws}


def losses(layout: str) -> list[float]:
    torch.manual_seed(0)
    mesh, plan, options = LAYOUTS[layout]
    program = partc.compile(
        Noisy(), mesh, batch(), loss=loss_of, plan=plan, random="single-device", **options
    )
    stage: Stage = program.module()
    stage.seed(7)
    optimizer = torch.optim.SGD(stage.parameters(), 0.1)
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        found.append(stage.step(*batch()).item())
        optimizer.step()
    return found


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_curves_of_layouts_are_equal(world: Processes) -> None:
    expected = world.run(losses, "one", num=1)[0]
    assert len(set(expected)) == 4
    for layout in ("megatron-sp", "pipeline"):  # the first has data ranks too
        for found in world.run(losses, layout):
            assert found == pytest.approx(expected, rel=1e-5), layout


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["megatron", "ddp"])
def test_draws_of_every_op_are_whole(layout: str) -> None:
    """Also those that read values: what they read is gathered."""
    mesh, plan, options = every_op.LAYOUTS[layout]
    program = partc.compile(
        every_op.net(), mesh, every_op.batch(), loss=every_op.loss_of, plan=plan,
        random="single-device", **options,
    )  # fmt: skip
    assert {draw.cuts for draw in program.draws.values()} == {()}
    verify(program, every_op.net(), every_op.batch(), every_op.loss_of).check()


class Sampled(nn.Module):
    """Draws by chances that it computes of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h * torch.bernoulli(torch.sigmoid(h.detach()))


def test_what_cannot_be_whole_is_refused() -> None:
    with pytest.raises(PartcError, match="needs the whole batch, not one microbatch"):
        partc.compile(
            Sampled(), "dp=2", batch(), loss=loss_of, plan="ddp", microbatches=2,
            random="single-device",
        )  # fmt: skip
    with pytest.raises(PlanError, match="random = 'alike' means nothing"):
        partc.compile(Sampled(), "dp=2", batch(), loss=loss_of, plan="ddp", random="alike")


def test_the_plan_says_so_and_replays() -> None:
    program = compiled("ddp")
    assert 'random = "single-device"\n' in program.plan
    again = partc.compile(net(), "dp=4", batch(), loss=loss_of, plan=Plan.parse(program.plan))
    assert again.sources == program.sources
    assert "random" not in str(Plan(preset="ddp"))
