"""The rule of the gradients that a script gives back: each lies as the result of which it is."""

from __future__ import annotations

import partc.graph.given_back  # noqa: F401 - defines the op
from partc.rules.call import Call
from partc.rules.table import rule

LETTERS = "abcdefghij"


def given_back(call: Call) -> str:
    """``ab, a_ -> ab, a_``: results are cut along what all of them have in common, as a batch."""
    shapes = [call.shape(i) for i in range(len(call.slots))]
    several = [shape for shape in shapes if shape]
    common = [
        LETTERS[dim] if len({shape[dim : dim + 1] for shape in several}) == 1 else "_"
        for dim in range(max(map(len, shapes)))
    ]
    terms = ",".join("".join(common[: len(shape)]) for shape in shapes)
    return f"{terms}->{terms}"


rule("partc.given_back", given_back)
