"""What is said of a program beside the pinned one, by its bounds; and what cannot be pinned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partc
from partc.errors import UsageError
from partc.file_text import Unreadable
from partc.program import Program
from partc.testing.pin import HEAD, Pin, check_name
from partc.testing.told import Bounds, told

FIVE = Bounds(step=0.05, peak=0.05, sent=0.05)
ANY = Bounds(step=None, peak=None, sent=None)


@pytest.fixture(scope="module")
def program() -> Program:
    loss = lambda m, x: m(x).pow(2).mean()  # noqa: E731
    return partc.compile(nn.Linear(6, 4), "dp=2", (torch.zeros(8, 6),), loss=loss, plan="ddp")


@pytest.fixture(scope="module")
def pin(program: Program) -> Pin:
    return Pin.of(program)


def read(pin: Pin, folder: Path) -> Pin:
    pin.write(folder, "pytest")
    found = Pin.read(folder)
    assert isinstance(found, Pin)
    return found


def test_what_is_written_is_read(pin: Pin, tmp_path: Path) -> None:
    assert read(pin, tmp_path / "a") == pin
    assert not told(pin, pin, FIVE, "a").lines


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"step_s": 1e-9}, "step: 0.001 us -> "),
        ({"peak_bytes": 100}, "peak: 100 B -> "),
        ({"sent_bytes": {"dp": 1}}, "bytes over dp: 1 B -> "),
        ({"sent_bytes": {}}, "bytes over dp: none -> "),
        ({"step_s": None}, "step: none -> "),
    ],
)
def test_what_has_grown_beyond_its_bound_fails(
    pin: Pin, tmp_path: Path, changed: dict[str, Any], what: str
) -> None:
    """Though plan and text are as pinned; it passes without the bound."""
    old = read(replace(pin, **changed), tmp_path / "a")
    lines = told(old, pin, FIVE, "a").lines
    assert lines[0] == "plan       no key differs"
    assert lines[-1] == "program    no line differs"
    assert any(what in line and "more than the +5% that the test allows" in line for line in lines)
    assert not told(old, pin, ANY, "a").lines


def test_what_stays_below_its_bound_passes(pin: Pin) -> None:
    assert pin.step_s
    assert pin.peak_bytes
    old = replace(pin, step_s=pin.step_s / 1.04, peak_bytes=pin.peak_bytes * 2)
    assert not told(old, pin, FIVE, "a").lines
    assert told(replace(pin, step_s=pin.step_s / 1.06), pin, FIVE, "a").lines
    assert told(replace(pin, sent_bytes={"tp": 4, **pin.sent_bytes}), pin, FIVE, "a").lines == ()


def test_files_more_or_less_are_differences(pin: Pin) -> None:
    more = replace(pin, texts={**pin.texts, "stage1.py": "x = 1\n"})
    assert "-x = 1" in told(more, pin, FIVE, "a").lines
    assert "+x = 1" in told(pin, more, FIVE, "a").lines


def test_a_comment_of_the_plan_is_a_difference(pin: Pin) -> None:
    other = replace(
        pin, texts={**pin.texts, "plan.toml": f"# left out: a\n{pin.texts['plan.toml']}"}
    )
    lines = told(pin, other, FIVE, "a").lines
    assert lines[0] == "plan       no key differs, but comments do"
    assert "+# left out: a" in lines


@pytest.mark.parametrize("torch_then", ["2.9.0", "3.0"])
def test_other_versions_are_told_first(pin: Pin, torch_then: str) -> None:
    old = replace(pin, versions={"partc": pin.versions["partc"], "torch": torch_then, "gone": "1"})
    now = pin.versions["torch"]
    assert (
        told(old, pin, FIVE, "a").other_versions
        == f"pinned with torch {torch_then}; this is torch {now}"
    )
    found = [*told(replace(old, step_s=1e-9), pin, FIVE, "a")]
    assert found[0].startswith("pinned with torch")
    assert "+" not in now


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<<<<<<< ours\n", "<<<<<<< ours"),
        ("", "no \\[versions\\] and \\[cost\\]"),
        ("[versions]\n[cost]\npeak_bytes = []", "no \\[versions\\] and"),
        ("versions = 1\n[cost]", "no \\[versions\\] and"),
    ],
)
def test_a_head_that_cannot_be_read(pin: Pin, tmp_path: Path, text: str, why: str) -> None:
    pin.write(tmp_path / "a", "pytest")
    (tmp_path / "a" / HEAD).write_text(text)
    found = Pin.read(tmp_path / "a")
    assert isinstance(found, Unreadable)
    with pytest.raises(Unreadable, match=why):
        raise found
    assert told(found, pin, FIVE, "a").lines[0].startswith("nothing to compare with: a: ")


def test_a_plan_that_cannot_be_read(pin: Pin) -> None:
    for text in ("preset : ddp", "params = 3", "notes = 3"):
        old = replace(pin, texts={**pin.texts, "plan.toml": text})
        assert told(old, pin, FIVE, "a").lines[0].startswith("plan ")


def test_files_of_others_stay(pin: Pin, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"mine\.txt, which partc did not write"):
        pin.write(folder, "pytest")
    assert (folder / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("bound", [-1, "5%", float("nan"), float("inf"), True])
def test_bounds_that_are_none(bound: Any) -> None:
    for name in ("step", "peak", "sent"):
        with pytest.raises(UsageError, match=rf"partc_golden\({name}="):
            Bounds(**{"step": 0.0, "peak": 0.0, "sent": 0.0, name: bound})


def test_what_cannot_be_pinned(program: Program, tmp_path: Path) -> None:
    for given in (None, nn.Linear(2, 2), "build"):
        with pytest.raises(UsageError, match="is no program"):
            Pin.of(given)  # type: ignore[arg-type]
    program.save(tmp_path / "build")
    loaded = partc.load(tmp_path / "build")
    assert Pin.of(loaded) == Pin.of(program)
    with pytest.raises(UsageError, match="has no model to trace"):
        Pin.of(loaded, graph=True)
    for name in ("a/b", "a.b", "..", " "):
        with pytest.raises(UsageError, match="is no name of a program"):
            check_name(name)


def test_programs_of_other_shapes_and_pipelines_are_pinned_too() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2)))
    loss = lambda m, x: m(x).pow(2).mean()  # noqa: E731
    batch = (torch.zeros(8, 6),)
    made = partc.compile(model, "pp=2", batch, loss=loss, plan="ddp", microbatches=2, stages=["1"])
    pin = Pin.of(made.for_shapes((torch.zeros(4, 6),)))
    assert {"pipeline0.py", "programs/0/pipeline0.py", "programs/0/plan.toml"} <= {*pin.texts}
    assert pin.sent_bytes["messages between stages"] > 0
    assert pin.step_s
