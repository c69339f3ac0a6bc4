"""Modules of a stage whose tensors other pipeline ranks hold, on real gloo processes."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partc
from partc.errors import RunError
from partc.program import Program
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from tests.program.families import begun, close, gan, maker_loss

pytestmark = pytest.mark.gloo
HALVES = ("maker", "critic")  # the first on pipeline rank 0, the second on 1


def both_loss(model: Any, real: Tensor, noise: Tensor) -> Tensor:
    made: Tensor = model.critic(model.maker(noise)).square().mean()
    wanted: Tensor = (model.critic(real) - 1).square().mean()
    return made + wanted


def compiled() -> tuple[nn.Module, Program]:
    model, noise = gan(), torch.ones(8, 4, dtype=torch.float64)
    return model, partc.compile(
        model, "pp=2", (noise,), loss=maker_loss, plan="ddp", stages=["critic"]
    )


def trained_by_halves() -> None:
    """An optimizer for each half of a model, of which each rank has one."""
    (model, program), reference = compiled(), gan()
    stage = begun(program, model)
    noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    real = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    critic = stage.share(program.also((real, noise), loss=both_loss))
    turns: list[Any] = [
        (stage.step, maker_loss, (noise,)),
        (critic.step, both_loss, (real, noise)),
    ]
    ours, theirs = (
        [torch.optim.Adam(each.get_submodule(half).parameters(), lr=1e-2) for half in HALVES]
        for each in (stage, reference)
    )
    stage.step_on_pieces(ours[0])
    for _ in range(3):
        for which, (run, loss, batch) in enumerate(turns):
            ours[which].zero_grad()
            stage.zero_grad()
            reference.zero_grad()
            expected = loss(reference, *batch)
            close(run(*batch), expected, loss.__name__)
            expected.backward()
            ours[which].step()
            theirs[which].step()
    for name, tensor in stage.full_state_dict().items():
        close(tensor, reference.get_parameter(name), name)
    for mine, other in zip(ours, theirs, strict=True):
        saved = stage.full_optim_state_dict(mine)["state"]
        for number, state in other.state_dict()["state"].items():
            close(saved[number]["exp_avg"], state["exp_avg"], f"state {number}")


def asked_for(stage: Stage) -> None:
    here, there = HALVES[dist.get_rank()], HALVES[1 - dist.get_rank()]
    assert stage.get_parameter(f"{here}.0.weight").numel()
    assert [name for name, _ in stage.named_parameters() if name.startswith(there)] == []
    away, names = stage.get_submodule(there), ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [param.numel() for param in away.parameters()] == [0] * 4
    assert [name for name, _ in away.named_parameters()] == names
    at = rf"on pipeline rank {HALVES.index(there)}\)"
    for kind in (AttributeError, RunError):
        with pytest.raises(
            kind, match=rf"stage.{there}.0.weight: this rank has not got it .* {at}"
        ):
            _ = away.get_submodule("0").weight
    assert not hasattr(away.get_submodule("0"), "bias")


def with_the_model() -> None:
    stage = compiled()[1].module()
    stage.step(torch.ones(8, 4, dtype=torch.float64))
    for half in HALVES:  # on both ranks, as neither may go on alone
        with pytest.raises(RunError, match=r"stage.clip_grad_norm_, which is over the whole model"):
            nn.utils.clip_grad_norm_(stage.get_submodule(half).parameters(), 1.0)
    asked_for(stage)
    asked_for(copy.deepcopy(stage))
    asked_for(stage.to(torch.float64))


@pytest.mark.exhaustive
def test_each_half_of_a_pipeline_has_an_optimizer(world: Processes) -> None:
    world.run(trained_by_halves, num=2)


def with_frozen_parts(folder: Path) -> None:
    """A rank that has nothing to train makes the same optimizer as the others."""
    model, reference = (gan().requires_grad_(False) for _ in range(2))
    model.critic[2].requires_grad_()
    reference.critic[2].requires_grad_()
    noise = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stage = partc.compile(
        model, "pp=2", (noise,), loss=maker_loss, plan="ddp", stages=["critic"]
    ).module()
    ours, theirs = (
        torch.optim.AdamW((p for p in each.parameters() if p.requires_grad), lr=1e-2)
        for each in (stage, reference)
    )
    stage.step_on_pieces(ours)
    schedule = torch.optim.lr_scheduler.StepLR(ours, 2)
    for number in range(3):
        reference.zero_grad()
        ours.zero_grad()
        expected = maker_loss(reference, noise)
        close(stage.step(noise), expected, "loss")
        expected.backward()
        ours.step()
        theirs.step()
        schedule.step()
        theirs.param_groups[0]["lr"] = schedule.get_last_lr()[0]
        partc.save_checkpoint(folder, stage, ours, step=number)
    for name, tensor in stage.full_state_dict().items():
        close(tensor, reference.get_parameter(name), name)
    partc.load_checkpoint(folder, stage, ours)
    whole = stage.full_optim_state_dict(ours)
    assert len(whole["state"]) == 2
    stage.requires_grad_(True)
    del ours
    gc.collect()  # stages of other tests
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="empty parameter list on this pipeline rank"):
            torch.optim.AdamW(p for n, p in stage.named_parameters() if n.startswith("maker"))


def test_a_rank_without_trained_parameters_has_an_optimizer(
    world: Processes, tmp_path: Path
) -> None:
    world.run(with_frozen_parts, tmp_path, num=2)


def scaled_on_one_rank() -> None:
    """A GradScaler has one verdict where all that an optimizer trains is on another rank."""
    (model, program), noise = compiled(), torch.ones(8, 4, dtype=torch.float64)
    stage = begun(program, model)
    for of_part in (True, False):
        stage.requires_grad_(True)
        if not of_part:
            stage.maker.requires_grad_(False)
        mine = stage.critic if of_part else stage
        ours = torch.optim.SGD((p for p in mine.parameters() if p.requires_grad), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for bad in (False, True, False):
            stage.zero_grad()
            stage.step(noise, scale=scaler.scale(torch.ones(())).item())
            if bad and dist.get_rank() == 1:
                next(stage.critic.parameters()).grad.to_local().fill_(torch.inf)
            before = stage.full_state_dict()
            scaler.step(ours)
            scaler.update()
            after = stage.full_state_dict()
            assert bad is all(torch.equal(before[name], after[name]) for name in before)
        assert scaler.get_scale() == 4.0


def test_a_scaler_has_one_verdict_where_others_train(world: Processes) -> None:
    world.run(scaled_on_one_rank, num=2)


class Averaged(nn.Module):
    """A network, and another that follows it; all layers have the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = (
            nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))) for _ in range(2)
        )
        self.target.requires_grad_(False)

    def loss(self, x: Tensor) -> Tensor:
        found: Tensor = (self.online(x) - self.target(x)).square().mean()
        return found


