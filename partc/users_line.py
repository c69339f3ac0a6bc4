"""Warn at the user's own line: a line of partc or of a library says nobody what to change."""

from __future__ import annotations

import os
import sys
import warnings
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
