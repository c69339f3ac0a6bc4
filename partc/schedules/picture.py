"""Draw a timeline: as a grid of text, or as an SVG that reads on light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import floor, log10

from partc.drawing import image, label, page
from partc.schedules.actions import Schedule
from partc.schedules.timing import Costs, Timeline
from partc.schedules.timing import timeline as timeline_of

COLOURS = {"F": (111, 168, 255), "I": (95, 200, 150), "W": (244, 178, 102), "B": (200, 150, 235)}
MEANINGS = {"F": "forward", "I": "input gradient", "W": "weight gradients", "B": "backward"}
ROW, GAP, LEFT, TOP = 26, 6, 70, 56  # pixels: a rank's row, between rows, around the boxes
WIDEST = 1800  # pixels for the whole time; up to this the shortest action is 30 pixels wide
NARROWEST = 720  # pixels for title and legend
MOST_DRAWN = 150  # actions in a notebook, where a picture of many is too large
MOST_SLOTS = 1 << 16  # of a grid; with one action far shorter than all others it is rounded


def grid(timeline: Timeline, columns: int = 64, *, width: int = 0) -> str:
    """A timeline as text: one row per rank, one column per slot of time.

    A slot is as long as the shortest action. Longer actions are drawn out with ``-``, idle slots
    are dots. Times that are no multiple of a slot are rounded, so a picture of uneven stages is
    only roughly to scale. A grid of more than ``columns`` slots, or of lines with more than
    ``width`` characters where that is given, is shown without its middle::

        1f1b: 2 ranks, 2 microbatches, bubble 33.3%, a column is 1
        rank 0 holds 2 | 0F0 0F1 .   0B0---- 0B1----
        rank 1 holds 1 | .   1F0 1B0---- 1F1 1B1----
    """
    slot = max(_shortest(timeline), timeline.makespan / MOST_SLOTS)
    schedule = timeline.schedule
    head = (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} microbatches, "
        f"bubble {timeline.bubble:.1%}, a column is {slot:g}"
    )
    cell = 1 + max((len(str(a)) for order in schedule.orders for a in order), default=1)
    labels = [f"rank {rank} holds {peak:g}" for rank, peak in enumerate(timeline.peaks)]
    wide = max(map(len, labels))
    if width:
        columns = max((width - wide - len(" | ... ")) // cell, 2)
    rows = [_row(timeline, rank, slot, cell) for rank in range(schedule.ranks)]
    slots = max(map(len, rows)) // cell
    rows = [row + ("." + " " * (cell - 1)) * (slots - len(row) // cell) for row in rows]
    if slots > columns:
        half = columns // 2 * cell
        rows = [f"{row[:half]}... {row[-half:]}" for row in rows]
    body = (f"{a:{wide}} | {row}".rstrip() for a, row in zip(labels, rows, strict=True))
    return "\n".join((head, *body))


def _shortest(timeline: Timeline) -> float:
    lengths = (
        end - start
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
        for start, end in zip(starts, ends, strict=True)
    )
    return min((length for length in lengths if length > 0), default=1)


def _row(timeline: Timeline, rank: int, slot: float, cell: int) -> str:
    row, order = "", timeline.schedule.orders[rank]
    for action, start, end in zip(order, timeline.starts[rank], timeline.ends[rank], strict=True):
        idle = max(0, round(start / slot) - len(row) // cell)
        slots = max(1, round(end / slot) - len(row) // cell - idle)
        row += ("." + " " * (cell - 1)) * idle
        row += str(action).ljust(slots * cell - 1, "-" if slots > 1 else " ") + " "
    return row


def svg(timeline: Timeline) -> str:
    """A timeline as an SVG: one row per rank, one box per action, a time axis below.

    A box has its kind's colour, paler for later stages of a rank, and the number of its microbatch
    if the box is wide enough. Every box has its action (``0F2``) as a tooltip. The SVG grows by
    some 200 bytes per action.
    """
    schedule = timeline.schedule
    longest = timeline.makespan or 1
    scale = min(30 / _shortest(timeline), WIDEST / longest)
    width = max(NARROWEST, LEFT + longest * scale + 20)
    bottom = TOP + schedule.ranks * (ROW + GAP)
    title = (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} microbatches, "
        f"bubble {timeline.bubble:.1%}"
    )
    body = [
        label(10, 18, title, "bold"),
        *_legend(timeline),
        *(line for rank in range(schedule.ranks) for line in _boxes(timeline, rank, scale)),
        *time_axis(longest, scale, bottom),
    ]
    return page(width, bottom + 34, title, body)


def schedule_html(schedule: Schedule) -> str:
    """A schedule as a picture for a notebook; a long one as text."""
    line = timeline_of(schedule, Costs.even(schedule.stages))
    if sum(map(len, schedule.orders)) > MOST_DRAWN:
        return f"<pre>{escape(grid(line))}</pre>"
    return image(svg(line), grid(line))


def _legend(timeline: Timeline) -> Iterator[str]:
    x, schedule = LEFT, timeline.schedule
    for kind, meaning in MEANINGS.items():
        if kind in schedule.kinds:
            yield f'<rect x="{x}" y="30" width="14" height="14" fill="{_colour(kind, 0, 1)}"/>'
            yield f'<text x="{x + 20}" y="41">{kind} {meaning}</text>'
            x += 44 + 7 * len(meaning)
    paler = ", paler: later stages of the rank" if len(schedule.rank_of) > schedule.ranks else ""
    yield f'<text x="{x}" y="41">numbers: microbatches{paler}</text>'


def _boxes(timeline: Timeline, rank: int, scale: float) -> Iterator[str]:
    schedule = timeline.schedule
    own = schedule.stages_of(rank)
    chunk_of = {stage: chunk for chunk, stage in enumerate(own)}
    y = TOP + rank * (ROW + GAP)
    yield f'<text x="10" y="{y + 17}">rank {rank}</text>'
    times = zip(timeline.starts[rank], timeline.ends[rank], strict=True)
    for action, (start, end) in zip(schedule.orders[rank], times, strict=True):
        x, width = LEFT + start * scale, (end - start) * scale
        colour = _colour(action.kind, chunk_of[action.stage], len(own))
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{colour}" '
            f'stroke="#444" stroke-width="0.5"><title>{action}</title></rect>'
        )
        if width >= 7 * len(str(action.microbatch)) + 3:
            middle = x + width / 2
            yield f'<text class="in" x="{middle:.1f}" y="{y + 17}">{action.microbatch}</text>'


def time_axis(longest: float, scale: float, y: int) -> Iterator[str]:
    """The SVG lines of a time axis with marks at round times, at least 80 pixels apart."""
    yield f'<path class="line" d="M{LEFT} {y}H{LEFT + longest * scale:.1f}"/>'
    power = 10 ** floor(log10(80 / scale))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step * scale >= 80)
    for n in range(int(longest / step) + 1):
        x = LEFT + n * step * scale
        yield f'<path class="line" d="M{x:.1f} {y}v5"/>'
        yield f'<text x="{x:.1f}" y="{y + 20}" text-anchor="middle">{n * step:g}</text>'


def _colour(kind: str, chunk: int, chunks: int) -> str:
    """The kind's colour, up to halfway to white for the last stage of a rank."""
    pale = 0.55 * chunk / max(1, chunks - 1)
    return "#" + "".join(f"{round(c + (255 - c) * pale):02x}" for c in COLOURS[kind])
