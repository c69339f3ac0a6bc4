"""What is said of unequal numbers of microbatches that a plan cannot have, and of edits of them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.api import compile
from partc.audit.audit import audit
from partc.errors import CheckError, PartcError, PlanError
from partc.machines.topology import Topology
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.program import Program
from partc.verification.verification import verify
from tests.mistakes.test_island_mistakes import Net, X, island, loss, without_one
from tests.texts import everywhere, with_role


class Plain(Net):
    """Without a norm, whose statistics would be each island's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Linear(8, 8)  # type: ignore[assignment]


def model() -> nn.Module:
    torch.manual_seed(0)
    return Plain()


@cache
def step() -> partc.Traced:
    return partc.Traced(model(), (X,), loss)


@cache  # the texts of programs are edited in copies
def compiled(mesh: str, plan: str) -> Program:
    return compile(step(), mesh, plan=plan)


PLAN = 'preset = "ddp"\n[uneven]\nmicrobatches = [3, 1]\n'


@pytest.mark.parametrize(
    ("mesh", "plan", "said"),
    [
        ("dp=2", PLAN, "has no islands"),
        ("dp=2,island=2", PLAN, "is not the first axis"),
        ("island=4", PLAN, "Write 4 numbers"),
        ("island=2", PLAN.replace("microbatches", "microbatch"), "Did you mean 'microbatches'"),
        ("island=2", PLAN.replace("3", "0"), "whole numbers from 1"),
        ("island=2", PLAN.replace("[3, 1]", "[]"), "whole numbers from 1"),
        ("island=2", PLAN.replace("[3, 1]", "2.5"), "or their sum"),
        ("island=2", PLAN + "dims = { z = 1 }", "dims names 'z'"),
        ("island=2", PLAN + "dims = { x = 7 }", "has no dim 7"),
        ("island=2", PLAN + "dims = { x = -1 }", "no input has rows"),
        ("island=2", 'allow = ["stale"]\n' + PLAN + "[stale]\nsteps = 1", "has [stale] too"),
    ],
)
def test_what_cannot_be_uneven_is_refused(mesh: str, plan: str, said: str) -> None:
    with pytest.raises(PlanError) as error:
        compiled(mesh, plan)
    assert said in str(error.value)
    assert "uneven" in str(error.value)


def test_fewer_microbatches_than_islands_are_refused() -> None:
    with pytest.raises(PartcError, match="1 for 2 islands"):
        compiled("island=2", PLAN.replace("[3, 1]", "1"))


def test_running_statistics_and_extras_are_refused() -> None:
    normed = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    x = torch.randn(4, 8)
    with pytest.raises(PlanError, match=r"a step changes 1\.running_mean"):
        compile(normed, "island=2", (x,), loss=lambda m, x: m(x).square().mean(), plan=PLAN)
    with pytest.raises(PlanError, match="returns values beside it"):
        compile(
            normed[:1], "island=2", (x,), loss=lambda m, x: ((y := m(x)).square().mean(), y),
            plan=PLAN,
        )  # fmt: skip


def test_a_plan_replays() -> None:
    program = compiled("island=2,dp=2", PLAN)
    again = compile(model(), "island=2,dp=2", (X,), loss=loss, plan=program.plan)
    assert again.sources == program.sources
    assert str(Plan.parse(program.plan)) == program.plan


def test_speeds_are_those_of_the_machines() -> None:
    """16 microbatches for two kinds of devices, by their peak."""
    fast = Topology.load("dgx-h100", 8)
    slow = Topology.load("dgx-a100", 8)
    both = fast.resized(16)
    kinds = ((fast.device, 8), (slow.device, 8))
    machines = type(both)(**{**vars(both), "groups": kinds})
    mesh = Mesh.parse("island=2,dp=8")
    batch = (torch.randn(16, 8),)
    net = nn.Linear(8, 8)
    mean = lambda m, x: m(x).square().mean()  # noqa: E731
    text = 'preset = "ddp"\n[uneven]\nmicrobatches = 16\n'
    program = compile(net, Mesh(mesh.axes, machines), batch, loss=mean, plan=text)
    how = Plan.parse(program.plan).uneven
    assert how is not None
    first, second = how.of_each
    assert first + second == 16
    assert first > second
    alike = compile(net, Mesh(mesh.axes, both), batch, loss=mean, plan=text)
    assert "microbatches = [8, 8]" in alike.plan
    replayed = compile(net, mesh, batch, loss=mean, plan=program.plan)
    assert replayed.sources == program.sources


class SequenceFirst(nn.Module):
    """Rows along dim 1, and a mask for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = self.head(self.rnn(x)[0] * mask)
        return result


@pytest.mark.exhaustive
def test_rows_are_where_the_batch_is() -> None:
    x, mask = torch.randn(5, 4, 6), torch.rand(5, 1, 1)
    made = SequenceFirst()
    program = partc.compile(
        made, "island=2", (x, mask), loss=lambda m, x, mask: m(x, mask).square().mean(), plan=PLAN
    )
    assert "x.chunk(self.microbatches, 1)" in program.source(0)
    assert "mask.chunk" not in program.source(0)
    verify(program, made, (x, mask), loss=lambda m, x, mask: m(x, mask).square().mean()).check()


# edits --------------------------------------------------------------------------------------------
def test_check_refuses_every_edit() -> None:
    program = compiled("island=2", PLAN)
    audit(program)
    before, lines = island(program)
    edits = [*without_one(lines)]
    assert len(edits) > 8
    for _, text in edits:
        with pytest.raises(PartcError):
            audit(with_role(program, f"{before}{text}\n"))
    with pytest.raises(CheckError, match="MICROBATCHES"):
        audit(everywhere(program, "MICROBATCHES = (3, 1)", "MICROBATCHES = (1, 3)"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("is not None)], 4, self.island)", "is not None)], 2, self.island)"),  # not of all
        (".chunk(self.microbatches)", ".chunk(self.microbatches)[:2]"),  # the third is skipped
        # the first one again and again
        (".chunk(self.microbatches)", ".chunk(self.microbatches)[:1] * self.microbatches"),
        ("average_over([result, *(", "average_over([result], 4, self.island); (*("),
        ("losses = []", "losses, before = [], []"),  # drops what was there
        ("torch.stack(losses).sum()", "torch.stack(losses).mean()"),
    ],
)  # fmt: skip
def test_verify_refuses_other_numbers(old: str, new: str) -> None:
    program = compiled("island=2", PLAN)
    changed = everywhere(program, old, new)
    with pytest.raises((CheckError, PartcError)):
        verify(changed, model(), (X,), loss=loss).check()


def test_verify_finds_the_step_right() -> None:
    report = verify(compiled("island=2", PLAN), model(), (X,), loss=loss).check()
    assert "gradient of all islands" in report.kinds()
