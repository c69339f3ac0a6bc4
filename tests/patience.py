"""Time-outs of tests that may hang, such as ranks that wait for each other.

A test that works must pass on a slow or busy machine too. So a time-out is far longer than the test
takes on a quiet machine, and grows with the time that a fixed piece of work takes on this one.
"""

from __future__ import annotations

import subprocess
import sys
import time
from functools import cache

LONG_S = 300.0  # on a quiet machine, nothing that a test starts takes a tenth of it
WORK, QUIET_S = "sum(i * i for i in range(2_000_000))", 0.12  # on a quiet core of 3 GHz


def patience(quiet_s: float = LONG_S) -> float:
    """A time-out in seconds for work that takes less than ``quiet_s`` on a quiet machine."""
    return quiet_s * slowness()


@cache
def slowness() -> float:
    """How many times longer a new process takes here than on a quiet machine; never below 1."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-S", "-c", WORK], check=True)
    return max(1.0, (time.perf_counter() - start) / QUIET_S)
