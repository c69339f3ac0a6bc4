"""What is said of late gradients that a plan does not allow, or explain, and of edits of theirs."""

from __future__ import annotations

import pytest

from partc.api import compile
from partc.audit.audit import audit
from partc.errors import CheckError, PartcError, PlanError
from partc.plan import Plan
from partc.verification.verification import verify
from tests.mistakes.test_island_mistakes import (
    X,
    compiled,
    island,
    loss,
    model,
    without_one,
)
from tests.texts import everywhere, with_role

PLAN = 'preset = "ddp"\nallow = ["stale"]\n[stale]\nsteps = 1\n'
MORE = PLAN.replace("steps = 1", "steps = 2\ncompensation = 0.5\nstart_step = 2")


@pytest.mark.parametrize(
    ("mesh", "plan", "said"),
    [
        ("island=2,dp=2", PLAN.replace("allow", "notes"), "nothing allows it"),
        ("dp=2", PLAN, "has no islands"),
        ("dp=2,island=2", PLAN, "is not the first axis"),
        ("island=2", PLAN.replace("steps", "step"), "Did you mean 'steps'"),
        ("island=2", PLAN.replace("steps = 1", ""), "does not say how many steps late"),
        ("island=2", PLAN.replace("1", "0"), "steps = 0 means nothing"),
        ("island=2", PLAN.replace("1", "1000"), "from 1 to 64"),
        ("island=2", PLAN + "compensation = -1", "a number from 0"),
        ("island=2", PLAN + "[local_steps]\nperiod = 4", "the plan has [local_steps] too"),
    ],
)
def test_late_gradients_are_said_and_allowed_or_refused(mesh: str, plan: str, said: str) -> None:
    with pytest.raises(PlanError) as error:
        compiled(mesh, plan)
    assert said in str(error.value)
    assert "stale" in str(error.value)


def test_what_is_allowed_and_not_said_is_told() -> None:
    with pytest.warns(UserWarning, match="applied in their own step"):
        compiled("dp=2", 'preset = "ddp"\nallow = ["stale"]')


def test_a_plan_with_late_gradients_replays() -> None:
    program = compiled("island=2,dp=2", MORE)
    again = compile(model(), "island=2,dp=2", (X,), loss=loss, plan=program.plan)
    assert again.sources == program.sources
    assert str(Plan.parse(program.plan)) == program.plan


def test_check_refuses_every_edit_of_how_gradients_are_late() -> None:
    program = compiled("island=2", MORE)
    audit(program)
    before, lines = island(program)
    edits = [*without_one(lines)]
    assert len(edits) > 20
    for _, text in edits:
        edited = with_role(program, f"{before}{text}\n")
        with pytest.raises(PartcError):
            audit(edited)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".detach().div_(2)", ".detach()"),  # the sum in place of the mean
        (".detach().div_(2)", ".detach().div_(4)"),  # divided twice
        ("self.taken - self.met >= 2", "self.taken - self.met >= 3"),  # one step too late
        ("self.taken - self.met >= 2", "self.taken - self.met >= 1"),  # what was never sent
        ("slot = self.taken % 2", "slot = 0"),  # one step late
        ("self.taken < 2", "self.taken < 1"),  # applied at once in one step too few
        ("self.taken < 2", "self.taken < 3"),
        ("mean += 0.5 *", "mean -= 0.5 *"),
        ("0.5 * mean * mean", "0.5 * mean"),
        ("_island\").copy_(param)", "_island\").copy_(0 * param)"),  # moved from elsewhere
        ("param.grad = given[name]", "pass"),  # this island's own gradient, now
        ("start_sums([*own.values()]", "start_sums([x / 2 for x in own.values()]"),
        (
            "self.under_way[slot] = start_sums([*own.values()], places, self.island)",
            "self.under_way[slot] = start_sums([*own.values()][1:], places[1:], self.island)",
        ),  # a parameter is left out
    ],
)  # fmt: skip
def test_verify_refuses_gradients_that_are_otherwise_late(old: str, new: str) -> None:
    program = compiled("island=2", MORE)
    changed = everywhere(program, old, new)
    report = verify(changed, model(), (X,), loss=loss)
    with pytest.raises(CheckError, match="late gradient"):
        report.check()


def test_verify_finds_them_right() -> None:
    report = verify(compiled("island=2", MORE), model(), (X,), loss=loss).check()
    assert "late gradient" in report.kinds()
