"""The report of a program: its data, and that page and data say the same."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

import partc
from partc.amounts import time_text
from partc.cli.main import main
from partc.cost.roofline import BLOCKS, COMPUTE
from partc.cost.sites import NOWHERE
from partc.dryrun.program_trace import program_trace
from partc.machines.what_if import Change
from partc.plan import Plan
from partc.plan.plan_keys import MEANINGS
from partc.reports.linked import NO_LINE, linked_step
from partc.reports.other_machines import stage_step
from partc.reports.report_page import report_page
from partc.reports.step_streams import waits_of
from tests.reports.report_programs import PLANS, compiled
from tests.surface.shown import counts_differ, shown_numbers, strange_numbers

NOT_WRITTEN = {"apart", "of_another", "homes", "other_passes", "left_out"}
Json = dict[str, Any]


@pytest.mark.rows(2)
@pytest.mark.parametrize("plan", PLANS)
def test_transfers_are_predicted_in_the_order_of_the_lines(plan: str) -> None:
    """Per axis: what is predicted is what the program starts, one by one."""
    program = compiled(plan)
    step = stage_step(program, Change(), plan)
    trace = program_trace(program.role(0), library=step.mesh.hardware.library)
    for axis in program.mesh.names:
        predicted = [box for box in step.boxes if box.stream == axis]
        started = trace.starts(axis)
        layers = [each.site.module.split(".")[1:2] for each in started if each.site != NOWHERE]
        pairs = zip(predicted, started, strict=True)
        known = [b.site.module.split(".")[1:2] for b, each in pairs if each.site != NOWHERE]
        assert known == layers, axis
    waits = waits_of(program.basis.tapes[0], step.mesh)
    linked = linked_step(step.boxes, waits, trace)
    assert linked.orders_agree
    moved = [bar for bar in linked.bars if bar.box.stream not in (BLOCKS, COMPUTE)]
    assert moved
    assert all(bar.line != NO_LINE for bar in moved)


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", PLANS)
def test_the_curve_reaches_the_peak_of_the_dry_run(plan: str) -> None:
    program = compiled(plan)
    cost, told = program.cost.as_json(), partc.report(program).told
    assert max(told["timeline"]["memory"]["bytes"]) == cost["peak_bytes"]
    assert told["numbers"]["peak_bytes"] == cost["peak_bytes"]
    assert sum(each["bytes"] for each in told["holders"] if each["line"]) <= cost["live_bytes"]


def test_a_bar_names_line_layer_and_the_users_line() -> None:
    program = compiled("megatron-sp")
    told = partc.report(program).told
    (tp,) = [each for each in told["timeline"]["streams"] if each["axis"] == "tp"]
    text = program.source().splitlines()
    first = tp["layer"].index(2)
    what, module, source = told["timeline"]["calls"][tp["call"][first]]
    assert what == "all_gather"
    assert module.startswith("blocks.*")
    assert "report_programs.py" in source
    assert "gather" in text[tp["line"][first] - 1]
    assert {0, 1, 2, 3} <= {*tp["layer"]}


def test_the_numbers_add_up() -> None:
    told = partc.report(compiled("megatron-sp")).told
    numbers, line = told["numbers"], told["timeline"]
    assert sum(row["seconds"] for row in told["waterfall"]) == pytest.approx(numbers["step_s"])
    assert line["end_s"] == pytest.approx(numbers["step_s"])
    for axis in told["mesh"]["axes"]:
        (stream,) = [each for each in line["streams"] if each["axis"] == axis["axis"]]
        marked = [each for each in line["lines"] if each["axis"] == axis["axis"]]
        assert sum(each["transfers"] for each in marked) == len(stream["ns"]) == axis["transfers"]
        assert sum(stream["bytes"]) == axis["bytes"]
        assert sum(stream["waits_ns"]) / 1e9 == pytest.approx(axis["exposed_s"], rel=1e-3)
    assert max(accumulate(line["streams"][1]["begin_ns"])) / 1e9 <= line["end_s"]


def test_the_page_has_the_data_and_fetches_nothing() -> None:
    told = partc.report(compiled("megatron-sp")).told
    page = report_page(told)
    held = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert held
    assert json.loads(held[1]) == json.loads(json.dumps(told))
    assert "default-src 'none'" in page
    assert "http" not in page.replace("http-equiv", "")
    assert told["verdict"] in page


@pytest.mark.exhaustive
def test_the_verdict_begins_with_what_most_of_the_step_is() -> None:
    waits = partc.report(compiled("megatron-sp")).told["verdict"]
    assert re.match(r"9\d% of the step waits for transfers, most over tp \([\d.]+ ms\); ", waits)
    pipeline = partc.report(compiled("ddp", "pp=2,dp=2", 4)).told["verdict"]
    shares = [int(each) for each in re.findall(r"(?:^|; )(\d+)% ", pipeline)]
    assert len(shares) == 3
    assert shares == sorted(shares, reverse=True)


def test_every_line_of_the_step_has_its_place_in_the_model() -> None:
    told = partc.report(compiled("megatron-sp")).told
    places = told["places"]["stage0.py"]
    by_line = {line: places["calls"][number] for line, number in places["lines"]}
    text = told["sources"]["stage0.py"].splitlines()
    (line,) = [number for number, code in enumerate(text, 1) if "up = F.linear(" in code]
    module, source = by_line[line]
    assert module == "blocks.*.up"
    assert "report_programs.py" in source
    assert {*told["places"]} == {"stage0.py"}


@pytest.mark.parametrize("name", ["megatron-sp", "pipeline", "fsdp"])
def test_counts_and_numbers_of_the_page_are_those_of_program_and_data(name: str) -> None:
    program = compiled("ddp", "pp=2,dp=2", 4) if name == "pipeline" else compiled(name)
    told = json.loads(json.dumps(partc.report(program).told))
    assert not counts_differ(program, told)
    assert not strange_numbers(told)
    assert shown_numbers(told) > 50


def test_a_wrong_number_and_a_wrong_count_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled("megatron-sp")
    told = json.loads(json.dumps(partc.report(program).told))
    told["timeline"]["lines"][0]["transfers"] += 1
    assert len(counts_differ(program, told)) == 1
    step_s = told["numbers"]["step_s"]
    wrong = report_page(told).replace(f"<b>{time_text(float(f'{step_s:.4g}'))}</b>", "<b>77 ms</b>")
    monkeypatch.setattr("tests.surface.shown.report_page", lambda _: wrong)
    assert strange_numbers(told) == ["77 ms in '77 ms'"]


def test_calls_are_cut_off_where_they_would_be_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = partc.report(compiled("ddp", "pp=2,dp=2", 4)).told
    assert whole["timeline"]["calls_until_s"] is None
    monkeypatch.setattr("partc.reports.pipeline_timeline.MOST_BARS", 60)
    told = partc.report(compiled("ddp", "pp=2,dp=2", 4)).told
    assert 0 < told["timeline"]["calls_until_s"] < told["timeline"]["end_s"]
    assert "Calls and their transfers are shown up to" in report_page(told)


def test_text_of_a_model_is_no_markup() -> None:
    told = partc.report(compiled("megatron-sp")).told
    wrong = "</script><script>alert(1)</script>"
    page = report_page({**told, "model": wrong})
    assert wrong not in page


def test_a_notebook_gets_a_frame() -> None:
    shown = compiled("megatron-sp").report()._repr_html_()
    assert shown.startswith('<iframe sandbox="allow-scripts" srcdoc="&lt;!doctype')


def test_every_key_of_a_plan_has_a_meaning() -> None:
    assert {*MEANINGS} == {field.name for field in fields(Plan)} - NOT_WRITTEN


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build, page = str(tmp_path / "build"), tmp_path / "report.html"
    compiled("megatron-sp").save(build)
    assert main(["report", build, "-o", str(page), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert page.read_text() == report_page(told)
    assert main(["report", build]) == 0
    assert told["verdict"] in capsys.readouterr().out


def keys(told: Any, path: str = "") -> set[str]:
    """The paths of all entries of plain data; entries of a list, or of a table by name, once."""
    by_name = path in (".sources", ".places", ".plan[].value")
    if isinstance(told, dict):
        inner = [keys(each, path if by_name else f"{path}.{key}") for key, each in told.items()]
    elif isinstance(told, list):
        inner = [keys(each, f"{path}[]") for each in told]
    else:
        inner = []
    return set().union(*inner) or {path}


def test_the_keys_of_the_json(golden: Any) -> None:
    told = partc.report(compiled("megatron-sp")).told
    assert told["schema"] == 1
    golden("\n".join(sorted(keys(told))) + "\n")


def test_what_was_not_compiled_has_no_report() -> None:
    from tests.example_program import example_program

    with pytest.raises(partc.PartcError, match="there is no report of this program"):
        example_program().report()
