"""The user's own line, where something is warned of or has failed: a line of partc or of a library
says nobody what to change."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

_OWN_FOLDERS = (str(Path(__file__).parent) + os.sep, str(Path(os.__file__).parent) + os.sep)
_PACKAGES = {"site-packages", "dist-packages"}  # folders of what is installed


def warn(text: str) -> None:
    """A UserWarning at the innermost running line of a script, or of what it imports from beside
    it. Where none runs, as under the command line, it is the line that warns.
    """
    here = sys._getframe(1)
    frame = _frame_of_user(here) or here
    warnings.warn_explicit(
        text, UserWarning, frame.f_code.co_filename, frame.f_lineno,
        module=str(frame.f_globals.get("__name__", "")),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )  # fmt: skip


@cache
def is_users(file: str) -> bool:
    """Whether a file is neither partc's nor Python's own, nor installed."""
    torch: Any = sys.modules.get("torch")  # which may be built in a folder of its own
    own = (*_OWN_FOLDERS, str(Path(torch.__file__).parent) + os.sep) if torch else _OWN_FOLDERS
    return _PACKAGES.isdisjoint(Path(file).parts) and not file.startswith((*own, "<"))


def failed_at(error: Exception, function: Callable[..., Any] | None = None) -> str:
    """What a user's function raised, and at which line: ``KeyError: 'dim', at rules.py:12``.

    The innermost line in the file of the function, as that is the user's; without a function that
    of a file that is not installed. Of a file that is no Python, the line that is none.
    """
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    from inspect import unwrap
    from traceback import extract_tb

    code = getattr(unwrap(function), "__code__", None) if function else None
    frames = extract_tb(error.__traceback__)
    own = [
        each for each in frames
        if (is_users(each.filename) if code is None else each.filename == code.co_filename)
    ]  # fmt: skip
    if not own:
        return unparsed(error) if isinstance(error, SyntaxError) else said
    line = f": {own[-1].line}" if own[-1].line else ""
    return f"{said}, at {_shown(own[-1].filename)}:{own[-1].lineno}{line}"


def unparsed(error: SyntaxError) -> str:
    """What Python says of a text that does not parse, and of which line:
    ``SyntaxError: expected ':', at hooks.py:3: def double(x)``.
    """
    said, line = f"{type(error).__name__}: {error.msg}", (error.text or "").strip()
    if not (error.filename and error.lineno):
        return said
    return f"{said}, at {_shown(error.filename)}:{error.lineno}" + (f": {line}" if line else "")


def _shown(file: str) -> str:
    """A file as messages name it."""
    return Path(file).name.strip("<>").removeprefix("partc ")


def _frame_of_user(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not _runs_users(frame):
        frame = frame.f_back
    return frame


def _runs_users(frame: FrameType) -> bool:
    """A notebook's cell, and what `python -c` is given, have no file."""
    file = frame.f_code.co_filename
    if file.startswith("<"):
        return frame.f_globals.get("__name__") == "__main__" and "frozen" not in file
    return is_users(file)
