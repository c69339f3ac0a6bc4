"""Pieces of Python text that know how tightly they bind, and lines that fit the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ATOM, POWER, UNARY, PRODUCT, SUM, SHIFT, AND, XOR, OR, COMPARE, NONE = range(20, 9, -1)
WIDTH = 96  # of a line of code
PAGE = 120  # with the remark
COMMENT_COLUMN = 72  # where comments stand beside shorter lines


@dataclass(frozen=True)
class Text:
    """An expression and the level of its outermost operator."""

    code: str
    level: int = ATOM

    def at(self, level: int) -> str:
        """The expression as an operand of an operator of ``level``, in parentheses where needed.

        >>> Text("a + b", SUM).at(PRODUCT)
        '(a + b)'
        """
        return self.code if self.level >= level else f"({self.code})"

    def __str__(self) -> str:
        return self.code


@dataclass(frozen=True)
class Line:
    """One statement (or a whole-line comment, when there is no code) and the remark beside it."""

    code: str
    remark: str = ""
    indent: int = 0  # in levels, relative to the function's body


def block(lines: Iterable[Line], indent: int) -> str:
    """Lines as text: wrapped to the page, remarks aligned, indented by ``indent`` levels."""
    wrapped = [(_rows(line, indent), line.remark) for line in lines]
    ends = [len(rows[-1]) for rows, remark in wrapped if remark]
    column = max([end for end in ends if end <= COMMENT_COLUMN], default=0)
    text = []
    for rows, remark in wrapped:
        if remark and rows[-1].strip():
            rows[-1] = f"{rows[-1]:<{column}}  # {remark}"
        elif remark:
            rows[-1] = f"{rows[-1]}# {remark}"
        text += rows
    return "\n".join(row.rstrip() for row in text)


def _rows(line: Line, indent: int) -> list[str]:
    """A line's code, broken also where the remark would stand too far to the right."""
    rows = wrap(line.code, 4 * (indent + line.indent))
    too_far = len(rows) == 1 and len(rows[0]) + 4 + len(line.remark) > PAGE
    return wrap(line.code, 4 * (indent + line.indent), force=True) if too_far else rows


def wrap(code: str, indent: int, force: bool = False) -> list[str]:
    """A statement as lines within the page, broken inside its last bracket that is long enough.

    ``force`` breaks one that would fit.
    """
    pad = " " * indent
    if (len(pad) + len(code) <= WIDTH and not force) or not code:
        return [pad + code]
    pairs = [p for p in _brackets(code) if p[1] - p[0] > len(code) // 3 and _may_break(code, p)]
    if not pairs:
        return _wrap_targets(code, indent)
    start, end = pairs[0]
    items = [item.strip() for item in _split(code[start + 1 : end]) if item.strip()]
    comma = "," if len(items) > 1 or code[start] != "(" or _is_call(code, start) else ""
    rows = _fill([item + "," for item in items[:-1]] + [items[-1] + comma], indent + 4)
    return [pad + code[: start + 1], *rows, pad + code[end:]]


def _wrap_targets(code: str, indent: int) -> list[str]:
    """``a, b = value`` with its targets in parentheses, as many to a line as fit."""
    pad = " " * indent
    targets, equals, right = code.partition(" = ")
    names = _split(targets)
    if not equals or len(names) == 1:
        return [pad + code]
    rows = _fill([f"{name.strip()}," for name in names if name.strip()], indent + 4)
    return [f"{pad}(", *rows, f"{pad}) = {right}"]


def _fill(items: Sequence[str], indent: int) -> list[str]:
    """Items side by side, as many as fit; one too long by itself is wrapped in turn."""
    rows: list[str] = []
    for item in items:
        if (
            rows
            and len(rows[-1]) + 1 + len(item) <= WIDTH
            and not rows[-1].lstrip().startswith(")")
        ):
            rows[-1] += f" {item}"
        else:
            rows += wrap(item, indent)
    return rows


def _brackets(code: str) -> list[tuple[int, int]]:
    """The outermost bracket pairs of a statement, the last one first."""
    pairs, open_at = [], []
    for at, char in _outside_strings(code):
        if char in "([{":
            open_at.append(at)
        elif char in ")]}":
            start = open_at.pop()
            if not open_at:
                pairs.append((start, at))
    return pairs[::-1]


def _may_break(code: str, pair: tuple[int, int]) -> bool:
    return _is_call(code, pair[0]) or len(_split(code[pair[0] + 1 : pair[1]])) > 1


def _is_call(code: str, start: int) -> bool:
    return start > 0 and (code[start - 1].isalnum() or code[start - 1] in "_)]")


def _split(code: str) -> list[str]:
    """The items of a bracket: text between the commas that stand in no inner bracket."""
    items, depth, last = [], 0, 0
    for at, char in _outside_strings(code):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            items.append(code[last:at])
            last = at + 1
    return [*items, code[last:]]


def _outside_strings(code: str) -> Iterable[tuple[int, str]]:
    """Positions and characters that are not inside a string literal."""
    quote, skip = "", False
    for at, char in enumerate(code):
        if skip:
            skip = False
        elif quote:
            skip = char == "\\"
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        else:
            yield at, char
