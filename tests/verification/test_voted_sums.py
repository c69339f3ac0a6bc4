"""Votes on signs: what arrives is what most ranks have, and what is not is found."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partc
from partc.api import compile
from partc.audit.audit import audit
from partc.codegen.helpers.voted_sums import MajoritySum
from partc.control.variants import with_variants
from partc.errors import CheckError, PlanError, UsageError
from partc.plan.compress import Compress
from partc.program import Program
from partc.program.checkpoints.residuals import of_sums
from partc.verification.defined_sums import Site
from partc.verification.processes import Processes
from partc.verification.verification import verify
from tests.patience import patience
from tests.texts import everywhere

pytestmark = pytest.mark.gloo
TABLE = '[compress]\nwire = "majority-sign"\nleast_mb = 0\n'
SIZES = [1, 7, 8, 31, 32, 33, 100]  # of which few are whole bytes of equal pieces


def majority(every: Tensor) -> list[float]:
    """Of each column of the ranks' numbers what most of them have, counted one by one."""
    if not all(isfinite(x) for row in every.tolist() for x in row):
        return [nan] * every.shape[1]
    votes = [sum(-1 if x < 0 else 1 for x in column) for column in every.T.tolist()]
    return [-1.0 if each < 0 else 1.0 for each in votes]


def numbers(num: int, size: int) -> Tensor:
    """-1, 0 and 1 for each rank, so that there are zeros and ties; some of them tiny."""
    drawn = torch.randint(-1, 2, (num, size), generator=torch.Generator().manual_seed(size))
    return drawn.double() * torch.tensor([1.0, 1e-300, 1e30]).double()[torch.arange(size) % 3]


# the definition, and the class --------------------------------------------------------------------
@pytest.mark.parametrize("num", [2, 3, 4])
def test_the_definition(num: int) -> None:
    site = Site(Compress("majority-sign"), [])
    for size in SIZES:
        every = numbers(num, size)
        assert site.add(every).tolist() == majority(every)
        site.keep()
        assert not site.kept
    for value in (inf, -inf, nan):
        every[-1, 0] = value
        assert site.add(every).isnan().all()
    assert site.add(torch.tensor([[0.0, -0.0, -3.0], [-0.0, -5.0, 4.0]])).tolist() == [1, 1, 1]


def summed(mine: Tensor) -> Tensor:
    made = MajoritySum(mine, dist.get_world_size(), 1, [], dist.group.WORLD)  # type: ignore[arg-type]
    made.pass_on()
    made.wait()
    return mine


def votes() -> None:
    rank, num = dist.get_rank(), dist.get_world_size()
    for size in SIZES:
        every = numbers(num, size)
        assert summed(every[rank].clone()).tolist() == majority(every)
        few = every.clamp(-1, 1).to(torch.bfloat16)
        assert summed(few[rank].clone()).tolist() == majority(few)
        for at, value in ((0, inf), (num - 1, nan), (1, -inf)):
            mine = every[rank].clone()
            mine[-1] = value if rank == at else mine[-1]
            assert summed(mine).isnan().all()


@pytest.mark.rows(2)
@pytest.mark.parametrize("num", [2, 3, 4])
def test_ranks_vote(world: Processes, num: int) -> None:
    world.run(votes, num=num)


