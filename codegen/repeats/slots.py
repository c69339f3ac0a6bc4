"""How a block's function is fed: where every iteration finds each value from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from partc.codegen.repeats.blocks import PHASES, Loop, Run
from partc.codegen.repeats.equal import Group, ends_step
from partc.graph import Graph, Phase, value

Kind = Literal["own", "shared", "carried", "saved", "listed"]


@dataclass(frozen=True, eq=False)
class Slot:
    """One outside value of a block: ``nodes`` has it per group in the order of execution.

    own: the block's parameter; shared: the same for all; carried: from the group before (its call
    at ``position``); saved: from the block's own earlier phase ``made_in``, where the first block
    calls it ``source``; listed: from anywhere.
    """

    kind: Kind
    nodes: tuple[fx.Node, ...]
    position: int = -1
    source: fx.Node | None = None
    made_in: Phase = "F"


@dataclass(eq=False)
class Interface:
    """What one phase of a run takes and gives; positions count the calls of a group."""

    loop: Loop
    slots: list[Slot]
    carried: list[int] = field(
        default_factory=list
    )  # returned; the next iteration or what follows reads it
    listed: list[int] = field(default_factory=list)  # returned and kept of every iteration
    # of the first block, what it leaves for its own later phases
    saved: dict[Phase, list[fx.Node]] = field(default_factory=dict)

    def of(self, kind: Kind) -> list[Slot]:
        return [slot for slot in self.slots if slot.kind == kind]

    @property
    def group(self) -> Group:
        """The group that the function is printed from: the first block's."""
        return self.loop.run.of(self.loop.phase)[0]

    def own(self, slot: Slot) -> fx.Node:
        """The slot's value for the group that is printed."""
        return slot.nodes[self.loop.groups.index(self.group)]


