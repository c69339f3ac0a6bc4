"""Pieces of SVG pictures that read on light and on dark pages: page, text, boxes, axes, colours.

A picture has its own background, no script, and fetches nothing, so that it stands in a README, a
notebook or a mail. Lengths are pixels.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator
from html import escape
from math import ceil, floor, log10

STYLE = (
    "text{fill:#1f2328}.in{fill:#14181d;text-anchor:middle;font-size:11px}"
    ".small{font-size:11px}.faint{fill:#57606a}.line{stroke:#8b949e;fill:none}.page{fill:#fff}"
    ".bold{font-weight:bold}.end{text-anchor:end}.mid{text-anchor:middle}"
    ".grid{stroke:#d0d7de;fill:none}.panel{fill:#f3f5f8;stroke:#d0d7de}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.in{fill:#14181d}.page{fill:#0d1117}"
    ".faint{fill:#9da7b3}.grid{stroke:#30363d}.panel{fill:#161b22;stroke:#30363d}}"
)
AXIS_COLOURS = ("#2f9e7e", "#e08a3c", "#9673d6", "#c9a227", "#3d9bc4", "#c9639a")
LETTER = 6.2  # pixels of a letter of 12 pixels, on average


def page(width: float, height: float, title: str, body: Iterable[str]) -> str:
    """The text of a picture; ``title`` is read aloud, and shown where the mouse rests."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" font-size="12" '
        f'role="img">'
    )
    about = [f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>"]
    ground = f'<rect class="page" width="{width:.0f}" height="{height:.0f}"/>'
    return "\n".join([head, *about, ground, *body, "</svg>"]) + "\n"


def label(x: float, y: float, words: object, kind: str = "") -> str:
    """Text whose base line begins at a point; ``kind`` has classes of ``STYLE``."""
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}">{escape(str(words))}</text>'


def box(
    x: float, y: float, width: float, height: float, fill: str = "", told: str = "", kind: str = ""
) -> str:
    """A rectangle, with what is told of it where the mouse rests."""
    painted = f' class="{kind}"' if kind else f' fill="{fill}"'
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
    return f"<rect {size}{painted}>{_told(told)}</rect>" if told else f"<rect {size}{painted}/>"


def _told(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def rule(x: float, y: float, to_x: float, to_y: float, kind: str = "line") -> str:
    """A straight line."""
    return f'<path class="{kind}" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"/>'


def marks(most: float, about: int) -> list[float]:
    """Round numbers from 0 to ``most``, about so many: ``marks(7.3, 4) -> [0, 2, 4, 6]``."""
    if most <= 0:
        return [0.0]
    least = most / max(about, 1)
    power = 10.0 ** floor(log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
    return [number * step for number in range(floor(most / step * (1 + 1e-9)) + 1)]


def wrapped(words: str, width: float) -> Iterator[str]:
    """A text in lines that are about so many pixels wide."""
    most, line = max(floor(width / LETTER), 1), ""
    for word in words.split():
        if line and len(line) + 1 + len(word) > most:
            yield line
            line = word
        else:
            line = f"{line} {word}".strip()
    yield line


def image(svg: str, words: str) -> str:
    """A picture as an element of a page: its style then concerns nothing else of the page."""
    data = b64encode(svg.encode()).decode()
    told, style = escape(words, quote=True), "max-width:100%;display:block"
    return f'<img alt="{told}" style="{style}" src="data:image/svg+xml;base64,{data}">'


def rounded_up(number: float) -> float:
    """The next number of one or two digits: ``rounded_up(7.31) -> 7.4``."""
    if number <= 0:
        return 1.0
    power = 10.0 ** (floor(log10(number)) - 1)
    return ceil(number / power * (1 - 1e-9)) * power


def html_table(rows: Iterable[Iterable[object]], head: str = "") -> str:
    """Rows as a table of a page; ``head`` stands above it. All text is escaped."""
    style = ' style="text-align:left;vertical-align:top"'
    body = "".join(
        f"<tr>{''.join(f'<td{style}>{escape(str(cell))}</td>' for cell in row)}</tr>"
        for row in rows
    )
    return f"{f'<b>{escape(head)}</b>' if head else ''}<table>{body}</table>"
