"""What is said soon where a rank cannot join the others: they do not come, or cannot be reached."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from partc.errors import RunError

LOG = logging.getLogger("partc")
WAIT_S = 30.0  # behind which a rank says that it waits for others
ALONE_S = 5.0  # the same, where no launcher has started it
_OF_RANKS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def said_if_waiting(call: str) -> Iterator[None]:
    """Say on this rank that it waits for the others, if a call of all ranks takes long to begin."""
    text = (
        f"rank {os.environ.get('RANK', '0')} has waited {WAIT_S:g} s in {call} for the other "
        "ranks. It is a call of all ranks: each makes it, not behind `if rank == 0`."
    )
    with _said_behind(WAIT_S, text):
        yield


@contextmanager
def said_if_alone() -> Iterator[None]:
    """Say soon that ranks are missing where no launcher has started this one: its numbers may be
    left of another run, in a shell that has exported them.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        yield
        return
    said = ", ".join(f"{name}={os.environ.get(name, '')}" for name in _OF_RANKS)
    text = (
        f"this process has waited {ALONE_S:g} s for other ranks. It is one of several by its "
        f"environment alone, {said}, which no torchrun has set. Start the others, at the same "
        f"address; or, if it is to run alone, unset {' '.join(_OF_RANKS)}."
    )
    with _said_behind(ALONE_S, text):
        yield


@contextmanager
def _said_behind(seconds: float, text: str) -> Iterator[None]:
    timer = threading.Timer(seconds, LOG.warning, ("partc: %s", text))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_interface(backend: str) -> None:
    """RunError for an interface by which gloo cannot connect; NCCL takes several forms of names."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    here = [each for _, each in socket.if_nameindex()]
    wrong = [each for each in name.split(",") if each and each not in here]
    if wrong and backend == "gloo":
        raise RunError(
            where=f"GLOO_SOCKET_IFNAME={name}",
            what=f"this host has no network interface {wrong[0]}",
            why="the ranks connect over it",
            do=f"Unset it, or name one of {', '.join(here)}.",
        )  # fmt: skip
