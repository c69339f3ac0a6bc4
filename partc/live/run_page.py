"""A run as one HTML page that fetches nothing: curves of loss, step times and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

from partc.amounts import amount
from partc.drawing import AXIS_COLOURS, box, html_table, label, marks, page, rounded_up, rule
from partc.live.run_facts import GIB, losses
from partc.live.run_files import MEMORY, STEP_S, Run
from partc.live.run_text import run_text

LEFT, WIDE, RIGHT, TOP, HIGH, AXIS = 70, 800, 30, 48, 170, 34  # pixels
MOST = 400  # points of a curve
SAVED, AGAIN = "#2f9e7e", "#e0483e"
Curve = Sequence[tuple[int, float]]
_At = Callable[[float, float], tuple[float, float]]  # a step and a number -> pixels
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


def _drawn(
    title: str, curves: Mapping[str, Curve], run: Run, level: Mapping[str, float] | None = None,
    from_zero: bool = True,
) -> str:  # fmt: skip
    """Curves over the steps; checkpoints are green marks below, restarts red ones."""
    shown = {name: _thinned(curve) for name, curve in curves.items() if curve}
    values = [x for curve in shown.values() for _, x in curve] + [*(level or {}).values()]
    low = 0.0 if from_zero else min(values, default=0.0)
    high = rounded_up(max(values, default=1.0)) if from_zero else max(values, default=1.0)
    span, last = (high - low) or 1.0, max(run.step, 1)

    def at(step: float, value: float) -> tuple[float, float]:
        return LEFT + WIDE * step / last, TOP + HIGH * (1 - (value - low) / span)

    body = [label(10, 20, title, "bold"), *_axes(low, high, last, at)]
    for index, (name, curve) in enumerate(shown.items()):
        colour = AXIS_COLOURS[index % len(AXIS_COLOURS)]
        points = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in curve)
        drawn = f'stroke="{colour}" stroke-width="1.5" points="{points}"'
        body.append(f'<polyline fill="none" {drawn}/>')
        if index < len(AXIS_COLOURS):
            body.append(box(LEFT + 110 * index, 30, 10, 10, colour))
            body.append(label(LEFT + 14 + 110 * index, 39, name, "small"))
    for name, value in (level or {}).items():
        x, y = at(0, value)
        body.append(f'<path d="M{x} {y:.1f}h{WIDE}" stroke="#8b949e" stroke-dasharray="5 4"/>')
        body.append(label(x + WIDE, y - 4, name, "small end"))
    body += _marks(run, at)
    return page(LEFT + WIDE + RIGHT, TOP + HIGH + AXIS, f"{title} over the steps of a run", body)


def _axes(low: float, high: float, last: int, at: _At) -> Iterator[str]:
    for number in marks(high - low, 4):
        x, y = at(0, low + number)
        yield rule(x, y, x + WIDE, y, "grid")
        yield label(x - 6, y + 4, f"{low + number:.4g}", "small end")
    for step in marks(last, 8):
        x, y = at(step, low)
        yield rule(x, y, x, y + 5)
        yield label(x, y + 18, f"{step:g}", "small mid")
    yield label(10, TOP + HIGH + 18, "step", "small")


def _marks(run: Run, at: _At) -> Iterator[str]:
    bottom = TOP + HIGH
    for saved in run.checkpoints:
        x, _ = at(saved.step, 0.0)
        yield box(x - 2, bottom - 4, 4, 8, SAVED, f"checkpoint of step {saved.step}")
    for step in run.leader.restarts:
        x, _ = at(step, 0.0)
        yield box(x - 1, TOP, 2, HIGH, AGAIN, f"the run went on from step {step}")


def _thinned(curve: Curve) -> Curve:
    """A curve of finite numbers with few points, each the mean of those that it stands for."""
    known = [point for point in curve if math.isfinite(point[1])]
    each = max(-(-len(known) // MOST), 1)
    parts = [known[i : i + each] for i in range(0, len(known), each)]
    return [(part[-1][0], sum(x for _, x in part) / len(part)) for part in parts]
