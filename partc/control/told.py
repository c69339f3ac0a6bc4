"""What a controller is told, checked: its rules, a log to replay, a state to go on from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from partc.control.decide import Rules, Standing
from partc.errors import RunError, UsageError
from partc.plan import Plan
from partc.program import Program
from partc.program.ranks.same_choice import SameChoice
from partc.program.stage.runtime import Stage
from partc.wrong_calls import check_whole_number, did_you_mean, quoted

Row = Mapping[str, Any]


def rules_of(
    programs: Mapping[str, Program], order: Sequence[str] | None, gain: float, steps: int,
    stay: int, seconds: float,
) -> Rules:  # fmt: skip
    """The rules that a controller is given; UsageError where they say nothing."""
    for name, given, most in (("gain", gain, 10.0), ("seconds", seconds, 1e6)):
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= most:
            raise UsageError(
                where=f"Controller({name}={quoted(given)})", what="it is no such number",
                why=f"{name} is a number from 0 to {most:g}", do="Leave it out, or write one.",
            )  # fmt: skip
    check_whole_number(steps, "Controller(steps=...)", 1)
    check_whole_number(stay, "Controller(stay=...)")
    return Rules(_ordered(programs, order), float(gain), steps, stay, float(seconds))


def known_variant(programs: Collection[str], name: object, argument: str) -> str:
    """A name that is one of a variant; UsageError for others."""
    if isinstance(name, str) and name in programs:
        return name
    raise UsageError(
        where=f"Controller({argument}={quoted(name)})", what="there is no such variant",
        why=f"the stage has {', '.join(programs)}",
        do=did_you_mean(name, programs) or "Name one of them.",
    )  # fmt: skip


def check_is_stage(given: object) -> None:
    """UsageError for what is no stage: a program, a model."""
    if not isinstance(given, Stage):
        raise UsageError(
            where="Controller", what=f"the stage is {quoted(given)}",
            why="a controller watches the steps of this rank's stage",
            do="Make it, stage = program.module(), and pass partc.Controller(stage).",
        )  # fmt: skip


def check_stage(programs: Collection[str]) -> None:
    """UsageError for a stage whose program has no variants."""
    if len(programs) == 1:
        raise UsageError(
            where="Controller", what="the stage's program has no variants",
            why="a controller chooses between them",
            do="Compile some: program = partc.with_variants(program, int8=plan), and make the "
            "stage of that: program.module().",
        )  # fmt: skip


def checked_log(rows: Iterable[Row], programs: Collection[str]) -> dict[int, tuple[str, str]]:
    """The switches of a log, by the number of steps behind which they were made."""
    try:
        found = {int(row["step"]): (str(row["from"]), str(row["to"])) for row in rows}
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            where="Controller(replay=...)", what="it is no log of a controller",
            why=f"a row has step, from and to: {error!r}",
            do="Pass controller.log, or the lines of its file: map(json.loads, file).",
        ) from None  # fmt: skip
    for names in found.values():
        for name in names:
            known_variant(programs, name, "replay")
    return found


def checked_standing(state: Any, programs: Collection[str]) -> Standing:
    """How things stood by a ``state_dict``; UsageError where that is malformed."""
    try:
        standing = Standing.of_json(state)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            where="Controller.load_state_dict", what="it is no state of a controller",
            why=repr(error), do="Pass what controller.state_dict() gave.",
        ) from None  # fmt: skip
    known_variant(programs, standing.variant, "state_dict")
    return standing


def check_alike(ranks: SameChoice, told: object) -> None:
    """RunError on all ranks unless all were told the same; they call this together."""
    each = ranks.differing(repr(told))
    if each:
        odd = next(i for i, text in enumerate(each) if text != each[0])
        raise RunError(
            where="Controller",
            what=f"rank {odd} was given other arguments than rank 0",
            why="ranks would switch behind different steps, and wait for each other for ever",
            do="Give all ranks the same.",
        )


def not_replayed(step: int, now: str, row: tuple[str, str]) -> RunError:
    """The error for a log of another run."""
    return RunError(
        where=f"Controller(replay=...), step {step}",
        what=f"the log leaves the variant {row[0]}, and {now} runs",
        why="its switches are those of a run that began otherwise",
        do="Begin as that run did: with the same start, at the same step.",
    )


def _ordered(programs: Mapping[str, Program], order: Sequence[str] | None) -> tuple[str, ...]:
    """All variants, the preferred one first."""
    if order is None:
        exact = [n for n, p in programs.items() if Plan.parse(p.plan).compress is None]
        return (*exact, *(name for name in programs if name not in exact))
    if isinstance(order, str) or sorted(map(str, order)) != sorted(programs):
        raise UsageError(
            where=f"Controller(order={quoted(order)})", what="it does not have every variant once",
            why=f"the stage has {', '.join(programs)}", do="Name each of them, the best one first.",
        )  # fmt: skip
    return tuple(order)