def averaged_loss(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model.loss(x)
    return found


@torch.no_grad()
def follow(model: Any) -> None:
    for p, q in zip(model.online.parameters(), model.target.parameters(), strict=True):
        q.lerp_(p, 0.25)


def averaged(stages: list[str]) -> None:
    torch.manual_seed(3)
    model = Averaged().double()
    reference, x = copy.deepcopy(model), torch.ones(4, 4, dtype=torch.float64)
    stage = partc.compile(
        model, "pp=2", (x,), loss=averaged_loss, plan="ddp", stages=stages
    ).module()
    close(stage.step(x), averaged_loss(reference, x), "loss")
    names = [name for name, _ in reference.online.named_parameters()]
    assert [name for name, _ in stage.online.named_parameters()] == names
    whole = copy.deepcopy(reference)
    whole.load_state_dict(stage.full_state_dict())
    with pytest.raises(RunError, match=r"lerp_ of \w+.\d.weight and another tensor: they are not"):
        follow(stage)
    with pytest.raises(RunError, match=r"not have its value|not on the same|parameters alone"):
        float(sum(p.norm() for p in stage.target.parameters()))
    follow(whole)
    stage.load_full(whole.state_dict())
    follow(reference)
    for name, tensor in stage.full_state_dict().items():
        close(tensor, reference.get_parameter(name), name)


@pytest.mark.rows(2)
@pytest.mark.parametrize("stages", [["target"], ["online.1"], ["target.1"]])
def test_parts_of_two_ranks_are_not_averaged_by_mistake(
    world: Processes, stages: list[str]
) -> None:
    world.run(averaged, stages, num=2)


def without_the_model(path: Path) -> None:
    stage = partc.load(path).module()
    there = HALVES[1 - dist.get_rank()]
    with pytest.raises(AttributeError, match=rf"stage.{there}: this rank has not got it"):
        getattr(stage, there)


@pytest.mark.exhaustive
def test_a_tensor_of_another_rank_says_where_it_is(world: Processes, tmp_path: Path) -> None:
    world.run(with_the_model, num=2)
    compiled()[1].save(tmp_path / "saved")
    world.run(without_the_model, tmp_path / "saved", num=2)


def by_name(model: nn.Module, *, named: bool) -> list[dict[str, Any]]:
    """Groups by whole names, of which each pipeline rank has one alone."""

    def of(part: str) -> list[Any]:
        pairs = [(name, x) for name, x in model.named_parameters() if name.startswith(part)]
        return pairs if named else [x for _, x in pairs]

    return [{"params": of("maker"), "lr": 0.1}, {"params": of("critic"), "weight_decay": 0.5}]


def in_groups_by_name() -> None:
    (model, program), noise = (gan(), compiled()[1]), torch.randn(8, 4, dtype=torch.float64)
    dist.broadcast(noise, src=0)
    for named in (False, True):
        stage, reference = begun(program, model), copy.deepcopy(model)
        ours, theirs = (
            torch.optim.AdamW(by_name(each, named=named), lr=1e-2) for each in (stage, reference)
        )
        for _ in range(2):
            ours.zero_grad()
            theirs.zero_grad()
            stage.step(noise)
            maker_loss(reference, noise).backward()
            ours.step()
            theirs.step()
        for name, tensor in stage.full_state_dict().items():
            close(tensor, reference.get_parameter(name), name)
        whole = stage.full_optim_state_dict(ours)
        assert len(whole["state"]) == len(theirs.state_dict()["state"])


def test_groups_by_name_of_which_a_rank_has_none(world: Processes) -> None:
    world.run(in_groups_by_name, num=2)


def asked_by_name() -> None:
    stage, rank = begun(compiled()[1], gan()), dist.get_rank()
    own, other = (
        next(n for n, _ in gan().named_parameters() if n.startswith(HALVES[i]))
        for i in (rank, 1 - rank)
    )
    assert stage.get_parameter(own) is dict(stage.named_parameters())[own]
    with pytest.raises(
        RunError, match=rf"stage\.{HALVES[1 - rank]}(.|\n)*on pipeline rank {1 - rank}"
    ):
        stage.get_parameter(other)
    with pytest.raises(AttributeError):
        stage.get_parameter(f"{HALVES[rank]}.nothing")


def test_a_parameter_that_another_rank_has_is_named(world: Processes) -> None:
    world.run(asked_by_name, num=2)
