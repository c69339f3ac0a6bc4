"""What names a user's passes and rules where something came out wrong."""

from __future__ import annotations

import pytest

from partc.passes import suspects
from partc.passes.suspects import suspects as told_of


def test_one_pass_and_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "used_rules", dict)
    one = told_of(["fuse (mine)"])
    assert one.startswith("The pass fuse (mine) is yours: compile with disable=['fuse'] ")
    two = told_of(["fuse (mine)", "cast (mine)"])
    assert two.startswith("The passes fuse (mine), cast (mine) are yours: ")
    assert "disable=['fuse', 'cast'] to see whether one of them is at fault." in two


def test_one_rule_and_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "used_rules", lambda: {"aten.mm": "mine"})
    assert told_of([]).startswith("The rule of aten.mm (mine) is yours: prove it ")
    monkeypatch.setattr(suspects, "used_rules", lambda: {"aten.mm": "mine", "aten.t": "mine"})
    assert told_of([]).startswith(
        "The rules of aten.mm (mine), aten.t (mine) are yours: prove them"
    )
