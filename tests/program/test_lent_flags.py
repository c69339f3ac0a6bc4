"""Parameters that are frozen, or trained again, between a compile and the stage."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import partc
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from tests.mistakes.things import one_rank
from tests.patience import patience
from tests.program.training import batch_of, loss_of, model_of


class Unused(nn.Module):
    """A model with a part that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = model_of(), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.used(x)
        return y


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield


def compiled(model: nn.Module, mesh: str = "dp=1") -> partc.Program:
    return partc.compile(model, mesh, batch_of(), loss=loss_of, plan="ddp")


def at_once(model: nn.Module, change: Callable[[], object], folder: Path) -> Stage:
    program = compiled(model)
    change()
    return program.module()


def by_a_folder(model: nn.Module, change: Callable[[], object], folder: Path) -> Stage:
    compiled(model).save(folder / "build")
    change()
    return partc.load(folder / "build", model).module()


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [at_once, by_a_folder])
def test_what_was_frozen_behind_the_compile_is_not_trained(
    tmp_path: Path, make: Callable[..., Stage]
) -> None:
    model = model_of()
    with pytest.warns(UserWarning, match=r"blocks.* are frozen in the model .* freezes them"):
        stage = make(model, lambda: model.blocks.requires_grad_(False), tmp_path)
    stage.step(*batch_of())
    with_gradient = {name for name, p in stage.named_parameters() if p.grad is not None}
    assert with_gradient == {n for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("make", [at_once, by_a_folder])
def test_what_was_frozen_and_is_not_any_more_is_told(
    tmp_path: Path, make: Callable[..., Stage]
) -> None:
    model = model_of()
    model.blocks.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"blocks.* compile again to train them"):
        make(model, lambda: model.requires_grad_(True), tmp_path)


def test_what_no_loss_depends_on_is_no_such_case(tmp_path: Path) -> None:
    model = Unused()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        at_once(model, lambda: None, tmp_path)
        with torch.no_grad():  # a forward trains nothing
            partc.compile(model, "dp=1", batch_of()[:1], plan="ddp").module()


def frozen_on_rank_0(path: Path) -> None:
    """Ranks without the model freeze the same parameters, or their optimizers would differ."""
    model = model_of()
    model.blocks.requires_grad_(False)
    program = partc.load(path, model if dist.get_rank() == 0 else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stage = program.module()
    frozen = {n for n, p in stage.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, p in model.named_parameters() if not p.requires_grad}


@pytest.mark.exhaustive
@pytest.mark.gloo
def test_ranks_freeze_what_rank_0_has_frozen(tmp_path: Path) -> None:
    compiled(model_of(), "dp=2").save(tmp_path / "build")
    with Processes(2, timeout=patience()) as world:
        world.run(frozen_on_rank_0, tmp_path / "build")
