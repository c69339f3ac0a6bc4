"""In which order to eliminate variables: several rules are tried without touching a table."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from partc.passes.search.solver.network import Network, neighbours

# One step of a dry run takes about as long as adding so many cells: where the tables are smaller,
# no other rule is tried.
_CELLS_PER_STEP = 1e4

Near = list[dict[int, None]]  # per variable those that it shares a table with


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
    """The cheapest of three greedy orders: min-fill, min-weight and weighted fill.

    Ties go to the variable that comes first, then to the rule that comes first. Greedy rules as
    in Koller and Friedman, Probabilistic Graphical Models, section 9.4.3.
    """
    sizes = net.sizes
    near = neighbours(net.scopes, len(sizes))
    peeled = _peel(net.undecided(), sizes, near)
    gone = set(peeled)
    core = [v for v in net.undecided() if v not in gone]
    orders = [_measured(peeled + _greedy(core, near, sizes, [1] * len(sizes), _fewest_pairs), net)]
    if orders[0].cells > _CELLS_PER_STEP * net.sharing() * len(core):
        for score in (_fewest_cells, _fewest_pairs):
            orders.append(_measured(peeled + _greedy(core, near, sizes, sizes, score), net))
    return min(orders, key=lambda order: order.cells)


def _measured(variables: list[int], net: Network) -> Order:
    """Count the cells of an order."""
    near = neighbours(net.scopes, len(net.kept))
    sizes, width, counts = net.sizes, 0, []
    for v in variables:
        width = max(width, len(near[v]))
        counts.append(float(_cells(v, sizes, near)))
        _remove(v, near)
    return Order(tuple(variables), width, math.fsum(counts), max(counts, default=0.0))


def _peel(variables: list[int], sizes: Sequence[int], near: Near) -> list[int]:
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


def _cells(v: int, sizes: Sequence[int], near: Near) -> int:
    """The cells of the table that eliminating v makes."""
    return sizes[v] * math.prod([sizes[w] for w in near[v]])


def _remove(v: int, near: Near) -> None:
    """Take v out; its neighbours become neighbours of each other."""
    others = near[v]
    for w in others:
        mine = near[w]
        mine.update(others)
        del mine[v], mine[w]
    near[v] = {}


class Remaining:
    """The graph of the variables that are left, with what eliminating each would mean.

    ``cells[v]`` are the cells of its table. ``pairs[v]`` sums, over the pairs of its neighbours
    that would become neighbours, the product of their ``weights``.
    """

    def __init__(
        self, variables: Sequence[int], near: Near, sizes: Sequence[int], weights: Sequence[int]
    ) -> None:
        self.near = [dict(others) for others in near]
        self.sizes, self.weights = sizes, weights
        self.cells = {v: _cells(v, sizes, near) for v in variables}
        self.pairs = {v: self._missing(v) for v in variables}

    def eliminate(self, v: int) -> dict[int, None]:
        """Connect v's neighbours and take it out; the variables whose figures changed."""
        others = list(self.near[v])
        changed = dict.fromkeys(others)
        for i, a in enumerate(others):
            mine = self.near[a]
            for b in others[i + 1 :]:
                if b not in mine:
                    self._connect(a, b, changed)
        self.drop(v)
        changed.pop(v, None)
        return changed

    def drop(self, v: int) -> list[int]:
        """Take v out with its edges; its former neighbours."""
        near, weights = self.near, self.weights
        others = list(near[v])
        around = near[v]
        for w in others:
            del near[w][v]
            self.cells[w] //= self.sizes[v]
            left = sum([weights[u] for u in near[w] if u not in around])
            self.pairs[w] -= weights[v] * left
        near[v] = {}
        del self.cells[v], self.pairs[v]
        return others

    def _connect(self, a: int, b: int, changed: dict[int, None]) -> None:
        near, weights, pairs = self.near, self.weights, self.pairs
        product = weights[a] * weights[b]
        both = [c for c in near[a] if c in near[b]]
        for c in both:
            pairs[c] -= product
        changed.update(dict.fromkeys(both))
        pairs[a] += weights[b] * sum([weights[c] for c in near[a] if c not in near[b]])
        pairs[b] += weights[a] * sum([weights[c] for c in near[b] if c not in near[a]])
        near[a][b] = near[b][a] = None
        self.cells[a] *= self.sizes[b]
        self.cells[b] *= self.sizes[a]

    def _missing(self, v: int) -> int:
        near, weights, total = self.near, self.weights, 0
        members = list(near[v])
        for i, a in enumerate(members):
            mine = near[a]
            total += weights[a] * sum([weights[b] for b in members[i + 1 :] if b not in mine])
        return total


Score = Callable[[Remaining, int], tuple[int, int, int]]


def _fewest_pairs(left: Remaining, v: int) -> tuple[int, int, int]:
    return left.pairs[v], left.cells[v] // left.sizes[v], v


def _fewest_cells(left: Remaining, v: int) -> tuple[int, int, int]:
    return left.cells[v], left.pairs[v], v


def _greedy(
    variables: Sequence[int],
    near: Near,
    sizes: Sequence[int],
    weights: Sequence[int],
    score: Score,
) -> list[int]:
    """Eliminate what scores lowest, again and again."""
    left = Remaining(variables, near, sizes, weights)
    heap = [score(left, v) for v in variables]
    heapq.heapify(heap)
    order = []
    while heap:
        entry = heapq.heappop(heap)
        v = entry[-1]
        if v not in left.cells or score(left, v) != entry:
            continue  # an entry from before the score changed
        order.append(v)
        for w in left.eliminate(v):
            heapq.heappush(heap, score(left, w))
    return order
