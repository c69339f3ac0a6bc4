"""Islands that own parameters: training with them is that of one device, on four gloo ranks."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from partc.api import compile
from partc.plan import Plan
from partc.program import Program, load
from partc.program.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partc.program.stage.runtime import Stage
from partc.reports.server_cost import server_loads, sizes_of
from partc.verification.processes import Processes
from partc.verification.verification import verify
from tests.program.island_runs import Deep, Draws, batch, loss, made

pytestmark = pytest.mark.gloo
STEPS = 5
ONE, TWO = "count = 1", "count = 2"
PEERS = "count = 4\ncompute = true"
LAYOUTS = [
    ("island=4", "ddp", ONE),
    ("island=4", "ddp", TWO),
    ("island=4", "ddp", PEERS),
    ("island=2,dp=2", "ddp", ONE),
    ("island=2,dp=2", "fsdp", ONE),
    ("island=2,dp=2", "zero1;microbatches = 2", "count = 2\ncompute = true"),
    ("island=2,dp=2", 'fsdp;batch = "local"', ONE),
    ("island=2,tp=2", "megatron", ONE),
    ("island=2,pp=2", "ddp;microbatches = 2", ONE),
]
WIDER = [  # on more ranks than there are processes: verified alone
    ("island=3,dp=2,tp=2", "fsdp+megatron", ONE),
    ("island=3,pp=2,dp=2", "ddp;microbatches = 2", "count = 2"),
]


def plan(preset: str, servers: str) -> str:
    head, _, more = preset.partition(";")
    return f'preset = "{head}"\n{more}\n[servers]\n{servers}\n'


@cache
def compiled(mesh: str, preset: str, servers: str, kind: Any = Deep) -> Program:
    given = plan(preset, servers)
    rows = slice(4 if 'batch = "local"' in preset else 8)
    example = tuple(x[rows] for x in batch(0, 0))
    return compile(made(kind), mesh, example, loss=loss, plan=given)


def begin(
    mesh: str, preset: str, servers: str, kind: Any = Deep
) -> tuple[Stage, torch.optim.Optimizer]:
    stage = compiled(mesh, preset, servers, kind).module()
    stage.load_full(made(kind))
    return stage, torch.optim.AdamW(stage.parameters(), lr=1e-2)


def num_computing(stage: Stage) -> int:
    how = Plan.parse(stage._program.plan).servers
    assert how is not None
    return len(how.workers(stage.mesh))


def own_rows(stage: Stage, step: int) -> tuple[Tensor, ...]:
    """What this rank is given of a step; a server that computes nothing is given some batch too."""
    rows = batch(step, stage.coords["island"] % num_computing(stage))
    if 'batch = "local"' not in stage._program.plan:
        return rows
    first = 4 * stage.coords["dp"]
    return tuple(x[first : first + 4] for x in rows)


class Reference:
    """One device that trains on the batches of all islands that compute."""

    def __init__(self, num: int) -> None:
        self.num, self.model = num, made(Deep)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def backward(self, step: int) -> float:
        whole = sum(loss(self.model, *batch(step, i)) for i in range(self.num)) / self.num
        whole.backward()  # type: ignore[union-attr]
        return whole.item()  # type: ignore[union-attr]

    def step(self, step: int, clip: float = 0.0) -> float:
        found = self.backward(step)
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found


def same_weights(stage: Stage, model: nn.Module) -> None:
    for found in (stage.full_state_dict(), {n: x.full_tensor() if hasattr(x, "full_tensor") else x
                                            for n, x in stage.state_dict().items()}):  # fmt: skip
        for name, param in model.named_parameters():
            if name in found:  # a pipeline rank's state dict has those of its own stages
                torch.testing.assert_close(found[name], param.detach(), atol=1e-12, rtol=0)


def trains_as_one_device(mesh: str, preset: str, servers: str) -> None:
    stage, optimizer = begin(mesh, preset, servers)
    reference = Reference(num_computing(stage))
    for step in range(STEPS):
        clip = 0.1 * (step == 2)
        wanted = reference.step(step, clip)
        found = stage.step(*own_rows(stage, step)).item()
        assert abs(found - wanted) < 1e-13, (step, found, wanted)
        if clip:
            stage.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
    same_weights(stage, reference.model)
    here, owned = stage.coords["island"], stage.owners
    mine = {name for name, owner in owned.items() if owner == here}
    names = {param: name for name, param in stage.named_parameters()}
    assert {names[param] for param in optimizer.state} == mine  # type: ignore[index]


@pytest.mark.rows(2)
@pytest.mark.parametrize(("mesh", "preset", "servers"), LAYOUTS)
def test_training_is_that_of_one_device(
    world: Processes, mesh: str, preset: str, servers: str
) -> None:
    world.run(trains_as_one_device, mesh, preset, servers)


@pytest.mark.rows(1)
@pytest.mark.parametrize(("mesh", "preset", "servers"), [*LAYOUTS, *WIDER])
def test_the_step_is_verified(mesh: str, preset: str, servers: str) -> None:
    program = compiled(mesh, preset, servers)
    report = verify(program, made(Deep), batch(0, 0), loss=loss).check()
    said = {"gradient on its server", "loss of all islands", "parameter of a server"}
    assert said <= {*report.kinds()}


class Partly(Deep):
    """Some of its parameters are frozen, and one is read by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Parameter(torch.ones(3))
        self.blocks[1].weight.requires_grad_(False)
        self.first.bias.requires_grad_(False)


