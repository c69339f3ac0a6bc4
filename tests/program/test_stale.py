"""Islands that apply gradients some steps late train as the definition of stale gradients says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partc.api import compile
from partc.errors import RunError
from partc.program.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes
from partc.verification.verification import verify
from tests.program.island_runs import (
    LAYOUTS,
    STEPS,
    Deep,
    Net,
    batch,
    begin,
    compiled,
    loss,
    made,
    plan,
    train,
)

pytestmark = pytest.mark.gloo

ONE, TWO = "steps = 1", "steps = 2\nstart_step = 2"
COMPENSATED = "steps = 3\ncompensation = 0.5"
EVERY = {ONE: "one", TWO: "two", COMPENSATED: "compensated"}


# the definition, of one model in one process ------------------------------------------------------
Gradients = dict[str, Tensor]


class Reference:
    """One model, of which each step applies the mean gradient of some steps ago."""

    def __init__(self, kind: Callable[[], nn.Module], num: int, own: str) -> None:
        said = dict(line.split(" = ") for line in own.splitlines())
        self.late, self.start = int(said["steps"]), int(said.get("start_step", 0))
        self.weight = float(said.get("compensation", 0))
        self.num, self.model = num, made(kind)
        self.optimizer = torch.optim.AdamW(self.trained().values(), lr=1e-2)
        self.sent: list[tuple[Gradients, Gradients]] = []

    def trained(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def step(self, step: int) -> list[float]:
        losses, of_islands = [], []
        for island in range(self.num):
            twin = self.model if not island else copy.deepcopy(self.model)
            value = loss(twin, *batch(step, island))
            value.backward()
            of_islands.append({n: p.grad for n, p in twin.named_parameters() if p.grad is not None})
            twin.zero_grad()
            losses.append(value.item())
        mean = {n: torch.stack([x[n] for x in of_islands]).sum(0) / self.num for n in of_islands[0]}
        self.apply(step, mean)
        return losses

    def apply(self, step: int, mean: Gradients) -> None:
        now = {n: p.detach().clone() for n, p in self.trained().items()}
        due: Gradients | None = mean
        if step >= self.start:
            self.sent.append((mean, now))
            due = None
            if len(self.sent) > self.late:
                then, at = self.sent[-1 - self.late]
                due = {n: g + self.weight * g * g * (now[n] - at[n]) for n, g in then.items()}
        if due is not None:
            for name, param in self.trained().items():
                param.grad = due[name].clone()
        self.optimizer.step()
        self.optimizer.zero_grad()


def trains_as_defined(mesh: str, preset: str, own: str, kind: type[nn.Module]) -> None:
    num = int(mesh.partition("=")[2][0])
    stage, optimizer = begin(mesh, preset, own, kind)
    reference = Reference(kind, num, own)
    for step in range(STEPS):
        wanted = reference.step(step)[stage.coords["island"]]
        [found] = train(stage, optimizer, range(step, step + 1))
        assert abs(found - wanted) < 1e-11 * max(1, abs(wanted)), (step, found, wanted)
    whole = stage.full_state_dict()
    for name, param in reference.trained().items():
        torch.testing.assert_close(whole[name], param.detach(), atol=1e-11, rtol=0)


@pytest.mark.rows(1)
@pytest.mark.parametrize("own", EVERY, ids=EVERY.get)
def test_late_gradients_train_as_their_definition_says(world: Processes, own: str) -> None:
    some = {ONE: [LAYOUTS[0], LAYOUTS[5]], TWO: LAYOUTS[1:4]}
    for mesh, preset, kind in some.get(own, LAYOUTS):
        world.run(trains_as_defined, mesh, preset, own, kind)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "preset", "kind"), [*LAYOUTS[1:4], LAYOUTS[5]])
def test_late_gradients_are_verified(mesh: str, preset: str, kind: Any) -> None:
    program = compiled(mesh, preset, COMPENSATED, kind)
    report = verify(program, made(kind), batch(0, 0), loss=loss).check()
    assert "late gradient" in report.kinds()


# at rest ------------------------------------------------------------------------------------------
def held(stage: Stage) -> dict[str, Tensor]:
    return {name: piece.detach().clone() for name, (_, piece) in stage.pieces().items()}


CUTS = range(1, 6)


def resumes(folder: Path, mesh: str, preset: str, own: str, kind: type[nn.Module]) -> None:
    """Bit for bit, from checkpoints that one run saves; reading, and copies, change nothing."""
    whole, saving = begin(mesh, preset, own, kind), begin(mesh, preset, own, kind)
    losses, saved = train(*whole, range(8)), []
    for step in range(8):
        saved += train(*saving, range(step, step + 1))
        if step + 1 in CUTS:
            looks_and_saves(folder, saving, step + 1)
    assert saved == losses
    theirs = held(whole[0])
    assert all(torch.equal(x, theirs[name]) for name, x in held(saving[0]).items())
    for cut in CUTS:
        again = begin(mesh, preset, own, kind)
        assert load_checkpoint(folder / f"step-{cut:08d}", *again) == cut
        assert train(*again, range(cut, 8)) == losses[cut:]
        assert all(torch.equal(x, theirs[name]) for name, x in held(again[0]).items())


def looks_and_saves(folder: Path, saving: tuple[Stage, torch.optim.Optimizer], cut: int) -> None:
    """Also a copy of the stage goes on, which the stage must not notice."""
    stage = saving[0]
    stage.full_state_dict()
    stage.state_dict()
    twin = copy.deepcopy(stage)
    save_checkpoint(folder, *saving, step=cut)
    kept = held(stage)
    twin.step(*batch(cut, twin.coords["island"]))
    assert all(torch.equal(x, kept[name]) for name, x in held(stage).items())


@pytest.mark.exhaustive
@pytest.mark.parametrize("own", EVERY, ids=EVERY.get)
def test_training_resumes_behind_any_step(world: Processes, tmp_path: Path, own: str) -> None:
    if own != TWO:
        world.run(resumes, tmp_path / "fsdp", "island=2,dp=2", "fsdp", own, Net)
    if own != ONE:
        world.run(resumes, tmp_path / "pp", "island=2,pp=2", "ddp;microbatches = 2", own, Deep)


def saves(folder: Path, own: str) -> list[float]:
    stage, optimizer = begin("island=2,dp=2", "ddp", own)
    train(stage, optimizer, range(4))
    save_checkpoint(folder, stage, optimizer, step=4)
    return [x.sum().item() for x in stage.full_state_dict().values()]


def begins_anew(folder: Path, mesh: str, own: str, sums: list[float]) -> None:
    """What was under way is dropped: the first steps apply nothing."""
    if own:
        stage, optimizer = begin(mesh, "ddp", own)
    else:
        stage = compile(made(Net), mesh, batch(0, 0), loss=loss, plan="ddp").module()
        optimizer = torch.optim.AdamW([p for p in stage.parameters() if p.requires_grad], lr=1e-2)
    load_checkpoint(folder, stage, optimizer)
    found = [x.sum().item() for x in stage.full_state_dict().values()]
    assert found == pytest.approx(sums, rel=1e-12)
    stage.step(*batch(0, 0))
    nothing = all(p.grad is None for p in stage.parameters())
    assert nothing == bool(own)


@pytest.mark.exhaustive
def test_other_meshes_begin_anew(world: Processes, tmp_path: Path) -> None:
    [sums, *_] = world.run(saves, tmp_path, ONE)
    world.run(begins_anew, tmp_path, "dp=4", "", sums)
    world.run(begins_anew, tmp_path, "island=4", "steps = 2", sums)


def loads_weights() -> None:
    """Gradients of weights that are no longer there are dropped."""
    stage, optimizer = begin("island=2,dp=2", "ddp", ONE)
    train(stage, optimizer, range(3))
    stage.load_full(made(Net))
    train(stage, optimizer, range(1))
    for name, tensor in stage.full_state_dict().items():
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(tensor, made(Net).state_dict()[name], rtol=0, atol=0)


def test_weights_that_are_loaded_begin_anew(world: Processes) -> None:
    world.run(loads_weights)


# habits of scripts --------------------------------------------------------------------------------
def means(step: int) -> dict[str, Tensor]:
    """The gradients of both islands' batches, of weights that never change."""
    found: dict[str, Tensor] = {}
    for island in range(2):
        model = made(Deep)
        loss(model, *batch(step, island)).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            found[name] = found.get(name, torch.zeros(())) + param.grad / 2
    return found


