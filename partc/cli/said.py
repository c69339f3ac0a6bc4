"""What the options of a command say together: sizes of a model, and options that nothing reads."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping
from typing import Any

from partc.errors import UsageError

SIZES = ("batch", "seq", "layers", "dtype", "no_dropout")  # of the model that --model names
MOST_LAYERS = 10_000  # each is built
_LEFT_OUT = (None, False, "float32")  # what options have that nobody has given


def sizes_said(args: argparse.Namespace) -> Any:
    """The sizes of a Hugging Face model; UsageError for what is none, and for another model."""
    from partc.cli.target import Sizes
    from partc.program.role import dtype_of

    given = {"--batch": args.batch, "--seq": args.seq, "--layers": args.layers}
    for option, number in given.items():
        most = MOST_LAYERS if option == "--layers" else math.inf
        if number is not None and not 1 <= number <= most:
            why = "it counts from 1" + (f" to {most:,}" if most < math.inf else "")
            raise UsageError(
                where=f"{option} {number}", what="that is no size of a model or a batch",
                why=why, do=f"Write {option} {'1 or more' if number < 1 else '8'}.",
            )  # fmt: skip
    given["--dtype"] = None if args.dtype == "float32" else args.dtype
    option = next((option for option, each in given.items() if each is not None), "")
    if option and not args.model.startswith("hf:"):
        raise UsageError(
            where=option, what=f"{args.model} does not follow it",
            why="it says what the configuration of an hf: model leaves open",
            do="Leave it out, and let the function return inputs of that size.",
        )  # fmt: skip
    dtype = dtype_of(args.dtype)
    return Sizes(args.batch, args.seq, args.layers, dtype, not args.no_dropout)


def target_said(args: argparse.Namespace) -> dict[str, str | int | bool]:
    """What a command was told of the model, by option, as a saved program keeps it. Batch and
    sequence are those of its inputs.
    """
    given = {name: getattr(args, name) for name in ("layers", "dtype", "no_dropout")}
    kept = {name: each for name, each in given.items() if each not in _LEFT_OUT}
    return {"model": args.model, **kept}


def take_target(args: argparse.Namespace, kept: Mapping[str, str | int | bool]) -> None:
    """Take what a saved program keeps of its model where the command is told of none; UsageError if
    it keeps nothing.
    """
    if args.model:
        return
    check_compared(args)
    if not kept:
        raise UsageError(
            where=f"--model of {args.folder}", what="the program does not say its model",
            why="a script compiled it, and no command",
            do="Write --model package.module:callable, what gives model, inputs and loss.",
        )  # fmt: skip
    for name, given in kept.items():
        setattr(args, name, given)


def check_explained(args: argparse.Namespace) -> None:
    """UsageError for options of ``partc explain`` that say nothing beside the others."""
    if args.rules or (args.what or "").upper().startswith("PTC"):
        rest = "name the folder of a program"
        return _check_read(args, ("source", "rank", "model", *SIZES), "of a program", rest)
    if args.source:
        return _check_read(args, ("model", *SIZES), "of costs", "leave out --source")
    _check_read(args, ("rank",), "of the text of a rank", "add --source")
    check_compared(args)


def check_compared(args: argparse.Namespace) -> None:
    """UsageError for sizes of a model that no ``--model`` names."""
    if not args.model:
        _check_read(args, SIZES, "of the model that --model names", "add --model")


def _check_read(args: argparse.Namespace, names: Iterable[str], of: str, rest: str) -> None:
    for name in names:
        given = getattr(args, name)
        if not any(given is each or given == each is not False for each in _LEFT_OUT):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                where=option if given is True else f"{option} {given}",
                what="nothing reads it here", why=f"it is {of}", do=f"Leave it out, or {rest}.",
            )  # fmt: skip


def check_from_one(args: argparse.Namespace, names: Iterable[str]) -> None:
    """UsageError for a number of devices, stages or bytes below 1; left out it is None."""
    for name in names:
        if (given := getattr(args, name)) is not None and given < 1:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                where=f"{option} {given}", what="there is no such number of them",
                why="it counts from 1", do="Give 1 or more, or leave it out.",
            )  # fmt: skip


def listed(said: str | None) -> list[str]:
    """The names in an option such as ``A,B``; blanks beside commas do not count."""
    return [each.strip() for each in (said or "").split(",") if each.strip()]


def whole_numbers(option: str, said: str | None) -> list[int]:
    """The numbers in an option such as ``8,16``; UsageError for what is none, or below 1."""
    found = listed(said)
    wrong = next((each for each in found if not each.isdecimal() or int(each) < 1), None)
    if wrong is not None:
        raise UsageError(
            where=f"{option} {wrong}", what="that is no number of them",
            why="they count from 1", do=f"Write {option} 8,16.",
        )  # fmt: skip
    return [int(each) for each in found]
