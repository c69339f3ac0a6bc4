"""What README.md shows is what happens."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import partc
from examples import mlp

README = Path(__file__).resolve().parent.parent / "README.md"
WRITTEN = re.compile(r"(<!-- written by: .*? -->\n```python\n)(.*?)(```)", re.DOTALL)
EXAMPLES = re.compile(r"## (?:Use|Pipelines)\n.*?```python\n(.*?)```", re.DOTALL)


@pytest.fixture
def shown(request: pytest.FixtureRequest) -> Callable[[int, str], None]:
    """Compare code with the n-th block of README.md that is written by these tests."""

    def compare(number: int, code: str) -> None:
        text = README.read_text()
        found = list(WRITTEN.finditer(text))[number]
        if request.config.getoption("--update-golden"):
            text = text[: found.start(2)] + code + text[found.end(2) :]
            README.write_text(text)
            found = list(WRITTEN.finditer(text))[number]
        assert found[2] == code, "run pytest tests/test_readme.py --update-golden"

    return compare


def test_step(shown: Callable[[int, str], None]) -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 16), torch.randn(8, 16)
    program = partc.compile(mlp.MLP(), "tp=2", batch, loss=mlp.loss_of, plan="megatron")
    source = program.source(rank=0)
    step = source[source.index("    @torch.no_grad()") : source.index("\nStep =")].rstrip() + "\n"
    shown(1, step)


def test_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: Callable[[int, str], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    use, pipelines = EXAMPLES.findall(README.read_text())
    exec(compile(use, str(README), "exec"), names)
    assert (tmp_path / "build" / "mlp" / "run.py").exists()
    exec(compile(pipelines, str(README), "exec"), names)
    source = names["program"].source(rank=0)
    loops = source[source.index("        # warm-up") : source.index("        self.x_out[0].wait()")]
    shown(0, loops)
