"""Draw a comparison: speed-up against devices, and cost against time with the Pareto front."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log10

from partc.amounts import counted
from partc.drawing import AXIS_COLOURS, box, label, marks, page, rounded_up, rule
from partc.pictures.comparison import HOURS, PREDICTED, Comparison

WIDTH, TOP, HIGH, WIDE, GAP, LEFT = 900, 76, 260, 360, 90, 58
LIST = 20  # pixels of a row of the list of names
FRONT, IDEAL = "#e0483e", "#8b949e"


@dataclass(frozen=True)
class _Plane:
    """A panel: from numbers to pixels."""

    left: float
    most_x: float
    most_y: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        return (
            self.left + WIDE * x / (self.most_x or 1.0),
            TOP + HIGH * (1 - y / (self.most_y or 1.0)),
        )

    def axes(self, across: str, up: str, numbered: bool = True) -> Iterator[str]:
        """Grid lines with their numbers, and what they count."""
        for number in marks(self.most_y, 5):
            (x, y), (end, _) = self.at(0, number), self.at(self.most_x, number)
            yield rule(x, y, end, y, "grid")
            yield label(x - 6, y + 4, _short(number), "small end")
        for number in marks(self.most_x, 6) if numbered else ():
            x, y = self.at(number, 0)
            yield rule(x, y, x, y + 5)
            yield label(x, y + 18, _short(number), "small mid")
        x, y = self.at(0, 0)
        yield rule(x, y, x + WIDE, y)
        yield label(x + WIDE / 2, y + 36, across, "mid")
        yield label(x - LEFT + 12, TOP - 12, up)


def compare_svg(found: Comparison) -> str:
    """The SVG text of a comparison."""
    base = found.base
    what = "program" if base.how == PREDICTED else "plan"
    title = f"{counted(len(found.points), what)}, by {base.how} steps"
    said = f"Speed-up is relative to {base.name}, {counted(base.devices, 'device')}."
    bottom = TOP + HIGH + 56
    body = [
        label(10, 20, f"{title}.", "bold"), label(10, 38, said, "small"),
        *_speed_up(found), *_cost(found), *_names(found, bottom),
    ]  # fmt: skip
    rows = (len(found.points) + 1) // 2
    return page(WIDTH, bottom + 12 + LIST * rows, f"{title}. {said}", body)


def _speed_up(found: Comparison) -> Iterator[str]:
    """Speed-up against devices, with what as many devices would give at best (dashed); bars where
    all points have as many.
    """
    most = max(each.devices for each in found.points)
    reached = max(found.speed_up(each) for each in found.points)
    if all(each.devices == most for each in found.points):
        yield from _bars(found, reached)
        return
    first = found.base.devices
    plane = _Plane(LEFT, rounded_up(1.08 * most), rounded_up(1.1 * max(reached, 1.0)))
    yield from plane.axes("devices", "speed-up")
    end = min(plane.most_x, plane.most_y * first)
    (x, y), (to_x, to_y) = plane.at(0, 0), plane.at(end, end / first)
    line = f"M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"
    yield f'<path d="{line}" stroke="{IDEAL}" stroke-dasharray="5 4"/>'
    for index, each in enumerate(found.points):
        yield _dot(index, *plane.at(each.devices, found.speed_up(each)))


def _bars(found: Comparison, reached: float) -> Iterator[str]:
    """A bar per point, of its speed-up, with the number that it has in the list of names."""
    plane = _Plane(LEFT, len(found.points), rounded_up(1.1 * reached))
    yield from plane.axes("", "speed-up", numbered=False)
    wide = min(WIDE / len(found.points) - 8, 60)
    for index, each in enumerate(found.points):
        (x, y), (_, bottom) = plane.at(index + 0.5, found.speed_up(each)), plane.at(0, 0)
        colour = AXIS_COLOURS[index % len(AXIS_COLOURS)]
        yield box(x - wide / 2, y, wide, bottom - y, colour, each.name)
        yield label(x, y - 5, f"{found.speed_up(each):.2f}", "small mid")
        yield label(x, bottom + 18, index + 1, "small mid")


def _cost(found: Comparison) -> Iterator[str]:
    """Cost against time, both of a million samples or tokens, with the Pareto front (red)."""
    seconds = {each.name: 1e6 / each.per_s for each in found.points if each.per_s}
    scale, unit = _unit(max(seconds.values(), default=1.0))
    most_y = rounded_up(1.1 * max(found.cost(each) for each in found.points))
    plane = _Plane(LEFT + WIDE + GAP, rounded_up(1.08 * max(seconds.values()) / scale), most_y)
    what = "$" if found.in_dollars else HOURS
    yield from plane.axes(
        f"{unit} for a million {found.unit}", f"{what} for a million {found.unit}"
    )
    front = [plane.at(seconds[x.name] / scale, found.cost(x)) for x in found.front]
    if len(front) > 1:
        path = f"M{front[0][0]:.1f} {front[0][1]:.1f}"
        path += "".join(f"H{x:.1f}V{y:.1f}" for x, y in front[1:])
        yield f'<path fill="none" stroke="{FRONT}" stroke-width="1.5" d="{path}"/>'
    for index, each in enumerate(found.points):
        yield _dot(index, *plane.at(seconds[each.name] / scale, found.cost(each)))


def _dot(index: int, x: float, y: float) -> str:
    """A point with its number in the list of names."""
    colour = AXIS_COLOURS[index % len(AXIS_COLOURS)]
    dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>'
    return dot + label(x + 7, y - 5, index + 1, "small")


def _names(found: Comparison, top: float) -> Iterator[str]:
    """The list of points in two columns; those on the front are bold."""
    rows = (len(found.points) + 1) // 2
    for index, each in enumerate(found.points):
        x, y = 12 + WIDTH / 2 * (index // rows), top + LIST * (index % rows)
        colour = AXIS_COLOURS[index % len(AXIS_COLOURS)]
        yield f'<circle cx="{x + 5:.1f}" cy="{y + 6:.1f}" r="5" fill="{colour}"/>'
        words = f"{index + 1}  {each.name}"
        said = words if len(words) < 64 else f"{words[:61]}..."
        yield label(x + 16, y + 10, said, "small bold" if each in found.front else "small")


def _unit(seconds: float) -> tuple[float, str]:
    """The unit in which the longest time has few digits."""
    return next((size, name) for size, name in _UNITS if seconds >= size or size == 1.0)


_UNITS: Sequence[tuple[float, str]] = ((86400.0, "days"), (3600.0, "hours"), (1.0, "seconds"))


def _short(number: float) -> str:
    """A number on an axis: ``1500 -> 1.5k``."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:g}{letter}"
    return f"{round(number, 3 - int(log10(number))) if 0 < number < 1 else number:g}"
