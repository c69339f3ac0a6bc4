"""What rounded sums leave over goes through checkpoints, and begins as nothing."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from partc.api import compile
from partc.errors import LoadError
from partc.program import Program
from partc.program.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes

pytestmark = pytest.mark.gloo
EXACT = 'preset = "ddp"\nbucket_copy_mb = {}\ngrad_parts = { dp = 1 }\n'
PLAN = f'{EXACT}allow = ["compress"]\n[compress]\nleast_mb = 0\nblock = 8\nwire = "int8"\n'
OTHER = PLAN.replace("least_mb = 0", "least_mb = 1e-4")
Began = tuple[Stage, torch.optim.Optimizer]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    mean: Tensor = model(x).square().mean()
    return mean


@cache
def program(num: int, plan: str) -> Program:
    """What a rank compiles once; each stage is a module of its own."""
    mesh = "dp=2,tp=2" if "megatron" in plan else f"dp={num}"
    mesh = "pp=2,dp=2" if "microbatches" in plan else mesh
    mesh = "dp_replicate=2,dp_shard=2" if "hsdp" in plan else mesh
    return compile(model(), mesh, (torch.ones(8, 12),), loss=loss, plan=plan)


def begin(num: int, plan: str) -> Began:
    stage = program(num, plan).module()
    stage.load_full(model())
    return stage, torch.optim.AdamW(stage.parameters(), lr=1e-2)


def train(began: Began, steps: range) -> list[float]:
    stage, optimizer = began
    losses = []
    for number in steps:
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(number))
        losses.append(stage.step(x).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def held(stage: Stage) -> dict[str, Tensor]:
    return {name: piece.detach().clone() for name, (_, piece) in stage.pieces().items()}


def left_over(stage: Stage) -> Tensor:
    """The sum over ranks of what the first sum of the step has left over."""
    name = next(name for name in stage.shards if name.endswith("residual@dp"))
    whole: Tensor = stage._tensors.whole(name)
    return whole.sum(0)


def resumes(folder: Path) -> None:
    """Bit for bit, losses and what is left over, from a checkpoint and from DTensors."""
    whole = begin(4, PLAN)
    assert not left_over(whole[0]).any()
    losses = train(whole, range(6))
    first = begin(4, PLAN)
    train(first, range(3))
    assert left_over(first[0]).any()
    save_checkpoint(folder, *first, step=3)
    for route in ("checkpoint", "state dict"):
        again = begin(4, PLAN)
        load_checkpoint(folder, *again)
        if route == "state dict":
            again[0].load_state_dict(first[0].state_dict())
        assert train(again, range(3, 6)) == losses[3:]
        theirs = held(whole[0])
        assert all(torch.equal(x, theirs[name]) for name, x in held(again[0]).items())
    assert sorted(again[0].full_state_dict()) == sorted(model().state_dict())
    again[0].step(torch.ones(4, 12))  # a program for another batch has the same buffers
    theirs = held(whole[0])
    name = next(name for name in theirs if "residual" in name)
    assert not torch.equal(held(again[0])[name], theirs[name])
    again[0].load_full(model())
    assert not left_over(again[0]).any()
    save_checkpoint(folder, *begin(4, EXACT), step=1)


def resumes_with(folder: Path, own: str) -> None:
    """Bit for bit, where sums draw numbers or keep more than what they have not sent."""
    exact = EXACT.replace("ddp", "ddp+megatron") if "block" in own else EXACT
    exact = EXACT.replace("ddp", "hsdp").replace("dp =", "dp_shard =") if "fp8" in own else exact
    exact = f"microbatches = 2\n{EXACT}" if "fp16" in own or "start_step" in own else exact
    plan = f'{exact}allow = ["compress"]\n[compress]\nleast_mb = 0\n{own}\n'
    whole, first = begin(4, plan), begin(4, plan)
    losses = train(whole, range(5))
    train(first, range(3))
    save_checkpoint(folder, *first, step=3)
    again = begin(4, plan)
    load_checkpoint(folder, *again)
    assert train(again, range(3, 5)) == losses[3:]
    theirs = held(whole[0])
    assert all(torch.equal(x, theirs[name]) for name, x in held(again[0]).items())


def on_two(folder: Path, sum_before: list[float]) -> str:
    """Two ranks take over what four had left over; an exact program drops it; other sums do not
    fit.
    """
    began = begin(2, PLAN)
    load_checkpoint(folder / "step-00000003", *began)
    now, before = left_over(began[0]), torch.tensor(sum_before)
    size = min(len(now), len(before))
    assert torch.allclose(now[:size], before[:size], atol=1e-9)
    train(began, range(3, 5))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        load_checkpoint(folder / "step-00000003", *begin(2, EXACT))
    assert any("had left over is dropped" in str(each.message) for each in told)
    load_checkpoint(folder / "step-00000001", *began)
    assert not left_over(began[0]).any()
    try:
        load_checkpoint(
            folder / "step-00000003", *begin(2, PLAN.replace("_mb = 0\n", "_mb = 1e-4\n"))
        )
    except LoadError as error:
        return str(error)
    return ""


def sum_left(folder: Path) -> list[float]:
    stage, optimizer = begin(4, PLAN)
    load_checkpoint(folder / "step-00000003", stage, optimizer)
    return [float(x) for x in left_over(stage)]


@pytest.mark.exhaustive
def test_training_resumes(world: Processes, tmp_path: Path) -> None:
    world.run(resumes, tmp_path)
    before = world.run(sum_left, tmp_path)[0]
    for told in world.run(on_two, tmp_path, before, num=2):
        assert "least_mb was 0" in told


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "own",
    [
        'wire = "random-k"\nshare = 0.2\nstart_step = 1',  # in two stages, as what follows
        'wire = "fp16"',
        'wire = "power-sgd"\nrank = 1',
        'wire = "top-k"\nshare = 0.1',
        'wire = "int8-stochastic"\nblock = 8',  # beside tp, as what follows
        'wire = "sign"\nblock = 8',
        'wire = "fp8"\nblock = 16',  # between machines
        'wire = "int8"\nblock = 8',
    ],
)
def test_training_resumes_with_other_schemes(world: Processes, tmp_path: Path, own: str) -> None:
    world.run(resumes_with, tmp_path, own)
