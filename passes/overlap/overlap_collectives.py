"""Put computing between a collective's start and its wait, inside each block and phase.

Gradients of weights are the fillers: only the step's end needs them, so they are held back until a
collective is in flight, and run beside it.
"""

from __future__ import annotations

import heapq
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import groupby

import torch
from torch import fx

from partc.graph import (
    Graph,
    collectives,
    fake_of,
    first_operand,
    innermost_block,
    ops,
    tensor_args,
    value,
)  # fmt: skip
from partc.graph.folds import list_member
from partc.graph.places import innermost_turn
from partc.passes.overlap.write_pieces import joins_pieces

Lasting = Callable[[fx.Node], float]  # how long a call or a transfer takes, in any unit

_START, _REST = range(2)
_PRODUCTS = (torch.ops.aten.matmul.default, torch.ops.aten.mm.default)
# calls that only move or reshape a finished gradient on its way out of the step
_CARRY = (
    *collectives.COLLECTIVES,
    *collectives.LOCAL,
    collectives.wait,
    operator.getitem,
    torch.ops.aten.reshape.default,
)


def overlap_collectives(graph: Graph, lasting: Lasting | None = None) -> Graph:
    """Reorder the calls of each block and phase of a graph with waits, in place.

    All fillers stand before the first wait. With ``lasting`` (the time of a call or a transfer)
    each wait gets only as many fillers as the transfer outlasts the other computing beside it.
    """
    fillers = _fillers(graph)
    for segment in _segments(graph):
        anchor = segment[0].prev
        for node in _ordered(segment, fillers, _Clock(lasting)):
            anchor.append(node)
            anchor = node
        if not any(_moves_activations(n) and n not in fillers for n in segment):
            _weights_first(segment)
    graph.fx.lint()
    return graph


def _weights_first(segment: list[fx.Node]) -> None:
    """Compute a layer's weight gradient before its input gradient, which saves peak memory.

    The activation that only the weight gradient reads is freed before the input gradient is made.
    fx nodes compare by graph position.
    """
    inside = set(segment)
    for grad in segment:
        if grad.target is ops.weight_grad:
            d_y = first_operand(grad)
            products = [n for n in d_y.users if n in inside and n.target in _PRODUCTS]
            for product in products:
                if first_operand(product) is d_y and product < grad < min(product.users):
                    grad.append(product)


def _segments(graph: Graph) -> Iterator[list[fx.Node]]:
    """The consecutive calls of one block and phase, one list after the other.

    Blocks beside each other that differ, as tables of several sizes do, are one segment: no loop
    over them is printed, so that the transfers of one may run beside the calls of the next.
    """
    calls = list(graph.calls())
    together: list[fx.Node] = []
    for _, run in groupby(calls, key=lambda n: (innermost_turn(n), value(n).phase)):
        segment = list(run)
        if together and not _beside(together, segment):
            yield _waits_last(together)
            together = []
        together += segment
    if together:
        yield _waits_last(together)


def _beside(before: list[fx.Node], run: list[fx.Node]) -> bool:
    """Whether a block differs from the one before in its list, and reads nothing of it."""
    last, first = before[-1], run[0]
    lists = [list_member(innermost_block(node))[0] for node in (last, first)]
    if not lists[0] or lists[0] != lists[1] or value(last).phase != value(first).phase:
        return False
    inside = set(before)
    reads = any(not inside.isdisjoint(node.all_input_nodes) for node in run)
    neighbour = [node for node in before if innermost_turn(node) == innermost_turn(last)]
    return not reads and _says(neighbour) != _says(run)


def _says(block: list[fx.Node]) -> Counter[tuple[str, ...]]:
    """The calls of a block, each with what it reads and gives: equal for equal blocks."""
    return Counter(
        (str(node.target), *(str(fake_of(n)) for n in (node, *node.all_input_nodes)))
        for node in block
    )


