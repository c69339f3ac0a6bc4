"""Draw the predicted step of a pipeline: a row of actions and one of messages for each rank."""

from __future__ import annotations

from collections.abc import Iterator

from partc.amounts import time_text
from partc.plan.mesh import PP
from partc.program import Program
from partc.reports import step_streams as streams
from partc.reports.linked import Bar as Linked
from partc.reports.pipeline_timeline import pipeline_timeline
from partc.reports.saved_step import saved_step
from partc.reports.step_streams import Bar, Panel
from partc.reports.step_svg import picture
from partc.reports.timeline import RANKS, Stream

COLOURS = {
    "F": streams.FORWARD,
    "B": streams.BACKWARD,
    "I": streams.BACKWARD,
    "W": streams.WEIGHTS,
    streams.UPDATE: streams.UPDATE,
}


def pipeline_svg(program: Program) -> str:
    """The SVG text of a pipeline's predicted step."""
    line = pipeline_timeline(program)
    rows: dict[str, list[Bar]] = {}
    rank = ""
    for stream in (each for each in line.streams if each.kind == RANKS or each.axis == PP):
        rank = stream.name if stream.kind == RANKS else rank
        name = rank if stream.kind == RANKS else f"{rank.removeprefix('rank ')} sends"
        rows[name] = [*_bars(stream)]
    step = saved_step(program)
    title = f"{program.model} on {program.mesh}: a step of {_time(line.end_s)}"
    said = f"{step.step.schedule.name}; ranks compute nothing for {step.bubble:.0%} of it"
    note = "numbers are microbatches; of messages red is the time in which the rank waits"
    panel = Panel("The whole step", 0.0, line.end_s or 1e-6, rows, names_work=False, notes=(note,))
    return picture([panel], title, said)


def _bars(stream: Stream) -> Iterator[Bar]:
    for each in stream.bars:
        told = each.box.block or each.box.name
        if stream.kind == RANKS:
            colour = COLOURS.get(each.box.name, streams.EXPOSED)
            number = told.lstrip("0123456789").lstrip("FBIW") if colour in _NUMBERED else ""
            yield Bar(each.box.begin_s, each.end_s, colour, number, f"{told}, {_of(each)}")
        else:
            yield from _message(each)


_NUMBERED = (streams.FORWARD, streams.BACKWARD, streams.WEIGHTS)


def _message(each: Linked) -> Iterator[Bar]:
    """The bar of a message, red in its last part for as long as the rank waits for it."""
    begin, end = each.box.begin_s, each.end_s
    waits = max(end - each.waits_s, begin)
    told = f"{each.box.name}, {_of(each)}"
    if waits > begin:
        yield Bar(begin, waits, streams.HIDDEN, "", told)
    if end > waits:
        yield Bar(waits, end, streams.EXPOSED, "", told)


def _of(each: Linked) -> str:
    return _time(each.box.seconds)


def _time(seconds: float) -> str:
    return time_text(float(f"{seconds:.3g}"))
