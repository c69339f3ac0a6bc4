"""Plans, meshes and schedules of any content, as strangers may send them, are refused in time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import partc
from partc.errors import PlanError
from partc.plan.field_kinds import FIELDS
from partc.schedules.csv_form import load_csv
from tests.mistakes.things import check, compiled

VALUES = ("5", "-1", "1.5", "nan", "true", '"x"', "[1]", "[[1], [2]]", "{ a = 1 }", "1979-05-27")
TEXTS = {
    "brackets": ("a = " + "[" * 100_000, "nested too deeply"),
    "tables": ("a = " + "{a=" * 20_000, "nested too deeply"),
    "a deep key": (".".join("a" * 20_000) + " = 1", "more than 50 parts"),
    "a long number": ("microbatches = " + "9" * 5000, "4300 digits"),
    "many microbatches": ("microbatches = 1000000", "65,536"),
    "a long mesh": ("[mesh]\ndp = 1000000000000", "fewer ranks"),
    "a misspelt field": ("microbatch = 4", "Did you mean 'microbatches'"),
    "a dim that is not there": ('preset = "ddp"\n[inputs]\n"x" = { batch = 9 }', "no dim 9"),
    "an escape": ('"\\u001b[2J" = 1', "\\x1b[2J"),
    "a bare name": ("[params]\nup.weight = { dp = 0 }", '"up.weight" = { axis = dim }'),
    "a line below a table": ('[mesh]\ndp = 2\npreset = "ddp"', "above the first line in brackets"),
    "Python's words": ("messages = True", "TOML writes true and false"),
    "YAML": ("preset: ddp\nmicrobatches: 2", "TOML writes key = value"),
    "a negative dim": ("[scatter]\ntp = -1", "scatter.tp = 1"),
}


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_field_of_any_kind_is_read_or_refused(field: str) -> None:
    refused = [error for value in VALUES if (error := refusal(f"{field} = {value}"))]
    assert [str(error) for error in refused if field not in str(error) or not error.do] == []
    assert len(refused) >= len(VALUES) - 4  # none takes numbers, texts, lists and tables alike


def refusal(text: str) -> PlanError | None:
    try:
        partc.Plan.parse(text)
    except PlanError as error:
        return error
    return None


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_refused_in_words(name: str) -> None:
    text, words = TEXTS[name]
    check((lambda: compiled(plan=partc.Plan.parse(text)), (words,)))


@pytest.mark.parametrize("content", ["folder", "pipe", "device", "bytes", "missing"])
@pytest.mark.parametrize("read", [partc.Plan.load, partc.Mesh.of, load_csv])
def test_what_is_no_text_is_not_read(tmp_path: Path, content: str, read: object) -> None:
    path = tmp_path / "it.toml"
    if content == "folder":
        path.mkdir()
    elif content == "pipe":
        os.mkfifo(path)  # reading would wait for whoever writes
    elif content == "device":
        path.symlink_to("/dev/zero")  # reading would take all memory
    elif content == "bytes":
        path.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=r"it\.toml"):
        read(path)  # type: ignore[operator]


def test_a_schedule_with_a_long_cell_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("0F0," + "x" * 200_000)
    with pytest.raises(PlanError, match=r"own\.csv.*no CSV.*field limit"):
        load_csv(tmp_path / "own.csv")
