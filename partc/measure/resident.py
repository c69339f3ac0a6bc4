"""Memory of this process as the system counts it, for comparing a program with its predicted cost.

The profiler cannot see a tensor that a communication thread frees; the system sees everything.
Linux counts, glibc frees at once; elsewhere the answer is None.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_SMALL_BYTES = 65536


def free_at_once() -> None:
    """From here on give freed tensors back to the system, so that what is resident is what is held.

    Steps get slower: for the first lines of a process whose times do not matter.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _SMALL_BYTES)
        mallopt(_TRIM_THRESHOLD, _SMALL_BYTES)


def give_back_freed() -> None:
    """Give what is free now back to the system, where the C library can; nothing else changes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes() -> int | None:
    """What is resident now."""
    return _status("VmRSS")


def peak_resident_bytes(run: Callable[[], Any]) -> int | None:
    """The most that is resident while ``run()`` runs."""
    if (peaks := Path("/proc/self/clear_refs")).exists():
        peaks.write_text("5")  # forget the peak so far
    run()
    return _status("VmHWM")


def process_table(name: str) -> dict[str, str]:
    """One of Linux's tables about this process, ``/proc/self/<name>``; elsewhere empty."""
    table = Path("/proc/self", name)
    if not table.exists():
        return {}
    pairs = (line.partition(":") for line in table.read_text().splitlines())
    return {key: value.strip() for key, _, value in pairs}


def _status(field: str) -> int | None:
    """A size that ``/proc/self/status`` gives as ``VmRSS:  1234 kB``, in bytes."""
    size = process_table("status").get(field)
    return None if size is None else int(size.split()[0]) * 1024
