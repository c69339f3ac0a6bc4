"""The predicted step beside the program: for each bar of the time line, the program's line.

A prediction follows the scheduled graph, a rank follows the printed text. Both are walked here side
by side: transfers of an axis pair in order, calls pair by the user's call for which both stand.
What does not pair has line 0, and no guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from partc.cost.roofline import BLOCKS, COMPUTE, Box
from partc.cost.sites import NOWHERE
from partc.dryrun.program_trace import CALL, MESSAGES, Done, ProgramTrace
from partc.graph.folds import list_member
from partc.reports.step_streams import Wait

AHEAD = 48  # of the user's calls that may stand between those of two bars
INSIDE = 6  # of them that are near: one of these may be a statement around a call
BACK = 8  # of them that an expression of several may make earlier than the graph has them
NO_LINE = 0


class Bar(NamedTuple):
    """One box of the time line with the program's line, and the seconds that computing waits."""

    box: Box
    line: int
    waits_s: float

    @property
    def end_s(self) -> float:
        return self.box.begin_s + self.box.seconds


class Point(NamedTuple):
    """A moment of the step, and the bytes that are live from then on."""

    at_s: float
    num_bytes: int


@dataclass(frozen=True)
class LinkedStep:
    """All bars of a step, and the memory that the program holds over its time."""

    bars: tuple[Bar, ...]
    curve: tuple[Point, ...]
    orders_agree: bool  # whether each axis has its transfers in the order of the program's lines


def linked_step(boxes: Sequence[Box], waits: Sequence[Wait], trace: ProgramTrace) -> LinkedStep:
    """Pair the boxes of a predicted step with what the program does."""
    lines: dict[int, int] = {}
    axes = dict.fromkeys(box.stream for box in boxes if box.stream not in (BLOCKS, COMPUTE))
    agree = True
    for axis in axes:
        mine = [i for i, box in enumerate(boxes) if box.stream == axis]
        there = trace.starts(axis)
        agree &= _are_alike([boxes[i] for i in mine], there)
        lines |= dict(zip(mine, _lines([boxes[i] for i in mine], there), strict=True))
    computed = [i for i, box in enumerate(boxes) if box.stream == COMPUTE]
    met = _walk([boxes[i] for i in computed], [each for each in trace.done if each.kind == CALL])
    lines |= {i: line for i, (line, _) in zip(computed, met, strict=True)}
    bars = tuple(
        Bar(box, lines.get(i, NO_LINE), _waited(box, waits)) for i, box in enumerate(boxes)
    )
    return LinkedStep(bars, tuple(_curve([boxes[i] for i in computed], met, trace)), agree)


def _are_alike(boxes: Sequence[Box], starts: Sequence[Done]) -> bool:
    """Whether transfers of an axis are the same ones in the same order."""
    pairs = zip(boxes, starts, strict=False)
    return len(boxes) == len(starts) and all(_is_same(*pair) for pair in pairs)


def _is_same(box: Box, start: Done) -> bool:
    """Whether a predicted transfer may be what the program starts: in bytes, and in its layer."""
    same_size = start.name == MESSAGES or box.num_bytes == start.num_bytes
    return same_size and (not _are_known(box, start) or _layer(box) == _layer(start))


def _are_known(box: Box, start: Done) -> bool:
    """Whether the layers of both are known: a line that several blocks share may be of any."""
    return NOWHERE not in (box.site, start.site) and "*" not in start.site.module


def _layer(moved: Box | Done) -> tuple[str, int]:
    return list_member(moved.site.module)


def _lines(boxes: Sequence[Box], starts: Sequence[Done]) -> list[int]:
    """The line of each transfer: in order where both orders agree, otherwise the first start that
    is left and most like it.
    """
    if _are_alike(boxes, starts):
        return [each.line for each in starts]
    left = [*starts]
    lines = []
    for box in boxes:
        likeness = [_likeness(box, start) for start in left]
        best = max(likeness, default=0)
        lines.append(left.pop(likeness.index(best)).line if best else NO_LINE)
    return lines