def _waits_last(segment: list[fx.Node]) -> list[fx.Node]:
    """The calls of a segment of several blocks, what reads a transfer behind all that does not."""
    if len({innermost_turn(node) for node in segment}) < 2:
        return segment
    late: set[fx.Node] = set()
    for node in segment:
        if _waits(node) or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return [n for n in segment if n not in late] + [n for n in segment if n in late]


def _fillers(graph: Graph) -> set[fx.Node]:
    """Backward calls that only results of the step depend on: gradients of weights, with the
    collectives and reshapes behind them.
    """
    carriers: set[fx.Node] = set()
    fillers: set[fx.Node] = set()
    for node in reversed(list(graph.calls())):
        if value(node).phase == "B" and all(u.op == "output" or u in carriers for u in node.users):
            fillers.add(node)
            if node.target in _CARRY or joins_pieces(node):
                carriers.add(node)
    return fillers


def _ordered(segment: list[fx.Node], fillers: set[fx.Node], clock: _Clock) -> Iterator[fx.Node]:
    """The calls of a segment in a new order: starts first, fillers before the next wait, all other
    calls as before. Behind the last wait the fillers keep their places.
    """
    place = {node: i for i, node in enumerate(segment)}
    order = TopologicalSorter({n: [o for o in n.all_input_nodes if o in place] for n in segment})
    order.prepare()
    ready: list[tuple[int, int]] = []
    held_back: list[int] = []

    def admit(node: fx.Node) -> None:
        # A filler that starts a transfer is not held back: the sooner it starts, the more of it
        # is hidden.
        starts = node.target in collectives.COLLECTIVES
        if node in fillers and not starts:
            heapq.heappush(held_back, place[node])
        else:
            heapq.heappush(ready, (_START if starts else _REST, place[node]))

    waits = sum(_waits(n) and n not in fillers for n in segment)
    while order.is_active():
        for node in order.get_ready():
            admit(node)
        rank, first = ready[0] if ready else (_REST, len(segment))
        at_wait = not ready or (_waits(segment[first]) and clock.is_late(segment[first]))
        # With no wait left to hide, a filler that is held back only keeps its operands in memory.
        in_place = not waits and rank == _REST and held_back and held_back[0] < first
        take_filler = held_back and (at_wait or in_place)
        index = heapq.heappop(held_back) if take_filler else heapq.heappop(ready)[1]
        waits -= _waits(segment[index]) and not take_filler
        clock.run(segment[index])
        yield segment[index]
        order.done(segment[index])


@dataclass
class _Clock:
    """The time in a segment, and when its transfers end; one axis moves one transfer at a time."""

    lasting: Lasting | None
    now: float = 0.0
    free: dict[object, float] = field(default_factory=dict)
    ends: dict[fx.Node, float] = field(default_factory=dict)

    def run(self, node: fx.Node) -> None:
        """Move the clock over the next call, start or wait."""
        if self.lasting is None:
            return
        if node.target in collectives.COLLECTIVES:
            axis = node.kwargs["axis"]
            begin = max(self.now, self.free.get(axis, 0.0))
            self.free[axis] = self.ends[node] = begin + self.lasting(node)
        elif node.target is collectives.wait:
            self.now = max(self.now, self.ends.get(first_operand(node), 0.0))
        else:
            self.now += self.lasting(node)

    def is_late(self, wait: fx.Node) -> bool:
        """Whether the transfer of a wait is still under way; True where no times are known."""
        return self.lasting is None or self.ends.get(first_operand(wait), 0.0) > self.now


def _waits(node: fx.Node) -> bool:
    """Whether a call is a wait that can take time: not one for weights, gathered a block ahead."""
    return node.target is collectives.wait and _moves_activations(first_operand(node))


def _moves_activations(node: fx.Node) -> bool:
    """Whether a call starts a transfer of anything but weights."""
    operands = tensor_args(node) if node.target in collectives.COLLECTIVES else []
    return bool(operands) and value(operands[0]).kind != "param"
