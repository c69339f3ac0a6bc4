"""The audit of a program's text: sound programs pass, mistakes in single lines are refused."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from partc.audit.audit import audit
from partc.cli.main import main
from partc.errors import CheckError, LoadError, RunError
from partc.program import Program, load
from tests.audit.mutants import PLANS, Mutant, mutants
from tests.zoo import Case

SAMPLE = ("ddp+megatron", "fsdp", "1f1b tied")


@cache
def made(plan: str) -> tuple[Case, Program]:
    return PLANS[plan]()


@pytest.mark.parametrize("plan", SAMPLE)
def test_a_sound_program_passes_and_its_mistakes_are_refused(plan: str) -> None:
    """Eight mistakes of each plan, in lines that wait, transfer or add to a gradient."""
    _, program = made(plan)
    assert not audit(program).unchecked
    for mutant in random.Random(plan).sample(_distinct(program), 8):
        with pytest.raises((CheckError, RunError, LoadError)):
            print(mutant)
            audit(mutant.of(program))


def _distinct(program: Program) -> list[Mutant]:
    """Mutants that change what is computed: a doubled assignment or wait of nothing does not."""
    return [m for m in mutants(program) if m.how == "deleted"]


def spoil(folder: Path, old: str, new: str) -> None:
    """Replace the first ``old`` in one of a program's files."""
    for path in sorted(folder.glob("*.py")):
        if path.name != "run.py" and old in path.read_text():
            path.write_text(path.read_text().replace(old, new, 1))
            return
    raise AssertionError(f"no file has {old!r}")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("d_norm_0_done.wait()", "pass", "memory of all_reduce under way"),
        ("loss_done.wait()", "pass", "nobody waits for all_reduce"),
    ],
)
def test_check_refuses_edits_and_leaves_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    made("ddp+megatron")[1].save(tmp_path / "build")
    spoil(tmp_path / "build", old, new)
    before = (tmp_path / "build" / "program.json").read_bytes()
    assert main(["check", str(tmp_path / "build"), "--accept-edits"]) == 2
    assert said in capsys.readouterr().err
    assert (tmp_path / "build" / "program.json").read_bytes() == before
    with pytest.raises(LoadError, match="was changed"):
        load(tmp_path / "build")
