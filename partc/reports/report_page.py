"""A report as one HTML file that fetches nothing: the data, and what shows it.

The page may run its own script and style alone (Content-Security-Policy), so it can be sent by
mail, opened from a disk, and stands in a notebook.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

import jinja2

from partc.amounts import amount, counted, time_text
from partc.cost.cost_parts import part_text
from partc.reports.report_data import Json

TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("partc.reports"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=True,
    comment_start_string="<#",  # style has {#name
    comment_end_string="#>",
)
NOTEBOOK_PIXELS = 720  # high: a frame in a notebook does not grow


def report_page(told: Json) -> str:
    """The HTML text of a report's data."""
    return TEMPLATES.get_template("report.html.j2").render(
        told=told, data=_script_text(told), rows=_rows(told), part=part_text,
        amount=lambda number: amount(round(number), "B"), time=_time, counted=counted,
        share=lambda part: f"{part:.1%}", sentence=_value, change=_change,
    )  # fmt: skip


def framed(page: str) -> str:
    """A page as a frame of a notebook, which may run its script and nothing else."""
    return (
        f'<iframe sandbox="allow-scripts" srcdoc="{escape(page)}" width="100%" '
        f'height="{NOTEBOOK_PIXELS}" style="border:0"></iframe>'
    )


def _script_text(told: Json) -> str:
    """Data as JSON that may stand in a script element: no text of it can end the element."""
    return json.dumps(told, separators=(",", ":")).replace("<", "\\u003c")


def _time(seconds: float) -> str:
    return time_text(float(f"{seconds:.4g}"))


def _change(part: float) -> str:
    """A share by which something changes, in percent: ``+1.5``; ``0.0`` has no sign."""
    text = f"{100 * part:+.1f}"
    return "0.0" if float(text) == 0 else text


def _rows(told: Json) -> list[dict[str, Any]]:
    """The waterfall's rows: where each begins and how wide it is, as shares of the step."""
    whole = told["numbers"]["step_s"] or 1.0
    rows, begin = [], 0.0
    for row in told["waterfall"]:
        share = row["seconds"] / whole
        rows.append({**row, "begin": begin, "share": share})
        begin += share
    return rows


def _value(value: Any) -> str:
    """A plan's value as short text: tables and lists that are long by their number of entries."""
    text = json.dumps(value)
    if len(text) <= 80 or not isinstance(value, dict | list):
        return text
    entries = "entry" if len(value) == 1 else "entries"
    return f"{len(value)} {entries}"
