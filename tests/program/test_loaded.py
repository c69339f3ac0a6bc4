"""Memory that nobody has loaded cannot be trained on; a model in the process lends its weights."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.nn.utils import clip_grad_norm_

import partc
from partc.errors import RunError
from partc.program import Program, load
from partc.program.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from tests.program.training import (
    batch_of,
    loss_of,
    model_of,
    save_program,
    stage_of,
    train_alone,
    train_stage,
    whole,
)

pytestmark = pytest.mark.gloo
LAYOUTS = [("dp=4", "fsdp"), ("dp=2,tp=2", "fsdp+megatron"), ("pp=2,dp=2", "ddp")]


def compiled(model: nn.Module, mesh: str = "dp=2,tp=2", plan: str = "fsdp+megatron") -> Program:
    microbatches = 2 if "pp" in mesh else 1
    return partc.compile(
        model, mesh, batch_of(), loss=loss_of, plan=plan, microbatches=microbatches
    )


# weights of the model in the process ---------------------------------------------------------
def trained_as_compiled(mesh: str, plan: str, path: Path) -> None:
    torch.manual_seed(dist.get_rank())  # as scripts do that seed by rank: rank 0's weights count
    model = model_of(dist.get_rank())
    for program in (compiled(model, mesh, plan), load(path, model)):
        stage, alone = program.module(), model_of(0)
        optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (stage, alone)]
        found = train_stage(stage, optimizers[0], 3)
        assert found == pytest.approx(train_alone(alone, optimizers[1], 3), rel=1e-5)


@pytest.mark.rows(1)
@pytest.mark.parametrize(("mesh", "plan"), LAYOUTS)
def test_a_stage_has_the_weights_of_its_model(
    world: Processes, tmp_path: Path, mesh: str, plan: str
) -> None:
    path = save_program(tmp_path / "saved", mesh, plan, 2 if "pp" in mesh else 1)
    world.run(trained_as_compiled, mesh, plan, path)


def lent_by_rank_0() -> None:
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = model_of()
    stage = compiled(model).module()
    assert stage.step(*batch_of()).item() == pytest.approx(loss_of(model_of(), *batch_of()).item())
    with torch.device("cpu" if dist.get_rank() else "meta"):
        model = model_of()
    with pytest.raises(RunError, match="have no values"):
        compiled(model).module().step(*batch_of())


@pytest.mark.exhaustive
def test_rank_0_alone_needs_weights(world: Processes) -> None:
    world.run(lent_by_rank_0)


def loaded_too_late() -> None:
    model, other = model_of(0), model_of(3)
    stage = compiled(model).module()
    model.load_state_dict(other.state_dict())
    with pytest.raises(RunError, match=r"was given other values after .module\(\)"):
        stage.step(*batch_of())
    stage.load_full(model)
    stage.step(*batch_of())
    model.load_state_dict(model_of(5).state_dict())  # to evaluate: the stage has begun
    stage.step(*batch_of())
    stage = compiled(model).module()
    model.load_state_dict(stage.full_state_dict())
    stage.step(*batch_of())


@pytest.mark.exhaustive
def test_weights_that_come_after_the_stage_are_refused(world: Processes) -> None:
    world.run(loaded_too_late)


class Scaled(nn.Module):
    k: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 4)
        self.register_buffer("k", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.a(x) * self.k
        return scaled


def doubled_buffer(model: Scaled) -> None:
    model.k.mul_(2)


def another_buffer(model: Scaled) -> None:
    model.k = torch.full((4,), 2.0)


def doubled_data(model: Scaled) -> None:
    model.a.weight.data.mul_(2)


def changed_too_late() -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    for change in (doubled_buffer, another_buffer, doubled_data):
        torch.manual_seed(0)
        model = Scaled()
        program = partc.compile(model, "dp=4", (x,), loss=square_of, plan="ddp")
        stage = program.module()
        change(model)
        with pytest.raises(RunError, match=r"was given other values after .module\(\)"):
            stage.step(x)
        stage.load_full(model)
        stage.step(x)


def square_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def test_values_that_change_between_the_stage_and_its_first_step_are_refused(
    world: Processes,
) -> None:
    world.run(changed_too_late)


# memory without values -----------------------------------------------------------------------
def refused(stage: Stage, pattern: str) -> None:
    for run in (stage.step, stage):
        with pytest.raises(RunError, match=pattern):
            run(*batch_of())


def empty(path: Path) -> Stage:
    stage = load(path).module()
    assert all(bool(whole(p).isnan().all()) for p in stage.parameters())
    refused(stage, r"blocks.0.* and \d+ more have no values")
    return stage


def by_init(stage: Stage, folder: Path) -> None:
    with torch.no_grad():
        for param in stage.parameters():
            nn.init.constant_(param, 0.1)


def by_pieces(stage: Stage, folder: Path) -> None:
    for _, piece in stage.pieces().values():
        piece.data.fill_(0.1)


def by_state_dict(stage: Stage, folder: Path) -> None:
    stage.load_state_dict(model_of().state_dict())


def by_checkpoint(stage: Stage, folder: Path) -> None:
    load_checkpoint(folder / "ours", stage)


def by_dcp(stage: Stage, folder: Path) -> None:
    load_dcp({"model": stage.state_dict()}, checkpoint_id=folder / "dcp")


WAYS = (by_init, by_pieces, by_state_dict, by_checkpoint, by_dcp)


def every_way(path: Path, folder: Path) -> None:
    full = stage_of(path)
    save_checkpoint(folder / "ours", full)
    save_dcp({"model": full.state_dict()}, checkpoint_id=folder / "dcp")
    for way in WAYS:
        stage = empty(path)
        way(stage, folder)
        assert stage.step(*batch_of()).isfinite()
        assert stage(*batch_of()).isfinite()


def some_and_moved(path: Path, folder: Path) -> None:
    stage = empty(path)
    state = model_of().state_dict()
    stage.load_full({n: t for n, t in state.items() if n != "head.bias"}, strict=False)
    refused(stage, "^step: head.bias have no values")
    stage.double()
    with pytest.raises(RunError, match=r"head\.bias have no values"):
        stage._loaded.check(stage._tensors.held, stage.device)
    stage.load_full({"head.bias": torch.full((8,), torch.nan)}, strict=False)  # meant so
    stage._loaded.check(stage._tensors.held, stage.device)
    one = empty(path)
    if dist.get_rank() == 2:
        one.load_full(state)
    refused(one, "rank 0: gain, .*; rank 1: gain, .*; rank 3: ")


@pytest.mark.exhaustive
@pytest.mark.parametrize("job", [every_way, some_and_moved])
def test_what_was_never_loaded_is_named(
    world: Processes, tmp_path: Path, job: Callable[..., None]
) -> None:
    path = save_program(tmp_path / "saved", "dp=2,tp=2", "fsdp+megatron")
    world.run(job, path, tmp_path / "states")


def in_a_pipeline(path: Path) -> None:
    stage = load(path).module()
    refused(stage, "rank 0: .*; rank 1: ")
    stage.load_full(model_of())
    assert stage.step(*batch_of()).isfinite()


@pytest.mark.exhaustive
def test_a_pipeline_names_what_each_rank_lacks(world: Processes, tmp_path: Path) -> None:
    world.run(in_a_pipeline, save_program(tmp_path / "saved", "pp=2,dp=2", "ddp", 2))


# what scripts do to the model ----------------------------------------------------------------
def cleared_by_the_model() -> None:
    model, alone = model_of(), model_of()
    stage = compiled(model).module()
    ours, theirs = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (stage, alone))
    for number in range(4):
        model.zero_grad(set_to_none=bool(number % 2))
        alone.zero_grad(set_to_none=bool(number % 2))
        loss = stage.step(*batch_of(number))
        expected = loss_of(alone, *batch_of(number))
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        ours.step()
        theirs.step()
    model.blocks[0].zero_grad()
    without = [name for name, p in stage.named_parameters() if p.grad is None]
    assert without == [f"blocks.0.{name}" for name, _ in model.blocks[0].named_parameters()]


@pytest.mark.exhaustive
def test_zero_grad_of_the_model_reaches_the_stage(world: Processes) -> None:
    world.run(cleared_by_the_model)


def optimized_by_mistake() -> None:
    model = model_of()
    stage = compiled(model).module()
    wrong = torch.optim.AdamW(model.parameters(), 1e-2)
    wrong.step()  # before any step, as some schedulers want it
    stage.step(*batch_of())
    with pytest.raises(RunError, match=r"AdamW.step: it has the model's own parameters, such as"):
        wrong.step()
    clips = clip_grad_norm_, torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_
    for clip in clips:
        with pytest.raises(RunError, match=r"clip_grad_\w+_: it has the model's own parameters"):
            clip((p for p in model.parameters()), 1.0)
        clip(stage.parameters(), 1.0)
    loss_of(model, *batch_of()).backward()  # this trains the model itself
    wrong.step()
    assert clip_grad_norm_(model.parameters(), 1.0) > 0
    del stage
    gc.collect()
    wrong.zero_grad()
    wrong.step()


@pytest.mark.exhaustive
def test_an_optimizer_over_the_model_and_clipping_it_are_refused(world: Processes) -> None:
    world.run(optimized_by_mistake)


def frozen_in_the_model() -> None:
    model = model_of()
    stage = compiled(model).module()
    stage.step(*batch_of())
    stage.zero_grad()
    model.blocks.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"requires_grad of 12 parameters .* the stage follows"):
        stage.step(*batch_of())
    trained = [name for name, p in stage.named_parameters() if p.grad is not None]
    assert sorted(trained) == ["gain", "head.bias", "head.weight"]
    model.blocks.requires_grad_(True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stage(*batch_of()).backward()
    assert all(p.grad is not None for p in stage.parameters())


@pytest.mark.exhaustive
def test_freezing_in_the_model_reaches_the_stage(world: Processes) -> None:
    world.run(frozen_in_the_model)


def lent(path: Path, model: nn.Module) -> None:
    partc.with_model(load(path), model, loss_of)


@pytest.mark.exhaustive
@pytest.mark.parametrize("lend", [load, lent])
def test_a_model_of_the_other_mode_is_told(
    tmp_path: Path, lend: Callable[[Path, nn.Module], object]
) -> None:
    """The program's dropout is what runs: a script that meant another one has to hear of it."""
    model = model_of()
    compiled(model).save(tmp_path / "build")
    with pytest.warns(UserWarning, match="is in eval mode, and the program is in train mode"):
        lend(tmp_path / "build", model.eval())
    lend(tmp_path / "build", model.train())
