"""Weights that ranks gather with fewer bytes: all ranks compute with what was sent, and store what
is exact.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partc.api import compile
from partc.audit.audit import audit
from partc.errors import CheckError, PlanError
from partc.plan import Plan
from partc.plan.coded import CODES, Coded
from partc.program import Program
from partc.program.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partc.verification.coded_weights import decoded
from partc.verification.processes import Processes
from partc.verification.reference import Reference
from partc.verification.report import Report
from partc.verification.threads import ThreadMesh, run_ranks
from partc.verification.verification import verify
from tests.overlap.test_compress_sums import Counting
from tests.patience import patience
from tests.texts import everywhere
from tests.zoo import MODELS, Case

pytestmark = pytest.mark.gloo
BLOCK, RATE = 8, 0.05
ALLOWED = 'allow = ["compress"]\n'
NOTE = "gradients are taken at these, and applied to the exact ones (straight-through)"


class Net(nn.Module):
    """Weights that are cut on dim 0 and on dim 1, one that no rank has a piece of, and norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12)) for _ in range(3)
        )
        self.head = nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.head(x)
        return out


def loss(model: nn.Module, x: Tensor) -> Tensor:
    mean: Tensor = model(x).square().mean()
    return mean


def batch(step: int = 0) -> Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(step))


def table(wire: str) -> str:
    block = f"block = {BLOCK}\n" if CODES[wire].has_blocks else ""
    return f'[compress_weights]\nwire = "{wire}"\n{block}'


@cache
def case_of(name: str) -> Case:
    return MODELS[name]() if name else Case(Net(), (batch(),), loss)


@cache
def compiled(
    wire: str = "int8", mesh: str = "dp=4", preset: str = "fsdp", more: str = "", name: str = ""
) -> Program:
    case = case_of(name)
    plan = f'{more}preset = "{preset}"\n{ALLOWED + table(wire) if wire else ""}'
    if name:
        return compile(case.step, mesh, plan=plan)  # traced once
    return compile(case.model, mesh, case.inputs, loss=case.loss, plan=plan)  # by one of the ranks


def verified(program: Program, name: str = "", **named: Any) -> Report:
    case = case_of(name)
    report = verify(program, case.model, case.inputs, loss=case.loss, lossy=True, **named).check()
    assert "gathered weight" in report.kinds()
    assert all(each.error <= each.bound for each in report.sent)
    assert any(each.error > 0 for each in report.sent if each.name.endswith("as it is gathered"))
    return report


# the definition -----------------------------------------------------------------------------------
def by_hand(numbers: list[float], wire: str) -> list[float]:
    """One block as it arrives, number by number."""
    if wire == "bf16":
        return [float(torch.tensor(x, dtype=torch.bfloat16)) for x in numbers]
    most = 448 if wire == "fp8" else 127
    scale = max(map(abs, numbers)) / most or 1.0
    if wire == "fp8":
        return [scale * float(torch.tensor(x / scale).to(torch.float8_e4m3fn)) for x in numbers]
    return [scale * ((x / scale + 0.5) // 1) for x in numbers]


def hand_decoded(shard: Tensor, wire: str) -> Tensor:
    """A shard as it arrives: 8 of its numbers share a scale, and the last ones what is left."""
    rows = [by_hand(block.tolist(), wire) for block in shard.flatten().split(BLOCK)]
    return torch.tensor([x for row in rows for x in row], dtype=shard.dtype).view(shard.shape)


@pytest.mark.parametrize("wire", CODES)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 300.0])
def test_a_shard_by_hand(wire: str, scale: float) -> None:
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(2)).double() * scale
    x[1] = 0
    found = decoded(x, Coded(wire, BLOCK))
    torch.testing.assert_close(found, hand_decoded(x, wire), rtol=1e-12, atol=0)
    assert not torch.equal(found, x)
    assert torch.equal(decoded(torch.zeros(9), Coded(wire, BLOCK)), torch.zeros(9))
    assert not decoded(torch.tensor([1.0, inf]), Coded(wire, BLOCK)).isfinite().all()


