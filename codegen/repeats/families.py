"""Which blocks inside of blocks compute the same but for sizes, and which of them share a class."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import fx

from partc.codegen.repeats.common import common
from partc.codegen.repeats.contiguous import exposes, in_one_piece
from partc.codegen.repeats.equal import Equal, Group, ends_step
from partc.codegen.repeats.kin import (
    CLASS,
    INSTANCE,
    blocks_in,
    is_small,
    meets,
    nodes_of,
    prefix_of,
    says_of,
    within_path,
)
from partc.codegen.repeats.owners import blocks_of, layer_of, owners_of, takes_weights
from partc.codegen.repeats.runs import PHASES, Run
from partc.codegen.repeats.trim import Block
from partc.graph import Graph, Phase, collectives, is_tensor
from partc.graph.places import module_of

_BEHIND = (collectives.wait, operator.getitem)  # they stand where the call is that they read


@dataclass(eq=False)
class Member:
    """A run that was there before, or a block: inside of another member (``home``), or beside.

    ``blocks`` has the calls of all blocks of the run, which are those of the family's first block
    one by one.
    """

    family: Family
    blocks: list[Block]
    run: Run | None = None
    home: Member | None = None
    children: list[Member] = field(default_factory=list)

    @property
    def layer(self) -> str:
        return self.run.layers[0] if self.run is not None else layer_of(self.blocks[0])

    @property
    def depth(self) -> int:
        """How many members it is inside of."""
        return 0 if self.home is None else 1 + self.home.depth


@dataclass(eq=False)
class Family:
    """Members that one class can print, from the first one."""

    key: object  # what its members have in common: how often they call which op
    members: list[Member] = field(default_factory=list)
    found: list[Member] = field(default_factory=list)  # in this round, until they are judged

    @property
    def lead(self) -> Block:
        return [*self.members, *self.found][0].blocks[0]

    @property
    def paths(self) -> list[str]:
        """The paths of its single blocks."""
        return [m.layer for m in [*self.members, *self.found] if m.run is None]

    @property
    def kin(self) -> str:
        """The first block's path, if the family has single blocks; else ""."""
        return self.members[0].layer if any(m.run is None for m in self.members) else ""

    @property
    def layers(self) -> tuple[str, ...]:
        first = self.members[0].run
        return first.layers if first is not None else ()

    @property
    def kin_of_runs(self) -> str:
        first = self.members[0].run
        return first.kin if first is not None else ""

    @property
    def is_worth_it(self) -> bool:
        """Whether single blocks have fewer lines as calls of a class than in line."""
        every = [*self.members, *self.found]
        in_line = sum(member.run is None for member in every)
        if not any(m.home is not None for m in every) or not self.found:
            return False
        num = sum(is_tensor(node) for node in nodes_of(self.lead))
        printed = 1 if in_line == len(every) else 0
        return (in_line - printed) * num > printed * CLASS + in_line * INSTANCE


