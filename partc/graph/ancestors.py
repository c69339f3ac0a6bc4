"""What a value is computed from.

Nodes know their operands, so that nothing is gained by copying the graph into one of networkx: to
do so for every question takes thirty times as long.
"""

from __future__ import annotations

from torch import fx


def ancestors(node: fx.Node) -> list[fx.Node]:
    """Everything a node is computed from and the node itself, in order."""
    found, waiting = {node}, [node]
    while waiting:
        for read in waiting.pop().all_input_nodes:
            if read not in found:
                found.add(read)
                waiting.append(read)
    return sorted(found)
