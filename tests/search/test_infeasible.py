"""Where nothing fits the error says which pin stands in the way, and what giving it up costs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import partc
from partc.amounts import amount
from partc.errors import MemoryLimitError, PlanError
from partc.passes.search.plans.infeasible import nothing_fits, releases
from partc.passes.search.plans.search_plans import Search
from partc.plan.mesh import Mesh
from tests.towers import batch, compiled, loss_of, tower


def pinned(**pins: Any) -> Search:
    """The tower's search on four H100, with pins."""
    taken = compiled("open", "auto").basis.taken
    assert taken
    return replace(taken.search, **pins)


def test_the_pin_in_the_way_is_named_with_what_fits_without_it() -> None:
    search = pinned(microbatches=1, recompute=("cheap",), memory_bytes=11_000_000)
    search = replace(search, mesh=Mesh((("dp", 4),), search.mesh.topology))
    assert search.best() is None
    found = {each.pin: each.ranked for each in releases(search)}
    assert found["microbatches=1"].candidate.microbatches > 1
    assert found["recompute='cheap'"].candidate.recompute == "block"
    assert found["memory_bytes=11000000"].estimate.peak_bytes > 11_000_000
    error = nothing_fits(search)
    assert error.what == "nothing fits 11.00 MB on a device"
    assert "without microbatches=1: " in error.do
    least = min(each.estimate.peak_bytes for each in search.ascending())
    assert f"the least is {amount(round(least), 'B')}: " in error.why


@pytest.mark.exhaustive
def test_more_devices_are_named_where_no_pin_but_memory_helps() -> None:
    search = pinned(memory_bytes=1_300_000)
    assert search.best() is None
    error = nothing_fits(search)
    assert "the least is " in error.why
    assert "without memory_bytes=1300000: " in error.do
    assert "on 8 devices: " in error.do


def test_a_batch_that_the_axes_do_not_divide() -> None:
    search = pinned(microbatches=3)
    error = nothing_fits(search)
    assert error.what == "no way to cut the step fits the axes"
    assert "without microbatches=3: " in error.do


@pytest.mark.exhaustive
def test_the_error_reaches_the_user() -> None:
    with torch.device("meta"):
        model = tower()
    with pytest.raises(PlanError, match="By estimate it fits without the axes dp=4: "):
        partc.compile(model, "dp=4", batch(4), loss=loss_of, memory_bytes=1_500_000)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("plan", "said"), [("auto", "memory_bytes = "), ("ddp", "memory_bytes to ")]
)
def test_the_memory_that_is_told_is_enough(plan: str, said: str) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 24))
    like = batch(8, 16)
    with pytest.raises(PlanError) as caught:
        partc.compile(model, "dp=2", like, loss=loss_of, plan=plan, memory_bytes=16)
    found = re.search(rf"{said}(\d+)\b(?!\.\d)", caught.value.do)
    assert found, caught.value.do
    partc.compile(model, "dp=2", like, loss=loss_of, plan=plan, memory_bytes=int(found[1]))


def test_a_plan_by_hand_is_told_what_would_fit() -> None:
    with torch.device("meta"):
        model = tower()
    with pytest.raises(MemoryLimitError, match="By estimate it fits with ") as caught:
        partc.compile(model, "dp=4", batch(), loss=loss_of, plan="ddp", memory_bytes=16_000_000)
    assert "microbatches (" in caught.value.do
