"""What a report or a picture is made of: a program, and not the folder that it was saved to."""

from __future__ import annotations

import os
from typing import Any

from partc.errors import UsageError
from partc.program import Program
from partc.wrong_calls import quoted


def check_program(given: Any, call: str) -> None:
    """UsageError for what is no program, such as the path of one."""
    if isinstance(given, Program):
        return
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else ""
    do = f"Pass partc.load({str(path)!r})" if path else "Pass what partc.compile or partc.load gave"
    raise UsageError(
        where=f"partc.{call}", what=f"the program is {quoted(path or given)}",
        why="it shows what a program was predicted to do", do=f"{do}: partc.{call}(program).",
    )  # fmt: skip
