"""Notice that a step draws from Python's or numpy's default generator, and find the line.

A trace draws once, and the number would be the same in all steps.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from partc.trace.source_lines import is_users, line_text

RANDOM, NUMPY = "random", "numpy.random"


def generators() -> dict[str, Any]:
    """The states of the default generators, by module; numpy's only where it is imported."""
    found: dict[str, Any] = {RANDOM: random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found[NUMPY] = kind, keys.tobytes(), *rest
    return found


@contextmanager
def quiet_python_random() -> Iterator[None]:
    """Restore the states of the default generators afterwards."""
    known, numpy = random.getstate(), sys.modules.get("numpy")
    other = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(known)
        if numpy:
            numpy.random.set_state(other)


class Lines:
    """Finds the user's line at which a generator's state changes, while code runs in ``open()``."""

    def __init__(self) -> None:
        self.found, self._at, self._state = "", ("", 0), generators()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Look at the states before every line of the user's code, which takes time."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        return self._look if is_users(frame.f_code.co_filename) else None

    def _look(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if not self.found and generators() != self._state:
            self.found = line_text(*self._at)
        at = _calling(frame) if event == "return" else frame
        self._at = at.f_code.co_filename, at.f_lineno
        return self._look


def _calling(frame: FrameType) -> FrameType:
    """The user's frame that goes on once this one has returned, behind those of torch between."""
    back = frame.f_back
    while back is not None and not is_users(back.f_code.co_filename):
        back = back.f_back
    return back or frame