# programs -----------------------------------------------------------------------------------------
LAYOUTS = {
    "fsdp": ("int8", "dp=2", "fsdp", "", ""),
    "fsdp of four, fp8": ("fp8", "dp=4", "fsdp", "", ""),
    "fsdp of four, bf16": ("bf16", "dp=4", "fsdp", "", ""),
    "zero1, microbatches": ("int8", "dp=4", "zero1", "microbatches = 2\n", ""),
    "zero2": ("fp8", "dp=2", "zero2", "", ""),
    "fsdp, microbatches": ("int8", "dp=2", "fsdp", "microbatches = 2\n", ""),
    "hsdp": ("int8", "dp_replicate=2,dp_shard=2", "hsdp", "", ""),
    "tp": ("int8", "dp=2,tp=2", "fsdp+megatron", "", "llama"),
    "tp, sequences": ("bf16", "dp=2,tp=2", "fsdp+megatron-sp", "", "llama"),
    "pp": ("int8", "pp=2,dp=2", "fsdp", "microbatches = 2\n", "llama"),
    "recompute": ("int8", "dp=2", "fsdp", 'recompute = "block"\n', "llama"),
}


@pytest.mark.rows(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_that_of_the_weights_that_were_sent(layout: str) -> None:
    """Loss, gradients and what an optimizer makes of the exact weights."""
    wire, mesh, preset, more, name = LAYOUTS[layout]
    program = compiled(wire, mesh, preset, more, name)
    verified(program, name)
    assert any(CODES[wire].weights in text for text in program.sources.values())
    assert NOTE in program.plan
    assert "makes of weights that are gathered" in str(audit(program))


@pytest.mark.exhaustive
def test_processes_find_the_same() -> None:
    verified(compiled(), processes=True, timeout=patience())


@pytest.mark.exhaustive
def test_gradients_are_sent_with_fewer_bytes_too() -> None:
    both = f'{table("int8")}[compress]\nwire = "int8"\nblock = 8\nleast_mb = 0\n'
    plan = f'preset = "fsdp"\n{ALLOWED}{both}error_feedback = false\n'
    program = compile(Net(), "dp=2", (batch(),), loss=loss, plan=plan)
    report = verify(program, Net(), (batch(),), loss=loss, lossy=True).check()
    assert {"rounded gradient", "gathered weight"} <= report.kinds().keys()


def test_a_forward_computes_with_what_was_sent() -> None:
    plan = f'preset = "fsdp"\n{ALLOWED}{table("int8")}'
    model = Net().eval()
    with torch.no_grad():
        program = compile(model, "dp=2", (batch(),), plan=plan)
    report = verify(program, model, (batch(),)).check()
    assert "gathered weight" in report.kinds()


@pytest.mark.exhaustive
def test_a_reference_of_exact_weights() -> None:
    """One that is given knows of no code: the rest of the text is compared with it."""
    from partc.verification.reference import eager

    exact: Reference = eager(Net(), (batch(),), loss)
    verify(compiled(), Net(), (batch(),), loss=loss, reference=exact).check()


# bytes --------------------------------------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.parametrize("wire", CODES)
@pytest.mark.parametrize("preset", ["fsdp", "zero1"])
def test_bytes_are_those_that_are_sent(wire: str, preset: str) -> None:
    program, case = compiled(wire, "dp=4", preset), case_of("")
    traffic = {each["kind"]: each["sent_bytes"] for each in program.cost.as_json()["traffic"]}

    def step(rank: int, dist: Any) -> Counter[str]:
        role = program.role(rank)
        counting = Counting(dist, 4)
        role.module.dist = counting  # type: ignore[attr-defined]
        made: Any = role.build(ThreadMesh(program.mesh, rank))
        with torch.no_grad():
            made.step(*role.pieces(case.inputs, program.mesh.coords(rank)))
        return counting.sent

    sent = run_ranks(4, step)[0]
    assert sent["narrow"] >= traffic[f"all_gather in {wire}"] > 0
    exact = compiled("", "dp=4", preset).cost.as_json()["traffic"]
    [whole] = [each["sent_bytes"] for each in exact if each["kind"] == "all_gather"]
    assert traffic[f"all_gather in {wire}"] < (0.51 if wire == "bf16" else 0.8) * whole


def test_what_weights_take() -> None:
    """Of 21 and 8 numbers in blocks of 8: 4 scales."""
    assert CODES["int8"].num_bytes([21, 8], 8) == 29 + 4 * 4
    assert CODES["fp8"].num_bytes([21, 8], 8) == 29 + 4 * 4
    assert CODES["bf16"].num_bytes([21, 8], 8) == 58


# plans --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("plan", "mesh", "why"),
    [
        (f'preset = "fsdp"\n{table("int8")}', "dp=2", "nothing allows it"),
        (f'preset = "fsdp"\n{ALLOWED}[compress_weights]\n', "dp=2", "wire is one of"),
        (f'{ALLOWED}[compress_weights]\nwire = "int7"\n', "dp=2", "wire is one of"),
        (f'{ALLOWED}[compress_weights]\nwire = "bf16"\nblock = 8\n', "dp=2", "reads no block"),
        (f'preset = "fsdp"\n{ALLOWED}{table("int8")}', "island=2,dp=2", "has islands"),
    ],
)
def test_what_is_refused(plan: str, mesh: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        compile(Net(), mesh, (batch(),), loss=loss, plan=plan)


@pytest.mark.exhaustive
def test_what_tp_gathers_first_is_refused() -> None:
    """Where tp stands before dp, a weight that both cut along one dim is gathered over tp first."""
    with pytest.raises(PlanError, match="write dp before tp"):
        compiled("int8", "tp=2,dp=2", "fsdp+megatron", "", "llama")


@pytest.mark.exhaustive
def test_columns_of_an_embedding_are_used_as_they_are_stored() -> None:
    plan = Plan.parse(compiled("int8", "dp=2", "fsdp", "", "llama").plan)
    assert plan.compress_weights is not None
    assert plan.compress_weights.exact == ("model.embed_tokens.weight",)


@pytest.mark.exhaustive
def test_a_plan_is_read_as_it_is_written() -> None:
    program = compiled()
    plan = Plan.parse(program.plan)
    assert plan.compress_weights == Coded("int8", BLOCK)
    case = case_of("")
    again = compile(case.step, "dp=4", plan=plan)
    assert again.sources == program.sources
    assert compiled("", "dp=4").sources != program.sources


# training on processes ----------------------------------------------------------------------------
def stage_of(program: Program) -> tuple[Any, torch.optim.Optimizer]:
    stage = program.module(partial="replicate")
    stage.load_full(Net())
    return stage, torch.optim.SGD(stage.parameters(), RATE)


def trained(began: tuple[Any, torch.optim.Optimizer], steps: range) -> list[float]:
    stage, optimizer = began
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(stage.step(batch(step)).item())
        optimizer.step()
    return losses


def straight_through(program: Program, wire: str, steps: int) -> tuple[nn.Module, list[float]]:
    """Steps in float64: gradients at rounded weights, applied to the exact ones."""
    exact, losses = Net().double(), []
    cuts = {shard.name: shard.cuts for shard in program.role(0).params}
    for step in range(steps):
        sent = Net().double()
        for (name, weight), x in zip(exact.named_parameters(), sent.parameters(), strict=True):
            x.data = weight.detach().clone()
            for axis, dim, _ in cuts[name]:
                for piece in x.data.chunk(program.mesh.size(axis), dim):
                    piece.copy_(hand_decoded(piece, wire))
        found = loss(sent, batch(step).double())
        found.backward()
        losses.append(found.item())
        with torch.no_grad():
            for weight, x in zip(exact.parameters(), sent.parameters(), strict=True):
                assert x.grad is not None
                weight.sub_(RATE * x.grad)
    return exact, losses


def trains(wire: str, num: int) -> None:
    program = compiled(wire, f"dp={num}")
    began = stage_of(program)
    losses = trained(began, range(4))
    exact, wanted = straight_through(program, wire, 4)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-4, atol=0)
    for (name, param), weight in zip(began[0].named_parameters(), exact.parameters(), strict=True):
        found = param.detach().full_tensor().double()
        torch.testing.assert_close(found, weight.detach(), rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("wire", CODES)
@pytest.mark.parametrize("num", [2, 4])
def test_ranks_train_with_it(world: Processes, wire: str, num: int) -> None:
    world.run(trains, wire, num, num=num)


def resumes(folder: Path) -> None:
    """Bit for bit from the middle: exact weights are saved, and nothing else."""
    whole, first = stage_of(compiled()), stage_of(compiled())
    losses = trained(whole, range(5))
    trained(first, range(3))
    save_checkpoint(folder, *first, step=3)
    again = stage_of(compiled())
    load_checkpoint(folder, *again)
    assert trained(again, range(3, 5)) == losses[3:]
    assert sorted(again[0].state_dict()) == sorted(Net().state_dict())


@pytest.mark.exhaustive
def test_a_training_goes_on_from_a_checkpoint(world: Processes, tmp_path: Path) -> None:
    world.run(resumes, tmp_path / "saved")


def scales() -> None:
    """A factor of the loss is taken back, and an infinite batch stops all ranks; the norm is that
    of the gradients.
    """
    stage, optimizer = stage_of(compiled())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    before = {name: piece.clone() for name, (_, piece) in stage.pieces().items()}
    bad = batch()
    bad[-1] = inf
    scaler.scale(stage(bad)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32.0
    assert all(torch.equal(x, before[name]) for name, (_, x) in stage.pieces().items())
    optimizer.zero_grad()
    scaler.scale(stage(batch())).backward()
    scaler.unscale_(optimizer)
    grads = {n: p.grad.full_tensor().clone() for n, p in stage.named_parameters()}
    optimizer.zero_grad()
    stage.step(batch())
    for name, param in stage.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), grads[name], rtol=1e-5, atol=1e-8)
    norm = torch.cat([x.flatten() for x in grads.values()]).norm()
    torch.testing.assert_close(float(stage.clip_grad_norm_(1e-3)), float(norm), rtol=1e-5, atol=0)


