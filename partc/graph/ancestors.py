"""The ancestors of a node: all nodes that it is computed from.

fx nodes know their operands, so a copy of the graph for networkx would gain nothing: making this
copy for every question takes thirty times as long.
"""

from __future__ import annotations

from torch import fx


def ancestors(node: fx.Node) -> list[fx.Node]:
    """All nodes that a node is computed from, and the node itself, in graph order."""
    found, waiting = {node}, [node]
    while waiting:
        for read in waiting.pop().all_input_nodes:
            if read not in found:
                found.add(read)
                waiting.append(read)
    return sorted(found)
