"""The predicted step beside the program: for each bar of the time line, the program's line.

A prediction follows the scheduled graph, a rank follows the printed text. Both are walked here side
by side: transfers of an axis pair in order, calls pair by the user's call for which both stand.
What does not pair has line 0, and no guess.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from partc.cost.roofline import BLOCKS, COMPUTE, Box
from partc.cost.sites import NOWHERE
from partc.dryrun.program_trace import CALL, MESSAGES, Done, ProgramTrace
from partc.graph.folds import list_member
from partc.reports.step_streams import Wait

AHEAD = 48  # of the user's calls that may stand between those of two bars
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
    known = NOWHERE not in (box.site, start.site)
    return same_size and (not known or _layer(box) == _layer(start))


def _layer(moved: Box | Done) -> tuple[str, int]:
    return list_member(moved.site.module)


def _lines(boxes: Sequence[Box], starts: Sequence[Done]) -> list[int]:
    """The line of each transfer: in order where both orders agree, otherwise by size and layer."""
    if _are_alike(boxes, starts):
        return [each.line for each in starts]
    waiting: dict[object, deque[int]] = defaultdict(deque)
    for each in starts:
        waiting[each.num_bytes, _layer(each)].append(each.line)
    alike = (waiting[box.num_bytes, _layer(box)] for box in boxes)
    return [lines.popleft() if lines else NO_LINE for lines in alike]


def _walk(boxes: Sequence[Box], calls: Sequence[Done]) -> list[tuple[int, int]]:
    """The line of each box of computing, and the index of the call that pairs with it.

    A box without one has line 0 and the index of the box before. Calls that follow each other for
    one call of the user count as one: a helper that packs messages makes hundreds.
    """
    firsts = [k for k, each in enumerate(calls) if not k or calls[k - 1].site != each.site]
    found, at = [], 0
    for box in boxes:
        near = [*range(at, min(at + AHEAD, len(firsts))), *range(at - 1, max(at - BACK, -1), -1)]
        same = (k for k in near if box.site != NOWHERE and calls[firsts[k]].site == box.site)
        here = next(same, None)
        at = at if here is None else max(at, here)
        line = NO_LINE if here is None else calls[firsts[here]].line
        found.append((line, firsts[at] if firsts else 0))
    return found


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
