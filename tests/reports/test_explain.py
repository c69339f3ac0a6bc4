"""What ``partc explain`` says of saved programs: choices, bounds, holders, other machines."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partc.cli.main import main
from partc.passes.search.plans.alternatives import CHOICES
from partc.passes.search.plans.save_scaling_model import taken_as_json, taken_of_json
from partc.passes.search.plans.scaling_model import Calls
from partc.program import load
from partc.program.manifest import _digest_of
from partc.reports.explanation import Estimated, Explanation, explain_program
from tests.towers import compiled

Golden = Callable[..., None]


@cache
def explained(mesh: str, plan: str, **options: Any) -> Any:
    return explain_program(compiled(mesh, plan, **options))


def test_a_plan_that_was_searched(golden: Golden) -> None:
    golden(str(explained("open", "auto")))


def test_a_plan_by_hand(golden: Golden) -> None:
    golden(str(explained("dp=2,tp=2", "fsdp+megatron")))


def test_a_pipeline_by_hand(golden: Golden) -> None:
    golden(str(explained("pp=2,dp=2", "ddp", microbatches=4)))


def test_what_no_estimate_knows_has_bounds_and_holders_alone(golden: Golden) -> None:
    golden(str(explained("dp=4", "zero2")))


@pytest.mark.exhaustive
def test_a_saved_program_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled("open", "auto").save(tmp_path / "b")
    assert str(explain_program(load(tmp_path / "b"))) == str(explained("open", "auto"))
    assert main(["explain", str(tmp_path / "b"), "--all"]) == 0
    assert str(explained("open", "auto")) in capsys.readouterr().out
    assert main(["explain", str(tmp_path / "b"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["explanation"]
    assert told == json.loads(json.dumps(explained("open", "auto").as_json()))
    assert (tmp_path / "b" / "program.json").stat().st_size < 100_000


def _leaves(entry: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    pairs = entry.items() if isinstance(entry, dict) else enumerate(entry)
    return [
        each
        for key, inside in pairs
        for each in [
            (*path, key),
            *(_leaves(inside, (*path, key)) if isinstance(inside, (dict, list)) else []),
        ]
    ]


@pytest.mark.exhaustive
def test_forged_predictions_are_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever stands in ``cost`` and ``basis`` of a list whose digest is right."""
    compiled("dp=2,tp=2", "fsdp+megatron").save(tmp_path)
    whole = json.loads((tmp_path / "program.json").read_text())
    whole.pop("sha256")
    draw, refused = random.Random(5), 0
    for _ in range(25):
        forged = json.loads(json.dumps(whole))
        *path, last = draw.choice(_leaves({n: forged[n] for n in ("cost", "basis")}))
        entry = forged
        for key in path:
            entry = entry[key]
        if entry is not forged:
            entry[last] = draw.choice([None, -3, 1e308, float("inf"), "x", [], {}, [None], 10**30])
        text = json.dumps({**forged, "sha256": _digest_of(forged)})
        (tmp_path / "program.json").write_text(text)
        for command in (["explain", str(tmp_path)], ["simulate", str(tmp_path)]):
            refused += main(command) == 2  # any other error is raised here
    assert refused > 5
    capsys.readouterr()


def test_saved_laws_are_read_as_they_were() -> None:
    """Calls by unit, and every candidate's estimate."""
    taken = compiled("open", "auto").basis.taken
    assert taken
    again = taken_of_json(json.loads(json.dumps(taken_as_json(taken))))
    for key, laws in taken.search.scaling_models.items():
        by_unit = np.argsort(laws.calls.unit, kind="stable")
        for column in (each.name for each in fields(Calls)):
            whole = np.array(getattr(laws.calls, column))[by_unit]
            assert np.array_equal(whole, getattr(again.search.scaling_models[key].calls, column)), (
                column
            )
    for _, _, one in taken.search.candidates:
        assert again.search.estimate(one) == taken.search.estimate(one)


def test_numbers_and_text_are_the_same_facts() -> None:
    text, told = str(explained("open", "auto")), explained("open", "auto").as_json()
    estimated = told["estimated"]
    assert f"{estimated['candidates']} candidates" in text
    for each in (*estimated["choices"], *estimated["changes"]):
        row = next(
            line for line in text.splitlines() if each.get("choice", each.get("change")) in line
        )
        ratio = each["step_s"] / estimated["step_s"] - 1
        assert each["instead"] in row
        assert "the same" in row or f"{100 * ratio:+.1f} %" in row


def test_every_alternative_differs_in_its_choice_and_none_that_fits_is_better() -> None:
    known = explained("open", "auto").estimated
    own, chosen = known.chosen.estimate, known.taken.candidate
    for each in known.choices:
        say = CHOICES[each.choice]
        assert say(each.ranked.candidate) != say(chosen) == each.taken
        assert each.ranked.estimate.step_s >= own.step_s or not known.search.fits(each.ranked)


@pytest.mark.parametrize(("mesh", "plan"), [("open", "auto"), ("dp=2,tp=2", "fsdp+megatron")])
def test_better_machines_are_never_slower(mesh: str, plan: str) -> None:
    known = explained(mesh, plan).estimated
    assert len(known.changes) >= 4 - (plan != "auto")
    for each in known.changes:
        assert each.ranked.estimate.step_s <= known.chosen.estimate.step_s, each.change


def test_what_does_not_fit_says_so() -> None:
    """With microbatches pinned and little memory blocks are recomputed, and the table says why."""
    taken = compiled("open", "auto").basis.taken
    assert taken
    search = replace(taken.search, microbatches=1, memory_bytes=11_000_000)
    best = search.best()
    assert best
    assert best.candidate.recompute == "block"
    found = Estimated.of(replace(taken, search=search, candidate=best.candidate))
    row = next(each for each in found.choices if each.choice == "recompute")
    assert row.ranked
    assert row.ranked.estimate.step_s < best.estimate.step_s
    assert not search.fits(row.ranked)
    assert "does not fit" in str(Explanation(None, {}, 1, (), found))
