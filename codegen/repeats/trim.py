"""Take calls off the ends of a block, so that it is equal to its neighbours.

The first block of a run may cut what it is given, or the last one gather what it gives, where its
neighbours outside take another layout than blocks do. Such calls stand before, or behind, the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import fx

from partc.codegen.repeats.equal import Group, says
from partc.graph import Phase

Block = Mapping[Phase, Group | None]  # the calls of one block by phase


def trimmed(block: Block, like: Block) -> Block | None:
    """The block without the calls that it has beyond those of a block that it shall equal.

    None where these are not all at its ends: there they read nothing of the block, or the block
    reads nothing of them. Also None if it has fewer calls than the other.
    """
    inside = {node for group in block.values() if group is not None for node in group.nodes}
    found: dict[Phase, Group | None] = {}
    for phase, group in block.items():
        other = like[phase]
        if group is None or other is None:
            if group is not other:
                return None
            found[phase] = None
            continue
        extra = Counter(map(says, group.nodes))
        extra.subtract(map(says, other.nodes))
        if any(num < 0 for num in extra.values()):
            return None
        gone = _ends(group, +extra, inside)
        if len(group.nodes) - len(gone) != len(other.nodes):
            return None
        found[phase] = Group(group.layer, tuple(n for n in group.nodes if n not in gone))
    return found


def _ends(group: Group, extra: Counter[object], inside: set[fx.Node]) -> set[fx.Node]:
    """The calls of ``extra`` at the ends of a group; they are taken out of ``inside``."""
    gone: set[fx.Node] = set()
    for backwards in (False, True):
        for node in group.nodes[::-1] if backwards else group.nodes:
            near = node.users if backwards else node.all_input_nodes
            if extra[says(node)] and node not in gone and inside.isdisjoint(near):
                extra[says(node)] -= 1
                gone.add(node)
                inside.discard(node)
    return gone
