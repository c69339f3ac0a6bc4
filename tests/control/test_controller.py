"""A controller lets variants of a step run in turns: what is applied stays the sum of gradients."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.api import compile
from partc.control.controller import Controller
from partc.control.variants import variants_of, with_variants
from partc.errors import PlanError, RunError, UsageError
from partc.plan.wires import is_residual
from partc.program import Program, load
from partc.program.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partc.program.stage.runtime import Stage
from partc.verification.processes import Processes

pytestmark = pytest.mark.gloo

WIRES = ["int8", "int8-stochastic", "fp8", "bf16", "sign", "top-k", "random-k", "power-sgd"]
LAYOUTS = [("dp=4", "ddp"), ("dp=2,tp=2", "ddp+megatron"), ("dp_replicate=2,dp_shard=2", "hsdp")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = (model(x) - y).square().mean()
    return out


def batch(step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(8, 48, generator=numbers), torch.randn(8, 5, generator=numbers)


def plan(preset: str, wire: str) -> str:
    least = "least_mb = 0.0001\n"
    return f'preset = "{preset}"\nallow = ["compress"]\n[compress]\nwire = "{wire}"\n{least}'


@cache
def compiled(mesh: str, preset: str, wire: str) -> Program:
    program = compile(Net(), mesh, batch(0), loss=loss, plan=plan(preset, wire))
    return with_variants(program, exact=preset)


def gradients(steps: int) -> dict[str, Tensor]:
    """The sum of the gradients of so many steps, on one device."""
    model = Net()
    for step in range(steps):
        loss(model, *batch(step)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def sums(stage: Stage) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor() for name, p in stage.named_parameters()}  # type: ignore


def log(*switches: tuple[int, str, str]) -> list[dict[str, Any]]:
    return [{"step": step, "from": before, "to": to} for step, before, to in switches]


def sends_what_is_left(mesh: str, preset: str, wire: str) -> None:
    """Three compressed steps, one that sends all, two exact ones, and once more compressed ones."""
    stage = compiled(mesh, preset, wire).module()
    rows = log((3, "compiled", "exact"), (6, "exact", "compiled"), (8, "compiled", "exact"))
    controller = Controller(stage, start="compiled", replay=rows)
    ran = []
    for step in range(10):
        ran.append(controller.variant)
        stage.step(*batch(step))
        held = [b for n, b in stage._tensors.held.items() if is_residual(n) and "columns" not in n]
        if controller.variant == "exact":
            assert not any(buffer.any() for buffer in held)
            wanted = gradients(step + 1)
            for name, grad in sums(stage).items():
                torch.testing.assert_close(grad, wanted[name], atol=2e-6, rtol=2e-5)
        elif ran[-1] == "compiled":
            assert any(buffer.any() for buffer in held)
    assert ran == ["compiled"] * 4 + ["exact"] * 2 + ["compiled"] * 3 + ["exact"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("wire", WIRES)
def test_what_a_variant_has_kept_is_sent_at_its_end(world: Processes, wire: str) -> None:
    """Each wire under one layout; those whose sums are no tensors of numbers under all."""
    turn = WIRES.index(wire) % len(LAYOUTS)
    for mesh, preset in LAYOUTS if wire in ("random-k", "power-sgd") else [LAYOUTS[turn]]:
        world.run(sends_what_is_left, mesh, preset, wire)


# switches by measured numbers ---------------------------------------------------------------------
def follows(told: list[float], path: Path) -> tuple[list[str], list[Any], list[Any]]:
    """Which variants run while links are so many times as slow; the log, and that of a replay."""
    from tests.control.test_prices import prices, seen

    stage = compiled("dp=4", "ddp", "int8").module()
    controller = Controller(stage, stay=4, steps=2, gain=0.2, log=path)
    ran = []
    for step, slower in enumerate(told):
        ran.append(controller.variant)
        now = seen(prices(), controller.variant, {"dp": slower}, 1.0)
        took = prices().seconds(prices().pace(controller.variant, now))[controller.variant]
        controller._meter.seen = lambda now=now, took=took: replace(now, step_s=took)  # type: ignore
        stage.step(*batch(step))
    grads = [*sums(stage).values()]
    controller.close()
    again = compiled("dp=4", "ddp", "int8").module()
    other = Controller(again, replay=controller.log)
    for step in range(len(told)):
        assert other.variant == ran[step]
        again.step(*batch(step))
    assert all(map(torch.equal, grads, sums(again).values()))
    return ran, list(controller.log), list(other.log)


def test_it_follows_links_and_its_log_replays(world: Processes, tmp_path: Path) -> None:
    told = [1e-4] * 6 + [1e4] * 8 + [1e-4] * 8
    path = tmp_path / "log.jsonl"
    found = world.run(follows, told, path)
    ran, rows, replayed = found[0]
    assert all(each[0] == ran for each in found)
    assert ran == ["exact"] * 8 + ["compiled"] * 9 + ["exact"] * 5
    assert [(row["step"], row["to"]) for row in rows] == [(8, "compiled"), (16, "exact")]
    assert [row["step"] for row in replayed] == [8, 16]
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    assert "a step takes" in rows[0]["why"]


def goes_on(folder: Path) -> None:
    """A checkpoint between two switches, with the controller's state."""
    stage = compiled("dp=4", "ddp", "top-k").module()
    rows = log((2, "compiled", "exact"), (4, "exact", "compiled"))
    controller = Controller(stage, start="compiled", replay=rows)
    for step in range(2):
        stage.step(*batch(step))
    kept = {n: p.grad for n, p in stage.named_parameters()}
    save_checkpoint(folder, stage, step=2)
    state = controller.state_dict()
    assert state["leaving"]
    for step in range(2, 6):
        stage.step(*batch(step))
    again = compiled("dp=4", "ddp", "top-k").module()
    load_checkpoint(folder, again)
    other = Controller(again, start="exact", replay=rows)
    other.load_state_dict(state)
    for name, param in again.named_parameters():
        param.grad = kept[name]
    for step in range(2, 6):
        again.step(*batch(step))
    assert all(map(torch.equal, sums(stage).values(), sums(again).values()))


