"""Draw the held-out loss of all variants over seconds as SVG, the mean of their seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from statistics import mean

from benchmarks.sync.rank import Run
from partc.drawing import STYLE

WIDTH, HEIGHT = 960, 440
LEFT, RIGHT, TOP, BOTTOM = 50, 210, 50, 40  # pixels around the plot; names stand at the right
LINE = 20  # pixels from one name to the next
TICKS = 8
TOP_LOSS = 1.15  # of what is shown over the loss that is asked for: beginnings are all alike
PALETTE = ("#2f6fdb", "#e0483e", "#2c9c69", "#b8860b", "#8b5cd6", "#d0589b", "#3a9fb5", "#7a8794")
DASHES = ("", "6 3", "2 3")
Curve = list[tuple[float, float]]


def picture(runs: Sequence[Run], target: float, title: str) -> str:
    """The SVG text; the dotted line is the loss that is asked for."""
    curves = {name: mean_curve([r for r in runs if r.variant == name]) for name in _names(runs)}
    longest = max(curve[-1][0] for curve in curves.values()) or 1.0
    losses = [loss for curve in curves.values() for _, loss in curve]
    low, high = min(losses), max(min(max(losses), target * TOP_LOSS), target * 1.01)
    to_x = (WIDTH - LEFT - RIGHT) / longest
    to_y = (HEIGHT - TOP - BOTTOM) / (high - low)

    def at(seconds: float, loss: float) -> str:
        return f"{LEFT + seconds * to_x:.1f},{TOP + (high - loss) * to_y:.1f}"

    y = float(at(0, target).split(",")[1])
    body = [*_axes(longest, low, high), *_lines(curves, at)]
    body.append(f'<path class="line" stroke-dasharray="2 4" d="M{LEFT} {y} H{WIDTH - RIGHT}"/>')
    body.append(f'<text class="small" x="{LEFT + 4}" y="{y - 4}">the fixed loss</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12" role="img">'
    )
    about = [f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>"]
    about.append(f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>')
    about.append(f'<text x="10" y="22" font-weight="bold">{escape(title)}</text>')
    inside = f"M{LEFT} {TOP}H{WIDTH - RIGHT}V{HEIGHT}H{LEFT}z"
    clip = f'<clipPath id="plot"><path d="{inside}"/></clipPath>'
    return "\n".join([head, *about, clip, *body, "</svg>"]) + "\n"


def mean_curve(runs: Sequence[Run]) -> Curve:
    """Seconds and loss behind each number of steps, the mean over seeds."""
    return [
        (mean(seconds for _, seconds, _ in points), mean(loss for _, _, loss in points))
        for points in zip(*(run.curve for run in runs), strict=True)
    ]


def _names(runs: Sequence[Run]) -> list[str]:
    return [*dict.fromkeys(run.variant for run in runs)]


def _lines(curves: dict[str, Curve], at: Callable[[float, float], str]) -> Iterator[str]:
    """Each variant's curve, and its name beside the plot."""
    for number, (name, curve) in enumerate(curves.items()):
        colour = PALETTE[number % len(PALETTE)]
        dash = DASHES[number // len(PALETTE) % len(DASHES)]
        pen = f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"'
        points = " ".join(at(*point) for point in curve)
        yield f'<polyline clip-path="url(#plot)" {pen} points="{points}"/>'
        x, y = WIDTH - RIGHT + 14, TOP + number * LINE + 10
        yield f'<path {pen} d="M{x} {y - 4}h26"/>'
        yield f'<text class="small" x="{x + 32}" y="{y}">{escape(name)}</text>'


def _axes(longest: float, low: float, high: float) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    yield f'<path class="line" d="M{LEFT} {TOP}V{bottom}H{right}"/>'
    for tick in range(TICKS + 1):
        share = tick / TICKS
        x, y = LEFT + share * (right - LEFT), bottom - share * (bottom - TOP)
        yield f'<text class="small" x="{x - 8:.0f}" y="{bottom + 16}">{longest * share:.0f}</text>'
        yield f'<text class="small" x="14" y="{y + 4:.0f}">{low + (high - low) * share:.2f}</text>'
    yield f'<text class="small" x="{right - 50}" y="{bottom + 32}">seconds</text>'
    yield f'<text class="small" x="14" y="{TOP - 10}">held-out loss</text>'
