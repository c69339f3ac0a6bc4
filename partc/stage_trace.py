"""What the streams of a one-stage program do, as JSON for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from partc.roofline import COMPUTE, Box

US_PER_S = 1e6


def chrome_trace(boxes: Sequence[Box]) -> str:
    """One process, as all ranks do the same, with a row for its computing and one for each axis.

    Names are ``partc::<compute or axis>::<op or collective>``; ``block`` is the module.
    """
    rows = {COMPUTE: 0}
    for box in boxes:
        rows.setdefault(box.stream, len(rows))
    events = [*_labels(rows), *(_event(box, rows) for box in boxes)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _labels(rows: dict[str, int]) -> Iterator[dict[str, Any]]:
    label = {"ph": "M", "pid": 0}
    yield {**label, "tid": 0, "name": "process_name", "args": {"name": "every rank"}}
    for stream, row in rows.items():
        name = stream if stream == COMPUTE else f"over {stream}"
        yield {**label, "tid": row, "name": "thread_name", "args": {"name": name}}


def _event(box: Box, rows: dict[str, int]) -> dict[str, Any]:
    return {
        "ph": "X", "pid": 0, "tid": rows[box.stream], "name": f"partc::{box.stream}::{box.name}",
        "cat": box.stream, "ts": box.begin_s * US_PER_S, "dur": box.seconds * US_PER_S,
        "args": {"block": box.block},
    }  # fmt: skip
