"""What a stage refuses at its edges: memory without values, arguments, ranks that went apart."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from partc.api import compile
from partc.errors import CheckError, RunError, UsageError
from partc.program.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from partc.verification.verification import verify

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
ROWS = TensorDataset(torch.arange(48.0).view(8, 6))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    mean: Tensor = model(x).square().mean()
    return mean


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 4))


def stage() -> Stage:
    return compile(model(), "dp=2", (X,), loss=loss, plan="ddp").module()


# ranks --------------------------------------------------------------------------------------------
def apart(folder: Path) -> None:
    """One rank alone lets its optimizer step."""
    of = stage()
    optimizer = torch.optim.SGD(of.parameters(), lr=0.1)
    of.step(X)
    save_checkpoint(folder, of, optimizer, step=1)
    if dist.get_rank() == 0:
        optimizer.step()
    with pytest.raises(RunError, match="rank 1: another number of steps of the"):
        save_checkpoint(folder, of, optimizer, step=2)
    assert [each.name for each in folder.glob("step-*")] == ["step-00000001"]


def without_loader(folder: Path) -> list[str]:
    """What is said where a position is saved, and nobody goes on from it."""
    of, said = stage(), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("partc").addHandler(handler)
    save_checkpoint(folder, of, step=1, loader=of.loader(ROWS))
    load_checkpoint(folder, of, loader=of.loader(ROWS))
    said.clear()
    load_checkpoint(folder, of)
    return said


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_ranks_with_other_weights_are_not_saved(world: Processes, tmp_path: Path) -> None:
    world.run(apart, tmp_path, num=2)


@pytest.mark.gloo
def test_a_position_that_nobody_goes_on_from_is_told(world: Processes, tmp_path: Path) -> None:
    first, second = world.run(without_loader, tmp_path, num=2)
    assert second == []
    assert len(first) == 1
    assert "rows that were read come again" in first[0]


# memory -------------------------------------------------------------------------------------------
def emptied() -> None:
    of = stage()
    of.step(X)
    with pytest.raises(RunError, match="have no values"):
        of.to("meta")
    of.to_empty(device="cpu")
    with pytest.raises(RunError, match=r"0\.weight.*no values"):
        of.step(X)
    of.load_full(model())
    assert bool(of.step(X).isfinite())


@pytest.mark.gloo
def test_memory_without_values_is_not_computed_with(world: Processes) -> None:
    world.run(emptied, num=2)


# calls --------------------------------------------------------------------------------------------
CALLS: dict[str, Callable[[Any], object]] = {
    "loader": lambda of: of.loader(ROWS, 8),
    "full_state_dict": lambda of: of.full_state_dict("cpu"),
    "meet_islands": lambda of: of.meet_islands(1), "pieces": lambda of: of.pieces(1),
    "step_on_pieces": lambda of: of.step_on_pieces(), "share": lambda of: of.share(),
}  # fmt: skip


def called(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name}\(\)"):
        CALLS[name](stage())


@pytest.mark.exhaustive
@pytest.mark.gloo
@pytest.mark.parametrize("name", CALLS)
def test_arguments_that_a_call_does_not_take(name: str, world: Processes) -> None:
    world.run(called, name, num=2)


def test_a_model_in_another_mode_than_the_program_is_said_to_be() -> None:
    program = compile(model(), "dp=2", (X,), loss=loss, plan="ddp")
    with pytest.raises(CheckError, match="Bring the model into train mode"):
        verify(program, model().eval(), (X,), loss=loss).check()
