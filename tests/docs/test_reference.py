"""The reference is complete: every key of a plan, every option, error code and public name."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

import partc
from partc.errors import EXPLANATIONS
from tests.docs.pages import COMMAND, ROOT, blocks

REFERENCE = ROOT / "docs" / "reference"
# known while a plan is written, or comments: no keys of its file
NOT_WRITTEN = {"apart", "of_another", "homes", "other_passes", "left_out"}


def headings(page: str) -> list[str]:
    text = (REFERENCE / page).read_text(encoding="utf-8")
    return re.findall(r"^#{2,3} `?([^`\n]+)`?$", text, re.MULTILINE)


def test_every_key_of_a_plan_has_an_example() -> None:
    keys = {field.name for field in dataclasses.fields(partc.Plan)} - NOT_WRITTEN
    named = [name for name in headings("plan.md") if name in keys]
    assert sorted(named) == sorted(keys)
    text = (REFERENCE / "plan.md").read_text(encoding="utf-8")
    for key in keys:
        section = re.split(r"^#{2,3} ", text.partition(f"### `{key}`\n")[2], flags=re.MULTILINE)[0]
        assert re.search(rf"```toml\n.*^\[?{key}\b", section, re.DOTALL | re.MULTILINE), key


def test_examples_of_a_plan_say_what_their_key_is() -> None:
    """An example that is the default would pass for any text."""
    for block in blocks(REFERENCE / "plan.md"):
        if block.language == "toml":
            plan = partc.Plan.parse(block.text)
            assert plan != partc.Plan(), block


def help_of(*words: str) -> str:
    with redirect_stdout(StringIO()) as out, pytest.raises(SystemExit):
        COMMAND([*words, "--help"])
    return out.getvalue()


def test_every_command_and_option_is_named() -> None:
    commands = re.findall(r"^    ([a-z]+) {2,}\S", help_of(), re.MULTILINE)
    assert len(commands) > 5
    text = (REFERENCE / "commands.md").read_text(encoding="utf-8")
    assert set(commands) <= set(headings("commands.md"))
    for command in commands:
        for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", help_of(command))) - {"--help"}:
            assert re.search(rf"{option}\b", text), f"partc {command} {option}"


def test_every_error_code_is_explained() -> None:
    assert headings("errors.md") == list(EXPLANATIONS)


def test_every_public_name_has_its_docstring() -> None:
    text = (REFERENCE / "api.md").read_text(encoding="utf-8")
    for name in partc.__all__:
        assert f"::: partc.{name}\n" in text, name
        assert getattr(partc, name).__doc__, name


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ *- .*: (\S+\.md)$", config, re.MULTILINE)
    docs = ROOT / "docs"
    there = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert sorted(named) == sorted(there)


def test_the_pages_build(tmp_path: Path) -> None:
    """Where mkdocs is installed: a warning, as of a broken link or a missing name, is an error."""
    pytest.importorskip("mkdocstrings")
    mkdocs = Path(sys.executable).with_name("mkdocs")
    command = [str(mkdocs) if mkdocs.exists() else str(shutil.which("mkdocs")), "build", "--strict"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "site" / "reference" / "api" / "index.html").read_text(encoding="utf-8")
    assert "Compile one training step" in api


def test_every_row_on_reliability_names_tests_that_exist() -> None:
    """The column Test has ``file.py::function``, more functions of that file, or ``the same``."""
    tables = re.findall(r"(?:^\|.*\n)+", (ROOT / "docs/reliability.md").read_text(), re.MULTILINE)
    rows = [re.findall(r"^\| .* \| ([^|]*) \|$", table, re.MULTILINE) for table in tables]
    tests = [row for heading, *rest in rows if heading == "Test" for row in rest]
    assert len(tests) > 250
    for row in tests:
        file = ""
        for name in re.findall(r"`([^`]+)`", row):
            file, _, function = name.rpartition("::") if "::" in name else (file, "", name)
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert f"def {function}(" in text, name
        assert file or row.startswith("the same"), row
