"""What pages show of programs is what partc prints: blocks that these tests write.

``python -m pytest tests/docs --update-golden`` writes them anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import partc
from examples import mlp
from partc.lowering import PASSES, described
from partc.passes.runner import Table
from tests.docs.pages import ROOT, blocks, rewrite
from tests.house import GROUND, ROOMS, TOP

ARCHITECTURE = "docs/explanation/architecture.md"
README_LINES = 150
SHOWN_LINES = 30


@pytest.fixture
def shown(request: pytest.FixtureRequest) -> Callable[[str, int, str], None]:
    """Compare code with the n-th block of a page that is written by these tests."""

    def compare(page: str, number: int, code: str) -> None:
        def found() -> str:
            return [b for b in blocks(ROOT / page) if b.mark == "written by"][number].text

        if request.config.getoption("--update-golden"):
            written = [b for b in blocks(ROOT / page) if b.mark == "written by"]
            rewrite(written[number], code)
        assert found() == code, "run pytest tests/docs --update-golden"

    return compare


def test_the_step_in_the_readme(shown: Callable[[str, int, str], None]) -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 16), torch.randn(8, 16)
    program = partc.compile(mlp.MLP(), "tp=2", batch, loss=mlp.loss_of, plan="megatron")
    source = program.source(rank=0)
    step = source[source.index("    @torch.no_grad()") : source.index("\nStep =")].rstrip() + "\n"
    assert step.count("\n") <= SHOWN_LINES
    shown("README.md", 0, step)


def test_the_readme_is_read_in_ten_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < README_LINES


def test_the_table_of_passes(shown: Callable[[str, int, str], None]) -> None:
    """As ``partc passes`` prints it where no package has a pass."""
    shown(ARCHITECTURE, 0, "\n".join(described(Table(PASSES))) + "\n")


def test_the_picture_has_the_rooms_in_their_order() -> None:
    (picture,) = (b.text for b in blocks(ROOT / ARCHITECTURE) if b.text.startswith("partc/*.py"))
    folders = [line.split()[0].rstrip("/") for line in picture.splitlines()]
    assert folders == [_folder(room) for room in ROOMS]


def _folder(room: str) -> str:
    """Where the modules of a room are."""
    if room in (GROUND, TOP):
        return "partc/*.py"
    linked = room.startswith(("partc.passes", "partc.codegen"))
    return (room.removeprefix("partc.") if linked else room).replace(".", "/")


def test_the_tables_of_the_architecture_name_files() -> None:
    """A column that is headed "file of `passes/search/`" has files of that folder."""
    table = re.compile(r"^\|.*(?:file|module) of `(\S+/)`.*\n((?:\|.*\n)+)", re.MULTILINE)
    found = table.findall((ROOT / ARCHITECTURE).read_text(encoding="utf-8"))
    assert len(found) >= 4
    for folder, rows in found:
        for name in re.findall(r"`([\w/]+\.py)`", rows):
            assert (ROOT / folder / name).exists() or (ROOT / name).exists(), f"{folder}{name}"