def accumulates() -> None:
    """Calls count, and a scale is that of the call which gives the gradients."""
    stage, _ = begin("island=2,dp=2", "ddp", ONE, Deep)
    island = stage.coords["island"]
    for step in range(4):
        stage.step(*batch(step, island), scale=0.5)
    wanted = [means(step) for step in range(3)]
    for name, param in stage.named_parameters():
        grad = sum(each[name] for each in wanted) * 0.5
        torch.testing.assert_close(param.grad.full_tensor(), grad, rtol=1e-11, atol=1e-13)  # type: ignore[union-attr]
    norm = torch.stack([p.grad.full_tensor().norm() for p in stage.parameters()]).norm()  # type: ignore[union-attr]
    torch.testing.assert_close(stage.clip_grad_norm_(0.1), norm, rtol=1e-11, atol=0)


def test_gradients_add_up_over_calls(world: Processes) -> None:
    world.run(accumulates)


def compares() -> None:
    """What is half sent is no difference between ranks."""
    stage, _ = begin("island=2,dp=2", "ddp", ONE, Deep)
    stage.step(*batch(0, stage.coords["island"]))
    assert stage.rank_step.under_way
    stage.check_alike()
    assert not stage.rank_step.under_way


def test_a_comparison_waits_for_what_is_under_way(world: Processes) -> None:
    world.run(compares)


