"""Run the module or function that a name on the command line stands for, and tell what it raises,
and where.

It is imported to compile its model alone: what reads the command line there would read partc's, and
what trains or joins other ranks belongs under ``if __name__ == "__main__":``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import FrameSummary, extract_stack, extract_tb, format_exception_only
from typing import Any

from partc.errors import PartcError, UsageError

LookingUp = ImportError, AttributeError
MAIN = 'under if __name__ == "__main__":'


@contextmanager
def users_code(name: str) -> Iterator[None]:
    """Tell of an error in the code that a name stands for, and where it was raised.

    Not of those by which Python says that there is no such module or attribute.
    """
    try:
        with _own_words(name):
            yield
    except (Exception, SystemExit) as error:
        frames = [f for f in extract_tb(error.__traceback__) if _is_users(f.filename)]
        if isinstance(error, SyntaxError) and error.filename:
            frames.append(FrameSummary(error.filename, error.lineno, ""))
        if isinstance(error, PartcError) or (isinstance(error, LookingUp) and not frames):
            raise
        what, do = _told(name, error)
        raise UsageError(where=name, what=what, why=_at(frames), do=do) from error


@contextmanager
def _own_words(name: str) -> Iterator[None]:
    """UsageError where the user's code parses the words of this command, as they are partc's."""
    parse = argparse.ArgumentParser.parse_known_args

    def told(self: Any, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        frames = [f for f in extract_stack() if _is_users(f.filename)]
        if args is None and frames:
            raise UsageError(
                where=name, what=f"it parses the command line {_when(name)}",
                why=f"that is partc's own here: {_at(frames)}",
                do=f"Put it {MAIN}, or give it the words: parse_args([]) takes the defaults.",
            )  # fmt: skip
        return parse(self, args, namespace)

    argparse.ArgumentParser.parse_known_args = told  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]


def _told(name: str, error: BaseException) -> tuple[str, str]:
    """What a user's code has raised, and what to do about it."""
    if isinstance(error, SystemExit):
        ends = f"Put what ends it {MAIN}, or let it return"
        return f"it ends the process {_when(name)}, SystemExit({error.code!r})", f"{ends}."
    if any(f.name == "init_process_group" for f in extract_tb(error.__traceback__)):
        what = f"it joins a process group {_when(name)}, and this command is one process"
        return what, f"Put init_process_group {MAIN}, or behind what partc calls."
    raised = " ".join(["it raises", *format_exception_only(error)[-1].split()])
    return raised, "The error is in the code that partc was to run; call it in Python to debug it."


def _when(name: str) -> str:
    return "when it is called" if ":" in name else "when it is imported"


def _at(frames: Sequence[FrameSummary]) -> str:
    return "; ".join(f"{Path(f.filename).name}:{f.lineno}: {f.line}" for f in frames[-1:])


def _is_users(file: str) -> bool:
    """Whether a file is neither partc's nor Python's own, nor of a package that is installed."""
    others = {
        Path(__file__).parents[1],
        Path(importlib.__file__).parents[1],
        Path(sys.prefix, "bin"),
    }
    path = Path(file)
    return path.is_file() and "site-packages" not in path.parts and others.isdisjoint(path.parents)
