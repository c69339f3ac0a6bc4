"""What two blocks of one class have in common, where one of them does a little more.

Such as the attention of an encoder and that of a decoder, which also masks what lies ahead. The
calls that only one of them makes stand around the common ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import fx

from partc.codegen.repeats.equal import Equal, Group
from partc.codegen.repeats.trim import Block
from partc.graph import Phase

LEAST = 2  # at least 1/2 of the calls of both blocks are common ones


def common(equal: Equal, one: Block, other: Block) -> tuple[Block, Block] | None:
    """The calls of two blocks that compute the same, those of the other in the order of the one.

    None if that is less than a half of either.
    """
    mine, theirs = dict[Phase, Group | None](), dict[Phase, Group | None]()
    for phase, group in one.items():
        found = _in_phase(equal, group, other[phase])
        if found is None:
            return None
        mine[phase], theirs[phase] = found
    aligned = equal.all_aligned(mine, theirs)
    return (mine, aligned) if aligned is not None else None


def _in_phase(
    equal: Equal, one: Group | None, other: Group | None
) -> tuple[Group | None, Group | None] | None:
    """The common calls in one phase; None if they are few."""
    if one is None or other is None:
        return (None, None) if one is other else None
    sides = [one, other]
    while True:
        numbers = [equal.numbered(group) for group in sides]
        counts = [Counter(each.values()) for each in numbers]
        if counts[0] == counts[1]:
            return sides[0], sides[1]
        gone = _unlike(sides, numbers, counts)
        sides = [_without(group, gone) for group in sides]
        small = (
            LEAST * len(a.nodes) < len(b.nodes) for a, b in zip(sides, (one, other), strict=True)
        )
        if any(small):
            return None


def _unlike(
    sides: Sequence[Group], numbers: Sequence[Mapping[fx.Node, int]],
    counts: Sequence[Counter[int]],
) -> set[fx.Node]:  # fmt: skip
    """The first calls that one of two blocks makes and the other one does not.

    First are those whose operands both blocks have. Of these go the calls of an op that one block
    calls more often; where there is none, all.
    """
    targets = [Counter(str(node.target) for node in group.nodes) for group in sides]
    first, extra = set[fx.Node](), set[fx.Node]()
    for i, (group, known) in enumerate(zip(sides, numbers, strict=True)):
        surplus = {n for n in group.nodes if counts[i][known[n]] > counts[1 - i][known[n]]}
        for node in surplus:
            if surplus.isdisjoint(node.all_input_nodes):
                first.add(node)
                name = str(node.target)
                extra |= {node} if targets[i][name] > targets[1 - i][name] else set()
    return extra or first


def _without(group: Group, gone: set[fx.Node]) -> Group:
    return Group(group.layer, tuple(node for node in group.nodes if node not in gone))
