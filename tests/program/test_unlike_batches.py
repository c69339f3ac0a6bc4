"""What ranks are told that are given batches which one step cannot have; the advice works."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.errors import RunError, UsageError
from partc.verification.processes import Processes

pytestmark = pytest.mark.gloo
ISLANDS = 'preset = "ddp"\nallow = ["local_steps"]\n[local_steps]\nperiod = 4\n'
UNEVEN = 'preset = "ddp"\n[uneven]\nmicrobatches = [2, 1]\n'


@cache  # as a model that is gone lends no weights
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 5)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=drawn), torch.randint(5, (rows,), generator=drawn)


def program(mesh: str, plan: str, rows: int, **options: Any) -> Any:
    return partc.compile(model(), mesh, batch(rows), loss=loss_of, plan=plan, **options)


def said(compiled: Any, rows: Sequence[int], **choices: Any) -> str:
    """What a rank is told that is given so many rows; the same on all ranks."""
    with pytest.raises(RunError) as caught:
        compiled.module(**choices).step(*batch(rows[dist.get_rank()]))
    return str(caught.value)


def of_data_ranks() -> None:
    whole = program("dp=2", "ddp", 8)
    told = said(whole, (4, 3), partial="replicate")
    assert "The program takes the whole batch on every rank" in told
    assert "pad=" not in told
    told = said(whole, (7, 7))
    assert 'module(partial="pad", pad={"x": 0, "y": -100})' in told
    assert "labels get a number that the loss ignores" in told
    x, y = batch(7)
    expected = loss_of(model(), x, y).detach()
    padded = whole.module(partial="pad", pad={"x": 0, "y": -100})
    torch.testing.assert_close(padded.step(x, y), expected)
    told = said(whole, (7, 7), partial="pad", pad={"x": 0})
    assert "pad has no number for y" in told
    assert 'pad={"x": 0, "y": -100}' in told
    told = said(whole, (7, 7), partial="pad", pad={"x": 0, "y": 0})
    assert "loss differs). See that labels get a number that the loss ignores" in told
    own = program("dp=2", "ddp", 4, batch="local")
    assert 'program.module(partial="replicate")' in said(own, (4, 3))
    rank = dist.get_rank()
    own.module(partial="replicate").step(*batch((4, 3)[rank], rank))
    told = said_of_casts(whole)
    assert "Enter torch.autocast on all ranks, or on none" in told


def said_of_casts(compiled: Any) -> str:
    stage, first = compiled.module(), dist.get_rank() == 0
    casts = torch.autocast("cpu", torch.bfloat16) if first else contextlib.nullcontext()
    with pytest.raises(RunError) as caught, casts:
        stage.step(*batch(8))
    return str(caught.value)


def of_islands() -> None:
    mesh, island = "island=2,dp=2", dist.get_rank() // 2
    apart = program(mesh, ISLANDS, 8)
    told = said(apart, (8, 8, 6, 6), partial="pad", pad={"x": 0, "y": -100})
    assert "Islands compute as many rows in a step" in told
    assert "pad=" not in told
    own = program(mesh, ISLANDS, 4, batch="local")
    told = said(own, (4, 4, 3, 3), partial="replicate")
    assert "Islands compute as many rows in a step" in told
    assert 'partial="replicate"' in said(own, (4, 3, 4, 3))
    own.module(partial="replicate").step(*batch((4, 3)[dist.get_rank() % 2], dist.get_rank()))
    uneven = program(mesh, UNEVEN, 8)
    told = said(uneven, (8, 8, 8, 8))
    assert "islands compute 2, 1 microbatches of a step" in told
    assert "pad=" not in told
    uneven.module().step(*batch((16, 8)[island], island))


@pytest.mark.exhaustive
def test_data_ranks_are_told_what_works(world: Processes) -> None:
    world.run(of_data_ranks, num=2)


def test_islands_are_told_what_works(world: Processes) -> None:
    world.run(of_islands, num=4)


def test_every_input_is_named_where_pad_is_missing() -> None:
    with pytest.raises(UsageError) as caught:
        program("dp=1", "ddp", 8).module(partial="pad")
    assert 'Write pad={"x": 0, "y": -100}: labels get a number' in str(caught.value)
