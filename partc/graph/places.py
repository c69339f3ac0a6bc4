"""Where a call stands: the path of its module, with the numbers of the calls of that module.

A module that a step calls several times is not one block but several, one for each of its calls:
``cell.@3.x`` is inside of the fourth call of ``cell``. A module that is called once has no number
in a place, so that the place of most calls is the path of their module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import fx

from partc.graph import update, value
from partc.graph.blocks import prefixes
from partc.graph.folds import CALL, is_number

aten = torch.ops.aten
# Arguments that say which element or piece of a tensor a call is about: another one in each turn of
# a loop over calls, as in ``x[:, t]``.
PIECES = {
    (aten.select.int, "index"), (aten.select_backward.default, "index"),
    (aten.slice.Tensor, "start"), (aten.slice.Tensor, "end"),
}  # fmt: skip

FEWEST = 45  # values in line for which a class, with its methods and loops, has fewer lines


def takes_piece(node: fx.Node) -> bool:
    """Whether a call takes one element, or a piece, of a tensor along a dim."""
    return node.target in (aten.select.int, aten.slice.Tensor)


def place_of(node: fx.Node) -> str:
    """Where a call stands: ``cell.@3.x``, or ``layers.3.mlp`` where each module is called once."""
    known = value(node)
    return known.at or known.module


def named_place(node: fx.Node) -> str:
    """A node's place in the model, for messages: ``blocks.0.w1 (model.py:14), linear_3``."""
    known = value(node)
    line = known.source.partition(": ")[0]
    origin = known.name or known.module
    where = f"{origin} ({line})" if origin and line else origin or line
    return f"{where}, {node.name}" if where else node.name


def innermost_turn(node: fx.Node) -> str:
    """The innermost block around a call, where each call of a module is a block: ``cell.@3``.

    "" outside of blocks.
    """
    parts = place_of(node).split(".")
    last = max((i for i, part in enumerate(parts) if is_number(part)), default=-1)
    return ".".join(parts[: last + 1])


def are_worth_a_loop(calls: int, values: int) -> bool:
    """Whether a class and loops for the calls of a module have fewer lines than they have in line.

    ``values`` is how many tensors each call makes, with those of its backward.
    """
    return (calls - 1) * values >= FEWEST


def put(node: fx.Node, like: fx.Node) -> None:
    """Let a call stand where another one stands."""
    update(node, module=value(like).module, at=value(like).at)


def numbered(module: str, numbers: Mapping[str, int]) -> str:
    """The place inside of calls with these numbers, by path of the module that is called.

    >>> numbered("decoder.cell.x", {"decoder.cell": 3})
    'decoder.cell.@3.x'
    """
    parts = module.split(".")
    paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
    pairs = zip(parts, paths, strict=True)
    return ".".join(f"{p}.{CALL}{numbers[path]}" if path in numbers else p for p, path in pairs)


def module_of(place: str) -> str:
    """The path of the module of a place: ``cell.@3.x -> cell.x``."""
    return ".".join(part for part in place.split(".") if not part.startswith(CALL))


def is_one_call(block: str) -> bool:
    """Whether a block is one of several calls of a module: ``cell.@3``."""
    return block.rpartition(".")[2].startswith(CALL)


class Entered:
    """How often each module has been entered, by path, in the latest call of the module around it.

    So a module that is called once in each call of another one has no numbers of its own.
    """

    def __init__(self) -> None:
        self.times: Counter[str] = Counter()
        self.inside: dict[str, list[str]] = {}  # the modules entered since a module around them

    def begin(self) -> None:
        """Forget the step before."""
        self.times.clear()
        self.inside.clear()

    def enter(self, path: str) -> dict[str, int]:
        """Count one more call of a module; the number of the latest call of each one around it."""
        for inner in self.inside.pop(path, ()):
            self.times.pop(inner, None)
        self.times[path] += 1
        around = [*prefixes(path)]
        for each in around[:-1]:
            self.inside.setdefault(each, []).append(path)
        return {each: self.times[each] - 1 for each in around if self.times[each]}