def trains_some() -> None:
    stage, optimizer = begin("island=4", "ddp", TWO, Partly)
    model = made(Partly)
    reference = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        whole = sum(loss(model, *batch(step, i)) for i in range(2)) / 2
        whole.backward()  # type: ignore[union-attr]
        stage.step(*own_rows(stage, step))
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    same_weights(stage, model)
    assert stage.owners.keys() == {n for n, p in model.named_parameters() if p in reference.state}


@pytest.mark.exhaustive
def test_what_is_frozen_or_unread_stays(world: Processes) -> None:
    world.run(trains_some)


def habits() -> None:
    """Accumulation over calls, scales, GradScaler, and the call of the stage with a backward."""
    stage, optimizer = begin("island=4", "ddp", TWO)
    reference = Reference(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        reference.backward(2 * step)
        reference.step(2 * step + 1)
        stage.step(*own_rows(stage, 2 * step), scale=scaler.get_scale())
        scaler.scale(stage(*own_rows(stage, 2 * step + 1))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    same_weights(stage, reference.model)


@pytest.mark.exhaustive
def test_gradients_add_up_and_are_scaled(world: Processes) -> None:
    world.run(habits)


def overflows(mesh: str, preset: str, servers: str) -> None:
    """An infinite gradient of one worker: no server steps, and all ranks take half the scale."""
    stage, optimizer = begin(mesh, preset, servers)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    reference = Reference(num_computing(stage))
    for step in range(3):
        rows = own_rows(stage, step)
        if step == 1 and stage.coords["island"] == num_computing(stage) - 1:
            rows = (rows[0] * 1e200, rows[1])
        stage.step(*rows, scale=scaler.scale(torch.ones(())).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step != 1:
            reference.step(step)
    assert scaler.get_scale() == 512.0
    same_weights(stage, reference.model)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "preset", "servers"),
    [("island=4", "ddp", TWO), ("island=2,dp=2", "fsdp", ONE),
     ("island=2,pp=2", "ddp;microbatches = 2", ONE)],
)  # fmt: skip
def test_all_ranks_skip_a_step_that_overflows(
    world: Processes, mesh: str, preset: str, servers: str
) -> None:
    world.run(overflows, mesh, preset, servers)


def evaluates() -> None:
    """Between the optimizer's step and the next one every island evaluates the new parameters."""
    stage, optimizer = begin("island=4", "ddp", TWO)
    reference = Reference(2)
    for step in range(2):
        reference.step(step)
        stage.step(*own_rows(stage, step))
        optimizer.step()
        optimizer.zero_grad()
        x, _ = batch(7, 0)
        found = stage.eval()(x)
        stage.train()
        torch.testing.assert_close(found, reference.model(x).detach(), atol=1e-12, rtol=0)
    reference.step(2)
    stage.step(*own_rows(stage, 2))
    optimizer.step()
    stage.meet_islands()
    for name, param in reference.model.named_parameters():
        mine = stage.pieces()[name][1]
        torch.testing.assert_close(mine, param, atol=1e-12, rtol=0)


@pytest.mark.exhaustive
def test_all_islands_evaluate_what_servers_have(world: Processes) -> None:
    world.run(evaluates)


def resumes(folder: Path, mesh: str, preset: str, servers: str) -> None:
    stage, optimizer = begin(mesh, preset, servers)
    reference = Reference(num_computing(stage))
    for step in range(2):
        reference.step(step)
        stage.step(*own_rows(stage, step))
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(folder, stage, optimizer, step=2)
    whole = stage.full_optim_state_dict(optimizer)
    for number, (name, param) in enumerate(reference.model.named_parameters()):
        for field, value in reference.optimizer.state[param].items():
            found = whole["state"][number][field]
            torch.testing.assert_close(found, value, atol=1e-12, rtol=0, msg=f"{name} {field}")
    num = num_computing(stage)
    others = {1: ("island=2,tp=2", "megatron", ONE), 2: ("island=4", "ddp", TWO)}
    for layout in ((mesh, preset, servers), others[num]):
        again = begin(*layout)
        load_checkpoint(folder, *again)
        taken = begin(*layout)
        taken[0].load_full(stage.full_state_dict())
        taken[0].load_full_optim_state_dict(taken[1], whole)
        for continued, its in (again, taken):
            other = copy.deepcopy(reference)
            for step in (2, 3):
                other.step(step)
                continued.step(*own_rows(continued, step))
                its.step()
                its.zero_grad()
            same_weights(continued, other.model)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "preset", "servers"),
    [("island=4", "ddp", TWO), ("island=2,dp=2", "fsdp", ONE),
     ("island=2,pp=2", "ddp;microbatches = 2", "count = 2\ncompute = true")],
)  # fmt: skip
def test_training_resumes(
    world: Processes, tmp_path: Path, mesh: str, preset: str, servers: str
) -> None:
    world.run(resumes, tmp_path, mesh, preset, servers)


