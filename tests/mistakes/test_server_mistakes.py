"""What is said of servers that a plan cannot have, of what they cost, and of edits of them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from partc.api import compile
from partc.audit.audit import audit
from partc.errors import CheckError, PartcError, PlanError
from partc.plan import Plan
from partc.plan.mesh import Mesh
from partc.plan.servers import Servers, shared_out
from partc.program import Program
from partc.reports.explanation import explain_program
from partc.reports.server_cost import ring_seconds, server_loads
from partc.verification.verification import verify
from tests.mistakes.test_island_mistakes import X, island, loss, without_one
from tests.mistakes.test_uneven_mistakes import model, step
from tests.texts import everywhere, with_role

PLAN = 'preset = "ddp"\n[servers]\ncount = 1\n'


@cache  # the texts of programs are edited in copies
def compiled(mesh: str, plan: str) -> Program:
    return compile(step(), mesh, plan=plan)


@pytest.mark.parametrize(
    ("mesh", "plan", "said"),
    [
        ("dp=2", PLAN, "has no islands"),
        ("dp=2,island=2", PLAN, "is not the first axis"),
        ("island=4", PLAN.replace("1", "4"), "Write count = 3 or fewer"),
        ("island=4", PLAN.replace("1", "5") + "compute = true", "Write count = 4 or fewer"),
        ("island=4", PLAN.replace("count", "number"), "there is no entry 'number'"),
        ("island=4", PLAN.replace("count = 1", ""), "does not say how many islands own"),
        ("island=4", PLAN.replace("1", "0"), "count = 0 means nothing"),
        ("island=4", PLAN.replace("1", '"1"'), "Write count = 1, without quotation marks"),
        ("island=4", PLAN + 'compute = "yes"', "it is true or false"),
        ("island=64", PLAN.replace("1", "32"), "10 trained parameters"),
        ("island=8,pp=2", PLAN.replace("1", "7"), "Write count = 6 or fewer"),
        ("dp=2", PLAN + "max_steps_late = 1", "nothing allows it"),
        ("dp=2", PLAN + "max_steps_late = -1", "how many updates late a gradient may be"),
        ("dp=2", PLAN + "replicas = 2", "it is 0, or 1"),
        ("dp=2", PLAN + "replicas = 1", "Write a mesh such as"),
        ("dp=2", PLAN.replace("1", "2") + "max_steps_late = 0", "one process owns all parameters"),
        ("dp=2", PLAN + "compute = true\nmax_steps_late = 0", "one process owns all parameters"),
        ("pp=2", PLAN + "max_steps_late = 0", "has pipeline stages"),
        ("island=2", PLAN + "max_steps_late = 0", "it has max_steps_late, and the mesh"),
        ("island=2", PLAN + "replicas = 1", "it has replicas, and the mesh"),
        ("island=2", PLAN + "[uneven]\nmicrobatches = [3, 1]", "has [uneven] too"),
    ],
)
def test_what_cannot_be_servers_is_refused(mesh: str, plan: str, said: str) -> None:
    with pytest.raises(PlanError) as error:
        compiled(mesh, plan)
    assert said in str(error.value)
    assert "servers" in str(error.value)


def test_running_statistics_and_extras_are_refused() -> None:
    normed = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    x = torch.randn(4, 8)
    with pytest.raises(PlanError, match=r"a step changes 1\.running_mean"):
        compile(normed, "island=2", (x,), loss=lambda m, x: m(x).square().mean(), plan=PLAN)
    beside = PLAN + "max_steps_late = 0"
    with pytest.raises(PlanError, match=r"a step changes 1\.running_mean"):
        compile(normed, "dp=2", (x,), loss=lambda m, x: m(x).square().mean(), plan=beside)
    with pytest.raises(PlanError, match="returns values beside it"):
        compile(
            normed[:1], "island=2", (x,), loss=lambda m, x: ((y := m(x)).square().mean(), y),
            plan=PLAN,
        )  # fmt: skip


def test_a_plan_replays() -> None:
    program = compiled("island=2,dp=2", PLAN + "compute = true\n")
    again = compile(model(), "island=2,dp=2", (X,), loss=loss, plan=program.plan)
    assert again.sources == program.sources
    assert str(Plan.parse(program.plan)) == program.plan


# cost ---------------------------------------------------------------------------------------------
def test_one_server_carries_what_a_ring_shares() -> None:
    """Of p ranks: p gradients in and p copies out, each p * p / (p - 1) / 2 times a ring's half."""
    mesh, sizes = Mesh.parse("island=5"), [1 << 28] * 4
    [*workers, server] = server_loads(Servers(1), mesh, sizes)
    whole = sum(sizes)
    assert (server.grads_in, server.params_out) == (4 * whole, 4 * whole)
    assert all((w.grads_out, w.params_in, w.params_out) == (whole, whole, 0) for w in workers)
    times = server.seconds(mesh) / ring_seconds(Servers(1), mesh, sizes)
    assert times == pytest.approx(2 * 16 / 6, rel=0.01)


