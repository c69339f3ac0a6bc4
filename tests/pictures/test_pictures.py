"""Pictures are well-formed, stay inside of their page, and show the numbers of the program."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import partc
from partc.amounts import amount
from partc.cli.main import main
from partc.cost.cost_parts import peak_memory
from partc.drawing import LETTER, marks, page, rounded_up, wrapped
from partc.errors import UsageError
from partc.machines.topology import Topology
from partc.metrics import JsonLines
from partc.pictures import mesh_svg, pipeline_svg
from partc.pictures.picture import OF, picture
from partc.plan.mesh import PP, Mesh
from partc.reports.pipeline_timeline import pipeline_timeline
from partc.reports.saved_step import saved_schedule
from partc.reports.timeline import RANKS
from partc.schedules import make
from tests.reports.report_programs import compiled

SVG = "{http://www.w3.org/2000/svg}"
MOST_HTML = 50_000  # bytes of a piece in a notebook


def pipeline() -> partc.Program:
    return compiled("ddp", "pp=2", 4)


def parsed(svg: str) -> ElementTree.Element:
    assert "<script" not in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    return ElementTree.fromstring(svg)


def check_inside(svg: str) -> None:
    """Boxes stay inside of the page, and so do texts, as wide as letters are on average."""
    root = parsed(svg)
    width, height = (float(root.get(name, "0")) for name in ("width", "height"))
    for rect in root.iter(f"{SVG}rect"):
        x, y = float(rect.get("x", "0")), float(rect.get("y", "0"))
        assert x >= -1
        assert x + float(rect.get("width", "0")) <= width + 1
        assert y + float(rect.get("height", "0")) <= height + 1
    for text in root.iter(f"{SVG}text"):
        words, x = "".join(text.itertext()), float(text.get("x", "0"))
        kind = (text.get("class") or "").split()
        wide = 0.9 * LETTER * len(words)
        begin = x - wide if "end" in kind else x - wide / 2 if {"mid", "in"} & {*kind} else x
        assert begin > -15, words
        assert begin + wide < width + 40, words
        assert float(text.get("y", "0")) <= height, words


@pytest.mark.exhaustive
@pytest.mark.parametrize("of", ["timeline", "memory", "mesh"])
@pytest.mark.parametrize("plan", ["megatron-sp", "fsdp"])
def test_pictures_of_one_stage(plan: str, of: str) -> None:
    check_inside(picture(compiled(plan), of).svg)


@pytest.mark.exhaustive
@pytest.mark.parametrize("of", OF)
def test_pictures_of_a_pipeline(of: str) -> None:
    check_inside(picture(pipeline(), of).svg)


@pytest.mark.exhaustive
def test_the_peak_in_the_picture_is_that_of_the_cost() -> None:
    program = compiled("megatron")
    peak, holders = peak_memory(program.cost.as_json())
    svg = picture(program, "memory").svg
    assert f"{amount(peak, 'B')} at the peak" in svg
    assert amount(holders[0][1], "B") in svg


@pytest.mark.exhaustive
def test_a_pipelines_bars_are_those_of_its_time_line() -> None:
    """Every action and message is drawn; red is as long as ranks wait for messages."""
    line = pipeline_timeline(pipeline())
    drawn = [each for each in line.streams if each.kind == RANKS or each.axis == PP]
    assert len(drawn) == 4
    for stream in drawn:
        bars = [*pipeline_svg._bars(stream)]
        assert sum(bar.seconds for bar in bars) == pytest.approx(
            sum(bar.box.seconds for bar in stream.bars)
        )
    svg = pipeline_svg.pipeline_svg(pipeline())
    assert all(f"<title>{a}, " in svg for row in saved_schedule(pipeline()).orders for a in row)


def test_a_mesh_of_many_machines_counts_those_that_are_not_drawn() -> None:
    mesh = Mesh.of("pp=4,dp=32,tp=8")
    mesh = replace(mesh, topology=Topology.load("dgx-h100", 1024))
    svg = mesh_svg.drawn(mesh, {"tp": 0.5})
    check_inside(svg)
    assert "and 122 more machines alike" in svg
    assert "computing waits 500 ms for it" in svg
    rows = dict(re.findall(r">(\w+) = \d+</text>\s*<text[^>]*>over ([^<]*)<", svg))
    assert rows["tp"].startswith("nvlink")
    assert "infiniband" in rows["pp"]


def test_what_cannot_be_drawn_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="Did you mean 'memory'"):
        picture(compiled("ddp"), "memroy")
    with pytest.raises(UsageError, match="no pipeline ranks"):
        picture(compiled("ddp"), "grid")
    with pytest.raises(UsageError, match="nothing of this program's step was saved"):
        picture(replace(compiled("ddp"), basis=type(compiled("ddp").basis)()))


def test_notebooks_show_small_pieces_without_scripts() -> None:
    for program in (compiled("fsdp"), pipeline()):
        schedule = make("1f1b", ranks=4, microbatches=8)
        for shown in (program, program.cost, partc.Plan.parse(program.plan), schedule):
            html = shown_in_a_notebook(shown)
            assert 100 < len(html) < MOST_HTML
            assert "<script" not in html
            assert "<style" not in html  # which would concern the whole notebook
    assert "waits for dp" in shown_in_a_notebook(compiled("fsdp").cost)


@pytest.mark.parametrize("what", ["plan", "cost", "schedule", "program"])
def test_what_a_notebook_shows_is_pinned(golden: Callable[..., None], what: str) -> None:
    program = pipeline()
    things = {
        "plan": partc.Plan.parse(program.plan), "cost": program.cost, "program": program,
        "schedule": make("1f1b", ranks=2, microbatches=4),
    }  # fmt: skip
    golden(shown_in_a_notebook(things[what]).replace("><", ">\n<"), ".html")


def shown_in_a_notebook(thing: Any) -> str:
    return str(thing._repr_html_())


def test_a_long_schedule_is_text_in_a_notebook() -> None:
    html = make("1f1b", ranks=16, microbatches=64)._repr_html_()
    assert html.startswith("<pre>")
    assert len(html) < MOST_HTML


def test_the_command_writes_or_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build, out = str(tmp_path / "build"), tmp_path / "mesh.svg"
    compiled("ddp").save(build)
    assert main(["picture", build, "--of", "mesh", "-o", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert main(["picture", build, "--of", "mesh"]) == 0
    assert capsys.readouterr().out == out.read_text()
    assert main(["picture", build, "--of", "mesh", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["svg"] == out.read_text()


def test_a_name_with_another_ending_is_refused(tmp_path: Path) -> None:
    made = picture(compiled("ddp"), "mesh")
    for name in ("mesh.png", "mesh.html", "mesh.v2.PDF", "mesh.svgz"):
        with pytest.raises(UsageError, match=r"an SVG picture is written .* Name .*\.svg\."):
            made.save(tmp_path / name)
    assert not [*tmp_path.iterdir()]
    for name in ("mesh.svg", "mesh.SVG", "mesh", "mesh-0.5"):
        made.save(tmp_path / name)
    with pytest.raises(UsageError, match=r"an HTML page is written .* Name .*step\.html"):
        partc.report(compiled("ddp")).save(tmp_path / "step.md")
    with pytest.raises(UsageError, match=r"a line of JSON a step is written .* Name .*m\.jsonl"):
        JsonLines(tmp_path / "m.csv")


# pieces -----------------------------------------------------------------------------------------
def test_axes_have_round_numbers() -> None:
    assert marks(7.3, 4) == [0, 2, 4, 6]
    assert marks(1.0, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert marks(0.0, 4) == [0.0]
    assert rounded_up(7.31) == pytest.approx(7.4)
    assert rounded_up(0.0) == 1.0


def test_text_is_escaped_and_wrapped() -> None:
    assert parsed(page(10, 10, "<&>", [])).findtext(f"{SVG}title") == "<&>"
    assert [*wrapped("one two three", 8 * LETTER)] == ["one two", "three"]
