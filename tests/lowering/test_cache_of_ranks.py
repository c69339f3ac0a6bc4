"""One of several ranks compiles what a folder keeps, the others read it: on real gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import partc
from partc.verification.processes import Processes
from tests.compiles import counted
from tests.program.families import ROWS, close, compare_step, language, language_loss, tokens

pytestmark = pytest.mark.gloo
NUM_RANKS = 4
LAYOUTS = [("dp=4", "fsdp"), ("pp=2,dp=2", "ddp")]


def sums(found: list[list[str]]) -> list[str]:
    return sorted(each for seen in found for each in seen)


# partc.compile -----------------------------------------------------------------------------------
def compiled(folder: Path, mesh: str, plan: str) -> list[str]:
    """What this rank compiles at a start, and then for another length and an evaluation."""
    model, reference = language(), language()
    options: dict[str, Any] = {"plan": plan, "cache": folder}
    dist.barrier()  # they begin together
    with counted() as seen:
        program = partc.compile(model, mesh, tokens(ROWS, 4), loss=language_loss, **options)
        stage = program.module()
        for length in (4, 5):
            batch = tokens(ROWS, length)
            compare_step(stage, reference, stage.step(*batch), language_loss(reference, *batch))
        close(stage.eval_step(*batch), language_loss(reference, *batch), "loss in eval mode")
        close(stage.eval()(batch[0]), reference(batch[0]), "results")
    return seen


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "plan"), LAYOUTS)
def test_one_rank_compiles_and_the_others_read(
    world: Processes, tmp_path: Path, mesh: str, plan: str
) -> None:
    first = world.run(compiled, tmp_path / "cache", mesh, plan)
    assert len(sums(first)) == 4, first  # one for each program, not one for each rank
    assert len(list((tmp_path / "cache").glob("*/key.json"))) == 4
    assert sums(world.run(compiled, tmp_path / "cache", mesh, plan)) == []


# partc.parallelize -------------------------------------------------------------------------------
def parallelized(folder: Path | None) -> list[str]:
    """A script's steps and evaluations; ranks have seeds of their own, and so other weights."""
    torch.manual_seed(dist.get_rank())
    model, reference = Bare().double(), Bare().double()
    parallel = partc.parallelize(
        model, "dp=4", loss=squares, plan="fsdp", batch="global", **options_of(folder)
    )
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dist.barrier()
    with counted() as seen:
        parallel.step(x)
        parallel.zero_grad()
        reference.load_state_dict(parallel.full_state_dict())
        assert parallel._stage is not None
        compare_step(parallel._stage, reference, parallel.step(x), squares(reference, x))
        parallel.eval()
        close(parallel(x), reference(x), "results")
    return seen


def options_of(folder: Path | None) -> dict[str, Any]:
    return {} if folder is None else {"cache": folder}


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x).tanh())
        return y


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(model(x).square().mean())


def test_a_parallel_model_compiles_on_one_rank(world: Processes, tmp_path: Path) -> None:
    assert len(sums(world.run(parallelized, tmp_path))) == 2
    assert sums(world.run(parallelized, tmp_path)) == []
    assert len(sums(world.run(parallelized, None))) == 2 * NUM_RANKS  # without a folder, each does
