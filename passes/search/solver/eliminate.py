"""Exact minimisation by eliminating one variable after another (min-plus bucket elimination)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partc.passes.search.solver.dead_ends import drop_dead_ends
from partc.passes.search.solver.network import Network, Scope, network
from partc.passes.search.solver.order import choose_order
from partc.passes.search.solver.problem import Assignment, Costs, Problem

# A cell has 8 bytes: the largest table may take 0.3 GB, and all tables about a second or two.
MAX_CELLS, MAX_TABLE = 3e8, 4e7
# Looking for dead ends in one distinct table takes about as long as adding this many cells.
_DEAD_END_CELLS = 1e5
_SLICED_CELLS = 1e5  # 0.8 MB: about what a core's cache holds


@dataclass(frozen=True)
class Elimination:
    """An optimum.

    ``width`` is the most variables beside the eliminated one in a table, ``cells`` the cells of all
    tables, ``computed`` the cells of those that were not equal to an earlier table.
    """

    assignment: Assignment
    cost: float
    width: int
    cells: float
    computed: float
    seconds: float


@dataclass(frozen=True)
class TooWide:
    """No result: the tables would have more cells than allowed, ``largest`` in one table."""

    width: int
    cells: float
    largest: float


def eliminate(
    problem: Problem,
    *,
    max_cells: float = MAX_CELLS,
    max_table: float = MAX_TABLE,
) -> Elimination | TooWide:
    """A cheapest assignment; of equally good choices the first.

    TooWide if the tables exceed ``max_cells`` together or ``max_table`` in one. The result's
    ``cost`` is inf if every assignment is forbidden.

    Dechter, Bucket elimination: a unifying framework for reasoning, Artificial Intelligence 113.
    """
    began = time.perf_counter()
    net = network(problem)
    order = choose_order(net)
    # Looking for dead ends takes time: only where elimination takes longer, or is too wide.
    worth = order.cells > _DEAD_END_CELLS * net.sharing() * len(net.store)
    if worth or order.cells > max_cells or order.largest > max_table:
        net = drop_dead_ends(net)
        order = choose_order(net)
    if order.cells > max_cells or order.largest > max_table:
        return TooWide(order.width, order.cells, order.largest)
    assignment, _, computed = run_order(net, order.variables)
    seconds = time.perf_counter() - began
    cost = problem.cost(assignment)
    return Elimination(assignment, cost, order.width, order.cells, computed, seconds)


def run_order(net: Network, order: Sequence[int]) -> tuple[Assignment, float, float]:
    """A cheapest assignment of the network, its cost, and the number of cells computed.

    The dims of all tables are in elimination order. The eliminated variable is thus always dim 0,
    so that numpy adds and minimises over long contiguous rows.
    """
    buckets, store = fill_buckets(net, order)
    sizes = [len(net.kept[v]) for v in order]
    known: dict[tuple[tuple[int, Scope], ...], int] = {}
    computed, parts = 0.0, [net.constant]
    for bucket in buckets:
        scope = sorted({r for ranks, _ in bucket for r in ranks})
        # Dims are counted within the scope, so that the buckets of equal layers have equal keys.
        place = {r: i for i, r in enumerate(scope)}
        key = tuple([(table, tuple([place[r] for r in ranks])) for ranks, table in bucket])
        made = known.get(key)
        if made is None:  # equal layers ask for equal tables
            shape = [sizes[r] for r in scope]
            computed += math.prod(shape)
            made = known[key] = len(store)
            spread = spread_out([(store[table], dims) for table, dims in key], shape)
            store.append(_least(spread, shape))
        # What is left depends on the other variables: it waits for the next of them to go.
        if len(scope) > 1:
            buckets[scope[1]].append((tuple(scope[1:]), made))
        else:
            parts.append(float(store[made]))
    chosen = dict(zip(order, choose(buckets, store), strict=True))
    return net.assignment(chosen), math.fsum(parts), computed


Buckets = list[list[tuple[Scope, int]]]  # per rank in the order: ranks of a table's dims, table


def fill_buckets(net: Network, order: Sequence[int]) -> tuple[Buckets, list[Costs]]:
    """Put each table into the bucket of its first eliminated variable, dims in that order."""
    rank = {v: i for i, v in enumerate(order)}
    store = list(net.store)
    turned: dict[tuple[int, Scope], int] = {}
    buckets: Buckets = [[] for _ in order]
    for scope, table in zip(net.scopes, net.tables, strict=True):
        ranks = [rank[v] for v in scope]
        by_rank = sorted(ranks)
        if by_rank != ranks:
            dims = tuple([ranks.index(r) for r in by_rank])
            if (table, dims) not in turned:
                turned[table, dims] = len(store)
                store.append(np.ascontiguousarray(net.store[table].transpose(dims)))
            table = turned[table, dims]
        buckets[by_rank[0]].append((tuple(by_rank), table))
    return buckets, store


def spread_out(tables: list[tuple[Costs, Scope]], shape: list[int]) -> list[Costs]:
    """The tables reshaped to broadcast over ``shape``: size 1 along dims that a table lacks.

    The smallest come first, so that partial sums are as small as possible.
    """
    ones = [1] * len(shape)
    spread = []
    for table, dims in tables:
        over = list(ones)
        for dim in dims:
            over[dim] = shape[dim]
        spread.append(table.reshape(over))
    return sorted(spread, key=_size)


def add_up(spread: list[Costs]) -> Costs:
    """The sum of tables that ``spread_out`` has reshaped."""
    total = spread[0]
    for table in spread[1:]:
        total = total + table
    return total


def _least(spread: list[Costs], shape: list[int]) -> Costs:
    """The minimum over dim 0 of the tables' sum.

    A large sum is minimised choice by choice, so that it is never in memory as a whole.
    """
    if math.prod(shape) < _SLICED_CELLS:
        least: Costs = np.minimum.reduce(add_up(spread), axis=0)
        return least
    rows = [[table[min(choice, len(table) - 1)] for table in spread] for choice in range(shape[0])]
    least = np.broadcast_to(add_up(rows[0]), shape[1:]).copy()
    for row in rows[1:]:
        np.minimum(least, add_up(row), out=least)
    return least


def _size(table: Costs) -> int:
    return table.size


def choose(buckets: Buckets, store: list[Costs]) -> list[int]:
    """The best choice of every variable, by its rank in the elimination order.

    Back from the last eliminated variable, whose bucket depends on no other variable.
    """
    chosen = [0] * len(buckets)
    for rank in reversed(range(len(buckets))):
        rows = [
            _row(store[table], [chosen[r] for r in ranks[1:]]) for ranks, table in buckets[rank]
        ]
        chosen[rank] = int(np.argmin(sum(rows[1:], start=rows[0])))
    return chosen


def _row(table: Costs, rest: list[int]) -> Costs:
    """The entries along dim 0 at the indices ``rest`` of the other dims."""
    place: tuple[slice | int, ...] = (slice(None), *rest)
    row: Costs = table[place]
    return row
