"""Let the gradient of what all blocks read be summed alike in every block.

A position bias, or the weight of a norm, that all blocks read has a gradient to which each block
adds. The block whose backward runs first has nothing to add to, and so would differ from all
others: it adds to zeros. One function and a loop then serve all blocks.

    block 3: e = g3               block 3: e = zeros + g3
    block 2: f = e + g2           block 2: f = e + g2
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from partc.graph import Graph, fake_of, is_backward, is_call, is_tensor, update, value
from partc.graph.draws import draws_numbers
from partc.graph.folds import CALL, layer_path
from partc.graph.graph_edits import call_before
from partc.graph.places import are_worth_a_loop, place_of, put

aten = torch.ops.aten
FEWEST = 2  # blocks of a loop


def start_sums(graph: Graph) -> None:
    """Begin each sum of gradients over the blocks of a list with zeros, in place.

    Only where the first block to run lacks these additions alone, beside the block behind it.
    """
    for path, blocks in _lists(graph).items():
        if len(blocks) >= FEWEST and not _stays_in_line(graph, path, len(blocks)):
            first, second = blocks[:2]
            sums = [s for node in first for s in _sums(node, {*first}, {*second})]
            lacking = Counter(map(_says, second))
            lacking.subtract(map(_says, first))
            lacking = Counter({says: num for says, num in lacking.items() if num})
            if sums and lacking == Counter(_says(add) for _, add in sums):
                for start, add in sums:
                    _begin(start, add, first[0])


def _stays_in_line(graph: Graph, path: str, calls: int) -> bool:
    """Whether the blocks are calls of a module that are printed one by one.

    They are too short for a loop, or draw numbers: each call has a site of its own.
    """
    second = f"{path}.{CALL}1"
    inside = [n for n in graph.calls() if f"{place_of(n)}.".startswith(f"{second}.")]
    values = sum(map(is_tensor, inside))
    draws = any(map(draws_numbers, inside))
    return bool(inside) and (draws or not are_worth_a_loop(calls, values))


def _lists(graph: Graph) -> dict[str, list[Sequence[fx.Node]]]:
    """The backward calls of each block, by list, in the order in which the blocks run."""
    found: dict[str, dict[str, list[fx.Node]]] = defaultdict(dict)
    for node in graph.calls():
        path, _, number = layer_path(place_of(node), 1).rpartition(".")
        if path and is_backward(node):
            found[path].setdefault(number, []).append(node)
    return {path: [*blocks.values()] for path, blocks in found.items()}


def _says(node: fx.Node) -> object:
    """The op and the result of a call, which are the same in equal blocks."""
    fake = fake_of(node)
    return str(node.target), (tuple(fake.shape), fake.dtype) if is_tensor(node) else ()


def _sums(
    ended: fx.Node, first: set[fx.Node], second: set[fx.Node]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """A sum of gradients that goes on from the first block to the second: its start, and an add.

    ``ended`` is what the first block gives the second. Where a block adds several gradients to what
    it is given, the first block's own ones are added to each other, and the start is the innermost.
    """
    users = list(ended.users)
    if len(users) != 1 or users[0] not in second or not _adds(users[0], ended):
        return
    add = last = users[0]
    while len(last.users) == 1 and _adds(user := next(iter(last.users)), last) and user in second:
        last, ended = user, ended.args[0]  # type: ignore[assignment]
        if not isinstance(ended, fx.Node) or ended not in first:
            return
    yield ended, add


def _adds(node: fx.Node, to: fx.Node) -> bool:
    """Whether a call adds something else to a value."""
    return (
        is_call(node, aten.add.Tensor)
        and node.args[0] is to
        and isinstance(node.args[1], fx.Node)
        and node.args[1] is not to
        and not node.kwargs
        and fake_of(node).shape == fake_of(to).shape
    )


def _begin(start: fx.Node, add: fx.Node, before: fx.Node) -> None:
    """Add the start of a sum to zeros, as ``add`` adds in the next block."""
    fake = fake_of(start)
    zeros = call_before(
        before, aten.full.default, list(fake.shape), 0.0, dtype=fake.dtype, device=fake.device
    )
    update(zeros, module="", at="", source="", calls=(), phase="B", forward="")
    users = list(start.users)
    new = call_before(start.next, aten.add.Tensor, zeros, start)
    put(new, like=start)
    update(new, source=value(add).source, phase="B", forward="")
    update(new, calls=value(add).calls)
    for user in users:
        user.replace_input_with(start, new)
