"""``loss.backward()`` and ``step(scale=...)``: accumulation and GradScaler under every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from tests.program.training import batch_of, loss_of, model_of, save_program, stage_of, whole

pytestmark = pytest.mark.gloo
LAYOUTS = [("dp=2,tp=2", "fsdp+megatron"), ("pp=2,dp=2", "fsdp")]


def backward(stage: torch.nn.Module, seed: int, scale: float) -> Tensor:
    loss: Tensor = stage(*batch_of(seed))
    (loss * scale).backward()
    return loss


def by_step(stage: torch.nn.Module, seed: int, scale: float) -> Tensor:
    assert not isinstance(stage.step, Tensor | torch.nn.Module)
    loss: Tensor = stage.step(*batch_of(seed), scale=scale)
    return loss


def by_tensor(stage: torch.nn.Module, seed: int, scale: float) -> Tensor:
    assert not isinstance(stage.step, Tensor | torch.nn.Module)
    loss: Tensor = stage.step(*batch_of(seed), scale=torch.tensor(scale, dtype=torch.float64))
    return loss


def accumulated(path: Path) -> None:
    """Two steps of four microsteps, each weighed otherwise."""
    for run in (backward, by_step, by_tensor):
        stage, model = stage_of(path), model_of()
        ours, theirs = (torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (stage, model))
        for first in (0, 4):
            for seed in range(first, first + 4):
                scale = 0.25 * (seed + 1)
                loss = run(stage, seed, scale)
                expected = loss_of(model, *batch_of(seed))
                (expected * scale).backward()
                torch.testing.assert_close(loss.detach(), expected.detach())
            compare_grads(stage, model)
            for each in (ours, theirs):
                each.step()
                each.zero_grad()


def compare_grads(stage: Stage, model: torch.nn.Module) -> None:
    for name, param in stage.named_parameters():
        assert isinstance(param.grad, DTensor)
        expected = model.get_parameter(name).grad
        torch.testing.assert_close(param.grad.full_tensor(), expected, rtol=2e-5, atol=1e-6)


def scaled_by_a_scaler(path: Path) -> None:
    """The scale of a GradScaler, by both styles; an infinite gradient on one rank skips on all."""
    for run in (backward, by_step):
        stage, scaler = stage_of(path), torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(stage.parameters(), 0.1)
        for bad in (False, True):
            optimizer.zero_grad()
            run(stage, 0, scaler.scale(torch.ones(())).item())
            if bad and stage.coords.get("pp", 0) == 1:
                next(stage.parameters()).grad.to_local().fill_(torch.inf)  # type: ignore[union-attr]
            before = [whole(p.detach().clone()) for p in stage.parameters()]
            scaler.step(optimizer)
            scaler.update()
            after = [whole(p.detach()) for p in stage.parameters()]
            same = all(map(torch.equal, before, after))
            assert same is bad
        assert scaler.get_scale() == 4.0


def gradients_are_dropped(path: Path) -> None:
    stage = stage_of(path)
    stage.step(*batch_of())
    before = [p.grad.to_local().clone() for p in stage.parameters()]  # type: ignore[union-attr]
    with torch.no_grad():
        assert not stage(*batch_of()).requires_grad
    stage(*batch_of())
    after = [p.grad.to_local() for p in stage.parameters()]  # type: ignore[union-attr]
    assert all(map(torch.equal, before, after))
    stage.requires_grad_(False)
    stage.zero_grad()
    stage(*batch_of()).backward()
    assert all(p.grad is None for p in stage.parameters())


def all_of_them(path: Path) -> None:
    accumulated(path)
    gradients_are_dropped(path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "plan"), LAYOUTS)
def test_gradients_are_scaled_as_on_one_device(
    world: Processes, tmp_path: Path, mesh: str, plan: str
) -> None:
    path = save_program(tmp_path / "saved", mesh, plan, 4 if "pp" in mesh else 1)
    world.run(all_of_them, path)


def test_a_scaler_skips_on_every_pipeline_rank(world: Processes, tmp_path: Path) -> None:
    world.run(scaled_by_a_scaler, save_program(tmp_path / "saved", "pp=2,dp=2", "fsdp", 2))
