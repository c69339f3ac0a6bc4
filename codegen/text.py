"""Python text: expressions that know where they need parentheses, and lines that fit the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# Python's levels of precedence, the tightest first; at NONE no expression needs parentheses.
ATOM, POWER, UNARY, PRODUCT, SUM, SHIFT, AND, XOR, OR, COMPARE, NONE = range(20, 9, -1)
WIDTH = 100  # columns of a line of code
PAGE = 128  # columns of a line of code and the remark beside it
COMMENT_COLUMN = 72  # where comments stand beside shorter lines
Origin = tuple[str, str]  # a module's path in the user's model, and "net.py:14: the source line"


@dataclass(frozen=True)
class Text:
    """An expression and the precedence of its outermost operator: ``a + b`` has the level SUM.

    ``among``: of how many entries of a list it is one, as ``x_all[2]`` is; 0 for others.
    """

    code: str
    level: int = ATOM
    among: int = 0

    def at(self, level: int) -> str:
        """The expression as an operand of an operator of ``level``, in parentheses where needed.

        >>> Text("a + b", SUM).at(PRODUCT)
        '(a + b)'
        """
        return self.code if self.level >= level else f"({self.code})"

    def __str__(self) -> str:
        return self.code


@dataclass(frozen=True, eq=False)
class Range:
    """A range of torch.profiler: the lines that share this object. ``name``: an expression."""

    name: str


@dataclass(frozen=True)
class Line:
    """One statement (or a whole-line comment, when there is no code) and the remark beside it."""

    code: str
    remark: str = ""
    indent: int = 0  # in levels of four columns, relative to the function's body
    both: bool = False  # whether ``wrap`` may break among targets and among arguments at once
    origin: Origin | None = None  # the user's call for which the statement stands
    range: Range | None = None  # of torch.profiler
    around: str = ""  # one around that, as an expression: of a block whose calls stand in line

    @property
    def frees(self) -> bool:
        """Whether the statement only drops what no later one reads."""
        return self.code.startswith("del ") or self.code.endswith(".clear()")


@dataclass(frozen=True)
class Printed:
    """The text of a file, and for which of the user's calls each line stands, by line number.

    ``helpers``: the functions that it imports from the file beside it, and those that these call.
    """

    text: str
    origins: dict[int, Origin]
    helpers: tuple[Callable[..., Any], ...] = ()


def block(lines: Iterable[Line], indent: int) -> str:
    """Lines as text: wrapped to the page, remarks aligned, indented by ``indent`` levels."""
    wrapped = [(_rows(line, indent), line.remark) for line in lines]
    # One long line must not push the remarks of all others to the right.
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


def origins(lines: Iterable[Line], indent: int) -> list[Origin | None]:
    """The origin of each row of ``block(lines, indent)``: that of a statement at its first row."""
    rows = ([line.origin, *[None] * (len(_rows(line, indent)) - 1)] for line in lines)
    return [origin for each in rows for origin in each]


def _rows(line: Line, indent: int) -> list[str]:
    """A line's code as rows of text, with room for the remark behind the last one."""
    room = len(line.remark) + 4 if line.remark and line.code else 0
    return wrap(line.code, 4 * (indent + line.indent), room, line.both)


