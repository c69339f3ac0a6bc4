"""Dead-end elimination: drop a choice if another choice of the variable never costs more."""

from __future__ import annotations

import numpy as np

from partc.passes.search.solver.network import Network, restrict
from partc.passes.search.solver.problem import Costs


def drop_dead_ends(net: Network) -> Network:
    """The network with fewer choices and the same optimum; of two equal choices the first stays.

    Choice a of variable v is dropped if some choice b costs at most as much, whatever v's
    neighbours choose: the sum over v's tables T of min over neighbours of T[a] - T[b] is not
    negative (Goldstein, Biophysical Journal 66, 1994). Repeated until no choice is dropped.
    """
    while True:
        margins: dict[tuple[int, int], Costs] = {}
        decided: dict[tuple[tuple[int, int], ...], tuple[int, ...]] = {}
        keep = {}
        for v, uses in enumerate(_uses(net)):
            key = tuple(sorted(uses))
            if key not in decided:  # equal circumstances, such as equal layers, are decided once
                decided[key] = _survivors(net, key, margins)
            if len(decided[key]) < len(net.kept[v]):
                keep[v] = decided[key]
        if not keep:
            return net
        net = restrict(net, keep)


def _uses(net: Network) -> list[list[tuple[int, int]]]:
    """Per variable the (table, dim) pairs in which it occurs."""
    uses: list[list[tuple[int, int]]] = [[] for _ in net.kept]
    for scope, table in zip(net.scopes, net.tables, strict=True):
        for dim, v in enumerate(scope):
            uses[v].append((table, dim))
    return uses


def _survivors(
    net: Network, uses: tuple[tuple[int, int], ...], margins: dict[tuple[int, int], Costs]
) -> tuple[int, ...]:
    """The choices of a variable that no other choice replaces."""
    if not uses:
        return (0,)
    for use in uses:
        if use not in margins:
            margins[use] = _margin(net.store[use[0]], use[1])
    margin = np.sum([margins[use] for use in uses], axis=0)
    alive = list(range(len(margin)))
    for choice in reversed(range(len(margin))):
        if any(other != choice and margin[choice, other] >= 0 for other in alive):
            alive.remove(choice)
    return tuple(alive)


def _margin(table: Costs, dim: int) -> Costs:
    """f64[choices, choices]: entry (a, b) is the minimum of T[a] - T[b] over all other dims."""
    rows = np.moveaxis(table, dim, 0).reshape(table.shape[dim], -1)
    margin: Costs = np.stack([(row - rows).min(axis=1) for row in rows])
    return margin