# layouts ------------------------------------------------------------------------------------------
class Net(nn.Module):
    """Words, equal blocks with norms, and a head; a tied one is the embedding once more."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
            for _ in range(4)
        )
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def program_net(program: Program) -> Net:
    """The model of a program: stages have a head of their own."""
    return Net(tied=program.mesh.pipeline_ranks == 1)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    mean: Tensor = model(ids).square().mean()
    return mean


def batch(step: int = 0) -> Tensor:
    return torch.randint(12, (8, 6), generator=torch.Generator().manual_seed(step))


@cache
def compiled(mesh: str, preset: str, more: str = "", table: str = "") -> Program:
    plan = f'{more}preset = "{preset}"\nallow = ["compress"]\n{TABLE}{table}'
    return compile(Net(tied="pp" not in mesh), mesh, (batch(),), loss=loss, plan=plan)


def wanted(program: Program, voters: list[list[int]]) -> dict[str, list[float]]:
    """The outcome of a vote of ranks with such rows of the batch, by parameter."""
    every: dict[str, list[Tensor]] = {}
    for rows in voters:
        model = program_net(program)
        loss(model, batch()[rows]).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            every.setdefault(name, []).append(param.grad.flatten())
    return {name: majority(torch.stack(grads)) for name, grads in every.items()}


def directions(program: Program, voters: list[list[int]], exact: str) -> None:
    """Gradients are the outcome of a vote, and no sum of some; norms may have exact ones."""
    stage = program.module(partial="replicate")
    stage.load_full(program_net(program))
    stage.step(batch())
    outcome = wanted(program, voters)
    for name, param in stage.named_parameters():
        grad = param.grad.full_tensor().flatten().tolist()  # type: ignore[union-attr]
        is_exact = bool(exact) and name.rpartition(".")[0].endswith(exact)
        assert (grad == outcome[name]) != is_exact, name


TWO = "microbatches = 2\n"
HALVES, QUARTERS = torch.arange(8).view(2, 4).tolist(), torch.arange(8).view(4, 2).tolist()
ROWS: dict[tuple[str, str], list[list[int]]] = {  # of the batch, of each that votes
    ("dp=4", ""): QUARTERS,
    ("dp=2,tp=2", ""): HALVES,
    ("tp=2,dp=2", ""): HALVES,
    ("dp_replicate=2,dp_shard=2", ""): [[0, 1, 4, 5], [2, 3, 6, 7]],
    ("dp=4", TWO): [[0, 4], [1, 5], [2, 6], [3, 7]],
    ("pp=2,dp=2", TWO): [[0, 1, 4, 5], [2, 3, 6, 7]],
}
LAYOUTS: dict[str, tuple[str, str, str, str]] = {
    "ddp": ("dp=4", "ddp", "", ""),
    "tp": ("dp=2,tp=2", "ddp+megatron", "", ""),
    # where a sum over tp comes last, that over dp is exact: these are the norms' gradients
    "tp, sequences": ("dp=2,tp=2", "ddp+megatron-sp", "", ".0"),
    "tp first": ("tp=2,dp=2", "ddp+megatron-sp", "", ""),
    "hsdp": ("dp_replicate=2,dp_shard=2", "hsdp", "", ""),
    "zero1": ("dp_replicate=2,dp_shard=2", "zero1", "", ""),
    "zero2": ("dp_replicate=2,dp_shard=2", "zero2", "", ""),
    "microbatches": ("dp=4", "ddp", TWO, ""),
    "pp": ("pp=2,dp=2", "ddp", TWO, ""),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_directions_of_every_layout(world: Processes, layout: str) -> None:
    mesh, preset, more, exact = LAYOUTS[layout]
    world.run(directions, compiled(mesh, preset, more), ROWS[mesh, more], exact)


def test_a_weight_of_two_stages_is_refused() -> None:
    """Each stage would have a direction of its own, and their sum is none."""
    plan = f'{TWO}preset = "ddp"\nallow = ["compress"]\n{TABLE}'
    with pytest.raises(PlanError, match="several stages have a part of the gradient of words"):
        compile(Net(tied=True), "pp=2,dp=2", (batch(),), loss=loss, plan=plan)


# what reads gradients -----------------------------------------------------------------------------
def scaled() -> None:
    """A factor stays one; of an infinite gradient all ranks hear; a norm limits nothing."""
    stage = compiled("dp=4", "ddp").module(partial="replicate")
    stage.load_full(Net())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = torch.optim.SGD(stage.parameters(), 0.5)
    before = {n: p.detach().full_tensor().clone() for n, p in stage.named_parameters()}  # type: ignore
    scaler.scale(stage(batch())).backward()
    scaler.step(optimizer)
    scaler.update()
    outcome = wanted(compiled("dp=4", "ddp"), QUARTERS)
    for name, param in stage.named_parameters():
        moved = param.detach().full_tensor() - before[name]  # type: ignore
        expected = -0.5 * torch.tensor(outcome[name]).double().view(moved.shape)
        torch.testing.assert_close(moved, expected, rtol=0, atol=1e-12)
    for clip in (stage.clip_grad_norm_, limited(stage)):
        with pytest.raises(UsageError, match="arrive as directions"):
            clip(1.0)
    total = sum(param.numel() for param in stage.parameters())
    assert stage.clip_grad_norm_(inf).item() == pytest.approx(total**0.5)


def limited(stage: nn.Module) -> Any:
    return lambda most: torch.nn.utils.clip_grad_norm_(stage.parameters(), most)


def overflows() -> None:
    """One rank's rows have an infinite gradient."""
    stage = compiled("dp=4", "ddp").module(partial="replicate")
    stage.load_full(Net())
    made = spoiled(stage, dist.get_rank() == 2)
    stage.step(batch())
    assert made
    assert not any(p.grad.full_tensor().isfinite().any() for p in stage.parameters())  # type: ignore