def test_as_many_servers_as_peers_send_as_much_as_a_ring() -> None:
    mesh, sizes, how = Mesh.parse("island=4"), [1 << 28] * 4, Servers(4, compute=True)
    loads = server_loads(how, mesh, sizes)
    assert {load.sent_bytes for load in loads} == {2 * 3 * sum(sizes) // 4}
    slowest = max(load.seconds(mesh) for load in loads)
    assert slowest / ring_seconds(how, mesh, sizes) == pytest.approx(1.0, rel=0.01)


def test_parameters_are_shared_out_by_size() -> None:
    assert shared_out([10, 2, 3, 4], 2) == [10, 9]
    assert shared_out([5], 2) == [5, 0]


def test_reports_say_what_a_ring_would_take() -> None:
    program = compiled("island=5", PLAN)
    for said in (str(program.cost), str(explain_program(program))):
        assert "times a ring's" in said
    assert "servers" in str(compiled("island=2", PLAN).cost)  # a ring of one needs no time


# edits --------------------------------------------------------------------------------------------
def test_check_refuses_every_edit() -> None:
    program = compiled("island=3", PLAN)
    audit(program)
    before, lines = island(program)
    edits = [*without_one(lines)]
    assert len(edits) > 8
    for _, text in edits:
        with pytest.raises(PartcError):
            audit(with_role(program, f"{before}{text}\n"))
    for old, new in (
        ("WORKERS, SERVERS = range(2), range(2, 3)", "WORKERS, SERVERS = range(1), range(2, 3)"),
        ("give_params(", "(lambda *each: None)("),
    ):
        with pytest.raises(CheckError):
            audit(everywhere(program, old, new))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/ len(workers)", ""),  # the sum, not the mean
        ("/ len(workers)", "/ (len(workers) + 1)"),  # of all islands, the server too
        ("sum(arrived[1:], arrived[0])", "arrived[0]"),  # one worker's alone
        ("in workers]\n", "in [workers[0]] * len(workers)]\n"),  # the first one's twice
        ("self.pull(WORKERS)", "self.pull(range(0))"),  # workers stay behind
        ("x.grad = None", "pass"),  # workers step too
        ("(whole / 2)", "(whole / 3)"),
        ("param.grad.add_(grad)", "param.grad"),  # what was there is lost
        ("for server, arrived in flats.items()", "for server, arrived in [*flats.items()][:-1]"),
    ],
)
def test_verify_refuses_other_numbers(old: str, new: str) -> None:
    program = compiled("island=3", PLAN)
    changed = everywhere(program, old, new)
    with pytest.raises((CheckError, PartcError)):
        verify(changed, model(), (X,), loss=loss).check()


def test_verify_finds_the_step_right() -> None:
    report = verify(compiled("island=3", PLAN), model(), (X,), loss=loss).check()
    assert "gradient on its server" in report.kinds()
