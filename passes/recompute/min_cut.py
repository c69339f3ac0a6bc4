"""Minimum cuts of small directed graphs, by augmenting shortest paths (Edmonds and Karp 1972)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping

Edges = Mapping[tuple[Hashable, Hashable], int]  # capacities
_Residual = dict[Hashable, dict[Hashable, int]]


def sink_side(capacities: Edges, source: Hashable, sink: Hashable) -> set[Hashable]:
    """What is cut off from the source by the minimum cut that lies nearest to the sink.

    >>> sorted(sink_side({("s", "a"): 5, ("a", "b"): 3, ("b", "t"): 3}, "s", "t"))
    ['t']
    """
    residual: _Residual = defaultdict(dict)
    for (a, b), capacity in capacities.items():
        residual[a][b] = residual[a].get(b, 0) + capacity
        residual[b].setdefault(a, 0)
    while path := _shortest_path(residual, source, sink):
        width = min(residual[a][b] for a, b in path)
        for a, b in path:
            residual[a][b] -= width
            residual[b][a] += width
    return _reaching(residual, sink)


def _shortest_path(
    residual: _Residual, source: Hashable, sink: Hashable
) -> list[tuple[Hashable, Hashable]]:
    """The edges of a path along which more can flow, none if there is no such path."""
    came_from: dict[Hashable, Hashable] = {source: source}
    todo = deque([source])
    while todo and sink not in came_from:
        here = todo.popleft()
        for then, left in residual[here].items():
            if left and then not in came_from:
                came_from[then] = here
                todo.append(then)
    path = []
    here = sink
    while here in came_from and here != source:
        path.append((came_from[here], here))
        here = came_from[here]
    return path[::-1]


def _reaching(residual: _Residual, sink: Hashable) -> set[Hashable]:
    """What still has a way to the sink along which more can flow."""
    found, todo = {sink}, [sink]
    while todo:
        here = todo.pop()
        for before in residual[here]:
            if before not in found and residual[before][here]:
                found.add(before)
                todo.append(before)
    return found
