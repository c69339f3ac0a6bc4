"""The audit of a program's text: sound programs pass, mistakes in single lines are refused."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import partc
from partc.audit.audit import audit
from partc.audit.sums import check_sums
from partc.cli.main import main
from partc.errors import CheckError, LoadError, RunError
from partc.passes import suspects
from partc.program import Program, load
from partc.program.expected import Expectation
from tests.audit.mutants import Mutant, mutants
from tests.example_program import example_program
from tests.pipelines import toy, toy_program
from tests.texts import roles_of

MODEL = "tests.example_program:cli_target"


@cache
def made(plan: str) -> Program:
    """A toy's program of one of three plans."""
    if plan == "pipeline":
        return toy_program("1f1b", 4, tied=True)[1]
    mesh = "dp=2" if plan == "fsdp" else "dp=2,tp=2"
    return partc.compile(toy(2).step, mesh, plan=plan)


@pytest.mark.rows(1)
@pytest.mark.parametrize("plan", ["ddp+megatron", "fsdp", "pipeline"])
def test_a_sound_program_passes_and_mistakes_are_refused(plan: str) -> None:
    """Eight mistakes of each plan, in lines that wait, transfer or add to a gradient."""
    program = made(plan)
    assert not audit(program).unchecked
    telling = [mutant for mutant in mutants(program) if not _is_idle(mutant)]
    for mutant in random.Random(plan).sample(telling, 8):
        assert refused(mutant.of(program)), mutant


@pytest.mark.exhaustive
def test_numbers_that_nobody_edited_are_looked_for_in_what_is_not_of_partc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = made("fsdp")
    known = program.expected.numbers
    assert known is not None
    tensors = {**known.tensors, "loss": known.tensors["loss"].times(2)}
    other = replace(program, expected=Expectation(lambda: replace(known, tensors=tensors)))
    for rules, told in (({}, "Report it"), ({"aten.mm": "mine"}, r"rule of aten\.mm \(mine\) is")):
        monkeypatch.setattr(suspects, "used_rules", lambda rules=rules: rules)
        with pytest.raises(CheckError, match=rf"loss is off(.|\n)*{told}"):
            audit(other)


def refused(program: Program) -> bool:
    try:
        audit(program)
    except (CheckError, RunError, LoadError):
        return True
    return False


def _is_idle(mutant: Mutant) -> bool:
    """Whether no number changes: lists of transfers are waited for until they are empty.

    A wait for the earlier ones of a list only keeps memory small.
    """
    early = mutant.how == "deleted" and mutant.before == "self.wait(self.bound)"
    return early or (mutant.how == "doubled" and "wait(" in mutant.before)


def edited(program: Program, old: str, new: str) -> Program:
    """A program with the first ``old`` of a file replaced, of a role's if one has it."""
    files = [*sorted(roles_of(program).items()), *program.sources.items()]
    name, text = next((n, t) for n, t in files if old in t)
    return replace(program, sources={**program.sources, name: text.replace(old, new, 1)})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("async_op=True", "async_op=len"),
        ("async_op=True", "async_op='yes'"),
        ("all_gather_single(flat,", "all_gather_single(len,"),
    ],
)
def test_arguments_that_torch_would_not_take_are_refused(old: str, new: str) -> None:
    """All of them are true, or not looked at, where no bytes are sent."""
    with pytest.raises(CheckError, match=r"torch.distributed.\w+ takes no (async_op|output)"):
        audit(edited(made("fsdp"), old, new))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("dist.all_reduce(labels_total, group=self.dp)", "pass",
         "unfinished sum and is not linear"),
        ("dist.all_reduce(labels_total, group=self.dp)",
         "dist.all_reduce(labels_total, group=self.tp)",
         "on tp its operand is whole on every rank, not an unfinished sum"),
        ("op=dist.ReduceOp.MAX", "op=dist.ReduceOp.SUM", "unfinished maximum, not an unfinished"),
        ("dist.all_reduce(loss, group=self.tp)", "pass", "the loss: at the end of the step it is"),
        ("reduced.append((grads, dist.all_reduce(flat, group=self.dp, async_op=True)))",
         "reduced.append((grads, dist.all_reduce(flat, group=self.tp, async_op=True)))",
         "on tp its operand is"),
    ],
)  # fmt: skip
def test_a_sum_that_is_not_finished_once_is_found_on_shapes_alone(
    old: str, new: str, said: str
) -> None:
    with pytest.raises(CheckError, match=said):
        check_sums(edited(made("ddp+megatron"), old, new))


