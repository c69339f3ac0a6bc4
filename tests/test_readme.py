"""What README.md shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import partc
from examples import mlp

README = Path(__file__).resolve().parent.parent / "README.md"
STEP = re.compile(r"(<!-- written by: .*? -->\n```python\n)(.*?)(```)", re.DOTALL)


def test_step(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 16), torch.randn(8, 16)
    program = partc.compile(mlp.MLP(), "tp=2", batch, loss=mlp.loss_of, plan="megatron")
    source = program.source(rank=0)
    step = source[source.index("    @torch.no_grad()") : source.index("\nStep =")].rstrip() + "\n"
    text = README.read_text()
    if request.config.getoption("--update-golden"):
        README.write_text(STEP.sub(lambda found: found[1] + step + found[3], text))
    shown = STEP.search(README.read_text())
    assert shown is not None
    assert shown[2] == step, "run pytest tests/test_readme.py --update-golden"


def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = re.search(r"## Use\n\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert example is not None
    exec(compile(example[1], str(README), "exec"), {})
    assert (tmp_path / "build" / "mlp" / "run.py").exists()
