"""Measures how many bytes of tensors a function holds at its peak, as PyTorch's allocator counts.

On the CPU only allocations of the calling thread are seen. A thread of gloo may drop its handle of
a tensor after the program did: the tensor then counts as live to the end, and allocations and frees
do not add up to zero.
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
    """The peak of live bytes while ``run`` runs once, beyond those live at its start."""
    if torch.cuda.is_initialized():
        return _cuda_peak_bytes(run)
    return peak_bytes(allocations(run))


def peak_bytes(changes: Iterable[int]) -> int:
    """The highest sum of a series of allocations and frees, in bytes; 0 at its start."""
    return max(accumulate(changes, initial=0))


def allocations(run: Callable[[], Any]) -> list[int]:
    """Run a function once on the CPU; its allocations in order, in bytes, frees negative."""
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
