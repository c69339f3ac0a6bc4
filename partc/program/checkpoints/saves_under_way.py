"""A save under way is finished before what it needs is gone: the process groups of its ranks.

The interpreter waits for the thread of a save by itself, however the script ends. A script that
destroys its process groups before would leave the thread without them.
"""

from __future__ import annotations

import functools
import threading
from concurrent.futures import Future, wait
from weakref import WeakSet

import torch.distributed as dist

THREAD = "partc checkpoints"  # the name of the thread that writes
_UNDER_WAY: WeakSet[Future[None]] = WeakSet()
_WATCHED: list[type] = []


def finish_before_groups_go(save: Future[None]) -> None:
    """Let ``dist.destroy_process_group()`` wait for a save, on every rank."""
    _UNDER_WAY.add(save)
    if not _WATCHED:
        _WATCHED.append(dist.ProcessGroup)
        _watch()


def _watch() -> None:
    """Wrap what ``destroy_process_group`` calls, as scripts import its own name before."""
    plain = dist.ProcessGroup.shutdown

    @functools.wraps(plain)
    def shutdown(self: dist.ProcessGroup) -> None:
        if not threading.current_thread().name.startswith(THREAD):
            wait([*_UNDER_WAY])  # what fails is logged
        plain(self)

    dist.ProcessGroup.shutdown = shutdown  # type: ignore[method-assign]
