"""A process that ends tells the others by what: those that it has not joined yet, so that nobody
waits for it, and those that wait for it in a transfer, which fails as it ends.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from partc.program.ranks import meeting
from partc.program.ranks.places import called
from partc.program.ranks.waiting import known_waiting

GLOO_S = 0.1
AT_ITS_END = "has ended: its script came to its end"
_ENDS = "partc ends"
SAID_S = 2.0  # so long others may take to say that they have ended
ENDED = (
    "its script has ended without program.module(), which is a call of all ranks (not behind "
    "`if rank == 0`)"
)
_state = {"registered": False, "joined": False}


def tell_at_exit() -> None:
    """If this process of a launched job ends before it joins, the others are told, and by what.

    An error that the script catches is no reason, so this is done when the interpreter ends.
    """
    if not _state["registered"] and not meeting.is_alone():
        _state["registered"] = True
        atexit.register(_at_exit)


def has_joined() -> None:
    """From now on the other ranks see by themselves where this process ends."""
    if not _state["joined"]:
        _state["joined"] = True
        atexit.register(_let_gloo_end)
        if dist.get_world_size() > 1:
            atexit.register(_say_end, dist.distributed_c10d._get_default_store(), dist.get_rank())


def _say_end(store: Any, rank: int) -> None:
    """Say by what this process ends, to whom its end surprises in a transfer."""
    with suppress(Exception):  # the store is gone, with the job
        PrefixStore(_ENDS, store).set(str(rank), how_it_ends())


def how_it_ends() -> str:
    """In a few words, behind the rank's name."""
    error = getattr(sys, "last_value", None)  # what ended the script
    if error is None:
        return AT_ITS_END + _behind()
    first = (str(error).strip().splitlines() or [""])[0]
    return f"has failed: {type(error).__name__}: {first}"


def _behind() -> str:
    """``, behind step 3``: what this rank's last call was, if there was one."""
    known = known_waiting(threading.get_ident())
    return f", behind {called(known.last)}" if known is not None and known.last else ""


def ends_of_others() -> dict[int, str]:
    """By rank what those have said who have ended; waits a moment for the first of them."""
    with suppress(Exception):  # the store is gone, or stands still
        return meeting.answered(_asked, 2 * SAID_S)
    return {}


def _asked() -> dict[int, str]:
    first: Any = dist.distributed_c10d._get_default_store()
    store = first.clone()  # by a connection of its own, as another may be busy waiting
    store.set_timeout(timedelta(seconds=SAID_S))
    store, until = PrefixStore(_ENDS, store), time.monotonic() + SAID_S
    others = [r for r in range(dist.get_world_size()) if r != dist.get_rank()]
    while True:
        said = [rank for rank in others if store.check([str(rank)])]
        if said or time.monotonic() > until:
            return {rank: store.get(str(rank)).decode() for rank in said}
        time.sleep(0.1)


def _let_gloo_end() -> None:
    """Wait for gloo's threads to let go of the tensors of their last transfers.

    One that does so while the interpreter ends, which it may some microseconds behind the wait for
    its transfer, aborts the process ("terminate called without an active exception").
    """
    time.sleep(GLOO_S)


def _at_exit() -> None:
    error = getattr(sys, "last_value", None)  # what ended the script
    if _state["joined"]:
        return
    if dist.is_initialized():  # by the script: the others may wait in a transfer
        if dist.get_world_size() > 1:
            _say_end(dist.distributed_c10d._get_default_store(), dist.get_rank())
        return
    if error is not None:
        meeting.tell(f"{type(error).__name__}: {error}")
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # which is there in any case
        meeting.tell(ENDED)