def spoiled(stage: Any, here: bool) -> list[int]:
    """Let the numbers of one rank be infinite in all sums."""
    made: list[int] = []
    module = stage._role.module.__dict__
    plain = module["MajoritySum"]

    def with_inf(flat: Tensor, *given: Any) -> Any:
        made.append(1)
        flat.view(-1)[0] = inf if here else flat.view(-1)[0]
        return plain(flat, *given)

    module["MajoritySum"] = with_inf
    return made


@pytest.mark.exhaustive
def test_a_scaler_and_clipping(world: Processes) -> None:
    world.run(scaled)
    world.run(overflows)


def resumes(folder: Path) -> None:
    """The third step is the first with directions, behind a checkpoint too."""
    stage = compiled("dp=4", "ddp", table="start_step = 2\n").module(partial="replicate")
    stage.load_full(Net())
    for step in range(2):
        stage.zero_grad()
        stage.step(batch(step))
        assert not all_directions(stage)
    partc.save_checkpoint(folder, stage, step=2)
    again = compiled("dp=4", "ddp", table="start_step = 2\n").module(partial="replicate")
    partc.load_checkpoint(folder, again)
    again.step(batch(2))
    assert all_directions(again)


def all_directions(stage: nn.Module) -> bool:
    grads = [p.grad.full_tensor() for p in stage.parameters()]  # type: ignore[union-attr]
    return all(bool((grad.abs() == 1).all()) for grad in grads)


@pytest.mark.exhaustive
def test_exact_steps_come_first_and_are_counted(world: Processes, tmp_path: Path) -> None:
    world.run(resumes, tmp_path / "saved")
    program = compiled("dp=4", "ddp")
    assert not of_sums(program.plan, program.mesh)


@pytest.mark.exhaustive
def test_directions_and_numbers_are_no_variants_of_one_step() -> None:
    """Among themselves they are."""
    votes = f'preset = "ddp"\nallow = ["compress"]\n{TABLE}'
    exact = compile(Net(), "dp=4", (batch(),), loss=loss, plan="ddp")
    with pytest.raises(PlanError, match="in the program directions"):
        with_variants(compiled("dp=4", "ddp"), exact="ddp")
    with pytest.raises(PlanError, match="gradients are directions"):
        with_variants(exact, votes=votes)
    assert with_variants(compiled("dp=4", "ddp"), alone=f"bucket_mb = 0.0001\n{votes}").others


# mistakes -----------------------------------------------------------------------------------------
def dead() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 9))


def zeros() -> Tensor:
    """Rows of which two columns are zeros, so that gradients have zeros too."""
    torch.manual_seed(0)
    x = torch.randn(8, 12)
    x[:, 3:5] = 0
    return x


def of_dead(model: nn.Module, x: Tensor) -> Tensor:
    mean: Tensor = model(x).square().mean()
    return mean


@cache
def small() -> Program:
    plan = f'preset = "ddp"\nallow = ["compress"]\n{TABLE}'
    return compile(dead(), "dp=4", (zeros(),), loss=of_dead, plan=plan)


def verified(program: Program, **named: Any) -> set[str]:
    rows = verify(program, dead(), (zeros(),), loss=of_dead, **named).check().rows
    return {row.kind for row in rows}


MISTAKES = {  # in the text of a program -> what is wrong then
    "a tie is -1": ("2 * above >= self.num", "2 * above > self.num"),
    "zero is -1": ("flat.flatten() >= 0", "flat.flatten() > 0"),
    "a rank has no vote": ("self.decode(self.sums).sum(0,", "self.decode(self.sums)[1:].sum(0,"),
    "a rank has two votes": ("above = self", "above = self.decode(self.sums)[:1] + self"),
    "ranks do not say that a number is not finite": (
        "~flat.isfinite().all()", "~flat.isfinite().any()"
    ),
    "owners do not pass it on": (">= self.num, self.unfit())", ">= self.num, self.unfit() * 0)"),
    "nobody reads it": ("torch.where(self.unfit(), torch.nan, signs)", "signs"),
    "two in place of one": ("2.0 * self.decode", "4.0 * self.decode"),
    "gradients stay as they were": ("        self.write(torch.where", "        (torch.where"),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str) -> None:
    """By verify, and by the check of the text."""
    old, new = MISTAKES[mistake]
    edited = everywhere(small(), old, new)
    with pytest.raises((CheckError, RuntimeError)):
        verified(edited)
    with pytest.raises(CheckError):
        audit(replace(edited, fixed=small().fixed))


@pytest.mark.exhaustive
def test_mistakes_are_found_by_processes() -> None:
    named = {"processes": True, "timeout": patience()}
    assert "rounded gradient" in verified(small(), **named)
    edited = everywhere(small(), *MISTAKES["a tie is -1"])
    with pytest.raises((CheckError, RuntimeError)):
        verified(edited, **named)