@pytest.mark.exhaustive
def test_a_training_resumes_between_two_switches(world: Processes, tmp_path: Path) -> None:
    world.run(goes_on, tmp_path)


def other_calls() -> None:
    """Evaluations, and batches of another shape, are none of the controller's."""
    program = compile(Net(), "dp=2", batch(0), loss=loss, plan=plan("ddp", "int8"))
    stage = with_variants(program, exact="ddp").module(partial="replicate")
    controller = Controller(stage, start="exact", steps=1, stay=0)
    model = Net()
    stage.load_full(model)
    x, y = batch(0)
    assert abs(stage.eval_step(x, y).item() - loss(model, x, y).item()) < 1e-6
    assert abs(stage.step(x[:4], y[:4]).item() - loss(model, x[:4], y[:4]).item()) < 1e-6
    assert controller._standing.stayed == 0
    stage.step(x, y)
    assert controller._standing.stayed == 1


@pytest.mark.exhaustive
def test_what_is_no_step_of_a_variant_is_not_measured(world: Processes) -> None:
    world.run(other_calls, num=2)


def scaled() -> None:
    """A GradScaler's factor, and a step that it skips: what is kept is sent by the next one."""
    stage = compiled("dp=4", "ddp", "int8").module()
    controller = Controller(stage, start="compiled", replay=log((2, "compiled", "exact")))
    for step in range(2):
        stage.step(*batch(step))
    stage.zero_grad()
    kept = {n: b.clone() for n, b in stage._tensors.held.items() if is_residual(n)}
    x, y = batch(2)
    stage.step(x * float("inf"), y)
    assert controller.variant == "compiled"
    held = stage._tensors.held
    assert all(torch.equal(held[name], buffer) for name, buffer in kept.items())
    stage.zero_grad()
    stage.step(*batch(2), scale=8.0)
    assert controller.variant == "exact"
    assert not any(held[name].any() for name in kept)


