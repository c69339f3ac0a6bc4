"""Numbers that differ from block to block: a scale, the rate of a drop path, a dilation, a size.

Blocks that differ in nothing else are printed as one class, and each instance has its own numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from partc.codegen.repeats.equal import Group
from partc.codegen.repeats.may_vary import may_vary, names_of_arguments
from partc.codegen.repeats.read_sizes import read_sizes
from partc.graph import op_word
from partc.graph.places import is_one_call
from partc.quoting import Named

Number = int | float
Values = tuple[Number, ...]
Place = tuple[str, tuple[int, ...]]  # an argument's name, and where in it a number stands
May = Callable[[fx.Node, str, Any], bool]
Column = Sequence[fx.Node]  # the same call of every block
RESHAPES = {torch.ops.aten.reshape.default, torch.ops.aten.view.default}


@dataclass(frozen=True)
class Varied:
    """One number of every block of a run, in the order of the blocks; ``name`` is its attribute."""

    name: str
    values: tuple[Number, ...]
    word: str  # what the number is to its call: ``dilation``

    @property
    def type_name(self) -> str:
        return "int" if all(type(value) is int for value in self.values) else "float"


def varied(
    layers: Sequence[str], phases: Iterable[Sequence[Group]], *, sizes: bool = False
) -> tuple[Varied, ...]:
    """The numbers in which the blocks of a run differ; equal rows of numbers are one.

    ``layers`` has blocks too for which there are no calls: they are like the block before. With
    ``sizes`` the blocks may differ in sizes.
    """
    found: dict[tuple[str, tuple[Number, ...]], str] = {}
    may_differ = partial(may_vary, sizes=sizes, calls=is_one_call(layers[0]))
    for groups in phases:
        for column in zip(*(group.nodes for group in groups), strict=True):
            for (argument, at), values in _rows(column, may_differ):
                by_layer = dict(zip((g.layer for g in groups), values, strict=True))
                word, values = _word(column[0], argument, at), _spread(layers, by_layer)
                if is_one_call(layers[0]) and _shifted(found, values):
                    continue  # written as `index - 1`
                if (word, values) not in found:
                    same = sum(w == word for w, _ in found)
                    taken = same > 0 or hasattr(nn.Module, word)
                    found[word, values] = f"{word}_{same + 1}" if taken else word
    return tuple(Varied(name, values, word) for (word, values), name in found.items())


def _shifted(found: Mapping[tuple[str, Values], str], values: Values) -> str:
    """A number that is another one and a constant, as text: ``index - 1``; "" if it is not."""
    for (_, others), name in found.items():
        shifts = {a - b for a, b in zip(values, others, strict=True)}
        if {*map(type, (*values, *others))} == {int} and len(shifts) == 1:
            shift = shifts.pop()
            return name if not shift else f"{name} {'+' if shift > 0 else '-'} {abs(shift)}"
    return ""


def _rows(column: Column, may_differ: May) -> Iterator[tuple[Place, tuple[Number, ...]]]:
    """The numbers of a call that differ among blocks, each with its value in every block.

    A size that follows from the others is none of them.
    """
    rows = _differing(column, may_differ)
    yield from ((place, values) for place, values in rows if place not in _open(column, rows))


def _differing(column: Column, may_differ: May) -> list[tuple[Place, tuple[Number, ...]]]:
    rows = zip(*(_numbers(node, may_differ) for node in column), strict=True)
    found = [(row[0][0], tuple(number for _, number in row)) for row in rows]
    found = [(place, values) for place, values in found if any(v != values[0] for v in values)]
    read = set.intersection(*map(read_sizes, column))  # these have no place in the text
    return [(place, values) for place, values in found if place[0] not in read]


def _open(column: Column, rows: Sequence[tuple[Place, tuple[Number, ...]]]) -> list[Place]:
    """The size that may be written -1: the only one of a reshape's that differs among blocks."""
    alone = column[0].target in RESHAPES and len(rows) == 1
    return [place for place, _ in rows if alone and not any(0 in n.args[1] for n in column)]  # type: ignore[operator]


def _spread(layers: Sequence[str], known: dict[str, Number]) -> tuple[Number, ...]:
    values: list[Number] = []
    for layer in layers:
        values.append(known[layer] if layer in known else values[-1])
    return tuple(values)


def _word(node: fx.Node, argument: str, at: tuple[int, ...]) -> str:
    """What a number is called: ``dilation``, or ``factor`` of a product."""
    if argument in ("size", "shape", "normalized_shape", "input_sizes", "self_size") and at:
        return f"size{at[-1]}"
    words = {"mul": "factor", "div": "divisor", "add": "shift", "sub": "shift"}
    return words.get(op_word(node.target), "number") if argument == "other" else argument


