"""Draw the memory of a rank over a predicted step, and who holds it at the peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from partc.amounts import amount, time_text
from partc.drawing import LETTER, box, label, marks, page, rounded_up, rule
from partc.program import Program
from partc.reports.explanation import explain_program_memory
from partc.reports.linked import Point
from partc.reports.pipeline_timeline import pipeline_timeline
from partc.reports.timeline import Timeline, thinned, timeline_of

LEFT, WIDE, RIGHT = 80, 780, 24  # pixels: of labels, of the curve, of margin
TOP, HIGH, AXIS = 88, 220, 40  # of title and legend, of the curve, of the time axis
ROW = 20  # of a holder's row
HOLDERS = 8  # that are named
SHARE = 0.4  # of the height that a limit may leave empty to be drawn
KEPT, LIVE, LIMIT = "#9aa9bf", "#7fb2e5", "#e0483e"
MS_PER_S = 1e3


@dataclass(frozen=True)
class _Scale:
    """From seconds and bytes to pixels."""

    end_s: float
    most: float

    def x(self, at_s: float) -> float:
        return LEFT + WIDE * at_s / (self.end_s or 1.0)

    def y(self, num_bytes: float) -> float:
        return TOP + HIGH * (1 - num_bytes / (self.most or 1.0))


def memory_svg(program: Program, where: str = "program") -> str:
    """The SVG text of the memory of a program's fullest rank over its predicted step.

    UsageError if nothing of the step was saved.
    """
    line = pipeline_timeline(program) if program.schedule else timeline_of(program, where)
    peak, holders = explain_program_memory(program)
    limit = program.basis.topology().memory_bytes
    return drawn(line, peak, holders, limit, f"{program.model} on {program.mesh}")


def drawn(
    line: Timeline, peak: int, holders: Sequence[tuple[str, int]], limit: int, name: str
) -> str:
    """The picture of a time line's memory, with the peak that the program's cost has."""
    curve = [Point(at, size + line.kept_bytes) for at, size in thinned(line.curve, WIDE // 2)]
    reached = max((point.num_bytes for point in curve), default=line.kept_bytes)
    is_near = limit * (1 - SHARE) <= max(peak, reached)
    scale = _Scale(line.end_s, rounded_up(max(peak, reached, limit if is_near else 0)))
    title = f"Memory of {line.memory_of} over a step of {name}"
    of = f"{amount(peak, 'B')} at the peak, of {amount(limit, 'B')}"
    shown = sorted(holders, key=lambda each: -each[1])[:HOLDERS]
    height = TOP + HIGH + AXIS + 28 + ROW * len(shown)
    body = [
        label(10, 20, f"{title}.", "bold"), label(10, 38, f"Predicted: {of}.", "small"),
        *_legend(line.kept_bytes), *_axes(scale), *_areas(curve, line.kept_bytes, scale),
        *(_limit(limit, scale) if is_near else ()), *_peak(curve, reached, scale),
        *_holders(shown, peak, TOP + HIGH + AXIS),
    ]  # fmt: skip
    return page(LEFT + WIDE + RIGHT, height, f"{title}: {of}", body)


def _legend(kept: int) -> Iterator[str]:
    told = f"through all steps: parameters, optimizer, inputs ({amount(kept, 'B')})"
    x = float(LEFT + WIDE)
    for colour, words in ((KEPT, told), (LIVE, "live in this step")):
        x -= 34 + 5.6 * len(words)
        yield box(x, 46, 12, 12, colour)
        yield label(x + 16, 56, words, "small")


def _axes(scale: _Scale) -> Iterator[str]:
    for size in marks(scale.most, 4):
        y = scale.y(size)
        yield rule(LEFT, y, LEFT + WIDE, y, "grid")
        yield label(LEFT - 6, y + 4, amount(round(size), "B"), "small end")
    bottom = TOP + HIGH
    for at in marks(scale.end_s * MS_PER_S, 8):
        x = scale.x(at / MS_PER_S)
        yield rule(x, bottom, x, bottom + 5)
        yield label(x, bottom + 18, f"{at:g}", "small mid")
    yield label(10, bottom + 18, "ms", "small")


def _areas(curve: Sequence[Point], kept: int, scale: _Scale) -> Iterator[str]:
    """What stays through all steps, and on top of it what is live: each as one filled path."""
    bottom, base = TOP + HIGH, scale.y(kept)
    path = [f"M{LEFT} {base:.1f}"]
    before = LEFT * 1.0
    for at_s, size in curve:  # the bytes hold from the point before up to this one
        path.append(f"L{before:.1f} {scale.y(size):.1f}H{scale.x(at_s):.1f}")
        before = scale.x(at_s)
    path.append(f"V{base:.1f}Z")
    yield f'<path fill="{LIVE}" d="{"".join(path)}"/>'
    yield box(LEFT, base, WIDE, bottom - base, KEPT)
    yield rule(LEFT, bottom, LEFT + WIDE, bottom)


def _limit(limit: int, scale: _Scale) -> Iterator[str]:
    y = scale.y(limit)
    yield f'<path d="M{LEFT} {y:.1f}H{LEFT + WIDE}" stroke="{LIMIT}" stroke-dasharray="6 4"/>'
    yield label(LEFT + WIDE - 4, y - 5, f"a device has {amount(limit, 'B')}", "small end")


def _peak(curve: Sequence[Point], reached: int, scale: _Scale) -> Iterator[str]:
    """A mark where the curve is highest."""
    if not curve:
        return
    at = max(curve, key=lambda point: point.num_bytes)
    x, y = scale.x(at.at_s), scale.y(reached)
    said = f"{amount(reached, 'B')} at {time_text(float(f'{at.at_s:.3g}'))}"
    left = x > LEFT + WIDE / 2
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{LIMIT}"/>'
    kind = "small end" if left else "small"
    yield label(x + (-7 if left else 7), max(y - 6, TOP - 2), said, kind)


def _holders(holders: Sequence[tuple[str, int]], peak: int, top: float) -> Iterator[str]:
    """A row per holder: its bytes, a bar, and what it is."""
    yield label(10, top + 14, "Who holds it at the peak", "bold")
    bar, room = 150, int((WIDE + LEFT - 290) / LETTER)
    largest = max((size for _, size in holders), default=1)
    for number, (who, size) in enumerate(holders):
        y = top + 24 + number * ROW
        yield label(LEFT + 24, y + 13, amount(size, "B"), "small end")
        yield box(LEFT + 34, y + 3, bar * size / largest, 12, KEPT, who)
        yield label(LEFT + 78 + bar, y + 13, f"{size / (peak or 1):.0%}", "small end")
        said = who if len(who) <= room else f"{who[: room - 3]}..."
        yield label(LEFT + 88 + bar, y + 13, said, "small")