@pytest.mark.parametrize("plan", ["ddp+megatron", "fsdp"])
def test_every_gradient_is_followed_to_the_end(plan: str) -> None:
    found = check_sums(made(plan))
    assert found.known == found.total > 0


def test_ranks_that_differ_in_the_order_of_transfers_are_refused() -> None:
    """One of two pipeline ranks takes another one for the source of the loss."""
    program = made("pipeline")
    name = min(roles_of(program))
    text = program.sources[name].replace("group_src=1", "group_src=0")
    with pytest.raises(CheckError, match=r"starts broadcast .* where rank"):
        audit(replace(program, sources={**program.sources, name: text}))


class Noisy(nn.Module):
    """Draws a mask, and keeps a count in a buffer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 4)
        self.drop = nn.Dropout(0.25)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        y: torch.Tensor = self.second(self.drop(self.first(x).relu()))
        return y.square().mean()


@pytest.mark.exhaustive
@pytest.mark.parametrize("trains", [True, False])
def test_programs_with_masks_and_forward_programs_have_numbers(
    tmp_path: Path, trains: bool
) -> None:
    model = Noisy() if trains else Noisy().eval()
    with torch.set_grad_enabled(trains):
        program = partc.compile(model, "dp=2", (torch.zeros(8, 8),), plan="ddp")
    program.save(tmp_path / "build")
    saved = load(tmp_path / "build")
    assert saved.expected.numbers == program.expected.numbers
    assert not audit(saved).unchecked
    assert refused(edited(saved, "first", "second")) or refused(edited(saved, "0.5", "0.25"))


# the command --------------------------------------------------------------------------------------
def spoil(folder: Path, change: Callable[[str], str]) -> None:
    path = next(folder.glob("*0.py"))
    path.write_text(change(path.read_text()))


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("gathered_done.wait()", r"role0.py:\d+.*memory of all_gather_single under way"),
        ("add_grad(self.up_bias, d_up_bias)", "up.bias: the step adds nothing to its gradient"),
    ],
)
def test_refused_edits_leave_the_folder_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, said: str
) -> None:
    folder = tmp_path / "build"
    example_program().save(folder)
    spoil(folder, lambda text: text.replace(old, "pass", 1))
    before = (folder / "program.json").read_bytes()
    assert main(["check", str(folder), "--accept-edits"]) == 2
    told = capsys.readouterr().err
    assert re.search(said, told), told
    assert (folder / "program.json").read_bytes() == before


class EmptyFirst(nn.Module):
    """Begins a list with an entry of no dims and another dtype, as caches of keys do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.tensor([], dtype=torch.float64), self.up(x)], dim=-1)


def test_a_concatenation_with_an_empty_list_is_followed() -> None:
    program = partc.compile(
        EmptyFirst(), "dp=2", (torch.ones(4, 4),), loss=lambda m, x: m(x).sum(), plan="ddp"
    )
    assert "torch.cat([" in "".join(program.sources.values())
    assert any(line.startswith("numbers:") for line in audit(program).checked)


@pytest.mark.exhaustive
def test_a_model_decides_where_a_program_has_no_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "build")
    example_program().save(folder)
    spoil(tmp_path / "build", lambda text: text.replace("(2 / 96)", "(1 / 96)"))
    assert main(["check", folder, "--accept-edits", "--model", MODEL]) == 2
    assert "differ from the model's" in capsys.readouterr().err
    assert main(["check", folder, "--accept-edits"]) == 2
    assert "--accept-edits --model" in capsys.readouterr().err
    example_program().save(folder)
    spoil(tmp_path / "build", lambda text: text.replace("(2 / 96)", "(1 / 48)"))
    assert main(["check", folder, "--accept-edits", "--model", MODEL]) == 0
    told = capsys.readouterr().out
    assert "not checked: numbers" in told
    assert "accepted: role0.py" in told
