"""Numbers that differ from block to block: a scale, the rate of a drop path, a dilation.

Blocks that differ in nothing else are printed as one class, and each instance has its own numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from partc.codegen.repeats.equal import Group
from partc.codegen.repeats.may_vary import may_vary, names_of_arguments
from partc.graph import op_word
from partc.quoting import Named

Number = int | float
Place = tuple[str, tuple[int, ...]]  # an argument's name, and where in it a number stands


@dataclass(frozen=True)
class Varied:
    """One number of every block of a run, in the order of the blocks; ``name`` is its attribute."""

    name: str
    values: tuple[Number, ...]
    word: str  # what the number is to its call: ``dilation``

    @property
    def type_name(self) -> str:
        return "int" if all(type(value) is int for value in self.values) else "float"


def varied(layers: Sequence[str], phases: Iterable[Sequence[Group]]) -> tuple[Varied, ...]:
    """The numbers in which the blocks of a run differ; equal rows of numbers are one.

    ``layers`` has blocks too for which there are no calls: they are like the block before.
    """
    found: dict[tuple[str, tuple[Number, ...]], str] = {}
    for groups in phases:
        for column in zip(*(group.nodes for group in groups), strict=True):
            for row in zip(*(numbers(node) for node in column), strict=True):
                values = tuple(value for _, value in row)
                if any(value != values[0] for value in values):
                    by_layer = dict(zip((g.layer for g in groups), values, strict=True))
                    values = _spread(layers, by_layer)
                    word = _word(column[0], row[0][0][0])
                    if (word, values) not in found:
                        same = sum(w == word for w, _ in found)
                        taken = same > 0 or hasattr(nn.Module, word)
                        found[word, values] = f"{word}_{same + 1}" if taken else word
    return tuple(Varied(name, values, word) for (word, values), name in found.items())


def _spread(layers: Sequence[str], known: dict[str, Number]) -> tuple[Number, ...]:
    values: list[Number] = []
    for layer in layers:
        values.append(known[layer] if layer in known else values[-1])
    return tuple(values)


def _word(node: fx.Node, argument: str) -> str:
    """What a number is called: ``dilation``, or ``factor`` of a product."""
    words = {"mul": "factor", "div": "divisor", "add": "shift", "sub": "shift"}
    return words.get(op_word(node.target), "number") if argument == "other" else argument


def numbers(node: fx.Node) -> Iterator[tuple[Place, Number]]:
    """The numbers among a call's arguments that may differ from block to block."""
    for name, value in names_of_arguments(node):
        for at, number in _leaves(value):
            if may_vary(node, number):
                yield (name, at), number


def _leaves(value: Any, at: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    if isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _leaves(item, (*at, i))
    else:
        yield at, value


def read_from_attributes(
    layers: Sequence[str], phases: Iterable[Sequence[Group]], rows: Sequence[Varied]
) -> None:
    """Let the calls of a run's first block, from which its class is printed, read its numbers."""
    names = {(row.word, row.values): row.name for row in rows}
    for groups in phases:
        for column in zip(*(group.nodes for group in groups), strict=True):
            at: dict[Place, str] = {}
            for row in zip(*(numbers(node) for node in column), strict=True):
                known = dict(zip((g.layer for g in groups), (v for _, v in row), strict=True))
                key = _word(column[0], row[0][0][0]), _spread(layers, known)
                if key in names:
                    at[row[0][0]] = names[key]
            if at:
                _rewrite(column[0], at)


def _rewrite(node: fx.Node, at: dict[Place, str]) -> None:
    def named(name: str, value: Any) -> Any:
        return _replaced(value, lambda where: at.get((name, where)))

    positions = [name for name, _ in names_of_arguments(node)]
    node.args = tuple(named(positions[i], value) for i, value in enumerate(node.args))
    node.kwargs = {name: named(name, value) for name, value in node.kwargs.items()}


def _replaced(
    value: Any, name_at: Callable[[tuple[int, ...]], str | None], at: tuple[int, ...] = ()
) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, name_at, (*at, i)) for i, item in enumerate(value))
    name = name_at(at)
    return value if name is None else Named(value, f"self.{name}")


def reads_numbers(node: fx.Node) -> bool:
    """Whether a call reads a number of its own block."""
    leaves = (leaf for arg in (*node.args, *node.kwargs.values()) for _, leaf in _leaves(arg))
    return any(isinstance(leaf, Named) for leaf in leaves)
