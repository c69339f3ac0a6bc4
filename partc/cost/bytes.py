"""Bytes each call moves through memory, and bytes each collective sends over its axis."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from partc.cost.storage import Replay, replay
from partc.graph import Graph, collectives, fake_of, results_of, tensor_args
from partc.graph.moves import kind_of, moves


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
    return sum(_num_bytes(fake_of(operand)) for operand in tensor_args(node))


def packed_bytes(node: fx.Node) -> int:
    """Bytes read and written to lay a collective's operands side by side, before it starts."""
    targets = (collectives.reduce_scatter, collectives.reduce_scatter_joined)
    together = len(tensor_args(node)) > 1
    if node.target is collectives.all_to_all:
        cut = (node.kwargs["to_dim"], node.kwargs.get("to_outer", 1)) != (0, 1)
    else:
        cut = node.target in targets and _is_cut_inside(node)
    return 2 * put_in_bytes(node) if together or cut else 0


def unpacked_bytes(node: fx.Node) -> int:
    """Bytes read and written to make the whole of what has arrived, after the wait."""
    gathers = (collectives.all_gather, collectives.all_gather_joined, collectives.all_to_all)
    if node.target not in gathers or not _is_cut_inside(node):
        return 0
    return 2 * sum(_num_bytes(fake) for fake in results_of(node) if fake is not None)


def _is_cut_inside(node: fx.Node) -> bool:
    """Whether what a collective gathers or scatters is not in a row of pieces on dim 0."""
    return any((m.kwargs["dim"], m.kwargs.get("outer", 1)) != (0, 1) for m in moves(node))


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
