"""Note which code runs in a step: what it reads is what the step reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
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


def not_noting_code(function: Callable[P, R]) -> Callable[P, R]:
    """The function, in which ``noting_code`` pauses: what torch does for a call would take most of
    the time.
    """

    @wraps(function)
    def unnoted(*args: P.args, **kwargs: P.kwargs) -> R:
        before = sys.gettrace()
        sys.settrace(None)
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(before)

    return unnoted
