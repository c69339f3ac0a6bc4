"""Numbers that a compiled or saved program has with it: transfers, bytes, predicted seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from partc.cost.bytes import sent_share
from partc.cost.step_events import LAST, START, StepEvents
from partc.program import Program

FULLEST = "the fullest rank"
STEP = "predicted step"


def transfers(program: Program) -> dict[tuple[str, str], tuple[int, int]]:
    """By axis and kind: how many collectives there are, and the bytes that a rank sends."""
    found: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    sizes = dict(program.mesh.axes)
    for events in program.basis.tapes:
        for kind, axis, num_bytes in _started(events):
            top, bottom = sent_share(kind, sizes.get(axis, 1))
            found[axis, kind] += 1
            sent[axis, kind] += int(num_bytes * top // bottom)
    return {key: (num, sent[key]) for key, num in found.items()}


def _started(events: StepEvents) -> Iterator[tuple[str, str, int]]:
    for _, run, _ in events.unrolled():
        for event in (*run.gathers, *run.events):
            if event.code in (START, LAST):
                move = events.moves[event.number]
                yield move.kind, move.axis, move.put_in_bytes


def message_bytes(program: Program) -> int | None:
    """Bytes that stages send to each other in a microbatch; None without stages."""
    stages = (program.cost.as_json() or {}).get("stages", ())
    return sum(int(stage["sent_bytes"]) for stage in stages) if stages else None


def peaks(program: Program) -> dict[str, float]:
    """Bytes at the peak: of the fullest rank, of a pipeline of each rank too."""
    data = program.cost.as_json() or {}
    if "ranks" in data:
        each = {f"pipeline rank {i}": rank["peak_bytes"] for i, rank in enumerate(data["ranks"])}
        return {FULLEST: max(each.values(), default=0), **each}
    return {FULLEST: data["peak_bytes"]} if "peak_bytes" in data else {}


def seconds(program: Program) -> dict[str, float]:
    """Predicted seconds: of the step, of its phases, and exposed ones of each axis."""
    known = (program.cost.as_json() or {}).get("prediction")
    if not known:
        return {}
    found = {STEP: known["seconds"]}
    found |= {f"of it {phase['name']}": phase["seconds"] for phase in known["phases"]}
    return found | {f"exposed over {x['axis']}": x["exposed_s"] for x in known["axes"]}