class Unfit(Exception):
    """A loop whose iterations cannot be fed by one text; its ``run`` stays in line."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.layers)
        self.run = run


def interfaces(graph: Graph, loops: Sequence[Loop]) -> dict[Loop, Interface]:
    """The interfaces of all loops; Unfit where there is none."""
    found: dict[Loop, Interface] = {}
    for loop in sorted(loops, key=lambda loop: PHASES.index(loop.phase)):
        earlier = [side for lp, side in found.items() if lp.run is loop.run]
        found[loop] = Interface(loop, _slots(loop, earlier))
        for side in earlier:
            made = [s for s in found[loop].of("saved") if s.made_in == side.loop.phase]
            side.saved[loop.phase] = [s.source for s in made if s.source is not None]
    served = _served(found)
    for interface in found.values():
        _give(graph, interface, served)
    return found


def outside(group: Group) -> list[fx.Node]:
    """What a group reads from outside, in the order of first use."""
    inside = set(group.nodes)
    return list(
        dict.fromkeys(n for node in group.nodes for n in node.all_input_nodes if n not in inside)
    )


def _slots(loop: Loop, earlier: Sequence[Interface]) -> list[Slot]:
    columns = zip(*(outside(group) for group in loop.groups), strict=True)
    return [_slot(loop, tuple(column), earlier) for column in columns]


def _slot(loop: Loop, nodes: tuple[fx.Node, ...], earlier: Sequence[Interface]) -> Slot:
    suffixes = {
        value(n).name.removeprefix(g.layer) if _is_own(n, g) else None
        for n, g in zip(nodes, loop.groups, strict=True)
    }
    if len(suffixes) == 1 and None not in suffixes:
        return Slot("own", nodes)
    if len(set(nodes)) == 1:
        return Slot("shared", nodes)
    for side in earlier:
        source = _saved_from(loop, nodes, side)
        if source is not None:
            return Slot("saved", nodes, source=source, made_in=side.loop.phase)
    places = {
        before.nodes.index(n) if n in before.nodes else -1
        for n, before in zip(nodes[1:], loop.groups, strict=False)
    }
    if len(places) == 1 and -1 not in places:
        return Slot("carried", nodes, position=places.pop())
    inside = {n for group in loop.groups for n in group.nodes}
    before = [g for side in earlier for g in side.loop.groups]
    of_its_own = any(
        n in group.nodes
        for n, g in zip(nodes, loop.groups, strict=True)
        for group in before
        if group.layer == g.layer
    )
    if of_its_own or inside.intersection(nodes):
        raise Unfit(loop.run)
    return Slot("listed", nodes)


def _is_own(node: fx.Node, group: Group) -> bool:
    return node.op == "placeholder" and value(node).name.startswith(f"{group.layer}.")


def _saved_from(loop: Loop, nodes: tuple[fx.Node, ...], forward: Interface) -> fx.Node | None:
    """A value that every block has from its own earlier phase, as the first block calls it."""
    run = loop.run
    mine = dict(zip((g.layer for g in loop.groups), nodes, strict=True))
    groups = {g.layer: g for g in forward.loop.groups}
    first = mine[run.layers[0]]
    if first in groups[run.layers[0]].nodes:
        at = groups[run.layers[0]].nodes.index(first)
        return first if all(groups[layer].nodes[at] is n for layer, n in mine.items()) else None
    for slot in (*forward.of("carried"), *forward.of("listed")):
        read = dict(zip((g.layer for g in forward.loop.groups), slot.nodes, strict=True))
        if read == mine:
            return first
    return None


def _give(graph: Graph, interface: Interface, served: dict[fx.Node, set[fx.Node]]) -> None:
    """Fill in what a loop returns: what the next iteration, or anything outside, reads."""
    loop = interface.loop
    carried = {slot.position for slot in interface.of("carried")}
    last = loop.groups[-1]
    for position in range(len(last.nodes)):
        read_of = [g for g in loop.groups if _read_outside(graph, loop, g, position, served)]
        if position in carried or read_of == [last]:
            interface.carried.append(position)
        if any(group is not last for group in read_of):
            interface.listed.append(position)


def _served(found: dict[Loop, Interface]) -> dict[fx.Node, set[fx.Node]]:
    """Per saved value the backward calls that find it among what their own forward saved."""
    served: dict[fx.Node, set[fx.Node]] = {}
    for loop, interface in found.items():
        for slot in interface.of("saved"):
            for node, group in zip(slot.nodes, loop.groups, strict=True):
                served.setdefault(node, set()).update(group.nodes)
    return served


def _read_outside(
    graph: Graph, loop: Loop, group: Group, position: int, served: dict[fx.Node, set[fx.Node]]
) -> bool:
    """Whether anything but the group, backwards that saved it and the next group reads a value."""
    node = group.nodes[position]
    at = loop.groups.index(group)
    following = set(loop.groups[at + 1].nodes) if at + 1 < len(loop.groups) else set()
    readers = set(node.users) - set(group.nodes) - served.get(node, set()) - following
    if graph.fx.output_node() in readers and _is_own_result(graph, node, group):
        readers.discard(graph.fx.output_node())
    return any(reader.op == "output" or not ends_step(graph, reader) for reader in readers)


def _is_own_result(graph: Graph, node: fx.Node, group: Group) -> bool:
    """Whether a value is given back only as gradients or new buffers of the block's own."""
    outputs = graph.outputs
    names = [name for name, n in (*outputs.grads.items(), *outputs.buffers.items()) if n is node]
    if node in (outputs.loss, *outputs.results.values(), *outputs.sent.values()):
        return False
    return all(name.startswith(f"{group.layer}.") for name in names) and all(
        writable_in(graph, group, name) for name, n in outputs.buffers.items() if n is node
    )


def writable_in(graph: Graph, group: Group, buffer: str) -> bool:
    """Whether a block may overwrite a buffer when it ends: nobody else reads the old value."""
    readers = set(graph.buffers[buffer].users) - {graph.fx.output_node()}
    return readers <= set(group.nodes)
