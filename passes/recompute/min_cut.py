"""Minimum cuts of small directed graphs; of several minimum cuts the one nearest to the sink."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

Edges = Mapping[tuple[Hashable, Hashable], int]  # capacities


def sink_side(capacities: Edges, source: Hashable, sink: Hashable) -> set[Hashable]:
    """The nodes on the sink's side of the minimum cut that is nearest to the sink.

    >>> sorted(sink_side({("s", "a"): 5, ("a", "b"): 3, ("b", "t"): 3}, "s", "t"))
    ['t']
    """
    import networkx  # its import takes 0.08 s, and few plans need a cut

    graph = networkx.DiGraph()
    graph.add_nodes_from((source, sink))
    for (before, then), capacity in capacities.items():
        graph.add_edge(before, then, capacity=capacity)
    _, (_, behind) = networkx.minimum_cut(graph, source, sink)
    return set(behind)
