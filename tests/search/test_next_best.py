"""``plan="auto"`` passes over candidates that a model does not allow, and says so."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.api import Job
from partc.errors import MemoryLimitError, PartcError, PlanError, ShardingError
from partc.passes.search.plans.save_scaling_model import taken_as_json, taken_of_json
from partc.plan.mesh import Mesh


def tower() -> nn.Module:
    layers = (nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))
    return nn.Sequential(nn.Sequential(*layers))


def dice(model: nn.Module, x: Tensor) -> Tensor:
    """Of the whole batch: no sum or mean over samples."""
    found, wanted = model(x).sigmoid(), (x > 0).float()
    loss: Tensor = 1 - (2 * (found * wanted).sum() + 1) / (found.sum() + wanted.sum() + 1)
    return loss


def square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


@pytest.mark.exhaustive
def test_a_loss_over_the_whole_batch_gets_one_microbatch() -> None:
    model, batch = tower(), (torch.randn(8, 8),)
    program = partc.compile(model, "pp=2", batch, loss=dice)
    assert "microbatches = 1" in program.plan
    assert "auto: passed over ddp on pp=2" in program.plan
    assert "needs the whole batch, not one microbatch" in program.plan
    partc.verify(program, model, batch, loss=dice).check()
    with pytest.raises(PlanError, match="needs the whole batch, not one microbatch"):
        partc.compile(model, "pp=2", batch, loss=dice, microbatches=2)


def test_a_pipeline_may_have_fewer_samples_than_stages() -> None:
    model, batch = tower(), (torch.randn(1, 8),)
    program = partc.compile(model, "pp=2", batch, loss=square)
    partc.verify(program, model, batch, loss=square).check()


@pytest.mark.exhaustive
def test_a_script_that_computes_the_loss_gets_no_pipeline() -> None:
    """Nor microbatches: none of either is a candidate, for however fast it is estimated."""
    model, batch = tower(), (torch.randn(8, 8),)
    script = partc.ScriptLoss(model)
    program = partc.compile(model, Mesh.load("cpu", 2), batch, loss=script)
    partc.verify(program, model, batch, loss=script).check()
    assert program.basis.taken
    saved = json.dumps(taken_as_json(program.basis.taken))
    for taken in (program.basis.taken, taken_of_json(json.loads(saved))):
        assert {(one.pp, one.microbatches) for _, _, one in taken.search.candidates} == {(1, 1)}
    with pytest.raises(PlanError, match="has an axis pp, and there is no loss="):
        partc.compile(model, "pp=2", batch, loss=script)


class Pair(nn.Module):
    """No stack of equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).relu())
        return y


@pytest.mark.rows(1)
@pytest.mark.parametrize(("mesh", "num"), [("pp=2", 8), ("pp=2", 3), ("tp=2", 3)])
def test_what_is_read_fits_the_model(mesh: str, num: int) -> None:
    """A pipeline of fewer blocks than stages; a batch that two data ranks would not divide."""
    model, batch = Pair(), (torch.randn(num, 8),)
    program = partc.compile(model, mesh, batch, loss=square)
    partc.verify(program, model, batch, loss=square).check()


def refused(where: str, kind: type[PartcError]) -> PartcError:
    return kind(where=where, what="it is not allowed", why="", do="Do otherwise.")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [PlanError, ShardingError])
def test_where_none_is_left_the_error_says_what_each_has_met(
    monkeypatch: pytest.MonkeyPatch, kind: type[PartcError]
) -> None:
    tried = []

    def with_plan(job: Job, mesh: Any, plan: Any, *_: Any) -> Any:
        tried.append((plan.preset, plan.microbatches))
        raise refused(f"{plan.preset} {plan.microbatches}", kind)

    monkeypatch.setattr(Job, "with_plan", with_plan)
    with pytest.raises(PlanError, match="best candidates can be compiled") as caught:
        partc.compile(tower(), "dp=2", (torch.randn(4, 8),), loss=square)
    assert len(tried) == len(set(tried)) == 3  # what is recomputed does not matter
    assert all(f"{preset} {number}: it is not" in caught.value.why for preset, number in tried)


@pytest.mark.parametrize("kind", [PlanError, MemoryLimitError])
def test_what_all_have_met_is_the_error(
    monkeypatch: pytest.MonkeyPatch, kind: type[PartcError]
) -> None:
    tried = []

    def with_plan(*_: Any) -> Any:
        tried.append(0)
        raise refused("the model", kind)

    monkeypatch.setattr(Job, "with_plan", with_plan)
    with pytest.raises(kind, match="the model: it is not allowed"):
        partc.compile(tower(), "dp=2", (torch.randn(8, 8),), loss=square)
    assert len(tried) <= 5


def test_a_fault_of_partc_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_plan(*_: Any) -> Any:
        raise AssertionError("a fault")

    monkeypatch.setattr(Job, "with_plan", with_plan)
    with pytest.raises(AssertionError, match="a fault"):
        partc.compile(tower(), "dp=2", (torch.randn(8, 8),), loss=square)
