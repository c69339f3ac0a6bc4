"""A lower bound, and a first assignment, where exact tables would be too large (mini-buckets)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from partc.passes.search.solver.eliminate import add_up, choose, fill_buckets, spread_out
from partc.passes.search.solver.network import Network, Scope
from partc.passes.search.solver.problem import Assignment, Costs


def lower_bound(net: Network, order: Sequence[int], max_table: float) -> tuple[float, Assignment]:
    """A lower bound on the cost of every assignment, and a good assignment to begin with.

    Where the sum of a variable's tables would have more than ``max_table`` cells, the tables are
    divided into groups, and each group is minimised by itself. The variable may then take another
    choice in each group, so that the result is at most the optimum (Dechter and Rish, Mini-buckets,
    JACM 50, 2003). Costs are first moved between groups so that the groups agree more often (Ihler,
    Flerova, Dechter and Otten, Join-graph based cost-shifting schemes, UAI 2012).
    """
    buckets, store = fill_buckets(net, order)
    sizes = [len(net.kept[v]) for v in order]
    bound = [net.constant]
    for bucket in buckets:
        sums = []
        for group in _groups(bucket, sizes, max_table):
            scope = sorted({r for ranks, _ in group for r in ranks})
            place = {r: i for i, r in enumerate(scope)}
            parts = [(store[table], tuple([place[r] for r in ranks])) for ranks, table in group]
            sums.append((scope, add_up(spread_out(parts, [sizes[r] for r in scope]))))
        for scope, table in _agreed(sums):
            least: Costs = np.minimum.reduce(table, axis=0)
            if len(scope) == 1:
                bound.append(float(least))
            else:
                buckets[scope[1]].append((tuple(scope[1:]), len(store)))
                store.append(least)
    chosen = dict(zip(order, choose(buckets, store), strict=True))
    return math.fsum(bound), net.assignment(chosen)


def _groups(
    bucket: list[tuple[Scope, int]], sizes: Sequence[int], max_table: float
) -> list[list[tuple[Scope, int]]]:
    """Divide tables into groups whose sum has at most ``max_table`` cells, largest tables first."""
    groups: list[tuple[set[int], list[tuple[Scope, int]]]] = []
    for ranks, table in sorted(bucket, key=lambda part: -math.prod(sizes[r] for r in part[0])):
        for scope, group in groups:
            if math.prod(sizes[r] for r in sorted(scope.union(ranks))) <= max_table:
                scope.update(ranks)
                group.append((ranks, table))
                break
        else:
            groups.append((set(ranks), [(ranks, table)]))
    return [group for _, group in groups]


def _agreed(sums: list[tuple[list[int], Costs]]) -> list[tuple[list[int], Costs]]:
    """Shift costs between groups: each choice (dim 0) then has the same least cost in every group.

    The sum over all groups stays the same.
    """
    if len(sums) == 1:
        return sums
    least = [table.reshape(len(table), -1).min(axis=1) for _, table in sums]
    mean = np.mean(least, axis=0)
    return [
        (scope, table + (mean - own).reshape([-1] + [1] * (table.ndim - 1)))
        for (scope, table), own in zip(sums, least, strict=True)
    ]
