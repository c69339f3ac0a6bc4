"""Where other ranks do not come, the error says that it is they, and which calls are of all."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, TCPStore

import partc
from partc.api import compile
from partc.errors import RunError, TransferError
from partc.program import load
from partc.program.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partc.program.ranks import farewell, other_ranks
from partc.program.ranks.other_ranks import of_other_ranks
from partc.verification.processes import Processes

pytestmark = pytest.mark.gloo


def loss(model: nn.Module, x: Tensor) -> Tensor:
    mean: Tensor = model(x).square().mean()
    return mean


def told(words: str) -> str:
    """What is said in place of an error of torch with these words; "" if it stays as it is."""
    with pytest.raises(RuntimeError) as found, of_other_ranks("save_checkpoint"):  # as of torch
        raise RuntimeError(words)
    return str(found.value) if isinstance(found.value, TransferError) else ""


def scaled(stage: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(stage.parameters(), 0.1))


SENDS: dict[str, Callable[[Any], object]] = {  # by what is told of them
    "aten.slice.Tensor of weight": lambda stage: stage.weight[:2],
    "aten.select.int of the gradient of weight": lambda stage: stage.weight.grad[3],
    "aten.argmax of weight": lambda stage: stage.weight.argmax(),
    "aten.sort of weight": lambda stage: stage.weight.sort(0),
    "aten.mm of weight": lambda stage: stage.weight.detach().t() @ stage.weight.detach(),
    "aten.cat of weight": lambda stage: torch.cat([p.flatten() for p in stage.parameters()]),
    "aten.sum of bias": lambda stage: stage.bias.sum(),
    "GradScaler.unscale_ of the gradient of weight": scaled,
}


SEND_COPIES: dict[str, Callable[[Any], object]] = {
    "aten.normal_ of bias": lambda stage: nn.init.normal_(stage.bias),
    "aten.add.Tensor of bias": lambda stage: stage.bias + torch.arange(4),
}


def one_alone(plan: str, call: str) -> list[str]:
    """What each rank is told where the first alone computes what sends, or what sends nothing."""
    x, found = torch.ones(4, 8), []
    stage: Any = compile(nn.Linear(8, 4), "dp=2", (x,), loss=loss, plan=plan).module()
    stage.step(x)
    for act in ({**SENDS, **SEND_COPIES}[call], sends_nothing):
        try:
            act(stage) if dist.get_rank() == 0 else stage.step(x)
            if dist.get_rank() == 0:
                stage.step(x)
            found.append("no error")
        except RunError as error:
            found.append(str(error))
    return found


def sends_nothing(stage: Any) -> None:
    for tensor in (stage.weight, stage.weight.grad):
        half = tensor.detach().clone() * 2 + tensor.detach()
        half.to_local().sum().item()
        half[:, :2].abs().t().flatten(1)
        torch.cat([half, half], 1).to(torch.float64)
        assert half.shape == (4, 8)
        assert "DTensor" in repr(half)


def apart(folder: Path, call: str, build: Path | None = None) -> str:
    """What each rank is told where the first alone makes a call of all; with a folder the program
    is one that was saved there, and knows no model.
    """
    torch.manual_seed(0)  # where a call before this one has drawn on one rank alone
    model, x = nn.Linear(8, 4), torch.ones(4, 8)
    program = compile(model, "dp=2", (x,), loss=loss, plan="fsdp")
    if build is not None:
        if dist.get_rank() == 0:
            program.save(build)
        dist.barrier()
        program = load(build)
    stage = program.module()
    stage.load_full(model)
    stage.step(x)
    calls: dict[str, Callable[[], object]] = {
        "save_checkpoint": lambda: save_checkpoint(folder, stage),
        "load_checkpoint": lambda: load_checkpoint(folder, stage),
        "full_state_dict": stage.full_state_dict,
        "clip_grad_norm_": lambda: stage.clip_grad_norm_(1.0),
        "load_full": lambda: stage.load_full(model),
        "copy.deepcopy": lambda: copy.deepcopy(stage),
        "StepGuard.passes": lambda: partc.StepGuard(stage).passes(1, torch.tensor(0.0)),
        "aten.linalg_vector_norm of weight": lambda: weight.norm(),
        "aten.linalg_vector_norm of the gradient of weight": lambda: weight.grad.norm(),
        "another layout of weight": lambda: weight.full_tensor(),
        "a read of the whole of bias": lambda: stage.bias.tolist(),
    }
    weight: Any = stage.weight
    save_checkpoint(folder, stage, step=1)
    try:
        calls[call]() if dist.get_rank() == 0 else stage.step(x)
    except RunError as error:
        found = str(error)
    else:
        found = "no error"
    stage.step(x)  # all ranks are where they were
    stage.clip_grad_norm_(1.0)
    return found


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    "call",
    [
        "save_checkpoint", "load_checkpoint", "full_state_dict", "clip_grad_norm_", "load_full",
        "copy.deepcopy", "StepGuard.passes",
        "aten.linalg_vector_norm of weight", "aten.linalg_vector_norm of the gradient of weight",
        "another layout of weight", "a read of the whole of bias",
    ],
)  # fmt: skip
def test_a_call_that_one_rank_makes_alone(world: Processes, tmp_path: Path, call: str) -> None:
    for said in world.run(apart, tmp_path, call, num=2):
        assert f"ranks differ in what they run: ranks 0: {call}; ranks 1: step" in said


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "call", ["save_checkpoint", "load_checkpoint", "full_state_dict", "clip_grad_norm_"]
)
def test_the_same_of_a_saved_program(world: Processes, tmp_path: Path, call: str) -> None:
    for said in world.run(apart, tmp_path / "steps", call, tmp_path / "build", num=2):
        assert f"ranks differ in what they run: ranks 0: {call}; ranks 1: step" in said


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    ("plan", "call"),
    [*(("fsdp", call) for call in SENDS), *(("ddp", call) for call in SEND_COPIES)],
)
def test_an_op_that_sends_on_one_rank_alone(world: Processes, plan: str, call: str) -> None:
    for said, free in world.run(one_alone, plan, call, num=2):
        assert f"ranks differ in what they run: ranks 0: {call}; ranks 1: step" in said
        assert free == "no error"


def test_of_whole_copies_a_rank_may_compute_alone(world: Processes) -> None:
    for call in ("aten.slice.Tensor of weight", "aten.sum of bias"):
        assert world.run(one_alone, "ddp", call, num=2) == [["no error"] * 2] * 2


def behind_its_group() -> str:
    """What a stage says whose process group is gone, and has another one then."""
    torch.manual_seed(0)  # where a call before this one has drawn on one rank alone
    model, x = nn.Linear(8, 4), torch.ones(4, 8)
    stage = compile(model, "dp=2", (x,), loss=loss, plan="fsdp").module()
    stage.load_full(model)
    stage.step(x)
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    try:
        stage.step(x)
        said = "no error"
    except RunError as error:
        said = str(error)
    alone = TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=alone, rank=0, world_size=1)  # which the job ends
    return f"rank {rank}: {said}"


def test_a_transfer_that_other_ranks_left() -> None:
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        said = told("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer")
        assert "rank 0, save_checkpoint: a transfer failed: another rank has ended" in said
        assert "without `if rank == 0`" in said
        assert told("Timed out waiting 12000ms for send operation")
        assert not told("size mismatch")
    finally:
        dist.destroy_process_group()


def test_a_transfer_that_a_rank_left_which_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", KeyError("tag"), raising=False)
    how = farewell.how_it_ends()
    assert how == "has failed: KeyError: 'tag'"
    monkeypatch.setattr(other_ranks, "ends_of_others", lambda: {1: how})
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        said = told("Connection closed by peer")
    finally:
        dist.destroy_process_group()
    assert said.startswith("rank 0, save_checkpoint: a transfer failed: rank 1 has failed: Key")
    assert "Mend what failed there" in said


def test_a_stage_whose_process_group_was_destroyed(world: Processes) -> None:
    for said in world.run(behind_its_group, num=2):
        assert "the process group of this stage was destroyed" in said
