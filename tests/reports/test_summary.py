"""A program in one line, how it is launched, and its explanation in short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from partc.cli.main import main
from partc.machines.topology import Topology
from partc.program import Program
from partc.reports.explanation import explain_program
from partc.reports.summary import (
    Summary,
    launch_line,
    ranks_per_machine,
    short_explanation,
    uncalibrated,
)
from tests.example_program import example_program
from tests.reports.report_programs import compiled


def on(machine: Topology) -> Program:
    program = compiled("ddp", "dp=4")
    return replace(program, basis=replace(program.basis, machine=str(machine)))


def test_the_line_has_the_numbers_of_the_cost() -> None:
    program = compiled("megatron")
    found, cost = Summary.of(program), program.cost.as_json()
    assert cost is not None
    step = cost["prediction"]
    assert found.step_s == step["seconds"]
    assert found.peak_bytes == cost["peak_bytes"]
    assert found.exposed_share == pytest.approx(
        sum(each["exposed_s"] for each in step["axes"]) / step["seconds"]
    )
    lines = program.source(0).count("\n")
    assert str(found).startswith(f"4 ranks, 1 program ({lines} lines), ")
    assert str(found).endswith("% exposed")


def test_of_a_pipeline_all_programs_and_the_fullest_rank_count() -> None:
    program = compiled("ddp", "pp=2", 4)
    found, cost = Summary.of(program), program.cost.as_json()
    assert cost is not None
    assert found.programs == 2
    assert found.peak_bytes == max(rank["peak_bytes"] for rank in cost["ranks"])


def test_a_program_without_costs_has_a_line_too() -> None:
    assert str(Summary.of(example_program())).startswith("4 ranks, 1 program (")


def test_ranks_are_launched_on_each_machine() -> None:
    one, several = Topology.load("dgx-h100", 4), Topology.load("dgx-h100", 32)
    assert launch_line(on(one), "my build") == "torchrun --nproc-per-node 4 'my build/run.py'"
    assert ranks_per_machine(on(several)) == 4  # of a mesh that is smaller than one machine
    many = compiled("ddp", "dp=4")
    level = several.levels[0].resized(2)
    small = replace(
        several, levels=(level, several.levels[1].resized(2)), groups=((several.device, 4),)
    )
    many = replace(many, basis=replace(many.basis, machine=str(small)))
    assert ranks_per_machine(many) == 2
    assert launch_line(many, "build/").startswith("torchrun --nnodes 2 --nproc-per-node 2 ")


def test_a_machine_that_nobody_measured_is_told_of() -> None:
    known = Topology.load("cpu", 4)
    assert "partc calibrate" in uncalibrated(known)
    assert uncalibrated(replace(known, name="ours")) == ""
    assert uncalibrated(None) == ""


@pytest.mark.exhaustive
def test_the_short_explanation_begins_with_the_verdict() -> None:
    why = explain_program(compiled("megatron"))
    lines = short_explanation(why).splitlines()
    assert lines[0].endswith(".")
    assert "of the step waits for transfers" in lines[0].split(";")[0]  # what most of it is
    parts = [line for line in lines if "=" in line and "%" in line and "ms" in line]
    assert len(parts) >= 3
    assert any(line.startswith("who holds memory") for line in lines)


@pytest.mark.exhaustive
def test_explain_is_short_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    compiled("megatron").save("build")
    assert main(["explain", "build"]) == 0
    short = capsys.readouterr().out
    assert main(["explain", "build", "--all"]) == 0
    long = capsys.readouterr().out
    assert 'preset = "megatron"' in long
    assert 'preset = "megatron"' not in short
    assert len(short) < len(long) / 2
    assert max(map(len, short.splitlines())) <= 120  # no terminal


def test_nothing_that_fits_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "build"
    compiled("ddp").save(folder)
    assert main(["simulate", str(folder), "--devices", "3"]) == 1
    assert "no plan fits there" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_a_pipelines_grid_is_as_wide_as_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "build"
    compiled("ddp", "pp=2", 8).save(folder)
    for width in (80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["simulate", str(folder)]) == 0
        rows = [x for x in capsys.readouterr().out.splitlines() if x.startswith("rank ")]
        assert 0.5 * width < max(map(len, rows)) <= width
