"""What a value is computed from."""

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
