"""A run on a terminal: one screen of text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from partc.amounts import amount, time_text
from partc.live.run_facts import (
    Pace,
    duration,
    losses,
    paces,
    promised,
    restarts,
    slowest,
    state,
)
from partc.live.run_files import Run

LEVELS = " .:-=+*#"  # of a curve in one line, low to high
MOST_RANKS = 16  # that are shown; of more the slowest


def run_text(run: Run, now: float, width: int = 100) -> str:
    """What a run does, in lines of at most ``width`` columns. ``now``: seconds since the epoch."""
    found = paces(run)
    lines = [f"{run.folder}: {state(run, now)}, {restarts(run)}", *_loss(run, width), ""]
    lines += [promised(run), slowest(found), "", *_ranks(run, found), "", *_saved(run, now)]
    for each in run.ranks:
        if each.unread:
            said = "1 line is" if each.unread == 1 else f"{each.unread} lines are"
            first = f"{each.file.name}:{each.first_unread}"
            lines.append(f"{said} no JSON with a step, and left out: {first}")
    return "\n".join(x if len(x) <= width else f"{x[: width - 3]}..." for x in lines)


def _loss(run: Run, width: int) -> Iterator[str]:
    found = losses(run)
    if not found:
        yield "loss: no line tells it"
        return
    first, last = found[0], found[-1]
    yield f"loss {last[1]:.4g} at step {last[0]}, {first[1]:.4g} at step {first[0]}"
    yield f"     {curve([value for _, value in found], max(width - 8, 8))}"


def curve(values: Sequence[float], width: int) -> str:
    """Numbers as one line of characters; each stands for the mean of those in its column.

    >>> curve([0, 1, 2, 3], 4)
    ' :=#'
    """
    each = max(-(-len(values) // width), 1)
    parts = [values[i : i + each] for i in range(0, len(values), each)]
    means = [sum(part) / len(part) for part in parts]
    finite = [x for x in means if math.isfinite(x)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0

    def level(x: float) -> str:
        return LEVELS[round((x - low) / span * (len(LEVELS) - 1))] if math.isfinite(x) else "!"

    return "".join(map(level, means))


def _ranks(run: Run, found: Sequence[Pace]) -> Iterator[str]:
    """A table of the ranks: measured step, beside the prediction, and what each waits for."""
    shown = sorted(found, key=lambda each: -(each.own_s or each.step_s or 0.0))[:MOST_RANKS]
    head = ("rank", "step", "predicted", "waits for ranks", "waits for data", "GPU memory")
    rows = [head]
    step = _seconds(run.promise.step_s) if run.promise else "-"
    for each in sorted(shown, key=lambda pace: pace.rank):
        memory = "-" if each.memory_bytes is None else amount(round(each.memory_bytes), "B")
        times = (_seconds(each.step_s), step, _seconds(each.waits_s), _seconds(each.data_s))
        rows.append((str(each.rank), *times, memory))
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{text:>{w}}" for text, w in zip(row, wide, strict=True))
    if len(found) > len(shown):
        yield f"... and {len(found) - len(shown)} ranks that are faster"
    if run.promise:
        peak = amount(run.promise.peak_bytes, "B")
        sent = run.promise.sent_bytes
        moved = f", {amount(sent, 'B')} sent by a rank in a step" if sent is not None else ""
        yield f"predicted of {run.promise.mesh or 'one device'}: {peak} of memory{moved}"


def _saved(run: Run, now: float) -> Iterator[str]:
    if not run.checkpoints:
        yield "no checkpoint"
        return
    last = run.checkpoints[-1]
    kept = ", ".join(str(each.step) for each in run.checkpoints[-6:])
    size, ago = amount(last.num_bytes, "B"), duration(max(now - last.written_at, 0.0))
    yield f"checkpoints of steps {kept}; the last has {size} and is {ago} old"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else time_text(float(f"{seconds:.3g}"))
