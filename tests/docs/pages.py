"""The fenced blocks of a Markdown page, each with what the comment above it says of it.

``<!-- not run: why -->`` marks a block that no test can run, ``<!-- file: train.py -->`` one that a
reader saves under this name, ``<!-- prints -->`` what the block before it prints, and
``<!-- written by: command -->`` one that a test of its own writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = import_module("partc.__main__").main  # what `partc` runs
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[a-z ]+?)(?:: (?P<told>[^\n]*?))? -->\n)?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block: which of its page, where it begins, its language and text, its mark and what
    that says.
    """

    page: Path
    number: int
    line: int
    language: str
    text: str
    mark: str
    told: str
    span: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    for number, found in enumerate(BLOCK.finditer(text)):
        line = text.count("\n", 0, found.start("text"))
        mark, told = found["mark"] or "", found["told"] or ""
        span = found.span("text")
        yield Block(page, number, line, found["language"], found["text"], mark, told, span)


def rewrite(block: Block, text: str) -> None:
    """Put another text into a block of its page, wherever that stands by now."""
    begin, end = [*blocks(block.page)][block.number].span
    whole = block.page.read_text(encoding="utf-8")
    block.page.write_text(whole[:begin] + text + whole[end:], encoding="utf-8")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()
