"""What the figures were measured on, in words that name no particular machine."""

from __future__ import annotations

import os
import platform

import torch


def machine() -> str:
    """Cores, memory, system and torch version in one line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{cores} CPU cores ({platform.machine()})"
    if hasattr(os, "sysconf"):
        gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        text += f", {gib:.0f} GiB"
    return f"{text}, {platform.system()}, torch {torch.__version__}, gloo, one thread per rank"
