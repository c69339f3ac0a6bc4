"""Draw the time line of a program without pipeline stages as SVG.

One row shows the computing stream, one row per mesh axis the transfers over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from partc.amounts import time_text
from partc.cost.roofline import BLOCKS, COMPUTE, Box
from partc.schedules.picture import GAP, LEFT, ROW, TOP, time_axis

WIDE = 1200  # pixels of the step
US_PER_S = 1e6
TOUCHING_S = 1e-9  # calls with a shorter gap count as following each other
COLOURS = {COMPUTE: "#8fb8de", "": "#d9b77e"}  # of computing, and of transfers
STYLE = "text{fill:#222}.line{stroke:#888}@media(prefers-color-scheme:dark){text{fill:#ddd}}"


def svg(boxes: Sequence[Box]) -> str:
    """The SVG text: boxes for blocks' computing and for transfers; tooltips name and time them."""
    boxes = [box for box in boxes if box.stream != BLOCKS]  # computing is drawn by block
    streams = list(dict.fromkeys([COMPUTE, *(box.stream for box in boxes)]))
    longest = US_PER_S * max((box.begin_s + box.seconds for box in boxes), default=1e-6)
    scale, bottom = WIDE / longest, TOP + len(streams) * (ROW + GAP)
    width, height = LEFT + WIDE + 20, bottom + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f"<style>{STYLE}</style>",
        f'<text x="10" y="18" font-size="14">step {time_text(longest / US_PER_S)}</text>',
        *(line for row, stream in enumerate(streams) for line in _row(row, stream, boxes, scale)),
        *time_axis(longest, scale, bottom),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _row(row: int, stream: str, boxes: Sequence[Box], scale: float) -> Iterator[str]:
    y = TOP + row * (ROW + GAP)
    label = stream if stream == COMPUTE else f"over {stream}"
    yield f'<text x="10" y="{y + 17}">{escape(label)}</text>'
    mine = [box for box in boxes if box.stream == stream]
    for box in _by_block(mine) if stream == COMPUTE else mine:
        x, width = LEFT + box.begin_s * US_PER_S * scale, box.seconds * US_PER_S * scale
        colour = COLOURS.get(stream, COLOURS[""])
        said = escape(" ".join(filter(None, (box.block, box.name, time_text(box.seconds)))))
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{colour}" '
            f'stroke="#444" stroke-width="0.5"><title>{said}</title></rect>'
        )


def _by_block(boxes: Sequence[Box]) -> Iterator[Box]:
    """Join the boxes of a block's calls that follow each other without a break."""
    run: list[Box] = []
    for box in boxes:
        if run and (box.block != run[-1].block or box.begin_s > _end(run[-1]) + TOUCHING_S):
            yield _joined(run)
            run = []
        run.append(box)
    if run:
        yield _joined(run)


def _joined(run: Sequence[Box]) -> Box:
    name = run[0].name if len(run) == 1 else f"{len(run)} calls"
    return run[0]._replace(name=name, seconds=_end(run[-1]) - run[0].begin_s)


def _end(box: Box) -> float:
    return box.begin_s + box.seconds
