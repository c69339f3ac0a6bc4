"""Calls with arguments that no function here takes: unknown names, missing ones, things that are no
path; and the names that somebody may have meant."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from partc.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")
RENAMED = {  # old names of a plan's fields and of arguments: their names now
    "join_mb": "bucket_mb",
    "pieces": "overlap_pieces",
    "chunks": "virtual_stages",
}
LONGEST = 60  # characters of an argument that a message quotes


def known_arguments(call: Callable[P, R]) -> Callable[P, R]:
    """The function, which answers arguments that it does not take with a UsageError.

    ``compile(microbatch=2)`` then says that ``microbatches`` may be meant.
    """
    signature = inspect.signature(call)

    @wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise _unbound(call.__name__, signature, kwargs, error) from None
        return call(*args, **kwargs)

    return checked


def _unbound(
    name: str, of: inspect.Signature, named: Iterable[str], error: TypeError
) -> UsageError:
    each = [p for p in of.parameters if p != "self"]
    unknown = next((n for n in named if n not in each), None)
    if unknown is None:
        what, meant = str(error), ""
    else:
        what, meant = f"there is no argument {unknown!r}", did_you_mean(unknown, each)
        if RENAMED.get(unknown) in each:
            meant = f"It is called {RENAMED[unknown]!r}."
    return UsageError(
        where=f"{name}()", what=what, why=f"it takes {', '.join(each)}",
        do=meant or f"Leave it out, or see help(partc.{name})."
        if unknown else f"Pass what is missing; help(partc.{name}) says what each is.",
    )  # fmt: skip


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``Did you mean 'fsdp'?`` for the known names next to one, whatever their case; "" if none is.

    >>> did_you_mean("FDSP", ["ddp", "fsdp"])
    "Did you mean 'fsdp'?"
    """
    by_lower = {each.lower(): each for each in known}
    near = get_close_matches(str(name).lower(), by_lower, n=2)
    return f"Did you mean {' or '.join(repr(by_lower[each]) for each in near)}?" if near else ""


def quoted(given: object) -> str:
    """A value as a message quotes it: its text, cut, without control characters; else its type."""
    items = given if isinstance(given, list | tuple) else [given]
    if all(x is None or isinstance(x, str | bytes | bool | int | float) for x in items):
        text = repr(given)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    if isinstance(given, type):
        return f"the class {given.__name__}"
    kind = type(given).__name__
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


def as_path(given: Any, where: str) -> Path:
    """The path; UsageError for what cannot be one."""
    if not isinstance(given, str | os.PathLike) or "\0" in os.fspath(given):
        raise UsageError(
            where=where, what=f"{quoted(given)} is no path", why="a path is a text or a Path",
            do='Name a file or folder, for example "build".',
        )  # fmt: skip
    return Path(given)


def check_whole_number(given: Any, where: str, least: int = 0) -> int:
    """The number; UsageError for what is no whole number, or is below ``least``."""
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        raise UsageError(
            where=where, what=f"{quoted(given)} is no such number",
            why=f"it is a whole number, {least} or more", do="Give such a number.",
        )  # fmt: skip
    return given
