"""Patterns of a plan that fit no name of the model: what is advised fits."""

from __future__ import annotations

import pytest

from partc.passes.shard.unknown_names import _refusal
from partc.plan import fits

NAMES = [f"blocks.{i}.{each}.weight" for i in range(3) for each in ("up", "down")]


@pytest.mark.parametrize(
    ("pattern", "advised"),
    [
        (r"blocks\.[0-9]\.up\.weight", ["blocks.*.up.weight"]),
        (r"blocks\.\d+\.(up|down)\.weight", ["blocks.*.up.weight", "blocks.*.down.weight"]),
        (r"blocks\.[01]\.up\.weight", ["blocks.0.up.weight", "blocks.1.up.weight"]),  # not 2
    ],
)
def test_a_regular_expression_is_told_as_patterns(pattern: str, advised: list[str]) -> None:
    told = _refusal("parameter", pattern, NAMES, [])
    assert "no regular expressions" in told.why
    assert told.do == f"Write {' and '.join(map(repr, advised))}, or drop the entry."
    assert all(any(fits(each, name) for name in NAMES) for each in advised)


@pytest.mark.parametrize("pattern", ["(", "bloks.*.up.weight", r"(\w+)*(\w+)*:", "a*b*c*d*e*f"])
def test_what_is_no_regular_expression_of_names_is_told_as_before(pattern: str) -> None:
    assert "it has blocks." in _refusal("parameter", pattern, NAMES, []).why