def _numbers(node: fx.Node, may_differ: May) -> Iterator[tuple[Place, Number]]:
    """The numbers among a call's arguments that may differ from block to block."""
    for name, value in names_of_arguments(node):
        for at, number in _leaves(value):
            if may_differ(node, name, number):
                yield (name, at), number


def _leaves(value: Any, at: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    if isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _leaves(item, (*at, i))
    else:
        yield at, value


def read_from_attributes(
    layers: Sequence[str], phases: Iterable[Sequence[Group]], rows: Sequence[Varied],
    printed: Sequence[str], *, sizes: bool = False, inner: AbstractSet[fx.Node] = frozenset(),
) -> None:  # fmt: skip
    """Let the calls of the blocks from which a class is ``printed`` read the block's numbers.

    ``rows`` has the numbers in the order of ``layers``; a class is printed from a run's first
    block. Calls of ``inner`` blocks read the numbers of those.
    """
    names = {(row.word, row.values): row.name for row in rows}
    may_differ = partial(may_vary, sizes=sizes, calls=is_one_call(layers[0]))
    owner = "" if is_one_call(layers[0]) else "self."
    for groups in phases:
        for column in zip(*(group.nodes for group in groups), strict=True):
            if not inner.isdisjoint(column):
                continue
            differing = _differing(column, may_differ)
            at: dict[Place, str | None] = dict.fromkeys(_open(column, differing))
            for place, values in differing:
                known = dict(zip((g.layer for g in groups), values, strict=True))
                key = _word(column[0], *place), _spread(layers, known)
                if place not in at and key in names:
                    at[place] = names[key]
                elif place not in at and is_one_call(layers[0]):
                    at[place] = _shifted(names, key[1])
            for node, group in zip(column, groups, strict=True):
                if at and group.layer in printed:
                    _rewrite(node, at, owner)


def numbers_at(
    layers: Sequence[str], phases: Iterable[Sequence[Group]], rows: Sequence[Varied], *,
    sizes: bool = False,
) -> dict[tuple[fx.Node, Place], tuple[str, Number]]:  # fmt: skip
    """The name and the value of each number that a call reads from its block, in all blocks.

    ``rows`` has the numbers in the order of ``layers``.
    """
    names = {(row.word, row.values): row.name for row in rows}
    may_differ = partial(may_vary, sizes=sizes)
    found: dict[tuple[fx.Node, Place], tuple[str, Number]] = {}
    for groups in phases:
        for column in zip(*(group.nodes for group in groups), strict=True):
            for place, values in _rows(column, may_differ):
                known = dict(zip((g.layer for g in groups), values, strict=True))
                name = names.get((_word(column[0], *place), _spread(layers, known)))
                if name is not None:
                    found |= {(n, place): (name, v) for n, v in zip(column, values, strict=True)}
    return found


def _rewrite(node: fx.Node, at: dict[Place, str | None], owner: str) -> None:
    """Write the name in ``at`` in place of a number; -1 where that is None.

    ``owner`` is what stands before a name: ``self.``, or nothing where it is an argument.
    """

    def named(name: str, value: Any) -> Any:
        here = {where: new for (argument, where), new in at.items() if argument == name}
        return _replaced(value, here, owner)

    positions = [name for name, _ in names_of_arguments(node)]
    node.args = tuple(named(positions[i], value) for i, value in enumerate(node.args))
    node.kwargs = {name: named(name, value) for name, value in node.kwargs.items()}


def _replaced(
    value: Any, names: dict[tuple[int, ...], str | None], owner: str, at: tuple[int, ...] = ()
) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, names, owner, (*at, i)) for i, item in enumerate(value))
    if at not in names:
        return value
    name = names[at]
    return -1 if name is None else Named(value, f"{owner}{name}")


def reads_numbers(node: fx.Node) -> bool:
    """Whether a call reads a number of its own block."""
    leaves = (leaf for arg in (*node.args, *node.kwargs.values()) for _, leaf in _leaves(arg))
    return any(isinstance(leaf, Named) for leaf in leaves)


def numbers_read(nodes: Iterable[fx.Node]) -> dict[str, None]:
    """The names of the numbers that calls read, in the order of first use."""
    given = (arg for node in nodes for arg in (*node.args, *node.kwargs.values()))
    leaves = (leaf for arg in given for _, leaf in _leaves(arg))
    texts = (leaf.name for leaf in leaves if isinstance(leaf, Named))
    return dict.fromkeys(text.partition(" ")[0] for text in texts)  # of `index - 1`
