"""The report's page against its data, and its time line against the program.

``counts_differ``: lines of the program, bars of the time line, marks beside lines, and what a rank
starts when it runs. ``strange_numbers``: numbers that the page shows and the data does not have.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from typing import Any

from partc.amounts import amount, time_text
from partc.dryrun.program_trace import program_trace
from partc.program import Program
from partc.reports.report_page import report_page

Json = dict[str, Any]
Counts = dict[tuple[str, int], int]  # (file, line) -> transfers
NUMBER = re.compile(
    r"(?<![\w.@=])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:\s?(?:%|[kMGTP]?B(?:/s)?|[mu]?s))?(?![\w%])"
)
COLUMNS = {"timeline", "sources", "places", "measured"}  # of the data; the script shows them


# lines and bars ----------------------------------------------------------------------------------
def bars_by_line(told: Json) -> Counts:
    """How many bars of transfers lead to each line."""
    found: Counter[tuple[str, int]] = Counter()
    for stream in told["timeline"]["streams"]:
        if stream["kind"] == "transfers":
            found.update((stream["file"], line) for line in stream["line"])
    return dict(found)


def marks_by_line(told: Json) -> Counts:
    """How many transfers the mark beside each line says."""
    lines = told["timeline"]["lines"]
    return {(each["file"], each["line"]): each["transfers"] for each in lines}


def starts_by_line(program: Program) -> Counts:
    """How many transfers a rank without pipeline stages starts at each line when it runs."""
    trace = program_trace(program.role(0), library=program.basis.topology().library)
    file = program.role_of(0)
    starts = (each.line for axis in program.mesh.names for each in trace.starts(axis))
    return dict(Counter((file, line) for line in starts))


def counts_differ(program: Program, told: Json) -> list[str]:
    """What differs between marks, bars and the program; empty where nothing does."""
    bars, marks = bars_by_line(told), marks_by_line(told)
    found = [*_differences("bars", bars, "marks", marks)]
    if not program.schedule:
        found += _differences("bars", bars, "starts of the program", starts_by_line(program))
    if any(line == 0 for _, line in bars):
        found.append("a bar of a transfer has no line")
    return found


def _differences(name: str, ours: Counts, other: str, theirs: Counts) -> Iterator[str]:
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key, 0) != theirs.get(key, 0):
            file, line = key
            yield f"{file}:{line}: {ours.get(key, 0)} {name}, {theirs.get(key, 0)} {other}"


# numbers -----------------------------------------------------------------------------------------
class _Texts(HTMLParser):
    """The texts of a page outside of its script and style."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._hidden += tag in ("script", "style", "title")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style", "title")

    def handle_data(self, data: str) -> None:
        if not self._hidden and data.strip():
            self.texts.append(" ".join(data.split()))


def strange_numbers(told: Json) -> list[str]:
    """Numbers of the page that are neither in the data nor a share of two numbers of it."""
    page = _Texts()
    page.feed(report_page(told))
    known = {text for number in _numbers(told) for text in _written(number)}
    known |= {text for share in _shares(told) for text in _as_share(share)}
    words = sorted({*_words(told)}, key=len, reverse=True)
    found = []
    for text in page.texts:
        left = "" if text in words else text
        for word in words:
            left = left.replace(word, " ") if len(word) > 4 else left
        found += [f"{n} in {text!r}" for n in NUMBER.findall(left) if n.strip() not in known]
    return found


def shown_numbers(told: Json) -> int:
    """How many numbers the page shows."""
    page = _Texts()
    page.feed(report_page(told))
    return sum(len(NUMBER.findall(text)) for text in page.texts)


def _leaves(told: Any) -> Iterator[Any]:
    if isinstance(told, dict):
        for key, each in told.items():
            yield from _leaves(each) if key not in COLUMNS else ()
    elif isinstance(told, list):
        for each in told:
            yield from _leaves(each)
    else:
        yield told


def _numbers(told: Json) -> Iterator[float]:
    yield from (x for x in _leaves(told) if isinstance(x, int | float) and not isinstance(x, bool))
    yield told["timeline"]["memory"]["peak_bytes"]


def _words(told: Json) -> Iterator[str]:
    """Texts of the data, which stand on the page as they are; lists of texts as entries."""
    for each in _leaves(told):
        if isinstance(each, str) and any(map(str.isdigit, each)):
            yield " ".join(each.split())
    for entry in told["plan"]:
        yield json.dumps(entry["value"])
        yield f"{len(entry['value'])} entr" if isinstance(entry["value"], dict | list) else "\0"
        yield entry["key"]


def _written(number: float) -> Iterable[str]:
    """All the ways in which a page writes a number."""
    size = amount(round(number), "B") if number >= 0 else ""
    rounded = float(f"{number:.4g}")
    return (
        str(number), f"{number:,.0f}", f"{number:,.4g}", size, f"{size}/s", time_text(rounded),
    )  # fmt: skip


def _shares(told: Json) -> Iterator[float]:
    """Shares that the page says, each of two numbers of the data."""
    numbers, other = told["numbers"], told["alternatives"]
    yield from (numbers["mfu"], numbers["exposed_share"])
    yield numbers["peak_bytes"] / numbers["limit_bytes"]
    yield from (row["seconds"] / numbers["step_s"] for row in told["waterfall"])
    yield from (each["bytes"] / numbers["peak_bytes"] for each in told["holders"])
    for each in (*other["choices"], *other["changes"]) if other else ():
        if each["step_s"] is not None:
            yield each["step_s"] / other["step_s"] - 1


def _as_share(share: float) -> Iterable[str]:
    return f"{share:.1%}", f"{100 * share:+.1f} %", "0.0 %" if abs(share) < 5e-4 else "\0"
