"""What a rank forks, such as a loader's workers, leaves the rank's garbage alone."""

from __future__ import annotations

import gc
import os
from functools import cache

_WAS_ON: list[bool] = []  # whether the collector ran, for each fork that has begun


@cache
def leave_garbage_to_ranks() -> None:
    """Let no fork of this process collect what the process has made before.

    A process group that waits for the garbage collector (that of a stage which is gone) would end
    in the child as well, and wait there for threads that the child has not: it crashes or hangs.
    """
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


def _before() -> None:
    """The child begins without a collector: other hooks of forks run in it before ours."""
    _WAS_ON.append(gc.isenabled())
    gc.disable()


def _in_parent() -> None:
    if _WAS_ON.pop():
        gc.enable()


def _in_child() -> None:
    gc.freeze()
    if any(_WAS_ON):
        gc.enable()
    _WAS_ON.clear()
