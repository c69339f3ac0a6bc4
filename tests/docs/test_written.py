"""What pages show of programs is what partc prints: blocks that these tests write.

``python -m pytest tests/docs --update-golden`` writes them anew.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import partc
from examples import mlp
from tests.docs.pages import ROOT, blocks, rewrite

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
