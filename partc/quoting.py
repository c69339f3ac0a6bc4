"""Quote untrusted values (names, strings, numbers of a user's model) for generated Python source.

A model or a plan may hold any text; the functions here give literals, identifiers, comments and
docstrings that cannot end early and become code.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable

import torch

from partc.errors import UsageError


class Named(float):
    """A number that is written as the name of what holds it: ``self.scale``.

    It equals no number, so that nothing is written for this one value alone.
    """

    def __new__(cls, value: float, name: str) -> Named:
        made = super().__new__(cls, value)
        made.name, made.value = name, value
        return made

    name: str
    value: float  # an int where the call takes one

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = object.__hash__


def literal(value: object) -> str:
    """A Python expression that evaluates to the value; UsageError for a type without a literal.

    >>> literal(("w1", 2, torch.float32))
    '("w1", 2, torch.float32)'
    """
    spell = _SPELL.get(type(value))  # exact types: a subclass may bring its own __repr__
    if spell is None:
        raise UsageError(
            where="generated source",
            what=f"a value of type {type(value).__name__} cannot be written as a literal",
            why="only plain Python values and torch dtypes, devices and formats can",
            do="Pass it as a number, string, tuple, list or dict of those.",
        )
    return spell(value)


def identifier(name: str) -> str:
    """An ASCII identifier for a name; two names may give the same one, which the caller resolves.

    >>> identifier("blocks.0.w1.weight")
    'blocks_0_w1_weight'
    """
    safe = re.sub(r"[^A-Za-z0-9_]+", "_", name)
    safe = re.sub(r"^__+", "_", safe)  # __x would be mangled in a class, __class__ would replace it
    if not safe or safe[0].isdigit():
        safe = f"_{safe}"
    return f"{safe}_" if keyword.iskeyword(safe) else safe


def comment(text: str, length: int = 100) -> str:
    """The text as one printable ASCII line of at most `length` characters, without the `#`."""
    # A line break or another control character would end the comment, and the rest would be code.
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    line = line.encode("ascii", "replace").decode("ascii")
    line = re.sub(r"coding(?=[:=])", "coding ", line)  # `# coding: utf-7` would change the file
    return line if len(line) <= length else line[: max(length - 3, 0)] + "..."[:length]


def docstring(text: str, length: int = 100) -> str:
    """The text as `comment` gives it, with quotes and backslashes replaced.

    So the text cannot end the double-quoted docstring that it is written into.
    """
    return comment(text, length).replace("\\", "/").replace('"', "'")


def _text(value: str) -> str:
    """The string in double quotes where that needs no escape, else as `ascii` quotes it."""
    quoted = ascii(value)
    plain = quoted[0] == "'" and '"' not in quoted  # so no escaped ' either: ascii avoids those
    return f'"{quoted[1:-1]}"' if plain else quoted


def _float(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def _complex(value: complex) -> str:
    """A complex number in brackets, so that the literal may stand as an operand.

    >>> _complex(-2j), _complex(1 + 0.5j)
    ('(-0.0-2.0j)', '(1.0+0.5j)')
    """
    return f"({value.real!r}{value.imag:+}j)"


def _tuple(value: tuple[object, ...]) -> str:
    return f"({_items(value)}{',' if len(value) == 1 else ''})"


def _list(value: list[object]) -> str:
    return f"[{_items(value)}]"


def _dict(value: dict[object, object]) -> str:
    return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"


def _device(value: torch.device) -> str:
    return f"torch.device({_text(str(value))})"


def _items(values: tuple[object, ...] | list[object]) -> str:
    return ", ".join(literal(value) for value in values)


_SPELL: dict[type, Callable[..., str]] = {
    type(None): repr,
    bool: repr,
    int: repr,
    float: _float,
    Named: repr,
    complex: _complex,
    str: _text,
    tuple: _tuple,
    torch.Size: _tuple,
    list: _list,
    dict: _dict,
    torch.dtype: str,
    torch.layout: str,
    torch.memory_format: str,
    torch.device: _device,
}
