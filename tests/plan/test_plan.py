"""Plans as text: reading back gives an equal plan, slips are named."""

from pathlib import Path

import pytest

from partc.errors import PlanError
from partc.plan import Plan, fold_names
from partc.plan.mesh import Mesh
from partc.plan.sharding import cut
from partc.program import Program
from partc.wrong_calls import SetError

PLAN = Plan(
    mesh=Mesh.of("dp=2,tp=2"),
    preset="fsdp+megatron",
    params={f"layers.{i}.w": {"tp": cut(1, 3), "dp": cut(0)} for i in range(3)} | {"head": {}},
    inputs={"ids": {"dp": cut(0)}},
    gather={"dp": "use"},
    scatter={"tp": 1},
    microbatches=4,
    schedule="zb-h1",
    stages=("layers.1",),
    notes=('a "quoted" note\n',),
)


def test_text_reads_back() -> None:
    again = Plan.parse(str(PLAN))
    assert again.changed(params={}) == PLAN.changed(params={})
    assert all(dict(again.stored(n)) == dict(PLAN.stored(n)) for n in PLAN.params)
    assert str(again) == str(PLAN)


def test_equal_layers_fold_into_one_line() -> None:
    assert list(fold_names(PLAN.params)) == ["layers.*.w", "head"]
    uneven = {**PLAN.params, "layers.1.w": {}}
    assert list(fold_names(uneven)) == ["layers.0.w", "layers.1.w", "layers.2.w", "head"]


@pytest.mark.parametrize(
    "text",
    [
        "nonsense = 1",
        "not toml",
        '[gather]\ndp = "sometimes"',
        'batch_norm = "off"',
        "[params]\nw = 3",
        "[params]\nw = { tp = -1 }",
        '[params]\nw = { tp = "0" }',
        "[mesh]\ndp = 0",
    ],
)
def test_slips_are_refused(text: str) -> None:
    with pytest.raises(PlanError):
        Plan.parse(text)


def test_an_entry_speaks_of_the_axes_that_it_names() -> None:
    plan = Plan.parse('params = { w = { dp = 0, tp = 1 } }\nvalues = { w = { tp = "whole" } }')
    assert plan.used("w") == {"dp": cut(0)}
    assert plan.changed(values={"w": {}}).used("w") == {}


def test_a_parameter_is_used_without_the_cuts_that_are_gathered() -> None:
    assert PLAN.used("layers.0.w") == {"tp": cut(1, 3)}


def test_a_plan_and_a_mesh_in_each_others_place_are_told(tmp_path: Path) -> None:
    plan, mesh = tmp_path / "plan.toml", tmp_path / "mesh.toml"
    plan.write_text('preset = "ddp"\nmicrobatches = 1\n\n[mesh]\ndp = 4\n')
    mesh.write_text('machine = "dgx-h100"\n\n[axes]\ndp = 8\n')
    with pytest.raises(PlanError, match=r'it is a plan, and no mesh.*mesh="dp=4"'):
        Mesh.of(plan)
    with pytest.raises(PlanError, match="it is a mesh, and no plan"):
        Plan.load(mesh)
    with pytest.raises(PlanError, match=r"Write Plan\(preset='zero2'\)"):
        Plan(preset="zero2", mesh="dp=2")  # type: ignore[arg-type]


def test_what_stays_as_it_was_made_says_how_another_is_made() -> None:
    program = Program("", Mesh(()), {}, ())
    for of, name, do in (
        (program, "plan", r"Compile again: .* plan=partc.Plan.parse"),
        (Plan(), "microbatches", r"dataclasses.replace\(plan, microbatches="),
        (Mesh(()), "axes", "Mesh.of"),
    ):
        with pytest.raises(SetError, match=do):
            setattr(of, name, 1)
