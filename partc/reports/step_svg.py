"""Draw the predicted step of a program without pipeline stages as SVG, for readers.

The first row of a panel shows a rank's computing, each other row the transfers over one mesh axis:
red while computing waits for them, pale while they are hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from partc.amounts import time_text
from partc.cost.prediction import Prediction
from partc.drawing import LETTER, page
from partc.errors import UsageError
from partc.machines.what_if import Change
from partc.program import Program
from partc.reports import step_streams as streams
from partc.reports.other_machines import stage_step
from partc.reports.step_streams import Bar, Panel
from partc.schedules.picture import time_axis

LEFT, RIGHT, WIDE = 70, 20, 870  # pixels: of labels, of margin, of the longest panel
ROW, GAP, HEAD, AXIS = 24, 4, 48, 34  # of a row, below it, a panel's caption, its time axis
TOP = 52  # of title and legend
MS_PER_S = 1e3
LEGEND = {  # colour and meaning of what streams do
    streams.FORWARD: ("#7fb2e5", "forward"),
    streams.BACKWARD: ("#cabaf0", "backward"),
    streams.WEIGHTS: ("#9d7fe6", "weight gradients"),
    streams.OTHER: ("#b8bfc6", "outside of the layers"),
    streams.UPDATE: ("#8cc6a0", "optimizer"),
    streams.HIDDEN: ("#f0d9a8", "transfer, hidden behind computing"),
    streams.EXPOSED: ("#e0483e", "transfer that computing waits for"),
}


def step_svg(
    program: Program, where: str = "program", name: str = "", change: Change | None = None
) -> str:
    """The SVG text of a program's predicted step, on its own machines or on changed ones.

    UsageError for a pipeline, and for a program that was saved without StepEvents.
    """
    if program.schedule:
        raise UsageError(
            where=where,
            what="a pipeline has no picture of streams",
            why="each of its ranks does something else",
            do="Draw its schedule: partc simulate BUILD --svg FILE.",
        )
    step = stage_step(program, change or Change(), where)
    title = f"{name or program.model} on {program.mesh}: a step of {_time(step.prediction.seconds)}"
    title += f" with {change}" if change else ""
    waits = streams.waits_of(program.basis.tapes[0], step.mesh)
    return picture(list(streams.panels(step.boxes, waits)), title, _verdict(step.prediction))


def picture(panels: Sequence[Panel], title: str, verdict: str) -> str:
    """The SVG text of panels, one below the other; all but the first have one time scale."""
    longest = max((p.end_s - p.begin_s for p in panels[1:]), default=1.0)
    scales = [WIDE / (panels[0].end_s - panels[0].begin_s), *[WIDE / longest] * len(panels[1:])]
    y = TOP
    parts: list[str] = []
    for panel, scale in zip(panels, scales, strict=True):
        parts += _drawn(panel, y, scale)
        y += HEAD + len(panel.rows) * (ROW + GAP) + AXIS
    heading = f'<text x="10" y="20"><tspan font-weight="bold">{escape(title)}.</tspan> '
    heading += f"{escape(verdict)}</text>"
    body = [heading, *_legend(), *parts]
    return page(LEFT + WIDE + RIGHT, y, f"{title}. {verdict}", body)


def _verdict(step: Prediction) -> str:
    """A sentence: how long all transfers take, and which share is hidden."""
    hidden = max(sum(each.hidden_s for each in step.axes), 0.0)
    whole = hidden + sum(each.exposed_s for each in step.axes)
    if not whole:
        return "Nothing is transferred."
    return f"Transfers take {_time(whole)}; {hidden / whole:.0%} of that is hidden."


def _time(seconds: float) -> str:
    return time_text(float(f"{seconds:.3g}"))


def _legend() -> Iterator[str]:
    x = 10.0
    for colour, meaning in LEGEND.values():
        yield f'<rect x="{x:.0f}" y="32" width="12" height="12" fill="{colour}"/>'
        yield f'<text class="small" x="{x + 16:.0f}" y="42">{meaning}</text>'
        x += 34 + 5.6 * len(meaning)


def _drawn(panel: Panel, top: int, scale: float) -> Iterator[str]:
    """A panel's caption, rows and time axis."""
    yield f'<text x="10" y="{top + 20}" font-weight="bold">{escape(panel.caption)}</text>'
    notes = "; ".join(streams.hidings(panel) if panel.notes is None else panel.notes)
    yield f'<text class="small" x="10" y="{top + 37}">{escape(notes)}</text>'
    for number, (label, bars) in enumerate(panel.rows.items()):
        y = top + HEAD + number * (ROW + GAP)
        yield f'<text x="10" y="{y + 16}">{escape(label)}</text>'
        for bar in bars:
            x, width = LEFT + (bar.begin_s - panel.begin_s) * scale, bar.seconds * scale
            yield from _box(bar, x, y, width)
    bottom = top + HEAD + len(panel.rows) * (ROW + GAP) + 2
    yield from time_axis((panel.end_s - panel.begin_s) * MS_PER_S, scale / MS_PER_S, bottom)
    yield f'<text x="10" y="{bottom + 20}">ms</text>'


def _box(bar: Bar, x: float, y: float, width: float) -> Iterator[str]:
    yield (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" '
        f'fill="{LEGEND[bar.colour][0]}"><title>{escape(bar.told)}</title></rect>'
    )
    if bar.label and width > LETTER * len(bar.label) + 2:
        yield f'<text class="in" x="{x + width / 2:.1f}" y="{y + 16}">{escape(bar.label)}</text>'
