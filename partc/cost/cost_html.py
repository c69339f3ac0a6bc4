"""A saved cost as a piece of a page: two bars, of the step and of the memory, and their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from partc.amounts import amount, time_text
from partc.cost.cost_parts import part_text, peak_memory, waterfall
from partc.cost.prediction import Prediction
from partc.drawing import AXIS_COLOURS, LETTER, box, html_table, image, label, page

LEFT, WIDE, ROW = 10, 700, 26  # pixels: of margin, of a bar, of its height
OWN = {"arithmetic": "#7fb2e5", "memory": "#cabaf0", "launches": "#b8bfc6", "optimizer": "#8cc6a0"}
OTHER = "#b8bfc6"
WAITS = ("#e0483e", "#e08a3c", "#c9a227")  # for transfers, by axis
MOST = len(AXIS_COLOURS)  # holders that are named
Part = tuple[str, float, str, str]  # what, how much, as text, its colour


def cost_html(cost: Any) -> str:
    """HTML of the data of ``program.cost.as_json()``, of at most some 10 kB."""
    data: Mapping[str, Any] = cost or {}
    bars = [*_step(data), *_memory(data)]
    title = f"Cost of {data.get('model', 'a program')} on {data.get('mesh') or 'one device'}"
    if not bars:
        return html_table([], f"{title}: nothing was predicted")
    svg = page(LEFT + WIDE + 10, 66 * len(bars) + 4, title, _drawn(bars))
    tables = (html_table(_rows(parts), caption) for caption, parts in bars)
    return f"<div>{image(svg, title)}{''.join(tables)}</div>"


def _rows(parts: Sequence[Part]) -> Iterator[tuple[str, str, str]]:
    whole = sum(part[1] for part in parts) or 1.0
    for what, size, text, _ in parts:
        yield what, text, f"{size / whole:.1%}"


def _step(data: Mapping[str, Any]) -> Iterator[tuple[str, list[Part]]]:
    told = data.get("prediction")
    if not told:
        return
    step = Prediction.of_json(told)
    axes = [each.axis for each in step.axes]
    parts = [
        (part_text(row["part"]), row["seconds"], _time(row["seconds"]), _colour(row["part"], axes))
        for row in waterfall(step)
    ]
    yield f"a step of {_time(step.seconds)}, predicted for {step.hardware}", parts


def _colour(part: str, axes: Sequence[str]) -> str:
    index = axes.index(part) if part in axes else len(axes)
    return OWN.get(part) or WAITS[index % len(WAITS)]


def _memory(data: Mapping[str, Any]) -> Iterator[tuple[str, list[Part]]]:
    peak, holders = peak_memory(data)
    if not peak:
        return
    named = [*holders[:MOST], ("others", max(peak - sum(x for _, x in holders[:MOST]), 0))]
    parts = [
        (who, float(size), amount(size, "B"), [*AXIS_COLOURS, OTHER][index])
        for index, (who, size) in enumerate(named) if size
    ]  # fmt: skip
    yield f"{amount(peak, 'B')} of memory at the peak of the fullest rank", parts


def _drawn(bars: Sequence[tuple[str, Sequence[Part]]]) -> Iterator[str]:
    for number, (caption, parts) in enumerate(bars):
        y, x = 66.0 * number + 8, float(LEFT)
        whole = sum(part[1] for part in parts) or 1.0
        yield label(LEFT, y + 12, caption, "bold")
        for what, size, text, colour in parts:
            wide = WIDE * size / whole
            yield box(x, y + 22, wide, ROW, colour, f"{what}: {text}")
            said = next((w for w in (what, text) if LETTER * len(w) + 6 < wide), "")
            if said:
                yield label(x + wide / 2, y + 39, said, "in")
            x += wide


def _time(seconds: float) -> str:
    return time_text(float(f"{seconds:.4g}"))
