"""Note which code runs in a step: what it reads is what the step reads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

Ran = dict[CodeType, dict[str, Any]]  # the code of functions, each with its global variables


@contextmanager
def noting_code(ran: Ran) -> Iterator[None]:
    """Add the code of every function of Python that runs while this is open."""
    before = sys.gettrace()

    def enter(frame: FrameType, event: str, arg: Any) -> None:
        if frame.f_code not in ran:
            ran[frame.f_code] = frame.f_globals

    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def not_noting_code() -> Iterator[None]:
    """Pause ``noting_code`` in what torch does for a call, which would take most of the time."""
    before = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(before)
