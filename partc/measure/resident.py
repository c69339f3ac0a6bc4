"""Measure this process's memory as the system counts it, to compare with a predicted cost.

torch's profiler misses tensors that a communication thread frees; the system counts everything. It
works on Linux with glibc, which can return freed memory at once; elsewhere the results are None.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_SMALL_BYTES = 65536


def free_at_once() -> None:
    """Let glibc return freed memory to the system at once: resident memory is then held memory.

    To be called first in a process. Steps get slower, so not where times are measured.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _SMALL_BYTES)
        mallopt(_TRIM_THRESHOLD, _SMALL_BYTES)


def give_back_freed() -> None:
    """Return memory that is free now to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes() -> int | None:
    """Bytes of this process that are resident now; None where the system does not tell."""
    return _status("VmRSS")


def peak_resident_bytes(run: Callable[[], Any]) -> int | None:
    """The peak of resident bytes while ``run()`` runs; None where the system does not tell."""
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
