"""Edits that small seeded numbers do not show: masks, bounds, other modes, NaN."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partc
from partc.audit.audit import audit
from partc.audit.changed_lines import Changes
from partc.errors import CheckError, PartcError
from partc.program import Program
from partc.program.fixed_text import FixedText
from tests.audit.bounded import Bounded, loss_of, program
from tests.texts import edited, one_role, with_role


def changed(pattern: str, new: str) -> Program:
    """The program with the first match of a pattern replaced."""
    return edited(program(), pattern, new)


SILENT = [
    (r"one_dropout_mask = dropout_mask\((.*)\)", r"\g<0>.flip(0)", "random numbers"),
    (r"\* one_dropout_mask\b", "* one_dropout_mask[:1]", "other numbers than the step"),
    (r"\* one_dropout_mask\b", "* one_dropout_mask.mean()", "other numbers than the step"),
    (r"(d_second = .*)\* two_dropout_mask\b", r"\1* one_dropout_mask", "other numbers than the"),
    (r"F\.hardtanh\((\w+), 0, 6\)", r"F.relu(\1)", "other numbers than the printed one"),
    (r"hardtanh_backward\((\w+, \w+), min_val=0, max_val=6\)",
     r"hardtanh_backward(\1, min_val=0, max_val=7)",
     "where numbers reach max_val=6 of hardtanh_backward"),
    (r"clamp\((\w+), -30.0, 30.0\)", r"clamp(\1, -30.0, 31.0)", "other numbers than the printed"),
    (r"(>=?) -30.0", r"\1 -31.0", "where numbers reach"),  # from torch 2.14 on a limit is outside
    (r"1e-12\)", "1e-8)", "where numbers reach"),
    (r"== 0, 0\)", "== 0, 1)", "where numbers reach"),
    (r"self\.seen \+= 1\b", "self.seen += self.seen < 3", "no number of the check reaches lt 3"),
    (r"( +)(param\.grad = grad if)", r"\1grad = grad.clamp(-1e3, 1e3)\n\1\2",
     "computes other numbers|no number of the check reaches"),
    (r"( +)(param\.grad = grad if)", r"\1grad = grad.nan_to_num()\n\1\2", "where numbers are NaN"),
    (r"( +)(reduced\.finish\(\))", r"\1loss = loss * self.training\n\1\2", "in eval mode"),
    (r"( +)(reduced\.finish\(\))", r"\1loss = loss * 2 if x.dim() > 2 else loss\n\1\2",
     "decides by a condition"),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(("pattern", "new", "said"), SILENT)
def test_edits_that_seeded_numbers_do_not_show_are_refused(
    pattern: str, new: str, said: str
) -> None:
    with pytest.raises(PartcError, match=said):
        audit(changed(pattern, new))


@pytest.mark.exhaustive
def test_edits_that_change_no_number_are_accepted() -> None:
    told = audit(changed(r"( +)(reduced\.finish\(\))", r"\1loss = loss.clone()\n\1\2"))
    assert not told.unchecked
    assert "printed and edited text agree on large numbers, NaN, in eval mode" in str(told)


def test_the_lines_of_edits_are_found() -> None:
    printed = {"a.py": "x = 1\nif x:\n    y = 2\nz = 3\n"}
    now = {"a.py": "z = 3\nx = 1\nif x:\n    y = 3\n    u = 1 if x else 2\n"}
    found = Changes.of(printed, now)
    assert (str(found), sorted(found.printed)) == ("a.py:4", [("a.py", 3)])
    assert found.conditions == {("a.py", 5)}


def test_the_printed_text_is_saved_with_the_program() -> None:
    assert program().fixed is not None
    saved = FixedText.of_json(program().fixed.as_json())  # type: ignore[union-attr]
    assert saved.sources == program().sources


class Drawing(nn.Module):
    """Draws from several distributions, of fixed and of computed chances."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.rrelu(self.first(x), training=True)) + 0.1 * torch.randn_like(x)
        x = x * (torch.rand(x.shape[0], 1) < 0.7) + torch.empty_like(x).exponential_(2.0)
        return (x * torch.bernoulli(torch.sigmoid(x).detach())).square().mean()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "options"), [
    ("dp=2", {"microbatches": 2}), ("tp=2", {"plan": "megatron"}),
])  # fmt: skip
def test_pieces_draw_what_the_whole_does(mesh: str, options: dict[str, object]) -> None:
    given: dict[str, object] = {"plan": "ddp", **options}
    made = partc.compile(Drawing(), mesh, (torch.randn(8, 8),), **given)  # type: ignore[arg-type]
    assert not audit(made).unchecked


def test_functions_that_move_nothing_are_named() -> None:
    with pytest.raises(CheckError, match=r"dist\.barrier is none of the transfers"):
        audit(changed(r"( +)(reduced\.finish\(\))", r"\1dist.barrier()\n\1\2"))


@pytest.mark.exhaustive
def test_edits_of_forward_programs_are_compared_too() -> None:
    with torch.no_grad():
        batch = (torch.randn(8, 8),)
        made = partc.compile(Bounded().eval(), "dp=2", batch, loss=loss_of, plan="ddp")
    _, text = one_role(made)
    wrong = text.replace("-30.0, 30.0)", "-30.0, 31.0)")
    with pytest.raises(CheckError, match="other numbers than the printed one"):
        audit(with_role(made, wrong))
    renamed = re.sub(r"\bclamp\b(?!\()", "limited", text)
    assert "printed and edited text agree" in str(audit(with_role(made, renamed)))