class Families:
    """The families of a step; ``apart`` has paths of blocks that are in none."""

    def __init__(
        self, graph: Graph, runs: Sequence[Run], alone: Collection[tuple[str, ...]],
        apart: Collection[str],
    ) -> None:  # fmt: skip
        self.graph, self.apart = graph, apart
        self.equal = Equal(graph, {}, sizes=True)
        self.all: list[Family] = []
        self.taken: set[fx.Node] = set()
        self.looped = [module_of(layer) for run in runs for layer in run.layers]
        for run in runs:
            self.taken |= {n for phase in PHASES for g in run.of(phase) for n in g.nodes}
            if not run.elsewhere and not run.is_called:
                self._know(run)
        self.shares = [each for each in self.all if each.layers not in alone]

    def _know(self, run: Run) -> None:
        family = next((f for f in self.all if run.follows and f.kin_of_runs == run.kin), None)
        if family is None:
            family = Family(says_of(self.graph, next(blocks_in(run))))
            self.all.append(family)
        family.members.append(Member(family, [*blocks_in(run)], run))

    def find(self) -> None:
        """Find blocks inside of the first blocks of all families, and again inside of those."""
        while self._round():
            pass

    def _round(self) -> bool:
        homes = self._homes()
        closed = {node for node in self.graph.calls() if node not in homes}
        level = 1
        while paths := {path for node in homes if (path := prefix_of(node, level))}:
            within = partial(within_path, level=level, allowed=paths - {*self.apart})
            for block in blocks_of(self.graph, owners_of(self.graph, within, closed, looped=False)):
                self._consider(block, homes)
            closed |= {n for f in self.shares if f.is_worth_it for m in f.found
                       for n in nodes_of(m.blocks[0])}  # fmt: skip
            level += 1
        kept: set[fx.Node] = set()
        judged = [self._judge(family, kept) for family in [*self.shares]]
        return any(judged)

    def _judge(self, family: Family, kept: set[fx.Node]) -> bool:
        """Keep what a round found if it is worth it; whether it is.

        A call is in one block: what meets ``kept``, the calls of blocks kept before, is let go.
        """
        family.found = [m for m in family.found if kept.isdisjoint(nodes_of(m.blocks[0]))]
        worth, found, family.found = family.is_worth_it, family.found, []
        if worth:
            family.members += found
            for member in found:
                kept.update(nodes_of(member.blocks[0]))
                if member.home is not None:
                    member.home.children.append(member)
            if family not in self.all:
                self.all.append(family)
        elif not family.members:
            self.shares.remove(family)
        return worth

    def _homes(self) -> dict[fx.Node, Member | None]:
        """For each call that may be part of another block the member that it is inside of."""
        homes: dict[fx.Node, Member | None] = {
            node: None for node in self.graph.calls() if node not in self.taken
        }
        members = (member for family in self.all for member in family.members)
        for member in sorted(members, key=lambda m: m.depth):  # the innermost has the last word
            for node in nodes_of(member.blocks[0]):
                homes.pop(node, None)
            if member is member.family.members[0]:
                homes |= dict.fromkeys(nodes_of(member.blocks[0]), member)
        return homes

    def _consider(self, block: Block, homes: dict[fx.Node, Member | None]) -> None:
        """Put a block among those that it equals but for sizes, or begin a new family with it."""
        layer, block = layer_of(block), _without_weights(block)
        inside = {homes[node] for node in nodes_of(block)}
        if len(inside) != 1 or block["F"] is None or is_small(block) or not self._is_whole(block):
            return
        home = inside.pop()
        if home is None and meets(layer, self.looped):
            return
        if home is not None and not layer.startswith(f"{module_of(home.layer)}."):
            return
        for fits in (self._equal, self._common):
            for family in self.shares:
                if not meets(layer, family.paths) and fits(family, block, home):
                    return
        family = Family(says_of(self.graph, block))
        family.found.append(Member(family, [block], home=home))
        self.shares.append(family)

    def _equal(self, family: Family, block: Block, home: Member | None) -> bool:
        """Add a block to a family that it equals but for sizes; whether it does."""
        if says_of(self.graph, block) != family.key:
            return False
        aligned = self.equal.all_aligned(family.lead, block)
        family.found += [Member(family, [aligned], home=home)] if aligned is not None else []
        return aligned is not None

    def _common(self, family: Family, block: Block, home: Member | None) -> bool:
        """Add a block to a family of its class, with which it has most calls in common.

        The others stand around them, as those do of a block that has been alone in its family.
        """
        classes, every = self.graph.classes, [*family.members, *family.found]
        known = classes.get(layer_of(block), "")
        if home is None or not known or known != classes.get(layer_of(family.lead)):
            return False
        found = common(self.equal, family.lead, block)
        if found is None or not all(map(self._is_whole, found)) or any(map(is_small, found)):
            return False
        mine, theirs = found
        if (mine != family.lead and len(every) > 1) or every[0].run is not None:
            return False
        every[0].blocks[0] = mine
        family.key = says_of(self.graph, mine)
        family.found.append(Member(family, [theirs], home=home))
        return True

    def _is_whole(self, block: Block) -> bool:
        """Whether a block waits for all that it starts, but for last reductions of gradients."""
        inside = {*nodes_of(block)}
        pairs = [(n.all_input_nodes[0], n) for n in self.graph.calls() if n.target in _BEHIND]
        return all(
            (before in inside) == (node in inside) or ends_step(self.graph, node)
            for before, node in pairs
            if before in inside or node in inside
        )

    # order -----------------------------------------------------------------------------------
    def in_one_piece(self) -> set[str]:
        """Order the calls of all members so that blocks inside of them are in one piece.

        The paths of blocks for which there is no such order.
        """
        for family in reversed(self.all):
            children = family.members[0].children
            for phase in PHASES if children else ():
                group = family.lead[phase]
                pieces = [g.nodes for m in children if (g := m.blocks[0][phase]) is not None]
                order = _order(group, pieces)
                if order is None:
                    return {_at_fault(group, children, phase).layer}
                for member in family.members if order else ():
                    member.blocks = [_ordered(block, phase, order) for block in member.blocks]
        return set()

    def origin(self, path: str, runs: Sequence[Run]) -> str:
        """The block that was found, for a path that a follower of its home has in its place."""
        for family in self.all:
            lead = family.members[0]
            for member in family.members[1:]:
                if path.startswith(f"{member.layer}."):
                    return self.origin(lead.layer + path.removeprefix(member.layer), runs)
        return path


def _order(group: Group | None, pieces: Sequence[Sequence[fx.Node]]) -> list[int] | None:
    """The order of calls in which each piece is in one place, and no transfer is exposed by it."""
    nodes = group.nodes if group is not None else ()
    order = in_one_piece(nodes, pieces)
    return None if order is None or exposes(nodes, order) else order


def _at_fault(group: Group | None, children: Sequence[Member], phase: Phase) -> Member:
    """A child for which there is no order, though it were the only one; else the last one."""
    for member in children:
        piece = member.blocks[0][phase]
        if piece is not None and _order(group, [piece.nodes]) is None:
            return member
    return children[-1]


def _ordered(block: Block, phase: Phase, order: Sequence[int]) -> Block:
    group = block[phase]
    assert group is not None
    return {**block, phase: Group(group.layer, tuple(group.nodes[i] for i in order))}


def _without_weights(block: Block) -> Block:
    """A block without the gathers of weights, which the block around it starts and waits for."""
    found: dict[Phase, Group | None] = {}
    for phase, group in block.items():
        kept = [n for n in group.nodes if not takes_weights(n)] if group is not None else []
        found[phase] = Group(group.layer, tuple(kept)) if group is not None and kept else None
    return found