def wrap(code: str, indent: int, room: int = 0, both: bool = False) -> list[str]:
    """A statement as lines within the page, ``room`` columns left free after the last one.

    With ``both``, or where no other way fits, a call may be broken among its targets and its
    arguments at once. Of the ways to break a statement inside a bracket, the one with the fewest
    and shortest lines is taken.

    >>> wrap("y = f(" + ", ".join(["argument"] * 12) + ")", 4)[1]
    '          argument, argument, argument)'
    """
    pad = " " * indent
    plain = [pad + code]
    if _fits(plain, room) or not code:
        return plain
    code = _in_brackets(code)
    pairs = _brackets(code)
    big = [pair for pair in pairs if pair[1] - pair[0] > len(code) // 3]
    ways = [way for pair in big for way in _broken(code, pair, indent)]
    if not _fits(plain, 0):
        ways += _broken_targets(code, indent)
        ways += _broken_twice(code, indent) if both else []
        ways += [way for pair in pairs if pair not in big for way in _broken(code, pair, indent)]
    if all(map(_too_long, ways)) and " = " in code and code.endswith(")"):
        ways += _broken_twice(code, indent)
    fitting = [way for way in ways if _fits(way, room)]
    return min(fitting or ways or [plain], key=_size)


def _in_brackets(code: str) -> str:
    """A statement whose several items may be broken in brackets: ``del a, b -> del (a, b)``."""
    word, _, items = code.partition(" ")
    bare = word in ("del", "return") and len(_split(items)) > 1 and not _brackets(items)
    return f"{word} ({items})" if bare else code


def _size(rows: Sequence[str]) -> tuple[int, int, int]:
    return _too_long(rows), len(rows), max(map(len, rows))


def _too_long(rows: Sequence[str]) -> int:
    """By how many columns the longest line is longer than WIDTH; 0 if none is."""
    return max(0, *(len(row) - WIDTH for row in rows))


def _fits(rows: Sequence[str], room: int) -> bool:
    return not _too_long(rows) and len(rows[-1]) + room <= PAGE


def _broken(code: str, pair: tuple[int, int], indent: int) -> Iterator[list[str]]:
    """The ways to break a statement inside one bracket.

    Later lines stand under the first item, or all items stand on lines of their own behind the
    bracket, which closes behind the last item or on a line of its own.
    """
    start, end = pair
    items = [item.strip() for item in _split(code[start + 1 : end]) if item.strip()]
    if len(items) < 2 and not (items and (_is_call(code, start) or code[start] == "{")):
        return
    items = [*(f"{item}," for item in items[:-1]), items[-1]]
    opened, closed = " " * indent + code[: start + 1], code[end:]
    if indent + start < WIDTH // 2 and len(items) > 1:
        first, *rows = _fill(items, indent + start + 1, closed)
        yield [opened + first.lstrip(), *rows]
    if not code.startswith("def "):  # its body would follow at the same depth
        yield [opened, *_fill(items, indent + 4, closed)]
    items[-1] += "," if len(items) > 1 else ""
    yield [opened, *_fill(items, indent + 4), " " * indent + closed]


def _broken_targets(code: str, indent: int) -> Iterator[list[str]]:
    """``a, b = saved`` broken among its targets, which then stand in brackets."""
    targets, equals, right = code.partition(" = ")
    if equals and len(_split(targets)) > 1 and not _brackets(targets):
        yield from _broken(f"({targets}) = {right}", (0, len(targets) + 1), indent)


def _broken_twice(code: str, indent: int) -> Iterator[list[str]]:
    """``a, b = f(x, y)`` broken among its targets, in brackets then, and among its arguments."""
    targets, _, call = code.partition(" = ")
    name, bracket, arguments = call.removesuffix(")").partition("(")
    if not bracket or not all(part.isidentifier() for part in name.split(".")):
        return
    items = [item.strip() for item in _split(arguments)]
    items = [*(f"{item}," for item in items[:-1]), items[-1]]
    for way in _broken(f"({targets}) = {name}(", (0, len(targets) + 1), indent):
        yield [*way, *_fill(items, indent + 4, ")")]


def _fill(items: Sequence[str], indent: int, closed: str = "") -> list[str]:
    """Rows of items side by side, as many as fit, with ``closed`` right behind the last item.

    An item too long for a row is wrapped itself.
    """
    rows: list[str] = []
    for item in items:
        behind = len(closed) if item is items[-1] else 0
        if rows and len(rows[-1]) + 1 + len(item) + behind <= WIDTH:
            rows[-1] += f" {item}"
        else:
            rows += wrap(item, indent)
    return [*rows[:-1], rows[-1] + closed]


def _brackets(code: str) -> list[tuple[int, int]]:
    """Positions of the outermost pairs of brackets in a statement, the last pair first.

    Where a bracket holds nothing but one call, as in ``f(g(x, y))``, the call's pair is there too.
    """
    pairs: list[tuple[int, int]] = []
    open_at: list[int] = []
    closed: list[tuple[int, int]] = []  # inside the outermost bracket
    for at, char in _outside_strings(code):
        if char in "([{":
            open_at.append(at)
        elif char in ")]}":
            closed.append((open_at.pop(), at))
            if not open_at:
                start, end = closed[-1]
                sole = [c for c in closed if c[1] == end - 1 and _is_sole_call(code, start, c[0])]
                pairs += [*sole, (start, end)]
                closed = []
    return pairs[::-1]


def _is_sole_call(code: str, outer: int, start: int) -> bool:
    """Whether the bracket from ``outer`` holds only the call whose arguments begin at ``start``.

    It may be the only value of a dict: ``{key: f(x, y)}``.
    """
    name = code[outer + 1 : start]
    name = name.rpartition(": ")[2] if code[outer] == "{" else name
    return _is_call(code, start) and all(part.isidentifier() for part in name.split("."))


def _is_call(code: str, start: int) -> bool:
    """Whether a bracket holds the arguments of a call.

    Only there may a single item get a trailing comma: ``x[0]`` and ``x[0,]`` differ.
    """
    before = code[start - 1 : start]
    return code[start] == "(" and (before.isalnum() or before in tuple("_)]"))


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
