"""Replace the random draw that a recomputation repeats by the forward's draw of the same numbers.

``torch.utils.checkpoint`` restores the generator's state, so its recomputation draws a second time
at the same site. One value for both has one sharding, and later passes decide what is kept.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from partc.graph import Graph, shape_of, value
from partc.graph.draws import draws_of, site_of
from partc.graph.graph_edits import drop_dead, replace_by


def merge_draws(graph: Graph) -> None:
    """Merge draws of one site into one value, in place.

    A site is one op on equal values, so what the draws read needs no comparison.
    """
    first: dict[Any, fx.Node] = {}
    for node in draws_of(graph):
        key = (site_of(node), node.target, shape_of(node), value(node).dtype)
        if first.setdefault(key, node) is not node:
            replace_by(node, first[key])
    drop_dead(graph)