def test_what_is_kept_stays_in_a_step_that_is_skipped(world: Processes) -> None:
    world.run(scaled)


# saved --------------------------------------------------------------------------------------------
@pytest.mark.exhaustive
def test_variants_are_saved(tmp_path: Path) -> None:
    program = compiled("dp=4", "ddp", "int8")
    program.save(tmp_path / "build")
    again = variants_of(load(tmp_path / "build"))
    assert {n: p.sources for n, p in again.items()} == {
        n: p.sources for n, p in variants_of(program).items()
    }
    alone = compile(Net(), "dp=4", batch(0), loss=loss, plan="ddp")
    assert (
        again["exact"].sources["stage0.py"].split("import")[1:]
        == (alone.sources["stage0.py"].split("import")[1:])
    )


# refused ------------------------------------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("variant", "why"),
    [
        (plan("ddp", "int8"), "error_feedback = false"),
        ("fsdp", "stored otherwise"),
    ],
)
def test_variants_that_keep_other_tensors_are_refused(variant: str, why: str) -> None:
    program = compile(Net(), "dp=4", batch(0), loss=loss, plan="ddp")
    with pytest.raises(PlanError, match=why):
        with_variants(program, other=variant)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        ("pp=2", "ddp"),
        ("dp=2", 'preset = "ddp"\nmicrobatches = 2\n'),
        ("island=2", 'preset = "ddp"\nallow = ["local_steps"]\n[local_steps]\nperiod = 2\n'),
    ],
)
def test_programs_without_one_whole_step_are_refused(mesh: str, text: str) -> None:
    program = compile(Net(), mesh, batch(0), loss=loss, plan=text)
    with pytest.raises(PlanError, match=r"the program has (pipeline stages|microbatches|islands)"):
        with_variants(program, other=text)


def test_names_are_checked() -> None:
    program = compile(Net(), "dp=2", batch(0), loss=loss, plan="ddp")
    for name in ("compiled", "a b", "1", ""):
        with pytest.raises(UsageError, match="no variant may be called so"):
            with_variants(program, **{name: "ddp"})
    with pytest.raises(UsageError, match="is a variant of this name"):
        with_variants(with_variants(program, a="ddp"), a="ddp")
    with pytest.raises(RunError, match="the model"):
        with_variants(replace(program, recipe=None), a="ddp")


def refusals() -> None:
    stage = compiled("dp=4", "ddp", "int8").module()
    wrong: dict[str, tuple[Any, str]] = {
        "start": ("exat", "no such variant"), "order": (("exact",), "every variant once"),
        "gain": ("big", "no such number"), "steps": (0, "steps"), "stay": (-1, "stay"),
        "seconds": (-1.0, "no such number"), "replay": ([{"step": 1}], "no log"),
    }  # fmt: skip
    for name, (told, what) in wrong.items():
        with pytest.raises(UsageError, match=what):
            Controller(stage, **{name: told})
    with pytest.raises(UsageError, match="no state of a controller"):
        Controller(stage).load_state_dict({"variant": "exact"})
    rank = torch.distributed.get_rank()
    with pytest.raises(RunError, match="rank 2 was given other arguments"):
        Controller(stage, stay=20 + (rank == 2))
    controller = Controller(stage, start="exact", replay=log((1, "compiled", "exact")))
    with pytest.raises(RunError, match="leaves the variant compiled, and exact runs"):
        stage.step(*batch(0))
    controller.close()
    plain = compile(Net(), "dp=4", batch(0), loss=loss, plan="ddp").module()
    with pytest.raises(UsageError, match="has no variants"):
        Controller(plain)


@pytest.mark.exhaustive
def test_what_it_is_told_is_checked(world: Processes) -> None:
    world.run(refusals)


def test_it_is_public() -> None:
    assert partc.Controller is Controller
    assert partc.with_variants is with_variants
