"""A process that ends by an error before it joined the others tells them, so that nobody waits."""

from __future__ import annotations

import atexit
import os
import sys
import time

import torch.distributed as dist

from partc.program.ranks import meeting

GLOO_S = 0.1
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


def _let_gloo_end() -> None:
    """Wait for gloo's threads to let go of the tensors of their last transfers.

    One that does so while the interpreter ends, which it may some microseconds behind the wait for
    its transfer, aborts the process ("terminate called without an active exception").
    """
    time.sleep(GLOO_S)


def _at_exit() -> None:
    error = getattr(sys, "last_value", None)  # what ended the script
    if _state["joined"] or dist.is_initialized():
        return
    if error is not None:
        meeting.tell(f"{type(error).__name__}: {error}")
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # which is there in any case
        meeting.tell(ENDED)
