"""Saved programs from strangers, whose digests were made right again."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from partc.cli.main import main
from partc.errors import LoadError
from partc.program import load
from tests.damage.artefacts import forge, write_manifest
from tests.example_program import example_program
from tests.forked_scripts import run_ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    example_program().save(tmp_path / "build")
    return tmp_path / "build"


def forge_entries(folder: Path, **entries: Any) -> None:
    path = folder / "program.json"
    write_manifest(path, json.loads(path.read_text()) | entries)


def test_what_shows_a_program_runs_nothing_of_it(folder: Path) -> None:
    ran = folder.parent / "ran"
    role = folder / "role0.py"
    role.write_text(f"{role.read_text()}open({str(ran)!r}, 'w')\n")
    inputs = {name: [[12, 8], "float32", [["dp", 0, 1]]] for name in "xy"}
    forge_entries(folder, inputs=inputs)
    forge(folder)
    for words in (["explain"], ["simulate"], ["diff", str(folder)], ["check"]):
        code = main([*words, str(folder)])
        assert not ran.exists(), words
    assert code == 2


def test_explain_says_what_a_rank_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = {name: [[12, 8], "float32", [["dp", 0, 1]]] for name in "xy"}
    forge_entries(folder, inputs=inputs)
    assert main(["explain", str(folder)]) == 0
    assert "inputs x float32[12, 8] ([6, 8] on each rank)" in capsys.readouterr().out


def test_run_py_refuses_a_role_that_is_no_python(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run: Any = runpy.run_path(str(folder / "run.py"))
    for text in (b"def (", b"x = '\xff'", b"(" * 100_000):
        with pytest.raises(SystemExit) as caught:
            run["load_role"]({"roles": [[1, "role0.py"]]}, {"role0.py": text}, 0)
        assert caught.value.code == 2
        assert "role0.py: is no Python" in capsys.readouterr().err
    for text in (b"SHARDS = {}", b"x: int = dist.Group", b"1 / 0", b"name = ''\nname()"):
        with pytest.raises(SystemExit) as caught:
            run["load_role"]({"roles": [[1, "role0.py"]]}, {"role0.py": text}, 0)
        assert caught.value.code == 2
        assert "role0.py: is no rank program (" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["role0.py", "plan.toml", "program.json"])
def test_a_text_without_end_is_not_read(folder: Path, name: str) -> None:
    with (folder / name).open("wb") as file:  # takes no room on the disk
        file.truncate(40_000_000_000)
    with pytest.raises(LoadError, match=f"{name}.*more than 64,000,000 bytes"):
        load(folder)


def test_constants_without_end_are_not_hashed(folder: Path) -> None:
    with (folder / "constants.safetensors").open("r+b") as file:
        file.truncate(40_000_000_000)
    with pytest.raises(LoadError, match="another size than its header says"):
        load(folder)
    (run,) = run_ranks(folder / "run.py", num=1)
    assert run.code == 2
    assert "constants.safetensors: missing, damaged or edited" in run.text


def test_printed_texts_of_some_files_alone_are_refused(folder: Path) -> None:
    fixed = json.loads((folder / "program.json").read_text())["fixed"]
    forge_entries(folder, fixed=fixed | {"printed": {"other.py": fixed["printed"]["role0.py"]}})
    with pytest.raises(LoadError, match=r"program\.json: has entries that are .* malformed"):
        load(folder)


def test_a_description_of_returned_values_that_is_none_is_refused(folder: Path) -> None:
    forge_entries(folder, returns={"up": ["param", [3], "float32"]})
    with pytest.raises(LoadError, match=r"program\.json: has entries that are .* malformed"):
        load(folder)
