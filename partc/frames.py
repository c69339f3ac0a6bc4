"""A look at where another thread of this process stands.

Whoever holds a thread's frame keeps its variables alive behind the end of their function, and a
trace would take its own tensors for ones that the model keeps. So a frame is held for moments, and
never while somebody looks for what is kept.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
_STATE = {"lock": threading.Lock()}


def seen(thread: int, read: Callable[[FrameType | None], T]) -> T:
    """What ``read`` says of a thread's innermost frame, which it must not keep."""
    with _STATE["lock"]:
        return read(sys._current_frames().get(thread))


@contextmanager
def none_held() -> Iterator[None]:
    """No thread holds a frame of another one meanwhile."""
    with _STATE["lock"]:
        yield


def _anew() -> None:
    _STATE["lock"] = threading.Lock()  # whose holder is no thread of a forked process


os.register_at_fork(after_in_child=_anew)
