"""What ``Program.module`` is told of batches that differ from the compiled one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from partc.errors import UsageError
from partc.wrong_calls import check_whole_number, did_you_mean, is_word, quoted

Partial = Literal["replicate", "drop", "pad"]
Pad = Mapping[str, float]
IGNORED = "labels get a number that the loss ignores, as ignore_index=-100 of a cross entropy"
MOST_PROGRAMS = 32  # of one stage, unless module(most_programs=...) says another number


@dataclass(frozen=True)
class Choices:
    """What a stage does with batches that differ from the compiled one.

    ``partial``: what happens with a batch whose rows data ranks cannot share. ``pad``: by the name
    of an input the number that fills it up. ``most_programs``: how many programs a stage may have.
    """

    partial: Partial | None = None
    pad: Pad = field(default_factory=dict)
    most_programs: int = MOST_PROGRAMS


NO_CHOICES = Choices()


def check_partial(partial: str | None) -> None:
    """UsageError for a word that says nothing about partial batches."""
    if partial is not None and not is_word(partial, get_args(Partial)):
        raise UsageError(
            where=f"partial={quoted(partial)}",
            what="there is no such way to treat a partial batch",
            why=f"there are {', '.join(get_args(Partial))}",
            do="Take one of these, or leave it out.",
        )


def check_fillers(call: str, pad: object, inputs: Iterable[str] = ()) -> None:
    """UsageError unless ``pad`` has numbers by name; ``inputs`` are the names that there are."""
    numbers = pad.values() if isinstance(pad, Mapping) else [pad]
    wrong = next((x for x in numbers if not isinstance(x, int | float)), None)
    if pad is None or (isinstance(pad, Mapping) and wrong is None):
        return
    known = [*inputs]
    named = isinstance(pad, Mapping)
    listed = f"; the inputs are {', '.join(known)}" if known else ""
    raise UsageError(
        where=f"{call}(pad=...)",
        what=f"{quoted(wrong)} is no number" if named else f"it is {quoted(pad)}",
        why="it has the number with which each input is filled up, by its name",
        do=f"Write pad={{{(known or ['input_ids'])[0]!r}: 0}}{listed}.",
    )  # fmt: skip


def check_pad(pad: Mapping[str, Any] | None, inputs: Mapping[str, Any]) -> None:
    """UsageError unless ``pad`` has numbers by the names of inputs."""
    check_fillers("module", pad, inputs)
    known = ", ".join(inputs)
    unknown = next((name for name in pad or () if name not in inputs), None)
    if unknown is not None:
        raise UsageError(
            where=f"module(pad={{{quoted(unknown)}: ...}})", what="there is no such input",
            why=f"the inputs are {known}", do=did_you_mean(unknown, inputs) or "Take one of these.",
        )  # fmt: skip


def pad_of(inputs: Mapping[str, tuple[Any, str]]) -> str:
    """An example of ``pad`` for these inputs, shape and dtype by name: ``pad={"x": 0, "y": -100}``.

    Whole numbers that come last are labels most often, and -100 is what cross entropies ignore.
    """
    names = [*inputs] or ["input_ids"]
    labels = names[-1] if len(names) > 1 and str(inputs[names[-1]][1]).startswith("int") else ""
    numbers = (f'"{name}": {-100 if name == labels else 0}' for name in names)
    return f"pad={{{', '.join(numbers)}}}"


def choices_of(
    partial: Partial | None, pad: Pad | None, most_programs: int, inputs: Mapping[str, Any]
) -> Choices:
    """What ``module`` was told; UsageError for what says nothing."""
    check_partial(partial)
    check_whole_number(most_programs, "module(most_programs=...)", 1)
    check_pad(pad, inputs)
    if partial == "pad" and not pad:
        raise UsageError(
            where="module(partial='pad')", what="pad= is missing",
            why="it has the number with which each input is filled up, by its name",
            do=f"Write {pad_of(inputs)}: {IGNORED}.",
        )  # fmt: skip
    return Choices(partial, pad or {}, most_programs)
