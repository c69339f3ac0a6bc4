"""Every fenced block of README, CONTRIBUTING and docs/ does what the page says.

Python runs, commands run and leave with exit code 0, TOML is loaded as a plan or a mesh, console
blocks print what they show. The blocks of a page share their names and a temporary folder.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from partc import Mesh, Plan
from partc.cost.flops import FORMULAS
from partc.cost.workspaces import WORKSPACES
from partc.rules.table import RULES
from partc.schedules import NAMES
from tests.docs.pages import COMMAND, PAGES, ROOT, Block, blocks, name_of, rewrite
from tests.patience import patience

DO = ("python", "bash", "console", "toml")
LANGUAGES = {*DO, "text", "csv", "json"}
MARKS = {"", "not run", "file", "prints", "written by"}
MESH_KEYS = {"machine", "axes", "devices", "levels"}
NOT_RUN = {  # how many blocks of a page no test can run; the reason stands above each
    "README.md": 1,
    "CONTRIBUTING.md": 4,
    "docs/how-to/add-a-machine.md": 1,
    "docs/how-to/add-a-pass.md": 3,
    "docs/how-to/add-a-rule.md": 1,
    "docs/how-to/add-a-schedule.md": 1,
    "docs/how-to/checkpoints.md": 3,
    "docs/how-to/explain-and-measure.md": 2,
    "docs/how-to/let-a-run-adapt.md": 2,
    "docs/how-to/launch-on-a-cluster.md": 1,
    "docs/how-to/load-data.md": 3,
    "docs/how-to/run-a-program.md": 7,
    "docs/how-to/shapes-and-modes.md": 6,
    "docs/how-to/train-in-islands.md": 1,
    "docs/how-to/trainer-and-accelerate.md": 2,
    "docs/how-to/use-parameter-servers.md": 1,
    "docs/performance.md": 10,
    "docs/how-to/watch-a-run.md": 2,
    "docs/how-to/survive-failures.md": 8,
    "docs/reference/commands.md": 8,
}


@dataclass
class Reader:
    """Someone who does what a page says, block by block, in an empty folder."""

    folder: Path
    update: bool = False
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "page"})
    printed: str = ""

    def follow(self, block: Block) -> None:
        if block.mark == "file":
            (self.folder / block.told).write_text(block.text, encoding="utf-8")
        if block.mark == "prints":
            self.compare(block.text, self.printed, block)
        elif block.language == "toml" and block.mark == "file":
            self.toml(block)
        elif block.language in DO and not block.mark:
            getattr(self, block.language)(block)

    def python(self, block: Block) -> None:
        code = compile("\n" * block.line + block.text, str(block.page), "exec")
        with redirect_stdout(StringIO()) as out:
            exec(code, self.names)
        self.printed = out.getvalue()

    def bash(self, block: Block) -> None:
        for line in block.text.replace("\\\n", " ").splitlines():
            if line.strip() and not line.startswith("#"):
                self.command(line, block)

    def console(self, block: Block) -> None:
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            self.command(line, block)
            self.compare(shown, self.printed, block)

    def toml(self, block: Block) -> None:
        if MESH_KEYS & set(tomllib.loads(block.text)):
            path = self.folder / "a-mesh.toml"
            path.write_text(block.text, encoding="utf-8")
            Mesh.of(str(path))
        else:
            Plan.parse(block.text, str(block))

    def command(self, line: str, block: Block) -> None:
        """Run a line; ``partc`` in this process, which is quicker by the seconds of an import."""
        words = shlex.split(line, comments=True)
        if words[0] == "partc":
            with redirect_stdout(StringIO()) as out:
                code = COMMAND(words[1:])
            self.printed = out.getvalue()
        else:
            code, self.printed = self.shell(line)
        assert code == 0, f"{block}: {line}\n{self.printed}"

    def shell(self, line: str) -> tuple[int, str]:
        """Exit code and output of a line in bash, with the tools of this environment.

        The pages speak to a person at a machine of their own: ``CI`` is not among its variables.
        """
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        more = {"PATH": path, "PYTHONPATH": f"{ROOT}{os.pathsep}{self.folder}"}
        more |= {"OMP_NUM_THREADS": "1"}
        kept = {name: value for name, value in os.environ.items() if name != "CI"}
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env={**kept, **more},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=patience(),
            check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def compare(self, shown: str, printed: str, block: Block) -> None:
        """Three dots stand for any text; without any ``--update-golden`` writes anew."""
        if self.update and block.mark == "prints" and "..." not in shown:
            rewrite(block, shown := printed.rstrip("\n") + "\n")
        alike = OutputChecker().check_output(shown, printed, ELLIPSIS | NORMALIZE_WHITESPACE)
        assert alike, f"{block} shows\n{shown}\nbut this was printed\n{printed}"


COSTLY = {  # pages whose blocks take most of the time of all
    "docs/tutorials/from-one-process-to-a-pipeline.md", "docs/how-to/load-data.md",
    "docs/how-to/trainer-and-accelerate.md", "docs/how-to/run-a-program.md",
    "docs/how-to/send-fewer-bytes.md",
    "docs/how-to/use-parameter-servers.md", "docs/how-to/pin-your-model.md",
    "docs/reference/commands.md", "docs/how-to/read-the-report.md",
    "docs/how-to/draw-and-compare.md", "docs/how-to/explain-and-measure.md",
}  # fmt: skip


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(each, marks=[pytest.mark.exhaustive] * (name_of(each) in COSTLY))
        for each in PAGES
    ],
    ids=name_of,
)
def test_page(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for registry in (RULES, FORMULAS, WORKSPACES, NAMES):  # a page's own entries end with it
        monkeypatch.setattr(registry, "_entries", dict(registry.items()))
    torch.manual_seed(0)
    reader = Reader(tmp_path, request.config.getoption("--update-golden"))
    known = set(sys.modules)
    for block in blocks(page):
        reader.follow(block)
    for name in set(sys.modules) - known:  # a page's own files
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_every_block_has_a_language_and_a_known_mark() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found = list(blocks(page))
        assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(found), page
        for block in found:
            assert block.language in LANGUAGES, f"{block}: language {block.language!r}"
            assert block.mark in MARKS, f"{block}: <!-- {block.mark} -->"
            assert block.told or block.mark not in ("not run", "file"), f"{block}: says nothing"
        assert not re.search(r"\n\n {4}\S.*\n", _outside(text, found)), f"{page}: indented code"


def _outside(text: str, found: list[Block]) -> str:
    """A page without its blocks, and without the lines of its lists."""
    for block in reversed(found):
        text = text[: block.span[0]] + text[block.span[1] :]
    return re.sub(r"^ *(?:[-*]|\d+\.) .*(?:\n+ +.*)*", "", text, flags=re.MULTILINE)


def test_what_is_not_run_is_a_short_list() -> None:
    counted: dict[str, int] = {}
    for page in PAGES:
        for block in blocks(page):
            if block.mark == "not run":
                counted[name_of(page)] = counted.get(name_of(page), 0) + 1
                if block.language == "python":
                    ast.parse(block.text)
    assert counted == NOT_RUN


def test_commands_of_the_repository_exist() -> None:
    """Also those of blocks that are not run, and in sentences."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for module, rest in re.findall(r"python -m ((?:benchmarks|tests)[.\w]*)([^`\n]*)", text):
            path = ROOT / module.replace(".", "/")
            file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path
            assert file.exists(), f"{page}: {module}"
            sources = [file] if file.is_file() else file.glob("*.py")
            source = "".join(each.read_text(encoding="utf-8") for each in sources)
            for option in re.findall(r"(?<= )--[a-z-]+", rest.partition(" -- ")[0]):
                assert f'"{option}"' in source, f"{page}: {module} has no {option}"


def test_links_lead_somewhere() -> None:
    """Relative links of all pages, and the headings that they name."""
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in target or target.startswith("mailto:"):
                continue
            name, _, heading = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            assert path.exists(), f"{page}: {target}"
            assert not heading or heading in _anchors(path), f"{page}: {target}"


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def test_modules_that_pages_name_exist() -> None:
    """A path such as `partc/api.py` in a sentence is a file; `*` and `<name>` stand for any."""
    for page in PAGES:
        for path in re.findall(r"`((?:partc|passes|codegen|tests|benchmarks|examples)/[\w/.*-]+)`",
                               page.read_text(encoding="utf-8")):  # fmt: skip
            there = any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists()
            assert there, f"{name_of(page)}: {path}"


def test_tests_that_pages_name_exist() -> None:
    """In commands and comments too, such as `python -m pytest tests/plan/test_plan.py`, if the
    reader of the page does not write them.
    """
    for page in PAGES:
        own = {block.told for block in blocks(page) if block.mark == "file"}
        for path in re.findall(r"\btests/[\w/]+\.py", page.read_text(encoding="utf-8")):
            is_written = path in own or "/partc_golden/" in path  # by the reader, by pytest
            assert is_written or (ROOT / path).exists(), f"{name_of(page)}: {path}"
