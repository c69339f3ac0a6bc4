"""Gradients to which all calls of a module add: they are added up in a dict, not passed on.

The graph has a chain of additions, one in each call, that begins with zeros:

    call 3: e = zeros + g3        sums.add(self.weight, g3)
    call 2: f = e + g2            sums.add(self.weight, g2)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from partc.codegen.repeats.runs import LATER, Loop
from partc.graph import Graph, collectives, fake_of, is_call, is_tensor
from partc.graph.moves import moves
from partc.passes.shard.zeros import is_zero

ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class Total:
    """The sum of the gradients that the calls of a module have for one of its parameters.

    ``adds`` are the additions of all calls in the order in which these run, ``parts`` what each of
    them adds, ``start`` the calls that make the zeros. ``is_last``: no other call reads the total,
    which is the parameter's gradient as this rank keeps it.
    """

    param: str
    adds: tuple[fx.Node, ...]
    parts: tuple[fx.Node, ...]
    start: tuple[fx.Node, ...]
    is_last: bool

    def part_of(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """What the call with these nodes adds."""
        pairs = zip(self.adds, self.parts, strict=True)
        return next(part for add, part in pairs if add in nodes)


def totals_of(graph: Graph, loop: Loop) -> list[Total]:
    """The totals to which the calls of a loop add; none of a loop over members of a list."""
    if not loop.run.is_called or loop.phase not in LATER:
        return []
    last = loop.groups[-1].nodes
    found = (_total(graph, loop, position) for position in range(len(last)))
    return [total for total in found if total is not None]


def _total(graph: Graph, loop: Loop, position: int) -> Total | None:
    adds = tuple(group.nodes[position] for group in loop.groups)
    param = _param_of(graph, adds[-1]) if is_call(adds[0], ADD) else ""
    if not param.startswith(f"{loop.run.module}.") or any(
        len(set(a.users)) != 1 for a in adds[:-1]
    ):
        return None
    parts = []
    for before, add, group in zip((None, *adds), adds, loop.groups, strict=False):
        part = _other(add, before)
        if part is None or part not in group.nodes or not _fits(part, add):
            return None
        parts.append(part)
    zeros = next(n for n in adds[0].all_input_nodes if n is not parts[0])
    alone = set(adds[-1].users) == {graph.fx.output_node()}
    return Total(param, adds, tuple(parts), _chain(zeros), alone) if is_zero(zeros) else None


def _other(add: fx.Node, before: fx.Node | None) -> fx.Node | None:
    """What a call adds to the sum before it, or to zeros."""
    operands = [n for n in add.args if isinstance(n, fx.Node)]
    if add.kwargs or len(operands) != 2 or operands[0] is operands[1]:
        return None
    rest = [n for n in operands if (n is not before if before is not None else not is_zero(n))]
    return rest[0] if len(rest) == 1 else None


def _fits(part: fx.Node, add: fx.Node) -> bool:
    """Whether a part has the shape and dtype of the total."""
    one, total = fake_of(part), fake_of(add)
    return is_tensor(part) and (one.shape, one.dtype) == (total.shape, total.dtype)


def _chain(zeros: fx.Node) -> tuple[fx.Node, ...]:
    """The calls that make zeros, the last one first."""
    chain = [zeros]
    while chain[-1].target in collectives.LOCAL:
        chain.append(chain[-1].all_input_nodes[0])
    return tuple(chain)


def unread_zeros(totals: Collection[Total]) -> set[fx.Node]:
    """The calls that make zeros for totals alone, and so need no line."""
    readers = {add for total in totals for add in total.adds}
    unread: set[fx.Node] = set()
    for node in (node for total in totals for node in total.start):
        if readers.union(unread).issuperset(node.users):
            unread.add(node)
    return unread


def _param_of(graph: Graph, total: fx.Node) -> str:
    """The parameter whose gradient follows from a total: by transfers, views, further additions."""
    names = {node: name for name, node in graph.grads.items()}
    node: fx.Node | None = total
    while node is not None and node not in names:
        node = _next(node)
    return names[node] if node is not None else ""


def _next(node: fx.Node) -> fx.Node | None:
    """The only call that reads a value, or of several transfers in one the result of its own."""
    users = list(node.users)
    if len(users) != 1 or users[0].op == "output":
        return None
    if users[0].target in collectives.JOINED:
        return next((move.result for move in moves(users[0]) if move.operand is node), None)
    goes_on = len(users[0].all_input_nodes) == 1 or is_call(users[0], ADD)
    return users[0] if goes_on else None