def _likeness(box: Box, start: Done) -> int:
    """How sure it is that a start is a predicted transfer: 0 if it cannot be."""
    if not _is_same(box, start):
        return 0
    return 1 + (box.num_bytes == start.num_bytes) + 2 * _are_known(box, start)


def _walk(boxes: Sequence[Box], calls: Sequence[Done]) -> list[tuple[int, int]]:
    """The line of each box of computing, and the index of the call that pairs with it.

    A box without one has line 0 and the index of the box before. Calls that follow each other for
    one call of the user count as one run: a helper that packs messages makes hundreds. A copy that
    no line of the user asks for has a module alone, and leads no further.
    """
    runs = _runs(calls)
    found, at = [], 0
    for box in boxes:
        here = _pair(box, calls, runs, at)
        if here is not None and box.site.source:
            at = max(at, here)
        line = NO_LINE if here is None else calls[runs[here][0]].line
        found.append((line, runs[at][0] if runs else 0))
    return [*_filled(boxes, found)]


def _pair(box: Box, calls: Sequence[Done], runs: Sequence[tuple[int, int]], at: int) -> int | None:
    """The run that makes a box's call: first one near, then a statement around it, then one far."""
    if box.site == NOWHERE:
        return None
    ahead = range(at, min(at + AHEAD, len(runs)))
    same = [k for k in ahead if calls[runs[k][0]].site == box.site]
    if same and same[0] < at + INSIDE:
        return same[0]
    around = (k for k in ahead[:INSIDE] if _is_inside(box, calls, runs[k]))
    back = (k for k in range(at - 1, max(at - BACK, -1), -1) if calls[runs[k][0]].site == box.site)
    return next(chain(around, back, same), None)


def _runs(calls: Sequence[Done]) -> list[tuple[int, int]]:
    """The calls that follow each other for one call of the user: the first, and behind the last."""
    firsts = [k for k, each in enumerate(calls) if not k or calls[k - 1].site != each.site]
    return [*zip(firsts, [*firsts[1:], len(calls)][: len(firsts)], strict=True)]


def _is_inside(box: Box, calls: Sequence[Done], run: tuple[int, int]) -> bool:
    """Whether a statement makes a box's call inside of an expression, which has the place of its
    last call: it is of the same module, and calls the same op.
    """
    first, last = run
    if calls[first].site.module != box.site.module:
        return False
    return any(each.name.startswith(f"{box.name}.") for each in calls[first:last])


def _filled(boxes: Sequence[Box], found: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Boxes without a line that stand between two of one line, all of one module, have it too."""
    after = [NO_LINE] * len(found)  # the line of the next box of the module that has one
    for i in range(len(found) - 2, -1, -1):
        if boxes[i].site.module == boxes[i + 1].site.module:
            after[i] = found[i + 1][0] or after[i + 1]
    before = NO_LINE
    for i, (line, at) in enumerate(found):
        if i and boxes[i].site.module != boxes[i - 1].site.module:
            before = NO_LINE
        yield (line or (before if before == after[i] else NO_LINE)), at
        before = line or before


def _waited(box: Box, waits: Sequence[Wait]) -> float:
    """Seconds of a transfer in which computing waits for it."""
    if box.stream in (BLOCKS, COMPUTE):
        return 0.0
    end_s = box.begin_s + box.seconds
    spans = (
        min(end_s, each.end_s) - max(box.begin_s, each.begin_s)
        for each in waits if each.axis == box.stream
    )  # fmt: skip
    return sum(span for span in spans if span > 0)


def _curve(
    boxes: Sequence[Box], met: Sequence[tuple[int, int]], trace: ProgramTrace
) -> list[Point]:
    """Live bytes over the time of the step: the most of all calls up to each box's end.

    A call without a box, such as a view, belongs to the box after it.
    """
    live = [each.live_bytes for each in trace.done if each.kind == CALL]
    points: list[Point] = []
    done = 0
    for box, (line, at) in zip(boxes, met, strict=True):
        if line != NO_LINE and at >= done:
            points.append(Point(box.begin_s + box.seconds, max(live[done : at + 1])))
            done = at + 1
    end_s = max((box.begin_s + box.seconds for box in boxes), default=0.0)
    return [*points, Point(end_s, max(live[done:], default=0))]
