"""Which entry of a plan counts where several fit a name, as docs/reference/plan.md has it."""

from __future__ import annotations

import pytest

from partc.plan import Plan

WHOLE, CUT = "{}", "{ dp = 0 }"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((("*.weight", WHOLE), ("0.*", CUT)), {}),
        ((("0.*", CUT), ("*.weight", WHOLE)), {"dp": 0}),
        ((("*.weight", WHOLE), ("0.weight", CUT)), {"dp": 0}),  # a name goes before patterns
    ],
)
def test_the_first_pattern_counts(
    lines: tuple[tuple[str, str], ...], found: dict[str, int]
) -> None:
    text = "".join(f'"{name}" = {cuts}\n' for name, cuts in lines)
    plan = Plan.parse(f"[params]\n{text}")
    assert {axis: layout.dim for axis, layout in plan.stored("0.weight").items()} == found
