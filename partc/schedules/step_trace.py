"""The timeline of a simulated step as JSON for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from partc.schedules.programs import (
    COMPUTE,
    RECEIVE,
    SEND,
    START,
    RankProgram,
)
from partc.schedules.queues import operation
from partc.schedules.simulate import Simulated

US_PER_S = 1e6
_KINDS = {SEND: "send", RECEIVE: "recv", START: "collective"}


def chrome_trace(step: Simulated) -> str:
    """The JSON text of a step: one process per rank, rows for computing and each communicator.

    Boxes are named ``partc::<kind>::<site>``, such as ``partc::F::0F2`` or ``partc::send::0F2``.
    """
    events = [event for program in step.programs for event in _rank(step, program)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _rank(step: Simulated, program: RankProgram) -> Iterator[dict[str, Any]]:
    wiring, rank = program.wiring, program.rank
    yield _label(rank, 0, "process_name", f"pipeline rank {rank}")
    yield _label(rank, 0, "thread_name", "compute")
    for channel, communicator in enumerate(wiring.communicators):
        if rank in communicator.members:
            yield _label(rank, channel + 1, "thread_name", communicator.name)
    before = 0.0
    for event, end in zip(program.events, step.ends[rank], strict=True):
        code, number = event
        if code == COMPUTE:
            action = wiring.action(number)
            yield _box(rank, 0, action.kind, str(action), before, end)
        elif code in _KINDS:
            done = operation(code, number)
            begin, over = step.queues.begin[done], step.queues.end[done]
            site = wiring.collectives[number].name if code == START else wiring.made(number)
            yield _box(rank, wiring.channel(event) + 1, _KINDS[code], site, begin, over)
        before = end


def _label(rank: int, row: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": row, "name": kind, "args": {"name": name}}


def _box(rank: int, row: int, kind: str, site: str, begin: float, end: float) -> dict[str, Any]:
    return {
        "ph": "X", "pid": rank, "tid": row, "name": f"partc::{kind}::{site}", "cat": kind,
        "ts": begin * US_PER_S, "dur": (end - begin) * US_PER_S,
    }  # fmt: skip
