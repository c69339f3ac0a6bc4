"""Write the time line of a rank as JSON for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from partc.cost.roofline import BLOCKS, COMPUTE, WAIT, Box

US_PER_S = 1e6
Event = dict[str, Any]


def chrome_trace(boxes: Sequence[Box]) -> str:
    """The trace of a step as JSON text; one process stands for all ranks, which do the same."""
    return trace_text(trace_events(boxes, 0, "every rank"))


def trace_text(events: Iterable[Event]) -> str:
    """Trace events as the JSON text of a file."""
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events)})


def trace_events(boxes: Sequence[Box], process: int, title: str) -> Iterator[Event]:
    """The events of one process, with a row for blocks, one for computing and one per axis.

    Names are ``partc::<kind>::<site>``: ``partc::forward::layers.0`` of a block,
    ``partc::compute::<op>``, ``partc::<axis>::<collective>``.
    """
    rows = {BLOCKS: 0, COMPUTE: 1}
    for box in boxes:
        rows.setdefault(box.stream, len(rows))
    yield _label(process, 0, "process_name", title)
    for stream, row in rows.items():
        moves = stream not in (BLOCKS, COMPUTE, WAIT)
        yield _label(process, row, "thread_name", f"over {stream}" if moves else stream)
    yield from (_event(box, process, rows[box.stream]) for box in boxes)


def _label(process: int, row: int, kind: str, name: str) -> Event:
    return {"ph": "M", "pid": process, "tid": row, "name": kind, "args": {"name": name}}


def _event(box: Box, process: int, row: int) -> Event:
    return {
        "ph": "X", "pid": process, "tid": row, "name": box.title, "cat": box.stream,
        "ts": box.begin_s * US_PER_S, "dur": box.seconds * US_PER_S, "args": {"block": box.block},
    }  # fmt: skip
