"""Sums of the numbers that are large enough: they are what is defined, and what is not is found."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from partc.api import compile
from partc.audit.audit import audit
from partc.codegen.helpers.picked_sums import ThresholdSum
from partc.errors import CheckError, PlanError, UsageError
from partc.plan import Plan
from partc.plan.compress import Compress
from partc.plan.wires import WIRES, bytes_of_counts, is_residual
from partc.program import Program
from partc.program.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partc.sent_counts import sent_counts
from partc.verification.defined_sums import Site
from partc.verification.processes import Processes
from partc.verification.report import Report
from partc.verification.verification import verify
from tests.patience import patience
from tests.texts import everywhere

pytestmark = pytest.mark.gloo
LEAST, RATE = 0.002, 0.5
TABLE = f'[compress]\nwire = "threshold"\nthreshold = {LEAST}\nleast_mb = 0\nshare = 0.1\n'


class Net(nn.Module):
    """Equal blocks between two layers of other sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.head(x)
        return out


def loss(model: nn.Module, x: Tensor) -> Tensor:
    mean: Tensor = model(x).square().mean()
    return mean


def batch(step: int = 0) -> Tensor:
    """Rows that differ by orders of magnitude, so that ranks send different numbers of them."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double()
    return x * torch.logspace(0, -2, 8).double()[:, None]


@cache
def compiled(mesh: str = "dp=4", preset: str = "ddp", more: str = "", table: str = "") -> Program:
    plan = f'{more}preset = "{preset}"\nallow = ["compress"]\n{TABLE}{table}'
    return compile(Net(), mesh, (batch(),), loss=loss, plan=plan)


def verified(program: Program, **named: Any) -> Report:
    report = verify(program, Net(), (batch(),), loss=loss, lossy=True, **named).check()
    assert report.sent
    assert all(each.error <= each.bound for each in report.sent)
    return report


# the definition, and the class --------------------------------------------------------------------
def large(numbers: list[float], least: float) -> list[float]:
    """The numbers that are sent, one by one; a tie is sent, and so is what is no number."""
    return [0.0 if abs(x) < least else x for x in numbers]


def every(num: int, size: int, seed: int = 0) -> Tensor:
    """Multiples of a quarter, among which there are ties with any threshold that is one."""
    drawn = torch.randint(-8, 9, (num, size), generator=torch.Generator().manual_seed(seed))
    return drawn.double() / 4


def test_the_definition_by_hand() -> None:
    site = Site(Compress("threshold", threshold=2.0), [])
    x = torch.tensor([[1.5, -2.0, 2.0, 0.0], [0.5, 0.0, -1.75, 5.0]])
    assert site.add(x).tolist() == [0.0, -2.0, 2.0, 5.0]
    site.keep()
    assert site.kept[0].tolist() == [[1.5, 0.0, 0.0, 0.0], [0.5, 0.0, -1.75, 0.0]]
    assert site.add(x).tolist() == [3.0, -2.0, 2.0 - 3.5, 5.0]
    assert site.add(torch.tensor([[nan, 0.0, inf, 0.0], [0.0] * 4])).isfinite().tolist() == [
        False, True, False, True
    ]  # fmt: skip


@pytest.mark.parametrize("num", [1, 2, 4])
def test_the_definition_number_by_number(num: int) -> None:
    for size in (1, 7, 64):
        found = Site(Compress("threshold", threshold=0.75), []).add(every(num, size))
        parts = [large(row, 0.75) for row in every(num, size).tolist()]
        assert found.tolist() == [sum(column) for column in zip(*parts, strict=True)]


def sums(least: float) -> None:
    """Of ranks with very different counts; of one that sends nothing; of ranks that all do."""
    rank, num, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    for size in (1, 9, 100):
        numbers = every(num, size) * torch.arange(num).double()[:, None]
        mine, kept = numbers[rank].float(), torch.full((1, size), 0.25)
        made = ThresholdSum(mine, num, 1, [kept], group, least)  # type: ignore[arg-type]
        made.pass_on()
        made.wait()
        made.keep(torch.tensor(True))
        sent = [large(row, least) for row in (numbers + 0.25).tolist()]
        assert mine.tolist() == [sum(column) for column in zip(*sent, strict=True)]
        left = numbers[rank] + 0.25 - torch.tensor(sent[rank]).double()
        assert kept[0].tolist() == left.tolist()
        assert ThresholdSum.log[-1] == [sum(x != 0 for x in row) for row in sent]


@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize("least", [0.75, 1000.0, 0.1])
def test_ranks_sum(world: Processes, num: int, least: float) -> None:
    world.run(sums, least, num=num)


# programs -----------------------------------------------------------------------------------------
LAYOUTS = {
    "ddp": ("dp=2", "ddp", "", ""),
    "ddp of four": ("dp=4", "ddp", "", "start_step = 2\n"),
    "no feedback": ("dp=4", "ddp", "", "error_feedback = false\n"),
    "microbatches": ("dp=2", "ddp", "microbatches = 2\n", ""),
    "tp": ("dp=2,tp=2", "ddp+megatron", "", ""),
    "pp": ("pp=2,dp=2", "ddp", "microbatches = 2\n", ""),
    "machines": ("dp_replicate=2,dp_shard=2", "hsdp", "", ""),
}


@pytest.mark.rows(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_programs_sum_as_defined(layout: str) -> None:
    program = compiled(*LAYOUTS[layout])
    assert "rounded gradient" in verified(program).kinds()
    assert any("ThresholdSum(" in text for text in program.sources.values())
    audit(program)


@pytest.mark.exhaustive
def test_processes_find_the_same() -> None:
    verified(compiled(), processes=True, timeout=patience())


def test_shards_of_sums_are_refused() -> None:
    with pytest.raises(PlanError, match="threshold is for sums that all ranks have whole"):
        compiled("dp=2", "fsdp")


@pytest.mark.parametrize("given", ["0", "-1.0", '"0.1"', "true"])
def test_what_is_no_threshold(given: str) -> None:
    table = TABLE.replace(f"threshold = {LEAST}", f"threshold = {given}")
    with pytest.raises(PlanError, match=r"threshold = .* means nothing"):
        Plan.parse(f'allow = ["compress"]\n{table}')
    with pytest.raises(PlanError, match="top-k reads no threshold"):
        Plan.parse(f'allow = ["compress"]\n{TABLE}'.replace('"threshold"', '"top-k"'))


def test_a_plan_is_read_as_it_is_written() -> None:
    plan = Plan.parse(compiled().plan)
    assert plan.compress is not None
    assert (plan.compress.threshold, plan.compress.share) == (LEAST, 0.1)


def test_what_a_sum_takes() -> None:
    """Of 3 expected numbers each; of those that were counted."""
    sent = WIRES["threshold"].sent([(18, 5), (10,)], 4, 3)
    assert sent == (("all_gather", 4), ("all_gather", 24))
    assert bytes_of_counts([3, 0, 5, 1]) == 3 * (8 * 5 + 4)


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


@cache
def alone(num: int) -> Program:
    """All gradients leave in sums of their own, so that a test knows what is in each."""
    plan = f'bucket_mb = 0.00001\npreset = "ddp"\nallow = ["compress"]\n{TABLE}'
    return compile(Net(), f"dp={num}", (batch(),), loss=loss, plan=plan)


def by_hand(num: int, steps: int) -> tuple[dict[str, Tensor], list[list[int]]]:
    """The weights behind steps of SGD, and how many numbers each rank sends of each gradient."""
    model = Net()
    counts: list[list[int]] = []
    left: dict[tuple[int, str], Tensor] = {}
    for step in range(steps):
        grads: dict[str, Tensor] = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        sent: dict[str, list[int]] = {name: [] for name in grads}
        for rank, rows in enumerate(batch(step).chunk(num)):
            model.zero_grad()
            (loss(model, rows) / num).backward()
            for name, param in model.named_parameters():
                assert param.grad is not None
                wanted = param.grad + left.get((rank, name), 0)
                picked = wanted.abs() >= LEAST
                grads[name] += torch.where(picked, wanted, 0)
                left[rank, name] = torch.where(picked, 0, wanted)
                sent[name].append(int(picked.sum()))
        counts += sent.values()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.sub_(RATE * grads[name])
    return dict(model.named_parameters()), counts


def trains(steps: int) -> None:
    """Weights are those of the definition in float64; counts are those of the definition."""
    began = stage_of(alone(dist.get_world_size()))
    trained(began, range(steps))
    wanted, counts = by_hand(dist.get_world_size(), steps)
    for name, param in began[0].named_parameters():
        torch.testing.assert_close(param.detach().full_tensor(), wanted[name], rtol=1e-5, atol=1e-7)
    logged = sent_counts(began[0])
    assert sorted(logged) == sorted(counts)
    assert len({max(each) for each in counts}) > 2
    assert sent_counts(began[0]) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("num", [2, 4])
def test_ranks_train_with_it(world: Processes, num: int) -> None:
    world.run(trains, 4, num=num)


def resumes(folder: Path) -> None:
    """Bit for bit, from the middle."""
    whole, first = stage_of(compiled()), stage_of(compiled())
    losses = trained(whole, range(5))
    trained(first, range(3))
    save_checkpoint(folder, *first, step=3)
    again = stage_of(compiled())
    load_checkpoint(folder, *again)
    assert trained(again, range(3, 5)) == losses[3:]
    theirs = {name: piece for name, (_, piece) in whole[0].pieces().items()}
    for name, (_, piece) in again[0].pieces().items():
        assert torch.equal(piece, theirs[name])
        assert not is_residual(name) or piece.any()


@pytest.mark.exhaustive
def test_a_training_goes_on_from_a_checkpoint(world: Processes, tmp_path: Path) -> None:
    world.run(resumes, tmp_path / "saved")


def scales() -> None:
    """A factor of the loss is taken back; an infinite number of one rank stops all ranks."""
    stage, optimizer = stage_of(compiled())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    trained((stage, optimizer), range(2))
    before = {name: piece.clone() for name, (_, piece) in stage.pieces().items()}
    optimizer.zero_grad()
    bad = batch(2)
    bad[-1] = inf
    scaler.scale(stage(bad)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32.0
    for name, (_, piece) in stage.pieces().items():
        assert torch.equal(piece, before[name]), name
    optimizer.zero_grad()
    stage.step(batch(3))
    grads = torch.cat([p.grad.full_tensor().flatten() for p in stage.parameters()])
    norm = stage.clip_grad_norm_(1e-3)
    torch.testing.assert_close(float(norm), float(grads.norm()), rtol=1e-6, atol=0)


@pytest.mark.exhaustive
def test_a_scaler_and_clipping(world: Processes) -> None:
    world.run(scales)


def test_counts_of_what_is_no_stage() -> None:
    with pytest.raises(UsageError, match="the sums of this rank's stage are counted"):
        sent_counts(compiled())


# mistakes -----------------------------------------------------------------------------------------
MISTAKES = {  # in the text of a program -> what is wrong then
    "a tie or less": ("self.x.abs() < least", "self.x.abs() < 2 * least"),
    "the sign counts": ("~(self.x.abs() < least)", "~(self.x < least)"),
    "another threshold": (f"self.dp, {LEAST})", f"self.dp, {2 * LEAST})"),
    "all is kept": ("self.x.masked_fill(self.picked, 0.0)", "self.x.clone()"),
    "nothing is kept": ("self.x.masked_fill(self.picked, 0.0)", "self.x * 0"),
    "a rank is left out": ("zip(places, numbers, strict=True)", "[*zip(places, numbers)][1:]"),
    "the last one wins": ("total.index_add_(0, at, each)", "total.index_copy_(0, at, each)"),
    "one is not sent": ("self.most = max(counts)", "self.most = max(max(counts) - 1, 1)"),
    "places are shifted": ("places = at.clamp(min=0)", "places = (at - 1).clamp(min=0)"),
    "what fills up counts": ("torch.where(at < 0, 0.0, self.x[at])", "self.x[at]"),
    "what is no number stays": ("~(self.x.abs() < least)", "(self.x.abs() >= least)"),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str) -> None:
    """By verify, and by the check of the text."""
    old, new = MISTAKES[mistake]
    edited = everywhere(compiled(), old, new)
    with pytest.raises(CheckError):
        audit(replace(edited, fixed=compiled().fixed))
    with pytest.raises((CheckError, RuntimeError)):
        verified(edited)
