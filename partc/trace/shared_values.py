"""Take what one block computes for all blocks out of that block.

The first block of a T5 looks up a position bias from a table of its own, and all blocks read it.
Then the first block is unlike the others. With these calls, and their gradients, outside of the
block all blocks are equal, so that a program has one function and a loop for them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from partc.graph import update, value
from partc.graph.folds import layer_path

READERS = 2  # other blocks that read a value which depends on the inputs: one is just the next


def free_shared(forward: Sequence[fx.Node]) -> None:
    """Set the module path of each call that one block makes for others to one outside of blocks.

    ``forward``: all calls of the forward, in order. Such a call follows from parameters and from
    what the inputs alone decide, and its own block reads nothing that it is made of.
    ``encoder.block.0.bias`` becomes ``encoder.block.bias``.
    """
    plain, known = (
        _following(forward, ("buffer", "input")),
        _following(forward, ("param", "buffer")),
    )
    inside = {node: layer_path(value(node).module, 1) for node in forward}
    for node in forward:
        block = inside[node]
        others = {inside.get(user, "") for user in node.users} - {block, ""}
        readers = len({other for other in others if _same_list(other, block)})
        if block and readers >= (1 if node in known else READERS):
            made = _made_for(node, block, inside, plain)
            for each in made:
                update(each, module=_outside(value(each).module), at="")
                inside[each] = ""


def _following(forward: Sequence[fx.Node], kinds: Collection[str]) -> set[fx.Node]:
    """The calls that follow from placeholders of these kinds alone."""
    found: set[fx.Node] = set()
    for node in forward:
        if all(
            n in found or (n.op == "placeholder" and value(n).kind in kinds)
            for n in node.all_input_nodes
        ):
            found.add(node)
    return found


def _made_for(
    node: fx.Node, block: str, inside: dict[fx.Node, str], plain: Collection[fx.Node]
) -> list[fx.Node]:
    """The calls of a block that make one of its values; none if they serve anything else too."""
    made, todo = dict[fx.Node, None](), [node]
    while todo:
        each = todo.pop()
        if each in made or each.op == "placeholder" or (each in plain and inside[each] != block):
            continue
        if inside.get(each) != block:
            return []
        made[each] = None
        todo += each.all_input_nodes
    own = [n for n in made if n is not node and n not in plain]
    return list(made) if all(made.keys() >= n.users.keys() for n in own) else []


def _same_list(a: str, b: str) -> bool:
    return a.rpartition(".")[0] == b.rpartition(".")[0]


def _outside(module: str) -> str:
    """A module path without the numbers in it."""
    return ".".join(part for part in module.split(".") if not part.isdigit())
