"""Bytes that each call reads and writes in memory, and bytes that each collective sends."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from partc.cost.storage import Replay, replay
from partc.graph import Graph, collectives, fake_of, results_of, tensor_args
from partc.graph.moves import code_of, kind_in_words, kind_of, moved, moves, wire_of
from partc.plan.coded import CODES, coding_of
from partc.plan.wires import WIRES


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind over one mesh axis: their number, and the bytes a rank sends."""

    axis: str
    kind: str
    count: int
    sent_bytes: int


def moved_bytes(node: fx.Node, ran: Replay) -> int:
    """Bytes a call reads and writes in memory: its operands and its results.

    0 for a view, which touches no memory, and for a collective, which `sent_bytes` counts.
    """
    if node.op != "call_function" or node.target in (*collectives.COLLECTIVES, collectives.wait):
        return 0
    operands = list(dict.fromkeys(tensor_args(node)))
    inside = {s for operand in operands for s in ran.storages(operand)}
    if ran.storages(node).keys() <= inside:
        return 0
    read = sum(_num_bytes(t) for operand in operands for t in ran.tensors(operand))
    return read + sum(_num_bytes(t) for t in ran.tensors(node))


def total_moved_bytes(graph: Graph, ran: Replay | None = None) -> int:
    """Bytes that all calls of a graph read and write, those of left-out equal blocks included."""
    ran = ran or replay(graph)
    return sum(graph.times(node) * moved_bytes(node, ran) for node in graph.calls())


def sent_bytes(node: fx.Node) -> int:
    """Bytes one rank sends for a collective by the ring algorithm; 0 for a call that is none."""
    if node.target not in collectives.COLLECTIVES:
        return 0
    num = int(str(node.kwargs["num"]))
    shares = ((size, sent_share(kind, num)) for kind, size in transfers(node))
    return sum(int(size * top // bottom) for size, (top, bottom) in shares)


def transfers(node: fx.Node) -> list[tuple[str, int]]:
    """The transfers that a collective takes: the kind of each, and the bytes a rank puts in.

    One of its own kind, but for a sum that is sent with fewer bytes.
    """
    if wire := wire_of(node):
        shapes = [fake_of(x).shape for x in moved(node)]
        num, size = int(str(node.kwargs["num"])), int(str(node.kwargs["size"]))
        how = WIRES[wire]
        sent = how.scattered if kind_of(node) == "reduce_scatter" else how.sent
        assert sent is not None, f"{wire} has no reduce-scatter"
        return [*sent(shapes, num, size)]
    return [(kind_of(node), put_in_bytes(node))]


def put_in_bytes(node: fx.Node) -> int:
    """Bytes that one rank puts into a collective: its operands, in the dtype that is sent.

    For a sum that is sent with fewer bytes these are the bytes of an exact one that sends as many.
    """
    if wire_of(node):
        top, bottom = sent_share(kind_of(node), int(str(node.kwargs["num"])))
        return int(sent_bytes(node) * bottom // top)
    sent: torch.dtype | None = node.kwargs.get("dtype")  # type: ignore[assignment]
    fakes = map(fake_of, tensor_args(node))
    if code := code_of(node):
        sizes = [fake.numel() for fake in fakes]
        return CODES[code].num_bytes(sizes, int(str(node.kwargs["block"])))
    return sum(fake.numel() * (sent or fake.dtype).itemsize for fake in fakes)


def packed_bytes(node: fx.Node) -> int:
    """Bytes read and written before a collective starts, to make its operands one buffer, in the
    dtype that is sent.

    0 where the one operand can be sent as it lies in memory.
    """
    if wire_of(node):
        return _coded_bytes(node)
    if code_of(node):
        numbers = sum(_num_bytes(fake_of(operand)) for operand in tensor_args(node))
        return coding_of(code_of(node)) * numbers + _cast_bytes(node)
    targets = (collectives.reduce_scatter, collectives.reduce_scatter_joined)
    together = len(tensor_args(node)) > 1
    if node.target is collectives.all_to_all:
        cut = (node.kwargs["to_dim"], node.kwargs.get("to_outer", 1)) != (0, 1)
    else:
        cut = node.target in targets and _is_cut_inside(node)
    packed = 2 * put_in_bytes(node) if together or cut else 0
    return packed + _cast_bytes(node)


def _coded_bytes(node: fx.Node) -> int:
    """Bytes read and written to encode what a sum with fewer bytes sends, or to decode it.

    A reduce-scatter encodes and decodes each number once, an all-reduce decodes it twice.
    """
    coded = WIRES[wire_of(node)].coding * sum(_num_bytes(fake_of(x)) for x in moved(node))
    return coded * 2 // 3 if kind_of(node) == "reduce_scatter" else coded


def _cast_bytes(node: fx.Node) -> int:
    """Bytes read and written to cast a gather's shards to the dtype in which they are sent."""
    if node.kwargs.get("dtype") is None:
        return 0
    return sum(_num_bytes(fake_of(operand)) for operand in tensor_args(node)) + put_in_bytes(node)


def unpacked_bytes(node: fx.Node) -> int:
    """Bytes read and written after a collective's wait, to turn what arrived into its results.

    Ranks' pieces arrive one after the other. That is the result already if the pieces are shards
    of dim 0; shards of another dim have to be copied into place.
    """
    if wire_of(node):
        return _coded_bytes(node)
    if code_of(node):
        made = (_num_bytes(fake) for fake in results_of(node) if fake is not None)
        return coding_of(code_of(node)) * sum(made)
    gathers = (collectives.all_gather, collectives.all_gather_joined, collectives.all_to_all)
    if node.target not in gathers or not _is_cut_inside(node):
        return 0
    return 2 * sum(_num_bytes(fake) for fake in results_of(node) if fake is not None)


def _is_cut_inside(node: fx.Node) -> bool:
    """Whether a collective gathers or scatters shards of another dim than 0, or of parts of it."""
    return any((m.kwargs["dim"], m.kwargs.get("outer", 1)) != (0, 1) for m in moves(node))


def sent_share(kind: str, num: Any) -> tuple[Any, Any]:
    """The share of its operands that one rank of `num` sends, as numerator and denominator.

    By the ring algorithm: all-gather num - 1, all-reduce 2 (num - 1) / num, others (num - 1) / num;
    two collectives one behind the other (``all_to_all+all_gather``) as much as an all-reduce.
    """
    if kind == "all_gather":  # (num - 1) / num of the result, which is num times the operand
        return num - 1, 1
    return (2 if kind == "all_reduce" or "+" in kind else 1) * (num - 1), num


def traffic(graph: Graph) -> list[Traffic]:
    """The graph's collectives summed up by axis, in the mesh's order, and kind."""
    counts: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for node in graph.calls():
        if node.target in collectives.COLLECTIVES:
            key = (str(node.kwargs["axis"]), kind_in_words(node))
            counts[key] += graph.times(node)
            sent[key] += graph.times(node) * sent_bytes(node)
    order = sorted(counts, key=lambda key: (graph.mesh.names.index(key[0]), key[1]))
    return [Traffic(axis, kind, counts[axis, kind], sent[axis, kind]) for axis, kind in order]


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
