"""Recompute the values between an attention's projections: many bytes, made by few FLOPs.

An attention core is a matrix product of two activations (``q @ k``) with all calls connected to it
in the block, up to calls that read a weight: scores, softmax, dropout, but also rotary embeddings.
Results that take many FLOPs per byte are saved. Of the other values those with the fewest bytes are
saved: a minimum cut between the values that enter the core and the values that the backward reads.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

from torch import fx

from partc.cost.flops import node_flops
from partc.cost.storage import Replay, replay
from partc.graph import (
    Graph,
    collectives,
    is_tensor,
    is_weight,
    picked,
    results_of,
    tensor_args,
    value,
)
from partc.graph.places import innermost_turn
from partc.passes.recompute.copy_forward import Copies, may_repeat, reads_no_values
from partc.passes.recompute.min_cut import sink_side

# An H100 computes 989e12 bf16 FLOP in the time in which it moves 3.35e12 bytes: what takes fewer
# FLOPs per byte is computed again in about the time in which it would be read.
FLOPS_PER_BYTE = 300


def recompute_attention(graph: Graph) -> Graph:
    """Recompute attention cores in the backward where this saves fewer bytes, in place."""
    cores: dict[str, dict[fx.Node, None]] = {}
    again: set[fx.Node] = set()
    for node in _cores(graph):
        if reads_no_values(node):
            again.add(node)
        elif _is_light(node):
            cores.setdefault(innermost_turn(node), {})[node] = None
    ran = replay(graph)
    draws = frozenset(again)
    for core in cores.values():
        again |= _Cut(ran, core, draws).again()
    Copies(graph, again, innermost_turn).insert()
    return graph


def has_attention(graph: Graph) -> bool:
    """Whether some attention core has a value that takes few FLOPs per byte."""
    return any(reads_no_values(node) or _is_light(node) for node in _cores(graph))


# what is a core -----------------------------------------------------------------------------------
def _cores(graph: Graph) -> dict[fx.Node, None]:
    """The forward calls of all attention cores: spread from products of activations to their
    neighbours in the same block.
    """
    calls = [n for n in graph.calls() if value(n).phase == "F" and innermost_turn(n)]
    free = dict.fromkeys(n for n in calls if _repeats(n))
    found: dict[fx.Node, None] = {}
    todo = [n for n in free if node_flops(n)]
    while todo:
        node = todo.pop()
        if node not in found:
            found[node] = None
            near = (*tensor_args(node), *node.users)
            todo += [n for n in near if n in free and innermost_turn(n) == innermost_turn(node)]
    return found


def _repeats(node: fx.Node) -> bool:
    """Whether a call gives the same when run again, reads no weight, and is no collective."""
    reads_weight = any(is_weight(operand) for operand in tensor_args(node))
    return may_repeat(node) and not reads_weight and node.target not in collectives.COLLECTIVES


def _is_light(node: fx.Node) -> bool:
    return bool(node_flops(node) <= FLOPS_PER_BYTE * _num_bytes(node))


def _num_bytes(node: fx.Node) -> int:
    """Bytes of all results of a call."""
    return sum(int(fake.nbytes) for fake in results_of(node) if fake is not None)


# what of it is kept -------------------------------------------------------------------------------
SOURCE, SINK = "kept", "read"


@dataclass(frozen=True)
class _Cut:
    """The minimum cut of one core: each value is an edge whose capacity is the bytes of saving it.

    ``(n, "made") -> (n, "known")`` is that edge of node n. The core's dataflow and the backward's
    reads are edges of endless capacity.
    """

    ran: Replay
    core: Collection[fx.Node]
    draws: Collection[fx.Node]

    def again(self) -> set[fx.Node]:
        """The calls of the core to recompute: those on the sink's side of the cut."""
        behind = sink_side(self._edges(), SOURCE, SINK)
        return {node for node in self.core if (node, "made") in behind}

    def _edges(self) -> Mapping[tuple[Hashable, Hashable], int]:
        """The capacity of each edge of the core's graph."""
        inside = dict.fromkeys(self.core)
        entering = dict.fromkeys(o for n in self.core for o in tensor_args(n) if o not in inside)
        costs = {n: self._cost(n) for n in (*entering, *inside) if self._can_be_kept(n)}
        endless = 1 + sum(costs.values())  # more than any cut of finite edges: never cut
        edges: dict[tuple[Hashable, Hashable], int] = {}
        for node in (*entering, *inside):
            edges[(node, "made"), (node, "known")] = costs.get(node, endless)
        for node in entering:
            edges[SOURCE, (node, "made")] = endless
        for node in inside:
            edges |= {((o, "known"), (node, "made")): endless for o in tensor_args(node)}
            if _backward_readers(node):
                edges[(node, "known"), SINK] = endless
        return edges

    def _can_be_kept(self, node: fx.Node) -> bool:
        """Whether saving a value means something: it is a tensor and, in the core, no view.

        To save a view saves its base, which is in the core or enters it.
        """
        if not is_tensor(node) or node not in self.core:
            return is_tensor(node)
        call = picked(node)[0] if node.target is operator.getitem else node
        whole = [memory for o in tensor_args(call) for memory in self.ran.storages(o)]
        return self.ran.storages(node).keys().isdisjoint(whole)

    def _cost(self, node: fx.Node) -> int:
        """Bytes of saving a value: 0 if it is saved anyway, a share if several blocks read it."""
        readers = _backward_readers(node)
        elsewhere = node not in self.core or any(
            innermost_turn(r) != innermost_turn(node) for r in readers
        )
        if node.op == "placeholder" or node in self.draws or (readers and elsewhere):
            return 0
        blocks = dict.fromkeys(innermost_turn(u) for u in node.users if u.op == "call_function")
        return sum(self.ran.storages(node).values()) // max(1, len(blocks))


def _backward_readers(node: fx.Node) -> list[fx.Node]:
    return [u for u in node.users if u.op == "call_function" and value(u).phase == "B"]
