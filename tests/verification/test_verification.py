"""verify finds a right program right, and names what a wrong one gets wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import partc
from partc.errors import CheckError, UsageError
from partc.program import Program
from partc.verification.report import Report
from partc.verification.verification import verify
from tests.example_program import example_batch, example_loss, example_model, example_program


def check(program: Program) -> Report:
    return verify(program, example_model(), example_batch(), example_loss)


def edited(old: str, new: str) -> Program:
    """The example with one edit in its source."""
    program = example_program()
    source = program.source()
    assert source.count(old) == 1, old
    return replace(program, sources={"role0.py": source.replace(old, new)})


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 2), (4, 1), (1, 3), (3, 4)])
def test_the_example_is_right_on_every_mesh(dp: int, tp: int) -> None:
    report = check(example_program(dp, tp)).check()
    assert {row.kind for row in report.rows} == {
        "loss", "gradient", "buffer", "after SGD", "after AdamW", "accumulated gradient"
    }  # fmt: skip
    assert report.worst.error < 1e-14


def test_gradients_may_be_switched_off_around_it() -> None:
    with torch.no_grad():
        assert "gradient" in check(example_program(2, 1)).check().kinds()


WAIT = "gathered_done.wait()\n        down_weight = gathered.T "
LATE = "down_weight = gathered.T.clone()\n        gathered_done.wait() "
MISTAKES = {  # edit -> what the worst rows must name
    "a gradient is not summed over dp": (
        "dist.all_reduce(d_up_bias, group",
        "dist.all_reduce(d_up_bias.clone(), group",
        "up.bias",
    ),
    "a missing scale": ("(2 / 96)", "(1 / 96)", "gradient"),
    "the halves are swapped": ("a, b = up.chunk", "b, a = up.chunk", "up.weight"),
    "a buffer counts one rank": ("x.shape[0] * 2", "x.shape[0]", "rows"),
    "a gradient replaces": ("else param.grad.add_(grad)", "else grad", "accumulated"),
    "a frozen parameter gets a gradient": (
        "        return loss\n",
        "        add_grad(self.shift, d_down_bias)\n        return loss\n",
        "shift",
    ),
    "a gradient is lost": ("add_grad(self.down_bias, d_down_bias)", "pass", "down.bias"),
    "a parameter is written": (
        "        return loss\n",
        "        self.down_bias.mul_(0.99)\n        return loss\n",
        "changed parameter down.bias",
    ),
    "a wait comes too late": (WAIT, LATE, "loss"),
}


@pytest.mark.rows(5)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_program_is_caught_by_name(mistake: str) -> None:
    old, new, name = MISTAKES[mistake]
    report = check(edited(old, new))
    assert not report.ok()
    assert not report.ok  # without the call, as `assert verify(...)` without a verdict
    assert not report
    with pytest.raises(CheckError, match=name):
        report.check()


def test_a_parameter_that_no_rank_holds_is_missed() -> None:
    row = '"down_bias": ("down.bias", (8,), "float32", ()),'
    report = check(edited(row, ""))
    wrong = {r.name for r in report.rows if r.kind == "gradient" and r.error == float("inf")}
    assert wrong == {"down.bias"}


def test_the_report_is_a_table_that_names_the_worst() -> None:
    report = check(edited("(2 / 96)", "(1 / 96)"))
    assert report.worst.error == pytest.approx(0.5)
    assert "GatedMLP on dp=2 tp=2: 4 ranks in threads, float64" in str(report)
    assert report.as_json()["worst"]["name"] == report.worst.name


def test_precision_of_its_own_is_an_option() -> None:
    report = verify(example_program(), example_model(), example_batch(), example_loss, dtype=None)
    assert 1e-9 < report.worst.error < 1e-5


def test_gradients_that_are_zero_but_for_rounding_are_no_false_alarm() -> None:
    from partc.verification.differences import scales

    found = scales({"big": torch.tensor([4.0]).double(), "zero": torch.tensor([1e-17]).double()})
    assert found == {"big": (4.0, False), "zero": (4.0, True)}


def test_a_random_model_is_refused() -> None:
    model = example_model()
    model.register_forward_hook(lambda model, given, result: nn.functional.dropout(result, 0.1))
    with pytest.raises(UsageError, match="draws random numbers"):
        verify(example_program(), model, example_batch(), example_loss)


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(UsageError, match="meta device"):
        verify(example_program(), example_model().to("meta"), example_batch(), example_loss)


def _total(model: nn.Module, x: Tensor) -> Tensor:
    total: Tensor = model(x).sum()
    return total


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("x", "weight", "said"),
    [
        (torch.nan, 1.0, "the input x has NaN"),
        (torch.inf, 1.0, "the input x has infinite numbers"),
        (1.0, torch.nan, "the model's weight has NaN"),
    ],
)
def test_what_has_no_number_is_named(x: float, weight: float, said: str) -> None:
    """A batch with NaN cannot be compared; one that the model masks can."""
    model, batch = nn.Linear(4, 2), (torch.ones(4, 4),)
    program = partc.compile(model, "dp=2", batch, loss=_total, plan="ddp")
    batch[0][1, 2] = x
    nn.init.constant_(model.weight, weight)
    report = partc.verify(program, model, batch, loss=_total)
    with pytest.raises(CheckError, match=said):
        report.check()


def test_a_batch_whose_nan_is_masked_is_compared() -> None:
    model, batch = nn.Linear(4, 2), (torch.ones(4, 4),)
    batch[0][1, 2] = torch.nan

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total: Tensor = model(x.nan_to_num()).sum()
        return total

    program = partc.compile(model, "dp=2", batch, loss=loss, plan="ddp")
    partc.verify(program, model, batch, loss=loss).check()


def test_a_model_that_gives_nan_by_itself_is_not_verified() -> None:
    """NaN equals nothing, so that no gradient of the program could be told from another."""
    model, batch = nn.Linear(4, 2), (torch.ones(4, 4),)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        total: Tensor = (0 * model(x)).sqrt().sum()  # whose gradient is 0 / 0
        return total

    program = partc.compile(model, "dp=2", batch, loss=loss, plan="ddp")
    assert not partc.verify(program, model, batch, loss=loss).ok()
