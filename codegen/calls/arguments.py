"""One ATen call with its arguments by name, and the text of each argument."""

from __future__ import annotations

import itertools
import keyword
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from partc.codegen.text import PRODUCT, SUM, Text
from partc.quoting import literal

# Not printed: they follow from the operands, or the step's own device takes their place.
ENTRY = re.compile(r"(\w+_all)\[(\d+)\]")  # of the list that a loop makes
MANY = 3  # so many neighbouring entries are written as a slice
DIGITS = 12  # of a number that says more in another spelling
_PLACE = ("device", "layout", "pin_memory")


@dataclass(frozen=True)
class Call:
    """An ATen call; ``given`` has its arguments that differ from their defaults, in order.

    ``operand`` gives the text of a node. ``device`` is the text of the device on which a call makes
    a tensor from no other tensor: ``x.device``.
    """

    node: fx.Node
    given: dict[str, Any]
    operand: Callable[[fx.Node], Text]
    device: str

    @classmethod
    def of(cls, node: fx.Node, operand: Callable[[fx.Node], Text], device: str) -> Call:
        schema = node.target._schema  # type: ignore[union-attr]
        given = {}
        for position, arg in enumerate(schema.arguments):
            if position < len(node.args) and not arg.kwarg_only:
                value = node.args[position]
            elif arg.name in node.kwargs:
                value = node.kwargs[arg.name]
            else:
                continue
            if arg.name == "memory_format" and value == torch.preserve_format:
                continue
            if not (arg.has_default_value() and _same(value, arg.default_value)):
                given[arg.name] = value
        return cls(node, given, operand, device)

    @property
    def name(self) -> str:
        """The op's name without namespace and overload: ``add`` of ``aten.add.Tensor``."""
        return str(self.node.target._schema.name.split("::")[1])  # type: ignore[union-attr]

    def get(self, name: str) -> Any:
        """An argument's value, or its default."""
        for arg in self.node.target._schema.arguments:  # type: ignore[union-attr]
            if arg.name == name:
                return self.given.get(name, arg.default_value if arg.has_default_value() else None)
        raise AssertionError(f"{self.node.target} has no argument {name}")

    def text(self, name: str) -> Text:
        """An argument's text."""
        return self.spell(self.get(name))

    def spell(self, value: Any) -> Text:
        """Any argument value as text: nodes by name, lists by their items, the rest as literals."""
        if isinstance(value, fx.Node):
            return self.operand(value)
        if isinstance(value, list | tuple) and any(isinstance(v, fx.Node) for v in value):
            return Text(_as_list([self.spell(each) for each in value]))
        if isinstance(value, list | tuple):
            return Text(literal(tuple(value)))
        if isinstance(value, float) and (spelled := number(value)) is not None:
            return spelled
        text = literal(value)
        # A negative number stands in parentheses in sums and products, bare in comparisons.
        return Text(text, 14) if text.startswith("-") else Text(text)

    def arguments(self, skip: int = 0, place: bool = False, named: bool = False) -> str:
        """The given arguments, but for the first ``skip``, as text.

        A boolean is written by name, and so is every argument behind it or behind one that is left
        out. With ``named`` the first number and all behind it are, too. With ``place`` the device
        is added.
        """
        arguments = list(self.node.target._schema.arguments)  # type: ignore[union-attr]
        texts, by_name = [], False
        numbers = self._numbers() if named else set()
        for arg in arguments[skip:]:
            if arg.name in _PLACE and (arg.kwarg_only or arg.name not in self.given):
                continue
            if arg.name not in self.given:
                by_name = True
                continue
            value = self.given[arg.name]
            is_one = isinstance(value, list | tuple) and len(value) == 1
            if arg.name == "dim" and arg.N == 1 and is_one:  # int[1], for which a number will do
                value = value[0]
            by_name = by_name or arg.kwarg_only or isinstance(value, bool) or arg.name in numbers
            texts.append(f"{arg.name}={self.spell(value)}" if by_name else str(self.spell(value)))
        if place:
            texts.append(f"device={self.device}")
        return ", ".join(texts)

    def _numbers(self) -> set[str]:
        """The given arguments from the first one on that holds no tensor, if all can be named."""
        behind = [*itertools.dropwhile(lambda given: _has_tensor(given[1]), self.given.items())]
        while any(keyword.iskeyword(name) for name, _ in behind):
            behind = behind[1:]
        return {name for name, _ in behind}


def _has_tensor(given: Any) -> bool:
    parts = given if isinstance(given, list | tuple) else [given]
    return any(isinstance(part, fx.Node) for part in parts)


def _as_list(texts: Sequence[Text]) -> str:
    """A list; neighbouring entries of another list as a slice of that one, or as that one.

    >>> h = [Text(f"h_all[{i}]", among=4) for i in range(4)]
    >>> _as_list([Text("x"), *h[:3], Text("y")]), _as_list([Text("x"), *h[::-1]]), _as_list(h)
    ('[x, *h_all[:3], y]', '[x, *reversed(h_all)]', 'h_all')
    """
    found: list[str] = []
    while len(texts) > 0:
        run = max((_run(texts, step) for step in (1, -1)), key=len)
        if len(run) < MANY:
            run = run[:1]
            found.append(str(texts[0]))
        else:
            found.append(_slice(run, texts[0].among))
        texts = texts[max(1, len(run)) :]
    alone = found[0].removeprefix("*") if len(found) == 1 else ""
    return alone if alone.isidentifier() and found[0] != alone else f"[{', '.join(found)}]"


def _run(texts: Sequence[Text], step: int) -> list[tuple[str, int]]:
    """The entries of one list with which texts begin, each ``step`` behind the one before it."""
    run: list[tuple[str, int]] = []
    for text in texts:
        entry = ENTRY.fullmatch(str(text))
        if entry is None or (run and (entry[1], int(entry[2])) != (run[-1][0], run[-1][1] + step)):
            break
        run.append((entry[1], int(entry[2])))
    return run


def _slice(run: Sequence[tuple[str, int]], num: int) -> str:
    """Entries of a list of ``num`` entries, in order or in reverse, as a slice of it."""
    places = [place for _, place in run]
    first, last = min(places), max(places) + 1
    whole = (first, last) == (0, num)
    text = run[0][0] if whole else f"{run[0][0]}[{first or ''}:{'' if last == num else last}]"
    return f"*{text}" if places[0] < places[-1] else f"*reversed({text})"


def number(value: float) -> Text | None:
    """A number that is known by another spelling than its digits; None for all others.

    >>> str(number(1 - 0.9)), str(number(512 / 511)), number(0.1)
    ('1 - 0.9', '512 / 511', None)
    """
    if value == torch.finfo(torch.float32).min:
        return Text("torch.finfo(torch.float32).min")
    if len(repr(value)) < DIGITS or not math.isfinite(value):
        return None
    rest = round(1 - value, 6)
    if 0 < value < 1 and 1 - rest == value:
        return Text(f"1 - {rest}", SUM)
    whole = round(value / (value - 1)) if value > 1 else 0
    known = whole > 1 and whole / (whole - 1) == value
    return Text(f"{whole} / {whole - 1}", PRODUCT) if known else None


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, fx.Node) or isinstance(value, bool) != isinstance(default, bool):
        return False
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return list(value) == list(default)
    return type(value) is type(default) and value == default


def spelled(given: object) -> str:
    """A number as text: ``512 / 511`` for its digits."""
    known = number(given) if isinstance(given, float) else None
    return literal(given) if known is None else str(known)
