"""The endings of files that partc writes: a page is no ``.pdf``, and a picture no ``.png``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partc.errors import UsageError

_ENDINGS = {  # by what is written: its endings, and its name in a message
    "svg": ((".svg",), "an SVG picture"),
    "html": ((".html", ".htm"), "an HTML page"),
    "json": ((".json",), "a Chrome trace, in JSON,"),
    "toml": ((".toml",), "a text of TOML"),
    "jsonl": ((".jsonl", ".ndjson", ".json", ".log", ".txt"), "a text with a line of JSON a step"),
}
_ENDING = re.compile(r"\.[A-Za-z][A-Za-z0-9]*\Z")  # the 5 of run-0.5 says no format
_FURTHER = {"svg": " A browser shows it, and prints it as a PDF."}


def check_ending(path: str | Path, kind: str, where: str) -> None:
    """UsageError for a name that ends as files of another kind do; one without an ending is taken.

    ``kind``: what will be written, a key of ``_ENDINGS``.
    """
    endings, what = _ENDINGS[kind]
    given = Path(path)
    found = _ENDING.search(given.name)
    if found is None or found[0].lower() in endings or given.name == found[0]:
        return
    raise UsageError(
        where=where, what=f"it ends in {found[0]}, and {what} is written",
        why="another program would read the file by its ending",
        do=f"Name {given.with_suffix(endings[0])}.{_FURTHER.get(kind, '')}",
    )  # fmt: skip


def check_endings(args: Any, written: Mapping[str, str]) -> None:
    """UsageError for an option of a command that names a file with the ending of another kind.

    ``written``: by the option's name, what it writes.
    """
    for name, kind in written.items():
        if given := getattr(args, name):
            option = "-o" if name == "out" else f"--{name}"
            check_ending(given, kind, f"{option} {given}")