def scales() -> None:
    """A GradScaler has nothing to look at in the first step, and steps behind it."""
    stage, optimizer = begin("island=2,dp=2", "fsdp", ONE, Deep)
    other, plain = begin("island=2,dp=2", "fsdp", ONE, Deep)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        rows = batch(step, stage.coords["island"])
        scaler.scale(stage(*rows)).backward()
        scaler.unscale_(optimizer)
        stage.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        other(*rows).backward()
        other.clip_grad_norm_(1.0)
        plain.step()
        plain.zero_grad()
    assert scaler.get_scale() == 1024
    theirs = held(other)
    for name, tensor in held(stage).items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-12, atol=1e-14)


@pytest.mark.exhaustive
def test_a_grad_scaler_waits_for_gradients(world: Processes) -> None:
    world.run(scales)


def shared() -> str:
    program = compile(made(Deep), "island=2,dp=2", batch(0, 0), loss=loss, plan=plan(ONE, "ddp"))
    other = program.also(batch(0, 0), loss=lambda model, x, y: model(x).square().mean())
    stage = program.module()
    with pytest.raises(RunError) as error:
        stage.share(other)
    return str(error.value)


@pytest.mark.exhaustive
def test_a_second_loss_is_refused(world: Processes) -> None:
    assert "some steps late" in world.run(shared)[0]


def other_lengths() -> None:
    """Steps of other numbers of rows go on with what is under way."""
    stage, optimizer = begin("island=2,dp=2", "ddp", "steps = 2", Deep)
    model = made(Deep)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sent: list[list[Tensor]] = []
    for step, rows in enumerate((8, 4, 8, 4, 4, 8)):
        both = [tuple(x[:rows] for x in batch(step, island)) for island in range(2)]
        stage.step(*both[stage.coords["island"]])
        optimizer.step()
        optimizer.zero_grad()
        (sum(loss(model, *each) for each in both) / 2).backward()  # type: ignore[union-attr]
        sent.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        late = sent[-3] if len(sent) > 2 else [None] * len(sent[-1])
        for param, grad in zip(model.parameters(), late, strict=True):
            param.grad = grad
        plain.step()
        plain.zero_grad()
    for name, tensor in stage.full_state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=0, atol=1e-11)


@pytest.mark.exhaustive
def test_programs_of_other_lengths_share_what_is_under_way(world: Processes) -> None:
    world.run(other_lengths)
