"""In which order to eliminate variables: several rules are tried without touching a table."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from partc.passes.search.network import Network, neighbours

# A dry run of a rule takes about as long as adding this many cells: where the tables are smaller,
# no other rule is tried.
_CHEAP_CELLS = 2e6

Masks = list[int]  # bit w of masks[v] is set where v and w share a table
Score = Callable[[int, Masks, Sequence[int]], float]


@dataclass(frozen=True)
class Order:
    """``variables`` in the order of elimination; ``cells`` counts all tables that this makes,
    ``largest`` the cells of the largest, ``width`` the variables beside the eliminated one in it.
    """

    variables: tuple[int, ...]
    width: int
    cells: float
    largest: float


def choose_order(net: Network) -> Order:
    """The cheapest of three greedy orders: min-weight, min-fill and weighted fill.

    Ties go to the variable that comes first, then to the rule that comes first. Greedy rules as
    in Koller and Friedman, Probabilistic Graphical Models, section 9.4.3.
    """
    sizes = net.sizes
    near = neighbours(net.scopes, len(sizes))
    peeled = _peel(net.undecided(), sizes, near)
    gone = set(peeled)
    core = [v for v in net.undecided() if v not in gone]
    place = {v: i for i, v in enumerate(core)}
    masks = [sum(1 << place[w] for w in near[v]) for v in core]
    core_sizes = [sizes[v] for v in core]
    orders: list[Order] = []
    for score in (_weight, _fill, _weighted_fill):
        places = _greedy(core_sizes, masks, score) if core else []
        orders.append(_measured(peeled + [core[i] for i in places], net))
        if orders[-1].cells < _CHEAP_CELLS:
            break
    return min(orders, key=lambda order: order.cells)


def _measured(variables: list[int], net: Network) -> Order:
    """Count the cells of an order."""
    near = neighbours(net.scopes, len(net.kept))
    sizes, width, counts = net.sizes, 0, []
    for v in variables:
        width = max(width, len(near[v]))
        counts.append(float(sizes[v] * math.prod(sizes[w] for w in near[v])))
        _remove(v, near)
    return Order(tuple(variables), width, math.fsum(counts), max(counts, default=0.0))


def _peel(variables: list[int], sizes: list[int], near: list[dict[int, None]]) -> list[int]:
    """Take variables of at most two neighbours out of ``near``, the smallest table first: no rule
    would do better, and what is left is much smaller.
    """
    peeled = []
    heap = [(_cells(v, sizes, near), v) for v in variables if len(near[v]) <= 2]
    heapq.heapify(heap)
    gone: set[int] = set()
    while heap:
        cells, v = heapq.heappop(heap)
        if v in gone or cells != _cells(v, sizes, near):
            continue
        others = list(near[v])
        _remove(v, near)
        peeled.append(v)
        gone.add(v)
        for w in others:
            if len(near[w]) <= 2:
                heapq.heappush(heap, (_cells(w, sizes, near), w))
    return peeled


def _cells(v: int, sizes: list[int], near: list[dict[int, None]]) -> int:
    return sizes[v] * math.prod([sizes[w] for w in near[v]])


def _remove(v: int, near: list[dict[int, None]]) -> None:
    """Take v out; its neighbours become neighbours of each other."""
    others = near[v]
    for w in others:
        mine = near[w]
        mine.update(others)
        del mine[v], mine[w]
    near[v] = {}


def _greedy(sizes: Sequence[int], masks: Masks, score: Score) -> list[int]:
    """Eliminate what scores lowest, again and again."""
    masks = list(masks)
    scores: list[float | None] = [score(v, masks, sizes) for v in range(len(sizes))]
    heap = [(value, v) for v, value in enumerate(scores)]
    heapq.heapify(heap)
    order = []
    while heap:
        value, v = heapq.heappop(heap)
        if scores[v] != value:
            continue  # an entry from before the score changed
        order.append(v)
        scores[v] = None
        for w in bits(_connect(v, masks, fills=score is not _weight)):
            value = score(w, masks, sizes)
            if value != scores[w]:
                scores[w] = value
                heapq.heappush(heap, (value, w))
    return order


def _connect(v: int, masks: Masks, fills: bool) -> int:
    """Take v out of the graph and connect its neighbours; the mask of whose score may change.

    A fill score changes also where two neighbours of a variable have just been connected.
    """
    around = changed = masks[v]
    members = bits(around)
    for w in members:
        before = masks[w]
        masks[w] = (before | around) & ~(1 << v | 1 << w)
        if fills:
            for u in bits(masks[w] & ~before):
                changed |= before & masks[u]
    masks[v] = 0
    return changed & ~(1 << v)


def bits(mask: int) -> list[int]:
    """The places of all bits that are set, lowest first."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _weight(v: int, masks: Masks, sizes: Sequence[int]) -> float:
    """The cells of the table that eliminating v makes."""
    return sizes[v] * math.prod([float(sizes[w]) for w in bits(masks[v])])


def _fill(v: int, masks: Masks, sizes: Sequence[int]) -> float:
    """The pairs that eliminating v connects; the table's size decides between equal ones."""
    around = masks[v]
    members = bits(around)
    missing = sum((around & ~masks[w]).bit_count() - 1 for w in members) // 2
    weight = math.fsum(math.log2(sizes[w]) for w in members)
    return missing + weight / (1.0 + weight)


def _weighted_fill(v: int, masks: Masks, sizes: Sequence[int]) -> float:
    """The cells of the pair tables that eliminating v connects."""
    around, total = masks[v], 0
    for w in bits(around):
        for u in bits(around & ~masks[w]):
            if u > w:
                total += sizes[u] * sizes[w]
    return float(total)
