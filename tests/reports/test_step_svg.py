"""The picture of a step: what it shows is what was predicted."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import partc
from examples import demo
from partc.cost.roofline import BLOCKS, COMPUTE, Box
from partc.errors import UsageError
from partc.machines.what_if import Change
from partc.reports.other_machines import stage_step
from partc.reports.step_streams import EXPOSED, Wait, kind_of, numbered, panels, waits_of
from partc.reports.step_svg import step_svg

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "demo-step.svg"
DEMO = "Llama of 6 layers (make demo)"


@pytest.fixture(scope="module")
def program() -> partc.Program:
    """The demo's, compiled for machines of the default kind."""
    (ids,) = demo.batches(1)
    model = demo.build_model()
    return partc.compile(model, demo.MESH, (ids,), loss=demo.loss_of, plan=demo.PLAN)


@pytest.mark.exhaustive
def test_the_picture_in_the_docs(program: partc.Program, request: pytest.FixtureRequest) -> None:
    made = step_svg(program, name=DEMO)
    if request.config.getoption("--update-golden"):
        PICTURE.write_text(made)
    assert PICTURE.read_text() == made, "run pytest tests/reports --update-golden"
    assert ElementTree.fromstring(made).tag.endswith("svg")


@pytest.mark.exhaustive
@pytest.mark.parametrize("of", ["memory", "mesh"])
def test_other_pictures_in_the_docs(
    of: str, program: partc.Program, request: pytest.FixtureRequest
) -> None:
    made, path = partc.picture(program, of).svg, PICTURE.with_name(f"demo-{of}.svg")
    if request.config.getoption("--update-golden"):
        path.write_text(made)
    assert path.read_text() == made, "run pytest tests/reports --update-golden"


def test_red_is_as_long_as_the_exposed_time(program: partc.Program) -> None:
    step = stage_step(program, Change(), "demo")
    whole = next(panels(step.boxes, waits_of(program.basis.tapes[0], step.mesh)))
    assert {each.axis for each in step.prediction.axes} == {"dp", "tp"}
    for each in step.prediction.axes:
        bars = whole.rows[f"over {each.axis}"]
        red = sum(bar.seconds for bar in bars if bar.colour == EXPOSED)
        assert red == pytest.approx(each.exposed_s)
        assert sum(bar.seconds for bar in bars) == pytest.approx(each.exposed_s + each.hidden_s)


def test_equal_blocks_are_counted(program: partc.Program) -> None:
    blocks = numbered(stage_step(program, Change(), "demo").boxes)
    assert [(block.phase, block.number) for block in blocks] == [
        *(("forward", number) for number in range(6)),
        *(("backward", number) for number in reversed(range(6))),
    ]


def test_a_transfer_is_cut_where_computing_begins_to_wait() -> None:
    boxes = [
        Box(COMPUTE, "aten.mm", "", 0.0, 1.0),
        Box("tp", "all_reduce", "", 0.5, 1.5),
        Box(COMPUTE, "aten.mm", "", 2.0, 1.0),
    ]
    (whole,) = panels(boxes, [Wait(1.0, 2.0, "tp")])
    bars = [(bar.begin_s, bar.end_s, bar.colour) for bar in whole.rows["over tp"]]
    assert bars == [(0.5, 1.0, "hidden"), (1.0, 2.0, "exposed")]


def test_a_block_without_transfers() -> None:
    boxes = [Box(COMPUTE, "aten.mm", "a.0", 0.0, 1.0), Box(BLOCKS, "forward", "a.0", 0.0, 1.0)]
    assert [list(panel.rows) for panel in panels(boxes, [])] == [["compute"], ["compute"]]


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("aten.linear", "matmul"),
        ("weight_grad", "weight gradients"),
        ("aten._scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten.convolution_backward", "convolution"),
        ("aten.silu_backward", ""),
    ],
)
def test_kinds_of_work(op: str, kind: str) -> None:
    assert kind_of(op) == kind


def test_a_pipeline_has_no_such_picture() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    batch = torch.randn(4, 4), torch.randn(4, 4)
    program = partc.compile(
        model, "pp=2", batch, loss=lambda m, x, y: nn.functional.mse_loss(m(x), y),
        microbatches=2, stages=["1"], plan="ddp",
    )  # fmt: skip
    with pytest.raises(UsageError, match="a pipeline has no picture"):
        step_svg(program)
