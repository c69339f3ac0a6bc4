"""What differs between two programs, as lines of a terminal: step, peak and bytes come first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from partc.amounts import counted
from partc.program import Program
from partc.reports.differences import ROLES, Differences, number_text
from partc.reports.numbers_of import FULLEST, STEP, peaks, seconds, transfers


def difference_lines(
    found: Differences, old: Program, new: Program, source: bool, width: int
) -> list[str]:
    """Lines for a terminal: step, peak, bytes; then what differs, each in one line of the width;
    with ``source`` the lines of the files, else how many differ.
    """
    if not found:
        return ["no difference"]
    rows = [row for row in found.rows if row.topic != ROLES or "," not in row.what]
    lines = str(replace(found, rows=(*rows,), sources={})).splitlines() if rows else []
    counts = [_count(name, each) for name, each in found.sources.items()]
    lines += [f"{'text' if i == 0 else '':<10} {each}" for i, each in enumerate(counts)]
    shown = [x if len(x) <= width else f"{x[: max(width - 3, 0)]}..." for x in lines]
    more = ["", *(line for each in found.sources.values() for line in each)] if source else []
    if counts and not source:
        more = ["", "the lines themselves: --source"]
    head = [*_head(old, new)]
    return [*head, "", *shown, *more] if head else [*shown, *more]


def _count(name: str, lines: Sequence[str]) -> str:
    """``stage0.py: 3 lines gone, 4 new``, from the lines of a unified diff."""
    body = [x for x in lines if not x.startswith(("---", "+++"))]
    gone, come = (sum(x.startswith(mark) for x in body) for mark in "-+")
    return f"{name}: {counted(gone, 'line')} gone, {come} new"


def _head(old: Program, new: Program) -> Iterator[str]:
    """``step 10.58 s -> 10.22 s (-3.4%)``, and alike of the memory and of all bytes sent."""
    stages = "  (a microbatch, all stages)" if old.schedule or new.schedule else ""
    steps = [seconds(program).get(STEP) for program in (old, new)]
    yield from _compared("step", steps[0], steps[1], "s")
    yield from _compared("peak", peaks(old).get(FULLEST), peaks(new).get(FULLEST), "B")
    for line in _compared("sent", _all_sent(old), _all_sent(new), "B"):
        yield line + stages


def _compared(what: str, old: float | None, new: float | None, unit: str) -> Iterator[str]:
    if old is None and new is None:
        return
    texts = [number_text(each, unit) for each in (old, new)]
    more = f" ({new / old - 1:+.1%})" if old and new is not None and new != old else ""
    same = old == new
    yield f"{what:<10} {texts[0]}, the same" if same else f"{what:<10} {' -> '.join(texts)}{more}"


def _all_sent(program: Program) -> float | None:
    """Bytes that a rank sends in a step (of a pipeline: all stages, in a microbatch)."""
    if not program.basis.tapes:
        return None
    stages = (program.cost.as_json() or {}).get("stages", ())
    sent = sum(num_bytes for _, num_bytes in transfers(program).values())
    return sent + sum(int(stage["sent_bytes"]) for stage in stages)
