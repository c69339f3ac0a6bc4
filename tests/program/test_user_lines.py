"""Errors, tracebacks and debuggers show for which of the user's calls a line stands."""

from __future__ import annotations

import io
import pdb
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import RunError
from partc.program import Program, load_edited
from partc.program.user_lines import UserLines
from tests.texts import one_role, roles_of

HERE = Path(__file__).name


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Layer(6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


X = torch.randn(8, 6)


def compiled(mesh: str = "dp=1", **options: object) -> Program:
    return partc.compile(Tower(), mesh, (X,), plan="ddp", **options)  # type: ignore[arg-type]


def edited(program: Program, old: str, new: str) -> Program:
    """The program with another text, as after an edit of its files."""
    assert any(old in text for text in program.sources.values())
    sources = {name: text.replace(old, new) for name, text in program.sources.items()}
    return replace(program, sources=sources)


def run(program: Program, x: Tensor = X) -> None:
    role = program.role(0)
    step = role.build(None)
    with torch.no_grad():
        for param in step.parameters():
            param.fill_(0.1)
    role.run(step, [x])


def told(program: Program) -> tuple[str, str]:
    """Where the error of a step arose, and the error's whole text."""
    with pytest.raises(RunError) as found:
        run(program)
    return found.value.where, "".join(traceback.format_exception(found.value))


def test_an_error_names_the_block_and_the_source_line() -> None:
    program = compiled()
    broken = edited(program, "        y = x + down ", "        y = x + down[:, :3] ")
    where, text = told(broken)
    assert where.startswith("layers.0 (")
    assert f"{HERE}:" in where
    assert "y: Tensor = x + self.down(torch.tanh(self.up(x))))" in where
    assert "<- layers.* at " in text  # behind the line of the traceback


def test_the_number_is_that_of_the_block_that_failed() -> None:
    second = "embed_x[:, :3] if layers_saved else embed_x"
    broken = edited(compiled(), "saved = layer(embed_x)", f"saved = layer({second})")
    assert told(broken)[0].startswith("layers.1.up (")


def test_lines_follow_an_edit(tmp_path: Path) -> None:
    program = compiled()
    program.save(tmp_path)
    name, _ = one_role(program)
    old = "        y = x + down"
    text = program.sources[name].replace(old, f"        # mine\n        {old.strip()}[:, :3]")
    (tmp_path / name).write_text(text)
    assert told(load_edited(tmp_path))[0].startswith("layers.0 (")


@pytest.mark.exhaustive
def test_equal_names_show_their_own_text() -> None:
    first, second = compiled(), edited(compiled(), "x + down ", "x + down[:, :3] ")
    first.role(0)
    _, text = told(second)
    second.role(0), first.role(0)
    assert "x + down[:, :3]" in text
    with pytest.raises(RunError) as found:
        run(first, X[:, :3])
    assert "down[:, :3]" not in "".join(traceback.format_exception(found.value))


def test_every_statement_of_a_pipeline_rank_has_its_call() -> None:
    """What computes has a call; the block's number comes from the rank's own tables."""
    program = compiled("pp=2", microbatches=2)
    for name, text in roles_of(program).items():
        found = program.lines[name].of
        for number, line in enumerate(text.splitlines(), 1):
            if "F.linear(" in line and "=" in line:
                module, source = found[number]
                assert module in ("embed", "layers.*.up", "layers.*.down"), line
                assert f"{HERE}:" in source


def test_pdb_steps_through_a_program() -> None:
    role = compiled().role(0)
    step = role.build(None)
    number = next(n for n, (module, _) in role.lines.of.items() if module == "layers.*.up")
    shown = role.module.Step.__init__.__code__.co_filename
    out = io.StringIO()
    commands = io.StringIO("continue\nnext\np tuple(up.shape)\nquit\n")
    debugger = pdb.Pdb(stdin=commands, stdout=out, nosigint=True, readrc=False)
    debugger.use_rawinput = False
    assert debugger.set_break(shown, number) is None
    debugger.runcall(cast(Any, step).step, X)
    assert "<- layers.*.up at " in out.getvalue()
    assert "(8, 18)" in out.getvalue()


def test_lines_are_saved() -> None:
    lines = UserLines(
        {3: ("a.*.b", "net.py:4: x = y"), 9: ("", ""), 11: ("a.*.b", "net.py:4: x = y")}
    )
    assert UserLines.of_json(lines.as_json()) == lines
