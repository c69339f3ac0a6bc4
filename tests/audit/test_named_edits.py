"""Edits by name; ``python -m tests.audit.named_edits`` makes all of them in all programs."""

from __future__ import annotations

import pytest

from tests.audit.named_edits import EDITS, SAID, SAME, results

CHOSEN = {
    ("conv", "1f1b"): {
        "clip an activation's gradient": SAME,
        "another eps of the norms": SAME,
        "scale a value in the forward alone": SAID,
    },
    ("gpt", "fsdp+tp"): {
        "clamp an activation, gradient straight through": SAME,
        "another activation function": SAME,
        "noise on the loss": SAID,
    },
}


@pytest.mark.rows(1)
@pytest.mark.parametrize(("kind", "layout"), CHOSEN)
def test_an_edit_does_what_the_same_edit_of_the_model_does(kind: str, layout: str) -> None:
    wanted = CHOSEN[kind, layout]
    found = results(kind, layout, {name: EDITS[name] for name in wanted})
    assert {each.edit: each.outcome for each in found} == wanted


def test_there_are_thirty_edits() -> None:
    assert len(EDITS) == 30
