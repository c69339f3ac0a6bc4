"""The order in which variables are eliminated: greedy rules are tried on table sizes alone."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from partc.passes.search.solver.network import Network, neighbours

# To choose one variable of an order takes about as long as to add this many cells: where tables are
# smaller, no further rule is tried.
_CELLS_PER_STEP = 1e4

Near = list[dict[int, None]]  # per variable its neighbours: those with which it shares a table


@dataclass(frozen=True)
class Order:
    """An elimination order with the size of the tables that it makes.

    ``cells`` are the cells of all tables, ``largest`` those of the largest; ``width`` is the most
    variables beside the eliminated one in a table.
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
    """The order of these variables, with the cells of its tables counted."""
    near = neighbours(net.scopes, len(net.kept))
    sizes, width, counts = net.sizes, 0, []
    for v in variables:
        width = max(width, len(near[v]))
        counts.append(float(_cells(v, sizes, near)))
        _remove(v, near)
    return Order(tuple(variables), width, math.fsum(counts), max(counts, default=0.0))


def _peel(variables: list[int], sizes: Sequence[int], near: Near) -> list[int]:
    """Remove variables with at most two neighbours from ``near``, the smallest table first.

    Such variables may come first in any order without loss; the remaining graph is much smaller.
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
    """The cells of the table over v and its neighbours, which eliminating v adds up."""
    return sizes[v] * math.prod([sizes[w] for w in near[v]])


def _remove(v: int, near: Near) -> None:
    """Remove v from the graph; its neighbours become neighbours of each other."""
    others = near[v]
    for w in others:
        mine = near[w]
        mine.update(others)
        del mine[v], mine[w]
    near[v] = {}


class Remaining:
    """The graph of the variables that are not yet eliminated, with the cost of eliminating each.

    ``cells[v]`` are the cells of v's table. ``pairs[v]`` is the (weighted) fill of v: the sum, over
    the pairs of v's neighbours that would become neighbours, of the product of their ``weights``.
    """

    def __init__(
        self, variables: Sequence[int], near: Near, sizes: Sequence[int], weights: Sequence[int]
    ) -> None:
        self.near = [dict(others) for others in near]
        self.sizes, self.weights = sizes, weights
        self.cells = {v: _cells(v, sizes, near) for v in variables}
        self.pairs = {v: self._missing(v) for v in variables}

    def eliminate(self, v: int) -> dict[int, None]:
        """Eliminate v: connect its neighbours; return the variables whose costs changed."""
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
        """Remove v with its edges; return its former neighbours."""
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
    """The order in which the variable with the lowest score is eliminated, step by step."""
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