@pytest.mark.exhaustive
def test_a_scaler_and_clipping(world: Processes) -> None:
    world.run(scales)


# mistakes -----------------------------------------------------------------------------------------
MISTAKES = {  # in the text of a program -> what is wrong then
    "rounded down": ("(x + 0.5).floor()", "x.floor()"),
    "another block": (f", 4, {BLOCK}, ", f", 4, {2 * BLOCK}, "),
    "a scale too large": (
        "* scales.unsqueeze(2)", "* (2 * scales).unsqueeze(2)"
    ),
    "scales of other blocks": ("arrived.clone()", "arrived.roll(1, 1).clone()"),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_of_the_class_are_found(mistake: str) -> None:
    """By verify, and by the check of the text."""
    wrong(*MISTAKES[mistake])


def wrong(old: str, new: str) -> None:
    edited = everywhere(compiled(), old, new)
    with pytest.raises((CheckError, RuntimeError)):
        verified(edited)
    with pytest.raises(CheckError):
        audit(replace(edited, fixed=compiled().fixed))


@pytest.mark.exhaustive
def test_the_owner_has_what_was_sent() -> None:
    """Rank 0 keeps its own shard as it was."""
    keeps = "        self.own = shards\n        self.done = dist"
    edited = everywhere(
        compiled(),
        "        self.done = dist.all_gather_single(self.arr",
        f"{keeps}.all_gather_single(self.arr",
    )
    kept = (
        "        if dist.get_rank() == 0:\n            for i, x in enumerate(self.own):\n"
        "                self.pieces[i][0] = x\n        return True\n\n    def blocks"
    )
    edited = everywhere(edited, "        return True\n\n    def blocks", kept)
    with pytest.raises((CheckError, RuntimeError)):
        verified(edited)
    with pytest.raises(CheckError):
        audit(replace(edited, fixed=compiled().fixed))


@pytest.mark.exhaustive
def test_forward_and_backward_see_one_weight() -> None:
    """A backward that gathers weights as they are is another step."""
    program = compiled()
    exact = compiled("")
    [name] = [n for n in program.sources if n.startswith("stage")]
    text, other = program.sources[name], exact.sources[name]
    old = text.split("def regather(self)")[1].split("def forward")[0]
    new = other.split("def regather(self)")[1].split("def forward")[0]
    assert old != new
    helper = exact.sources["helpers.py"].split("def gather_weights")[1].split("\ndef ")[0]
    helper = helper.split("\nclass ")[0]
    sources = {
        name: text.replace(old, new).replace("gathered_from,", "gathered_from, gather_weights,"),
        "helpers.py": f"{program.sources['helpers.py']}\n\ndef gather_weights{helper}",
    }
    edited = replace(program, sources={**program.sources, **sources})
    with pytest.raises((CheckError, RuntimeError)):
        verified(edited)
    with pytest.raises(CheckError):
        audit(replace(edited, fixed=program.fixed))


def test_what_is_stored_stays_exact() -> None:
    """A step that writes to what a rank stores is wrong."""
    old = "        reduced = Reduced()\n"
    new = f"{old}        self.blocks[0].get_parameter('_0_weight').mul_(1.0001)\n"
    program = compiled()
    stage = next(n for n in program.sources if n.startswith("stage"))
    text = program.sources[stage].replace(old, new, 1)
    edited = replace(program, sources={**program.sources, stage: text})
    with pytest.raises((CheckError, RuntimeError)):
        verified(edited)
