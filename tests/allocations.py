"""How much memory a piece of code takes, as its allocator saw it.

On the CPU it sees the calling thread only. A gloo thread may drop its handle of a tensor after the
program did: the tensor then counts as live to the end, and the allocations do not add up to zero.
"""

import json
import tempfile
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def measured_peak_bytes(run: Callable[[], Any]) -> int:
    """Run it once; the most bytes that were live at a time beyond those live at its start."""
    if torch.cuda.is_initialized():
        return _cuda_peak_bytes(run)
    return peak_bytes(allocations(run))


def peak_bytes(changes: Iterable[int]) -> int:
    """The highest that a series of allocations and frees gets above its start."""
    return max(accumulate(changes, initial=0))


def allocations(run: Callable[[], Any]) -> list[int]:
    """Run it once on the CPU; every allocation in order, as bytes, negative where freed."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = run()  # freed after the measurement
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    del kept
    memory = [event for event in events if event["name"] == "[memory]"]
    return [int(event["args"]["Bytes"]) for event in sorted(memory, key=lambda event: event["ts"])]


def _cuda_peak_bytes(run: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - start
