"""A role imports its helpers from the file beside it, which all roles of a program share."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import partc
from partc.audit.edits import accept_edits
from partc.codegen.files.role_file import import_of, names_in
from partc.errors import CheckError, LoadError
from partc.program import Program
from partc.program.helper_file import NAME, imported
from partc.program.role import Role
from tests.pipelines import compiled, toy
from tests.texts import one_role, roles_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x).tanh()).square().mean()
        return out


@cache
def program(preset: str = "fsdp") -> Program:
    return partc.compile(Net(), "dp=2", (torch.randn(4, 8),), plan=preset)


@cache
def pipeline() -> Program:
    return compiled(toy(4), "pp=2,dp=2", partc.Plan(preset="fsdp"), "1f1b", 4)


@pytest.mark.exhaustive
def test_all_roles_share_one_file_that_has_what_they_import() -> None:
    texts = dict(pipeline().sources)
    defined = names_defined(texts.pop(NAME))
    taken = [imported(ast.parse(text)) for text in texts.values()]
    assert len(taken) == 2
    assert all(names and names <= defined for names in taken)
    assert taken[0] != taken[1]  # a role imports what it calls alone


@pytest.mark.exhaustive
def test_the_file_has_nothing_that_no_role_calls() -> None:
    """Each function is imported by a role, or called by another one of the file."""
    text = pipeline().sources[NAME]
    called = names_in(text).union(*(imported(ast.parse(t)) for t in roles_of(pipeline()).values()))
    assert names_defined(text) <= called


def names_defined(text: str) -> set[str]:
    body = ast.parse(text).body
    return {each.name for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef)}


def test_a_program_that_calls_no_helper_has_no_such_file() -> None:
    with torch.no_grad():
        made = partc.compile(Net().eval(), "dp=1", (torch.randn(4, 8),), plan="ddp")
    assert NAME not in made.sources
    assert "helpers" not in made.source()


def test_the_folder_is_a_package_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A role can be imported as any module, also where another ``helpers`` stands on the path."""
    program().save(tmp_path / "net")
    (tmp_path / NAME).write_text("raise RuntimeError('not this one')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    role = importlib.import_module("net.stage0")
    assert role.gather_weights.__module__ == "net.helpers"


def test_what_the_file_lacks_is_named() -> None:
    name, text = one_role(program())
    with pytest.raises(LoadError, match=f"it imports Reduced, which {NAME} does not define"):
        Role.load(text, name)
    with pytest.raises(LoadError, match=rf"{NAME}: is not a rank program \(line 1: ZeroDivision"):
        Role.load(text, name, helpers="1 / 0")


@pytest.mark.parametrize("line", [
    "from .helpers import gather as empty", "from .other import gather", "from .helpers import *",
    "from helpers import gather", "from ..helpers import gather", "from . import helpers",
])  # fmt: skip
def test_a_role_imports_nothing_else(line: str, tmp_path: Path) -> None:
    program().save(tmp_path / "net")
    path = tmp_path / "net" / "stage0.py"
    path.write_text(path.read_text().replace("MESH = ", f"{line}\nMESH = ", 1))
    with pytest.raises(CheckError, match="it imports"):
        accept_edits(tmp_path / "net")


@pytest.mark.parametrize(("old", "new", "said"), [
    ("param.grad.add_(grad)", "param.grad.add_(grad, alpha=2.0)", "accumulated gradient"),
    ("dist.all_gather_single(", "dist.all_to_all_single(", "all_to_all|do not fit|other numbers"),
    ("import torch\n", "import os\nimport torch\n", "it imports os"),
])  # fmt: skip
def test_edits_of_helpers_are_proved_as_those_of_roles(
    old: str, new: str, said: str, tmp_path: Path
) -> None:
    program().save(tmp_path / "net")
    path = tmp_path / "net" / NAME
    before = path.read_text()
    assert old in before
    path.write_text(before.replace(old, new))
    with pytest.raises(LoadError, match=f"{NAME}"):
        partc.load(tmp_path / "net")
    with pytest.raises(CheckError, match=said):
        accept_edits(tmp_path / "net")


def test_an_edit_of_helpers_that_changes_no_number_is_taken(tmp_path: Path) -> None:
    program().save(tmp_path / "net")
    path = tmp_path / "net" / NAME
    product = "d_y.flatten(0, -2).T @ x.flatten(0, -2)"
    assert product in path.read_text()
    path.write_text(path.read_text().replace(product, f"({product}) * 1.0"))
    assert f"({product}) * 1.0" in accept_edits(tmp_path / "net").sources[NAME]


def test_imports_fill_their_lines() -> None:
    names = [f"function_{i}" for i in range(12)]
    lines = import_of(names).splitlines()
    assert (lines[0], lines[-1]) == ("from .helpers import (", ")")
    assert max(map(len, lines)) <= 100
    assert import_of([]) == ""


def test_golden(golden: Callable[..., None]) -> None:
    golden(pipeline().sources[NAME], ".py")
