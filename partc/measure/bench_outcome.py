"""What a report shows of a bench: the step's figures, and the time line of its last step."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from statistics import quantiles
from typing import Any

import torch

from partc.amounts import counted
from partc.cost.roofline import BLOCKS, COMPUTE, WAIT, Box
from partc.measure.bench_report import Bench, Figure
from partc.reports.linked import NO_LINE, Bar
from partc.reports.timeline import MEASURED, Numbers, Stream, columns

MOST_BARS = 20_000  # of a saved time line: a step with more is kept as figures alone


def bench_outcome(found: Bench, device: str) -> dict[str, Any]:
    """The medians of a bench beside the prediction, and the busiest rank's last step as columns."""
    boxes = found.busiest.boxes[-1]
    calls = Numbers()
    shown = [*_streams(boxes, found.program.mesh.names)] if len(boxes) <= MOST_BARS else []
    streams = [columns(each, calls) for each in shown]
    return {
        "machine": machine_text(device),
        "ranks": len(found.ranks),
        "rank": found.ranks.index(found.busiest),
        "steps": len(found.busiest.timed),
        "figures": {name: _figure(each) for name, each in found.figures().items()},
        "end_s": max((box.begin_s + box.seconds for box in boxes), default=0.0),
        "streams": streams,
        "calls": [list(call) for call in calls.known],
    }


def machine_text(device: str) -> str:
    """The machine that measured: ``2 cores (x86_64)``, or the name of its GPU."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"{counted(os.cpu_count() or 1, 'core')} ({platform.machine()})"


def _figure(figure: Figure) -> dict[str, float | None]:
    low, middle, high = quantiles(figure.measured_s, n=4, method="inclusive")
    return {
        "predicted_s": figure.predicted_s, "measured_s": middle, "low_s": low, "high_s": high,
    }  # fmt: skip


def _streams(boxes: Sequence[Box], axes: Sequence[str]) -> Iterator[Stream]:
    """A row of blocks or actions with the optimizer, one of waits, and one for each axis."""
    ran = [box for box in boxes if box.stream in (BLOCKS, COMPUTE)]
    waits = [box for box in boxes if box.stream == WAIT and box.block in axes]
    yield _row("measured", ran)
    if waits:
        yield _row("· waits", waits)
    for axis in axes:
        if moved := [box for box in boxes if box.stream == axis]:
            yield _row(f"· over {axis}", moved, axis)


def _row(name: str, boxes: Sequence[Box], axis: str = "") -> Stream:
    return Stream(name, MEASURED, "", tuple(Bar(box, NO_LINE, 0.0) for box in boxes), axis)
