"""A loss that a script sums itself: gradients are the mean over ranks, and that is told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import partc
from partc.program.model.habits import TOLD
from partc.verification.processes import Processes
from tests.mistakes.things import Net

pytestmark = pytest.mark.gloo
ROWS, WIDTH = 8, 4


def gradients(how: str, batch: str = "local") -> tuple[float, list[str]]:
    """By what a rank's gradients differ from those of one process, and what was told."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("partc")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    TOLD.discard("a summed loss")
    numbers = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, ROWS, WIDTH, generator=numbers)
    torch.manual_seed(0)
    raw: Any = Net()
    alone = loss_of(raw(x), y, how, 1)
    wanted = torch.autograd.grad(alone, [*raw.parameters()])
    model: Any = partc.parallelize(raw, "dp=2", plan="ddp", batch=batch)
    mine = (t.chunk(2)[dist.get_rank()] for t in (x, y)) if batch == "local" else (x, y)
    own, target = mine
    loss_of(model(own), target, how, model.data_world).backward()
    log.removeHandler(handler)
    pairs = zip((p.grad for p in model.parameters()), wanted, strict=True)
    ratios = [float(got.sum() / want.sum()) for got, want in pairs]
    return sum(ratios) / len(ratios), [text for text in told if "is a sum over" in text]


def loss_of(scores: Any, y: Any, how: str, world: int) -> Any:
    if how == "sum":
        return F.mse_loss(scores, y, reduction="sum")
    if how == "added":
        return 0.5 + (scores - y).pow(2).sum()
    if how == "told":
        return F.mse_loss(scores, y, reduction="sum") * world
    if how == "of its rows":
        return F.mse_loss(scores, y, reduction="sum") / len(y)
    if how == "by all rows":
        return F.mse_loss(scores, y, reduction="sum") / ROWS
    return nn.functional.mse_loss(scores, y)


@pytest.mark.parametrize(
    ("how", "factor", "is_told"),
    [
        ("sum", 0.5, True), ("added", 0.5, True), ("told", 1.0, False), ("mean", 1.0, False),
        ("of its rows", 1.0, False), ("by all rows", 0.5, False),
    ],
)  # fmt: skip
def test_a_sum_is_that_of_a_rank(
    world: Processes, how: str, factor: float, is_told: bool
) -> None:  # fmt: skip
    for found, told in world.run(gradients, how, num=2):
        assert found == pytest.approx(factor, rel=1e-4)
        assert bool(told) == is_told
        assert all("1/2 of those of one process" in text for text in told)
        assert all("loss * model.data_world" in text for text in told)


def test_of_all_rows_it_is_that_of_one_process(world: Processes) -> None:
    for found, told in world.run(gradients, "sum", "global", num=2):
        assert found == pytest.approx(1.0, rel=1e-4)
        assert not told
