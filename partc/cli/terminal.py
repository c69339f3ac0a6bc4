"""What a command shows on a terminal: results, progress, colours, lines as wide as the window.

Results go to stdout, progress to stderr. Colours only on a terminal, and not where ``NO_COLOR`` is
set (no-color.org); what goes into a file or another command is plain text.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from partc.errors import visible
from partc.running import what_runs

COLOURS = {"red": "31", "green": "32", "yellow": "33", "faint": "2", "bold": "1"}
PLAIN_COLUMNS = 120  # of text that goes to no terminal and has to be cut
BEAT_S, REDRAW_S = 10.0, 0.2  # between lines of progress; between redrawn ones
CUT = "..."


def tell(args: argparse.Namespace, text: str, told: Any, paint: Callable[[str], str] = str) -> None:
    """Print a result: as text, or with ``--json`` as an object. ``paint`` colours a line."""
    if args.json:
        print(json.dumps(told))
    else:
        print("\n".join(map(paint, visible(text).split("\n"))))


def columns() -> int:
    """Columns of the window, or ``COLUMNS``; of what goes to no terminal 120."""
    return shutil.get_terminal_size((PLAIN_COLUMNS, 24)).columns


def shortened(lines: Iterable[str], width: int) -> list[str]:
    """Lines of at most ``width`` columns; what is left out of one is marked by ``...``."""
    return [x if len(x) <= width else x[: max(width - len(CUT), 0)] + CUT for x in lines]


def coloured(text: str, colour: str, stream: TextIO | None = None) -> str:
    """The text in a colour of ``COLOURS``, where the stream (or stdout) is a terminal with any."""
    stream = stream or sys.stdout
    if not shows_colours(stream) or not text:
        return text
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def shows_colours(stream: TextIO) -> bool:
    """Whether a stream is a terminal with colours, and ``NO_COLOR`` is not set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Say on stderr what runs: on a terminal in one line that has the compiler's pass and the time,
    elsewhere in a line now, and one every ten seconds.
    """
    start, over = time.monotonic(), threading.Event()
    redraws = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def beat() -> None:
        while not over.wait(REDRAW_S if redraws else BEAT_S):
            _show(what, time.monotonic() - start, redraws)

    if not redraws:
        print(f"{what} ...", file=sys.stderr, flush=True)
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if redraws:
            print(f"\r\x1b[K{what}  {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


def _show(what: str, seconds: float, redraws: bool) -> None:
    """A line of progress: ``... 20 s, propagate``."""
    now = what_runs()
    if not redraws:
        at = f", {now}" if now else ""
        print(f"  ... {seconds:.0f} s{at}", file=sys.stderr, flush=True)
        return
    text = f"{what}  {seconds:.0f} s" + (f"  {now}" if now else "")
    (line,) = shortened([visible(text)], columns() - 1)
    print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
