"""Put work between start and wait: inside each block, what does not need a collective's result
runs while it is under way.

Weight gradients are the filler: nothing in the step needs them before its end, so they wait until
a transfer is in flight and run beside it.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import groupby

import torch
from torch import fx

from partc.graph import Graph, collectives, first_operand, innermost_block, ops, tensor_args, value
from partc.passes.overlap.write_pieces import joins_pieces

Seconds = Callable[[fx.Node], float]

_START, _REST = range(2)
_PRODUCTS = (torch.ops.aten.matmul.default, torch.ops.aten.mm.default)
# what only moves or reshapes a finished gradient on its way out of the step
_CARRY = (
    *collectives.COLLECTIVES,
    *collectives.LOCAL,
    collectives.wait,
    operator.getitem,
    torch.ops.aten.reshape.default,
)


def overlap_collectives(graph: Graph, seconds: Seconds | None = None) -> Graph:
    """Reorder the calls of each block and phase of a scheduled graph, in place.

    What is to run beside transfers stands before the first wait. With ``seconds``, of a call or a
    transfer, as much of it stands before each wait as the transfer takes longer than what is
    computed beside it anyway.
    """
    fillers = _fillers(graph)
    for segment in _segments(graph):
        anchor = segment[0].prev
        for node in _ordered(segment, fillers, _Clock(seconds)):
            anchor.append(node)
            anchor = node
        if not any(_moves_activations(n) and n not in fillers for n in segment):
            _weights_first(segment)
    graph.fx.lint()
    return graph


def _weights_first(segment: list[fx.Node]) -> None:
    """Move gradients of inputs behind those of weights by the same layer's result: what the latter
    alone read is dropped before the former are made. Nodes compare by their place.
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
    """Runs of consecutive calls of one block and phase."""
    calls = list(graph.calls())
    for _, run in groupby(calls, key=lambda n: (innermost_block(n), value(n).phase)):
        yield list(run)


def _fillers(graph: Graph) -> set[fx.Node]:
    """Gradients of weights and what finishes them: only the step's results depend on them."""
    carriers: set[fx.Node] = set()
    fillers: set[fx.Node] = set()
    for node in reversed(list(graph.calls())):
        if value(node).phase == "B" and all(u.op == "output" or u in carriers for u in node.users):
            fillers.add(node)
            if node.target in _CARRY or joins_pieces(node):
                carriers.add(node)
    return fillers


def _ordered(segment: list[fx.Node], fillers: set[fx.Node], clock: _Clock) -> Iterator[fx.Node]:
    """Starts as soon as they can, fillers before the next wait, everything else in its order.

    Where no wait is to come, fillers stay at their place.
    """
    place = {node: i for i, node in enumerate(segment)}
    order = TopologicalSorter({n: [o for o in n.all_input_nodes if o in place] for n in segment})
    order.prepare()
    ready: list[tuple[int, int]] = []
    held_back: list[int] = []

    def admit(node: fx.Node) -> None:
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
        in_place = not waits and rank == _REST and held_back and held_back[0] < first
        take_filler = held_back and (at_wait or in_place)
        index = heapq.heappop(held_back) if take_filler else heapq.heappop(ready)[1]
        waits -= _waits(segment[index]) and not take_filler
        clock.run(segment[index])
        yield segment[index]
        order.done(segment[index])


@dataclass
class _Clock:
    """How far a segment has come, and when its transfers end; those of one axis take turns."""

    seconds: Seconds | None
    now: float = 0.0
    free: dict[object, float] = field(default_factory=dict)
    ends: dict[fx.Node, float] = field(default_factory=dict)

    def run(self, node: fx.Node) -> None:
        """Execute the next call, start or wait."""
        if self.seconds is None:
            return
        if node.target in collectives.COLLECTIVES:
            axis = node.kwargs["axis"]
            begin = max(self.now, self.free.get(axis, 0.0))
            self.free[axis] = self.ends[node] = begin + self.seconds(node)
        elif node.target is collectives.wait:
            self.now = max(self.now, self.ends.get(first_operand(node), 0.0))
        else:
            self.now += self.seconds(node)

    def is_late(self, wait: fx.Node) -> bool:
        """Whether there would be nothing to do at a wait; always, where no times are known."""
        return self.seconds is None or self.ends.get(first_operand(wait), 0.0) > self.now


def _waits(node: fx.Node) -> bool:
    """Whether a call waits for what it may have to wait for: weights were gathered a block
    ahead.
    """
    return node.target is collectives.wait and _moves_activations(first_operand(node))


def _moves_activations(node: fx.Node) -> bool:
    """Whether a call starts a transfer of anything but weights."""
    operands = tensor_args(node) if node.target in collectives.COLLECTIVES else []
    return bool(operands) and value(operands[0]).kind != "param"
