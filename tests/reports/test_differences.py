"""What differs between two saved programs, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import partc
from partc.errors import LoadError
from partc.program import Program
from partc.reports.difference_lines import difference_lines
from partc.reports.differences import differences
from tests.texts import with_role

X = torch.randn(8, 6)


def compiled(plan: str, mesh: str = "dp=2", **options: object) -> Program:
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
    loss = lambda m, x: m(x).pow(2).mean()  # noqa: E731
    return partc.compile(model, mesh, (X,), loss=loss, plan=plan, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def fsdp() -> Program:
    return compiled("fsdp")


def told(old: Program, new: Program) -> dict[str, dict[str, list[str]]]:
    return differences(old, new, ("a", "b")).as_json()


@pytest.mark.exhaustive
def test_nothing_differs(fsdp: Program) -> None:
    found = differences(fsdp, compiled("fsdp"), ("a", "b"))
    assert not found
    assert str(found) == "no difference"


@pytest.mark.parametrize(("text", "why"), [("= =", "not TOML"), ("a." * 10**5 + "a = 1", "50 par")])
def test_an_edited_plan_that_is_none(fsdp: Program, text: str, why: str) -> None:
    with pytest.raises(LoadError, match=why):
        differences(fsdp, replace(fsdp, plan=text), ("a", "b"))


def test_a_terminal_is_told_step_peak_and_bytes_first(fsdp: Program) -> None:
    ddp = compiled("ddp")
    found = differences(fsdp, ddp, ("a", "b"))
    lines = difference_lines(found, fsdp, ddp, source=False, width=80)
    assert [line.split()[0] for line in lines[:3]] == ["step", "peak", "sent"]
    assert " -> " in lines[0]
    assert lines[4].startswith("plan       preset: fsdp -> ddp")
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "the lines themselves: --source"
    assert any("stage0.py: " in line and " gone, " in line for line in lines)
    shown = difference_lines(found, fsdp, ddp, source=True, width=80)
    assert "--- a/stage0.py" in shown
    assert found.sources["stage0.py"][-1] in shown
    same = differences(fsdp, fsdp, ("a", "b"))
    assert difference_lines(same, fsdp, fsdp, source=True, width=80) == ["no difference"]


def test_every_topic_of_two_plans(fsdp: Program) -> None:
    found = told(fsdp, compiled("ddp"))
    assert found["plan"]["preset"] == ["fsdp", "ddp"]
    assert found["plan"]["gather"] == ["{ dp = use }", "none"]
    assert found["layouts"]["params 0.weight"] == ["{ dp = 0 }", "{}"]
    moved = found["transfers"]
    assert moved["all_gather over dp, a step"][1] == "none"
    # 136 parameters of f32, all-reduced by two ranks: half of the bytes twice; and the loss
    assert moved["all_reduce over dp, a step"][1].endswith(f", {4 * 136 + 4} B")
    assert "(+" in found["memory"]["peak of the fullest rank"][1]
    assert "predicted step" in found["time"]
    assert any("SequentialStep.step" in what for what in found["roles"])
    assert found["sources"]["stage0.py"][0] == "--- a/stage0.py"


def test_transfers_are_those_of_the_cost(fsdp: Program) -> None:
    found = told(fsdp, replace(fsdp, basis=replace(fsdp.basis, tapes=())))["transfers"]
    traffic = fsdp.cost.as_json()["traffic"]
    assert {what: texts[0].partition(",")[0] for what, texts in found.items()} == {
        f"{each['kind']} over {each['axis']}, a step": str(each["count"]) for each in traffic
    }


def test_an_edit_is_told_by_its_function(fsdp: Program) -> None:
    text = fsdp.sources["stage0.py"].replace("torch.tanh(", "torch.sin(", 1)
    found = differences(fsdp, with_role(fsdp, text), ("a", "b"))
    assert [str(row) for row in found.rows] == [
        "stage0.py, SequentialStep.step: 1 line gone, 1 new"
    ]


def test_a_pipeline_against_one_stage(fsdp: Program) -> None:
    found = told(fsdp, compiled("ddp", "pp=2", microbatches=2))
    assert found["plan"]["mesh"] == ["{ dp = 2 }", "{ pp = 2 }"]
    assert "pipeline1.py is new, " in " ".join(found["roles"])
    assert found["transfers"]["messages between stages, a microbatch"][0] == "none"
    assert found["memory"]["peak of pipeline rank 1"][0] == "none"


def test_other_models_and_programs(fsdp: Program) -> None:
    other = replace(fsdp, model="Other", inputs={"x": ((4, 6), "float32")}, others=(fsdp,))
    found = told(fsdp, other)["model"]
    assert found["class"] == ["Sequential", "Other"]
    assert found["input x"] == ["float32[8, 6]", "float32[4, 6]"]
    assert found["programs of other shapes and modes"] == ["0", "1"]
