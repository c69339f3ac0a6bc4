"""Only what a model's own rounding moves as far is taken for rounding."""

from __future__ import annotations

import pytest

from partc.verification.report import Report, Row
from tests.styles import Style
from tests.styles.made import made
from tests.styles.rounding import moved_by_rounding, only_rounding

ILL, WELL = 7128, 7133  # seeds: attention of nearly equal tokens; an MLP with norms


def report_of(name: str, error: float) -> Report:
    return Report("", (Row(error, "gradient", name, 0), Row(1e-15, "loss", "loss", 0)))


@pytest.fixture
def ill() -> Style:
    return made(ILL).style


def test_a_vanishing_gradient_moves_further_than_a_program_may_differ(ill: Style) -> None:
    assert only_rounding(report_of("1.block.k.weight", 2e-9), ill)


@pytest.mark.parametrize(("name", "error"), [
    ("1.block.k.weight", 1e-4), ("1.x.weight", 2e-9), ("no such tensor", 2e-9),
    ("1.block.k.weight", float("nan")),
])  # fmt: skip
def test_what_is_further_away_is_wrong(ill: Style, name: str, error: float) -> None:
    assert not only_rounding(report_of(name, error), ill)


def test_a_sound_model_hardly_moves() -> None:
    assert max(moved_by_rounding(made(WELL).style).values()) < 1e-9
