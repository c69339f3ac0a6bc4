"""Of several statements on one line each call belongs to its own, and is named after it."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

import partc
from partc.trace.source_lines import statement_text

CODE = """\
from torch import nn


class Short(nn.Module):
    def __init__(self):
        super().__init__(); self.up = nn.Linear(4, 8)

    def forward(self, x):
        wide = self.up(x); bent = wide.sin() + 1; flat = bent.exp() * wide
        return flat
"""


@pytest.mark.parametrize(
    ("line", "column", "said"),
    [
        ("    a = f(x); b = ';'; c = g(b)", 4, "a = f(x)"),
        ("    a = f(x); b = ';'; c = g(b)", 27, "c = g(b)"),
        ("    for x in y: a = f(x); b = g(a)", 30, "b = g(a)"),
        ("    if x: a = f(';'", 12, "if x: a = f(';'"),
        ("    a = f(x)", 0, "a = f(x)"),
    ],
)
def test_the_statement_at_a_column(tmp_path: Path, line: str, column: int, said: str) -> None:
    file = tmp_path / "code.py"
    file.write_text(f"{line}\n")
    assert statement_text(str(file), 1, column).partition(":1: ")[2] == said


def test_values_have_the_names_of_their_own_statements(tmp_path: Path) -> None:
    file = tmp_path / "short_module.py"
    file.write_text(CODE)
    spec = spec_from_file_location("short_module", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    program = partc.compile(
        module.Short(), "dp=1", (torch.ones(4, 4),), loss=lambda m, x: m(x).sum(), plan="ddp"
    )
    text = program.source(0)
    assert "bent = torch.sin(" in text
    assert "flat" in text
