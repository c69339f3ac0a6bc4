"""A user's own schedule, a CSV file: it runs, its plan replays alone, mistakes in it are named."""

from __future__ import annotations

from pathlib import Path

import pytest

import partc
from partc.cli.main import main
from partc.errors import PlanError
from partc.plan import Plan
from partc.program import Program
from partc.verification.verification import verify
from tests.pipelines import compiled, toy

# stage 0 runs all forwards first, with bubbles and a split backward as torch writes them
OWN = """\
0F0,0F1,0F2,,,0B0,0I1,0W1,0B2
,1F0,1B0,1F1,1F2,1B1,1I2,1W2,
"""
POINTS = ("blocks.1",)


def program_of(path: Path, text: str, **changed: object) -> Program:
    """The toy's program under a schedule in a file."""
    path.write_text(text)
    plan = Plan(preset="ddp", stages=POINTS, schedule=str(path)).changed(**changed)
    case = toy()
    return partc.compile(case.step, "pp=2", plan=plan)


@pytest.mark.exhaustive
def test_it_runs_and_its_plan_replays_without_the_file(tmp_path: Path) -> None:
    case = toy()
    program = program_of(tmp_path / "mine.csv", OWN)
    verify(program, case.model, case.inputs, case.loss).check(1e-9)
    assert program.schedule == "\n".join(
        ",".join(cell for cell in row.split(",") if cell) for row in [*OWN.splitlines(), ""]
    )
    (tmp_path / "mine.csv").unlink()
    plan = Plan.parse(program.plan)
    assert (plan.schedule, plan.order, plan.microbatches) == ("mine.csv", program.schedule, 3)
    again = partc.compile(case.step, "pp=2", plan=program.plan)
    assert (again.plan, again.sources) == (program.plan, program.sources)


def test_a_plans_file_names_one_beside_it_and_another_schedule_replaces_it(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(OWN)
    (tmp_path / "plan.toml").write_text('preset = "ddp"\nschedule = "mine.csv"\n')
    plan = Plan.load(tmp_path / "plan.toml")
    assert plan.order.startswith("0F0,0F1,0F2,0B0")
    assert Plan.parse(str(plan)) == plan
    named = compiled(toy(), "pp=2", plan.changed(stages=POINTS), "1f1b", 3)
    assert Plan.parse(named.plan).order == ""


@pytest.mark.exhaustive
def test_stages_are_chosen_for_it(tmp_path: Path) -> None:
    """Three stages, of which the second rank runs one."""
    text = "0F0,2F0,2B0,0B0,0F1,2F1,2B1,0B1\n1F0,1B0,1F1,1B1\n"
    program = program_of(tmp_path / "three.csv", text, stages=())
    assert len(Plan.parse(program.plan).stages) == 2
    case = toy()
    verify(program, case.model, case.inputs, case.loss).check(1e-9)


@pytest.mark.parametrize(
    ("text", "changed", "says"),
    [
        (OWN, {"microbatches": 4}, "it has 3 microbatches, and the plan 4"),
        (OWN, {"stages": ("blocks.0", "blocks.1")}, "it has 2 stages, and the plan 3"),
        (OWN, {"stages": (), "virtual_stages": 2}, "it has 2 stages, and the plan 4"),
        ("0F0,0B0,1F0,1B0", {}, "it has 1 pipeline ranks, and the plan 2"),
        ("\n0F0,1F0,1B0,0B0", {}, "it has 1 pipeline ranks with a stage, and the plan 2"),
        (OWN.replace("0B2", ""), {}, "stage 0 runs F for microbatch 2"),
        (OWN.replace("0B2", "0B0"), {}, "the action stands twice"),
        (OWN.replace("0B2", "0B2,0X2"), {}, "row 1, column 10: '0X2': this is not an action"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", {}, "rank 0 stands at 0B0, which needs 1B0 of rank 1"),
        ("0F0,0F1,0B0,0B1\n1F1,1F0,1B1,1B0", {}, "forwards of microbatches in different orders"),
        ("0F0\n1F0", {}, "it has no backwards"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, changed: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        program_of(tmp_path / "mine.csv", text, **changed)
    assert says in str(caught.value)
    assert all(caught.value.as_dict().values())


def test_a_file_that_is_not_there_and_rows_of_no_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="the file cannot be read"):
        Plan(schedule="none.csv").with_order(tmp_path)
    with pytest.raises(PlanError, match="it has no name"):
        Plan(order=OWN).with_order()


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    out = str(tmp_path / "build")
    named = ["--mesh", "pp=2", "--plan", "ddp", "--schedule", str(tmp_path / "mine.csv")]
    assert main(["compile", "tests.example_program:cli_target", *named, "--out", out]) == 0
    assert main(["simulate", out]) == 0
    assert "mine.csv: 2 ranks, 2 microbatches" in capsys.readouterr().out
