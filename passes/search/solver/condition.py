"""Search for a good assignment where exact elimination needs too large tables.

Some variables are fixed at their present choices and all others are solved for exactly; repeated
with other variables fixed.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from dataclasses import dataclass

from partc.passes.search.solver.bound import lower_bound
from partc.passes.search.solver.dead_ends import drop_dead_ends
from partc.passes.search.solver.eliminate import run_order
from partc.passes.search.solver.network import Network, neighbours, network, restrict
from partc.passes.search.solver.order import Near, Remaining, choose_order
from partc.passes.search.solver.problem import Assignment, Problem

MAX_TABLE = 1e5  # cells: to add them takes about as long as to choose a draw's order
BOUND_TABLE = 1e6  # cells: may be larger, as the bound is computed only once
DRAWS, PATIENCE = 200, 20  # draws at most, and in a row without a better assignment
_ROUNDING = 1e-12  # relative: two sums of the same numbers differ by about so much


@dataclass(frozen=True)
class Conditioned:
    """The best assignment found.

    No assignment costs less than ``bound``, which is inf if every assignment is proven to be
    forbidden. ``fixed`` is the number of variables that the last draw fixed.
    """

    assignment: Assignment
    cost: float
    bound: float
    draws: int
    fixed: int
    seconds: float


def condition(
    problem: Problem,
    *,
    seed: int = 0,
    draws: int = DRAWS,
    patience: int = PATIENCE,
    max_table: float = MAX_TABLE,
) -> Conditioned:
    """A good assignment of a problem of any width; the same for the same seed.

    Each draw fixes random variables with many neighbours at their present choices, until the tables
    have at most ``max_table`` cells, and solves for all others exactly. So no draw makes the
    assignment worse. Ends after ``draws`` draws, or ``patience`` draws without improvement.

    Dechter, Enhancement schemes for constraint processing, AIJ 41, 1990.
    """
    began = time.perf_counter()
    net = drop_dead_ends(network(problem))
    bound, best = lower_bound(net, choose_order(net).variables, BOUND_TABLE)
    # A generator of its own: the caller's random numbers neither change nor matter.
    source, near = random.Random(seed), neighbours(net.scopes, len(net.kept))
    least, since, drawn = math.inf, 0, 0
    fixed: list[int] = []
    while drawn < draws and since < patience and least > bound + _ROUNDING * abs(bound):
        drawn, since = drawn + 1, since + 1
        order, fixed = _draw(net, near, source, max_table)
        present = {v: (net.kept[v].index(best[v]),) for v in fixed}
        best, cost, _ = run_order(restrict(net, present), order)
        if cost < least - _ROUNDING * abs(cost):
            least, since = cost, 0
        if not fixed:
            bound = least  # no variable was fixed, so that this is the optimum
    bound = min(bound, least)  # rounding can put the bound above the cost of an optimum
    if bound > net.most + _ROUNDING * net.forbidden:
        bound = math.inf
    seconds = time.perf_counter() - began
    return Conditioned(best, problem.cost(best), bound, drawn, len(fixed), seconds)


def _draw(
    net: Network, near: Near, source: random.Random, max_table: float
) -> tuple[list[int], list[int]]:
    """An elimination order with tables of at most ``max_table`` cells, and the variables that are
    fixed for it.
    """
    sizes = net.sizes
    left = Remaining(net.undecided(), near, sizes, sizes)
    heap = [(cells, v) for v, cells in left.cells.items()]
    heapq.heapify(heap)
    order, fixed = [], []
    while heap:
        cells, v = heapq.heappop(heap)
        if left.cells.get(v) != cells:
            continue  # an entry from before the table changed
        if cells <= max_table:
            order.append(v)
            changed = list(left.eliminate(v))
        else:
            hub = max(left.cells, key=lambda u: len(left.near[u]) * source.random())
            fixed.append(hub)
            changed = [*left.drop(hub), v]
        for w in changed:
            if w in left.cells:
                heapq.heappush(heap, (left.cells[w], w))
    return order, fixed