# what is sent -------------------------------------------------------------------------------------
def counted(servers: str) -> tuple[int, int]:
    """Bytes that this rank sends in a step, counted at torch's own functions and predicted."""
    stage, _ = begin("island=4", "ddp", servers)
    role = stage._role
    sent = 0
    plain = dist.isend

    def isend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes
        return plain(tensor, *args, **kwargs)

    stage.step(*own_rows(stage, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", isend)
        stage.step(*own_rows(stage, 1))
    how = Plan.parse(stage._program.plan).servers
    assert how is not None
    loads = server_loads(how, stage.mesh, sizes_of(role.params, stage.mesh))
    return sent, loads[stage.coords["island"]].sent_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("servers", [ONE, TWO, PEERS])
def test_bytes_are_those_predicted(world: Processes, servers: str) -> None:
    for sent, predicted in world.run(counted, servers):
        assert sent == predicted


# rows ---------------------------------------------------------------------------------------------
def reads() -> list[int]:
    """The rows that this rank reads in an epoch, in order; the loss is that of one device."""
    stage, optimizer = begin("island=4", "ddp", TWO)
    x = torch.cat([batch(9, number)[0] for number in range(5)])
    rows = TensorDataset(x, x[:, :4].sin(), torch.arange(len(x)))
    taken: list[int] = []
    for own, labels, numbers in stage.loader(rows, shuffle=True, seed=3):
        found = stage.step(own, labels)
        taken += numbers.tolist()
        every: list[list[int]] = [[]] * 4
        dist.all_gather_object(every, numbers.tolist())
        whole = every[0] + every[1]
        assert len({*whole}) == 16
        wanted = loss(made(Deep), x[whole], x[whole, :4].sin())
        assert abs(found.item() - wanted.item()) < 1e-13
        optimizer.zero_grad()
    return taken


def test_loaders_read_the_rows_of_islands_that_compute(world: Processes) -> None:
    first, second, *servers = world.run(reads)
    assert len(first) == len(second) == 16
    assert not {*first} & {*second}
    assert servers == [first, second]


def draws() -> list[float]:
    """Losses of equal rows in two steps."""
    stage, _ = begin("island=4", "ddp", TWO, Draws)
    x = batch(0, 0)[0]
    return [stage.step(x, x[:, :4].sin()).item() for _ in range(2)]


@pytest.mark.filterwarnings("ignore:step. ranks 0, 1 were given the same samples")
def test_steps_draw_numbers_of_their_own(world: Processes) -> None:
    every = world.run(draws)
    assert all(each == every[0] for each in every)
    assert every[0][0] != every[0][1]


def test_a_program_saves_and_loads(tmp_path: Path) -> None:
    program = compiled("island=4", "ddp", TWO)
    program.save(tmp_path / "build")
    again = load(tmp_path / "build")
    assert again.sources == program.sources
    assert again.plan == program.plan
