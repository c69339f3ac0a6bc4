"""Bytes each call moves through memory, and bytes each collective sends over its axis."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from partc import collectives
from partc.graph import Graph, held, tensor_args
from partc.moves import kind_of
from partc.passes.storage import Replay, replay


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind on one axis: how many, and bytes one rank sends for them all."""

    axis: str
    kind: str
    count: int
    sent_bytes: int


def moved_bytes(node: fx.Node, ran: Replay) -> int:
    """Operands read plus results written; views are free, collectives are for `sent_bytes`."""
    if node.op != "call_function" or node.target in (*collectives.COLLECTIVES, collectives.wait):
        return 0
    operands = list(dict.fromkeys(tensor_args(node)))
    inside = {s for operand in operands for s in ran.storages(operand)}
    if ran.storages(node).keys() <= inside:
        return 0
    read = sum(_num_bytes(t) for operand in operands for t in ran.tensors(operand))
    return read + sum(_num_bytes(t) for t in ran.tensors(node))


def total_moved_bytes(graph: Graph, ran: Replay | None = None) -> int:
    """Memory traffic of a whole graph."""
    ran = ran or replay(graph)
    return sum(graph.times(node) * moved_bytes(node, ran) for node in graph.calls())


def sent_bytes(node: fx.Node) -> int:
    """Bytes one rank sends for a collective, by ring formulas; 0 for other calls."""
    if node.target not in collectives.COLLECTIVES:
        return 0
    top, bottom = sent_share(kind_of(node), node.kwargs["num"])
    return int(put_in_bytes(node) * top // bottom)


def put_in_bytes(node: fx.Node) -> int:
    """Bytes of one rank's operands of a collective."""
    return sum(_num_bytes(held(operand)) for operand in tensor_args(node))


def sent_share(kind: str, num: Any) -> tuple[Any, Any]:
    """What one rank of `num` sends, as a fraction (top, bottom) of its operands."""
    if kind == "all_gather":  # (num - 1) / num of the whole, which is num operands
        return num - 1, 1
    return (2 if kind == "all_reduce" else 1) * (num - 1), num


def traffic(graph: Graph) -> list[Traffic]:
    """Collectives per axis and kind, in mesh order."""
    counts: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for node in graph.calls():
        if node.target in collectives.COLLECTIVES:
            key = (str(node.kwargs["axis"]), kind_of(node))
            counts[key] += graph.times(node)
            sent[key] += graph.times(node) * sent_bytes(node)
    order = sorted(counts, key=lambda key: (graph.mesh.names.index(key[0]), key[1]))
    return [Traffic(axis, kind, counts[axis, kind], sent[axis, kind]) for axis, kind in order]


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
