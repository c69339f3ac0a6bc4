"""``check``, ``verify`` and ``bench`` keep what they found beside the program, for its report."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import partc
from partc.cli.main import main
from partc.program.outcomes import NAME, read_outcomes, write_outcome
from partc.reports.stamps import stamps_of
from tests.patience import patience
from tests.reports.report_programs import compiled

MODEL = "tests.cli.test_kept_outcomes:target"


def target() -> Any:
    """The model of the programs, for ``--model``."""
    from tests.reports.report_programs import step

    traced = step()
    return traced.model, traced.inputs, traced.loss


@pytest.fixture
def build(tmp_path: Path) -> str:
    folder = str(tmp_path / "build")
    compiled("fsdp").save(folder)
    return folder


def states(folder: str) -> dict[str, str]:
    stamps, _ = stamps_of(partc.load(folder))
    return {each["kind"]: each["state"] for each in stamps}


def test_what_nobody_has_done_is_told_with_its_command(build: str) -> None:
    stamps, measured = stamps_of(partc.load(build))
    assert {*states(build).values()} == {"open"}
    assert f"partc verify {build} --model ..." in [each["text"] for each in stamps]
    assert measured is None


@pytest.mark.exhaustive
def test_check_and_verify_are_kept_for_this_text_alone(build: str) -> None:
    assert main(["check", build, "--model", MODEL]) == 0
    assert states(build) == {"checked": "yes", "verified": "yes", "measured": "open"}
    told = read_outcomes(partc.load(build))["verified"]
    assert 0 < told["worst"]["error"] < 1e-12
    told = partc.load(build).report().told
    assert any("equal to the model to" in each["text"] for each in told["stamps"])
    source = Path(build) / "stage0.py"
    source.write_text(source.read_text() + "\n# mine\n", encoding="utf-8")
    assert main(["check", build, "--accept-edits"]) == 0
    assert states(build) == {"checked": "yes", "verified": "open", "measured": "open"}


def test_another_program_in_the_folder_has_no_stamps(build: str) -> None:
    write_outcome(partc.load(build), "checked", {"checked": [], "unchecked": []})
    assert states(build)["checked"] == "yes"
    other = Path(build).with_name("other")
    compiled("zero1").save(other)
    (other / NAME).write_bytes((Path(build) / NAME).read_bytes())  # a stamp that was carried over
    assert states(str(other))["checked"] == "open"
    compiled("fsdp").save(build)
    assert states(build)["checked"] == "open"
    assert not (Path(build) / NAME).exists()


def test_a_program_that_differs_has_a_stamp_too(build: str) -> None:
    source = Path(build) / "stage0.py"
    text = source.read_text()
    assert "gelu = F.gelu(up)" in text
    source.write_text(text.replace("= F.gelu(up)", "= F.gelu(up) * 1.5"), encoding="utf-8")
    from partc.program import write_digests

    write_digests(build)
    assert main(["verify", build, "--model", MODEL]) == 1
    (stamp,) = [x for x in stamps_of(partc.load(build))[0] if x["kind"] == "verified"]
    assert stamp["state"] == "no"
    assert stamp["text"].startswith("DIFFERENT from the model: ")


@pytest.mark.parametrize("text", ["no JSON", '{"schema": 7}', "[]", '{"schema": 1, "checked": 3}'])
def test_a_damaged_file_is_refused_by_the_report_alone(build: str, text: str) -> None:
    (Path(build) / NAME).write_text(text, encoding="utf-8")
    program = partc.load(build)
    with pytest.raises(partc.PartcError, match=r"outcomes\.json.*Delete it"):
        program.report()
    write_outcome(program, "checked", {"checked": [], "unchecked": []})
    assert states(build)["checked"] == "yes"


def test_malformed_entries_are_told(build: str) -> None:
    program = partc.load(build)
    for told in ({}, {"ok": True, "worst": None, "tensors": 3}, {"ok": 1, "worst": {"error": "x"}}):
        write_outcome(program, "verified", told)
        with pytest.raises(partc.PartcError, match=r"outcomes\.json.*missing or malformed"):
            stamps_of(program)


@pytest.mark.exhaustive
def test_a_folder_that_cannot_be_written_changes_no_result(
    build: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(build) / NAME).mkdir()
    assert main(["check", build]) == 0
    assert "the report will not show this" in capsys.readouterr().err


@pytest.mark.gloo
def test_bench_is_kept_with_its_time_line(build: str) -> None:
    words = ["bench", build, "--steps", "2", "--warmup", "1", "--timeout", str(patience())]
    assert main(words) == 0
    assert states(build)["measured"] == "yes"
    told = partc.load(build).report().told
    assert told["kind"] == "predicted, and measured"
    measured = told["measured"]
    assert f"{os.cpu_count()} core" in measured["machine"]
    assert measured["figures"]["step"]["measured_s"] > 0
    rows = {each["name"]: each for each in measured["streams"]}
    assert {"measured", "· waits", "· over dp"} == {*rows}
    called = [measured["calls"][i] for i in rows["measured"]["call"]]
    assert ["forward", "blocks.*", ""] in called
    assert {*rows["measured"]["layer"]} >= {0, 1, 2, 3}
    assert json.loads((Path(build) / NAME).read_text())["measured"]["of"]
