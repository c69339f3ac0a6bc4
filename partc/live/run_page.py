"""A run as one HTML page that fetches nothing: curves of loss, step times and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from partc.amounts import amount
from partc.drawing import AXIS_COLOURS, box, html_table, label, marks, page, rounded_up, rule
from partc.live.run_facts import GIB, losses
from partc.live.run_files import MEMORY, STEP_S, Run
from partc.live.run_text import run_text

LEFT, WIDE, RIGHT, TOP, HIGH, AXIS = 70, 800, 30, 48, 170, 34  # pixels
MOST = 400  # points of a curve
FAR = 4  # times the median: what is above is cut off
SAVED, AGAIN = "#2f9e7e", "#e0483e"
Curve = Sequence[tuple[int, float]]
STYLE = (
    ":root{color-scheme:light dark}body{margin:16px auto;max-width:920px;padding:0 12px;"
    "font:14px/1.45 sans-serif;background:#fff;color:#1f2328}pre{overflow-x:auto;font-size:12px;"
    "padding:10px;border:1px solid #8b949e;border-radius:6px}svg{max-width:100%;height:auto}"
    "@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}}"
)


def run_page(run: Run, now: float, refresh_s: int = 0) -> str:
    """The HTML text of a run; with ``refresh_s`` a browser loads it again after so many seconds."""
    again = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    title = escape(f"Run {run.folder}")
    told = escape(run_text(run, now, 130))
    pictures = "".join(f"<section>{svg}</section>" for svg in _pictures(run))
    rows = [(str(each.step), amount(each.num_bytes, "B")) for each in run.checkpoints]
    saved = html_table([("step", "bytes"), *rows], "Checkpoints") if rows else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">"
        f"{again}<title>{title}</title><style>{STYLE}</style></head>"
        f"<body><h1>{title}</h1><pre>{told}</pre>{pictures}{saved}</body></html>\n"
    )


def _pictures(run: Run) -> Iterator[str]:
    yield _drawn("Loss", {"loss": losses(run)}, run, from_zero=False)
    times = {f"rank {each.rank}": _numbers(each.steps, STEP_S, 1e3) for each in run.ranks}
    promise = {"predicted": run.promise.step_s * 1e3} if run.promise else {}
    yield _drawn("Milliseconds of a step", times, run, level=promise)
    name = next((n for n in MEMORY if any(each.last(n) for each in run.ranks)), "")
    if name:
        held = {f"rank {each.rank}": _numbers(each.steps, name) for each in run.ranks}
        limit = {"predicted peak": run.promise.peak_bytes / GIB} if run.promise else {}
        yield _drawn("GiB of a GPU", held, run, level=limit)


def _numbers(
    steps: Mapping[int, Mapping[str, float]], name: str, times: float = 1.0
) -> list[tuple[int, float]]:
    return [(step, each[name] * times) for step, each in sorted(steps.items()) if name in each]


@dataclass(frozen=True)
class _Plane:
    """From a step and a number to pixels; what is above the plane is drawn at its edge."""

    low: float
    high: float
    last: int

    @classmethod
    def of(cls, values: Sequence[float], last: int, from_zero: bool) -> _Plane:
        """The plane of some numbers. From zero on, a few that are far above the rest are cut off,
        as one step with a checkpoint would make a line of all others.
        """
        if not from_zero:
            return cls(min(values, default=0.0), max(values, default=1.0), max(last, 1))
        most = max(values, default=1.0)
        usual = FAR * median(values) if values else most
        return cls(0.0, rounded_up(min(most, usual) or 1.0), max(last, 1))

    def at(self, step: float, value: float) -> tuple[float, float]:
        share = (min(value, self.high) - self.low) / ((self.high - self.low) or 1.0)
        return LEFT + WIDE * step / self.last, TOP + HIGH * (1 - share)

    def axes(self) -> Iterator[str]:
        """Grid lines at round numbers, and the steps below."""
        whole = marks(self.high - self.low, 4)
        each = whole[1] if len(whole) > 1 else (self.high or 1.0)
        for number in range(math.ceil(self.low / each), math.floor(self.high / each + 1e-9) + 1):
            x, y = self.at(0, number * each)
            yield rule(x, y, x + WIDE, y, "grid")
            yield label(x - 6, y + 4, _short(number * each), "small end")
        for step in marks(self.last, 8):
            x, y = self.at(step, self.low)
            yield rule(x, y, x, y + 5)
            yield label(x, y + 18, f"{step:g}", "small mid")
        yield label(10, TOP + HIGH + 18, "step", "small")


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def _drawn(
    title: str, curves: Mapping[str, Curve], run: Run, level: Mapping[str, float] | None = None,
    from_zero: bool = True,
) -> str:  # fmt: skip
    """Curves over the steps; checkpoints are green marks below, restarts red ones."""
    shown = {name: _thinned(curve) for name, curve in curves.items() if curve}
    values = [x for curve in shown.values() for _, x in curve]
    plane = _Plane.of([*values, *(level or {}).values()], run.step, from_zero)
    most = max(values, default=0.0)
    cut = f", cut at {_short(plane.high)}; the most is {_short(most)}" if most > plane.high else ""
    body = [label(10, 20, title + cut, "bold"), *plane.axes()]
    for index, (name, curve) in enumerate(shown.items()):
        colour = AXIS_COLOURS[index % len(AXIS_COLOURS)]
        points = " ".join("{:.1f},{:.1f}".format(*plane.at(*point)) for point in curve)
        drawn = f'stroke="{colour}" stroke-width="1.5" points="{points}"'
        body.append(f'<polyline fill="none" {drawn}/>')
        if index < len(AXIS_COLOURS):
            body.append(box(LEFT + 110 * index, 30, 10, 10, colour))
            body.append(label(LEFT + 14 + 110 * index, 39, name, "small"))
    for name, value in (level or {}).items():
        x, y = plane.at(0, value)
        body.append(f'<path d="M{x} {y:.1f}h{WIDE}" stroke="#8b949e" stroke-dasharray="5 4"/>')
        body.append(label(x + WIDE, y - 4, name, "small end"))
    body += _marks(run, plane)
    return page(LEFT + WIDE + RIGHT, TOP + HIGH + AXIS, f"{title} over the steps of a run", body)


def _marks(run: Run, plane: _Plane) -> Iterator[str]:
    bottom = TOP + HIGH
    for saved in run.checkpoints:
        x, _ = plane.at(saved.step, 0.0)
        yield box(x - 2, bottom - 4, 4, 8, SAVED, f"checkpoint of step {saved.step}")
    for step in run.leader.restarts:
        x, _ = plane.at(step, 0.0)
        yield box(x - 1, TOP, 2, HIGH, AGAIN, f"the run went on from step {step}")


def _thinned(curve: Curve) -> Curve:
    """A curve of finite numbers with few points, each the mean of those that it stands for."""
    known = [point for point in curve if math.isfinite(point[1])]
    each = max(-(-len(known) // MOST), 1)
    parts = [known[i : i + each] for i in range(0, len(known), each)]
    return [(part[-1][0], sum(x for _, x in part) / len(part)) for part in parts]
