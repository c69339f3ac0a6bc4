"""Dead-end elimination: drop a choice where another of the same variable never costs more."""

from __future__ import annotations

import numpy as np

from partc.passes.search.solver.network import Network, restrict
from partc.passes.search.solver.problem import Costs


def drop_dead_ends(net: Network) -> Network:
    """The same optimum with fewer choices; of two equal choices the first stays.

    Choice a of v goes if some b is at most as dear whatever v's neighbours do: the sum over v's
    tables T of min over neighbours of T[a] - T[b] is not negative (Goldstein, Biophysical Journal
    66, 1994). Repeated until nothing goes.
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
    """Per variable the tables that it is in, and as which dim."""
    uses: list[list[tuple[int, int]]] = [[] for _ in net.kept]
    for scope, table in zip(net.scopes, net.tables, strict=True):
        for dim, v in enumerate(scope):
            uses[v].append((table, dim))
    return uses


def _survivors(
    net: Network, uses: tuple[tuple[int, int], ...], margins: dict[tuple[int, int], Costs]
) -> tuple[int, ...]:
    """The choices that no other one replaces."""
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
    """f64[choices, choices]: the least by which choice a exceeds choice b along the dim."""
    rows = np.moveaxis(table, dim, 0).reshape(table.shape[dim], -1)
    margin: Costs = np.stack([(row - rows).min(axis=1) for row in rows])
    return margin
