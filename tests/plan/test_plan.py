"""Plans as text: reading back gives an equal plan, slips are named."""

import pytest

from partc.errors import PlanError
from partc.plan import Plan, fold_names
from partc.plan.mesh import Mesh
from partc.plan.sharding import cut

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
