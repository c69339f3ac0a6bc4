"""What the printed loop over equal blocks passes to each block's method, and what it gets back.

One method is printed for all blocks of a run, from the calls of the first block. Each value that a
block reads from outside is a ``Slot``, which says where every iteration finds that value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import fx

from partc.codegen.repeats.equal import Group, ends_step
from partc.codegen.repeats.numbers import numbers_read
from partc.codegen.repeats.own_names import has, own_name
from partc.codegen.repeats.runs import PHASES, Loop, Run, with_inner
from partc.codegen.repeats.totals import Total, totals_of
from partc.graph import Graph, Phase, fake_of, is_backward, is_tensor, value
from partc.graph.moves import carried
from partc.passes.canonical.functionalize import viewed

Kind = Literal["own", "shared", "carried", "saved", "listed"]


@dataclass(frozen=True, eq=False)
class Slot:
    """One value that a block reads from outside; ``nodes`` has that value for each iteration.

    - own: a parameter or buffer of the block itself;
    - shared: one value for all blocks, such as a mask;
    - carried: a result of the block that ran just before, its call number ``position``: ``x``;
    - saved: a saved activation, which the block's own earlier phase ``made_in`` left; ``source`` is
      the first block's node;
    - listed: another value for each block, from anywhere, which the loop takes from a list.
    """

    kind: Kind
    nodes: tuple[fx.Node, ...]
    position: int = -1
    source: fx.Node | None = None
    made_in: Phase = "F"
    # of a saved value: whether the earlier phase made it or was given it, and as which call or
    # which value from outside
    origin: tuple[bool, int] = (False, -1)


@dataclass(eq=False)
class Interface:
    """What one phase of a run reads (``slots``) and returns.

    ``carried`` and ``listed`` are positions of calls in a block: call number 5 of every block.
    """

    loop: Loop
    slots: list[Slot]
    carried: list[int] = field(
        default_factory=list
    )  # results that the next iteration, or a call behind the loop, reads
    listed: list[int] = field(default_factory=list)  # results that the loop keeps of every block
    # nodes of the first block that its own later phases read, by the phase that reads them
    saved: dict[Phase, list[fx.Node]] = field(default_factory=dict)
    # results in `carried` that nobody reads here, but behind another run of the same kin
    unread: set[int] = field(default_factory=set)
    totals: list[Total] = field(default_factory=list)  # to which the calls of a module add

    def of(self, kind: Kind) -> list[Slot]:
        return [slot for slot in self.slots if slot.kind == kind]

    @property
    def group(self) -> Group:
        """The first block's calls, from which the method of all blocks is printed."""
        return self.loop.run.of(self.loop.phase)[0]

    @property
    def adds(self) -> set[fx.Node]:
        """The additions to totals, which stand in no method as such."""
        return {add for total in self.totals for add in total.adds}

    @property
    def sums_up(self) -> bool:
        """Whether the calls of a module add up gradients in a dict, which the step reads.

        Where none of these is reduced they are added to where they stay, as others are.
        """
        return not all(total.is_last for total in self.totals)

    @property
    def numbers(self) -> list[str]:
        """The numbers in which calls of one module differ, as far as this phase reads them."""
        return [*numbers_read(self.group.nodes)] if self.loop.run.is_called else []

    def own(self, slot: Slot) -> fx.Node:
        """The slot's value for the first block, from which the method is printed."""
        return slot.nodes[self.loop.groups.index(self.group)]


class Unfit(Exception):
    """Raised where no single method fits all blocks of ``run``: its calls are printed one by one.

    An example: every block reads a result of the block two before it.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.layers)
        self.run = run


def interfaces(graph: Graph, loops: Sequence[Loop]) -> dict[Loop, Interface]:
    """What each loop reads and returns, and each loop inside of one.

    Raises Unfit for a loop that one method cannot serve.
    """
    found: dict[Loop, Interface] = {}
    leads: dict[tuple[str, Phase], Interface] = {}
    every = [*with_inner(loops)]
    for loop in sorted(every, key=lambda loop: (PHASES.index(loop.phase), loop.run.follows)):
        earlier = [side for lp, side in found.items() if lp.run is loop.run]
        kin = loop.run.kin or loop.run.layers[0], loop.phase
        slots = _like(loop, earlier, leads[kin]) if kin in leads else _slots(graph, loop, earlier)
        totals = totals_of(graph, loop)
        passed = {n for total in totals for n in (*total.start, *total.adds)}
        slots = [slot for slot in slots if not passed.issuperset(slot.nodes)]
        found[loop] = Interface(loop, slots, totals=totals)
        leads.setdefault(kin, found[loop])
        for side in earlier:
            made = [s for s in found[loop].of("saved") if s.made_in == side.loop.phase]
            side.saved[loop.phase] = [s.source for s in made if s.source is not None]
    served = _served({loop: found[loop] for loop in loops})
    for loop, interface in found.items():
        mine = {lp: side for lp, side in found.items() if lp.run is loop.run}
        _give(graph, interface, served if loop in loops else _served(mine))
    while True:
        for lead in leads.values():
            _give_alike([s for s in found.values() if _is_kin(s.loop, lead.loop)])
        if not _hand_on(found):
            return found


def _is_kin(loop: Loop, lead: Loop) -> bool:
    return loop.phase == lead.phase and (loop.run is lead.run or loop.run.kin == lead.run.layers[0])


def outside(group: Group) -> list[fx.Node]:
    """The values that a block reads from outside, in the order of first use."""
    inside = set(group.nodes)
    return list(
        dict.fromkeys(n for node in group.nodes for n in node.all_input_nodes if n not in inside)
    )


def _slots(graph: Graph, loop: Loop, earlier: Sequence[Interface]) -> list[Slot]:
    """The slots of a phase; shared values stand in the order in which the forward takes them."""
    columns = zip(*(outside(group) for group in loop.groups), strict=True)
    slots = [_slot(loop, tuple(column), earlier) for column in columns]
    slots = _with_main(graph, loop, slots) if loop.run.is_single else slots
    order = [_root(slot.nodes[0]) for side in earlier for slot in side.of("shared")]
    shared = [(_root(slot.nodes[0]), slot) for slot in slots if slot.kind == "shared"]
    shared.sort(key=lambda s: order.index(s[0]) if s[0] in order else len(order))
    return [*(slot for slot in slots if slot.kind != "shared"), *(slot for _, slot in shared)]


def _root(node: fx.Node) -> fx.Node:
    """The parameter or buffer that a value is, gathered in this phase or that; else the value."""
    root = node
    while root.op == "call_function" and (before := carried(root)) is not None:
        root = before
    return root if root.op == "placeholder" and value(root).kind in ("param", "buffer") else node


def _with_main(graph: Graph, loop: Loop, slots: list[Slot]) -> list[Slot]:
    """The slots of a single block with its main value as the one that runs through blocks.

    That is the biggest value of its direction that it is given; its biggest result takes over.
    """
    group = loop.groups[0]
    mine = {n for phase in PHASES for g in loop.run.of(phase) for n in g.nodes}
    mine.add(graph.fx.output_node())  # which reads gradients of weights
    given = [
        s for s in slots
        if s.kind == "shared" and is_tensor(s.nodes[0])
        and is_backward(s.nodes[0]) == is_backward(group.nodes[-1])
        and _root(s.nodes[0]) is s.nodes[0]  # weights run through no blocks
    ]  # fmt: skip
    left = [
        p for p, node in enumerate(group.nodes)
        if is_tensor(node) and any(not ends_step(graph, u) for u in node.users.keys() - mine)
    ]  # fmt: skip
    if not given or not left:
        return slots
    main = max(given, key=lambda s: fake_of(s.nodes[0]).numel())
    most = max(left, key=lambda p: (fake_of(group.nodes[p]).numel(), p))
    return [Slot("carried", s.nodes, position=most) if s is main else s for s in slots]


def _like(loop: Loop, earlier: Sequence[Interface], lead: Interface) -> list[Slot]:
    """The slots of a run that is kin of another: of the same kinds, in the same order.

    Raises Unfit where a value comes another way than in the run from which the class is printed.
    """
    columns = list(zip(*(outside(group) for group in loop.groups), strict=True))
    theirs = outside(lead.loop.groups[0])
    return [_as(loop, columns[theirs.index(slot.nodes[0])], slot, earlier) for slot in lead.slots]


def _as(loop: Loop, nodes: tuple[fx.Node, ...], like: Slot, earlier: Sequence[Interface]) -> Slot:
    found = _slot(loop, nodes, earlier)
    if like.kind in ("own", "saved") or found.kind in ("own", "saved"):
        if any(getattr(found, of) != getattr(like, of) for of in ("kind", "made_in", "origin")):
            raise Unfit(loop.run)
        return found
    if not loop.run.is_single and (found.kind, found.position) != (like.kind, like.position):
        raise Unfit(loop.run)
    return replace(like, nodes=nodes)


def _give_alike(sides: Sequence[Interface]) -> None:
    """Let runs of one kin return the same results, though not all of them are read everywhere."""
    carried = sorted({p for side in sides for p in side.carried})
    if any(side.listed != sides[0].listed for side in sides):
        raise Unfit(next(s for s in sides if s.listed != sides[0].listed).loop.run)
    if len(sides) > 1:
        for side in sides:
            side.unread |= {p for p in carried if p not in side.carried}
            side.carried = carried


def _hand_on(found: dict[Loop, Interface]) -> bool:
    """Let blocks inside of a block return what that block returns; whether one returns more now.

    The block may return it for the sake of its kin alone, or of a later block of its run.
    """
    more = False
    for loop, side in found.items():
        results = {side.group.nodes[p] for p in (*side.carried, *side.listed)}
        for inner in (found[each] for each in with_inner(loop.inner)):
            handed = {p for p, node in enumerate(inner.group.nodes) if node in results}
            missing = handed - {*inner.carried, *inner.listed}
            inner.carried = sorted({*inner.carried, *missing})
            inner.unread -= handed
            more = more or bool(missing)
    return more


def _slot(loop: Loop, nodes: tuple[fx.Node, ...], earlier: Sequence[Interface]) -> Slot:
    suffixes = {
        own_name(g.layer, value(n).name) if _is_own(n, g, loop.run) else None
        for n, g in zip(nodes, loop.groups, strict=True)
    }
    if len(suffixes) == 1 and None not in suffixes:
        return Slot("own", nodes)
    if len(set(nodes)) == 1 and not loop.run.is_single:
        return Slot("shared", nodes)
    for side in earlier:
        source = _saved_from(loop, nodes, side)
        if source is not None:
            origin = _origin(source, loop.run.of(side.loop.phase)[0])
            return Slot("saved", nodes, -1, source, side.loop.phase, origin)
    if loop.run.is_single:
        return Slot("shared", nodes)
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


def _is_own(node: fx.Node, group: Group, run: Run) -> bool:
    return node.op == "placeholder" and has(group.layer, value(node).name, run.elsewhere)


def _origin(source: fx.Node, group: Group) -> tuple[bool, int]:
    """Where a block's earlier phase, ``group``, has a saved value from."""
    made = source in group.nodes
    return made, (group.nodes if made else outside(group)).index(source)


def _saved_from(loop: Loop, nodes: tuple[fx.Node, ...], forward: Interface) -> fx.Node | None:
    """The first block's node, if ``nodes`` are values of each block's own earlier phase.

    Such a value is made by the earlier phase, or handed to that phase from outside. None otherwise.
    """
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
    """Fill in what a phase returns: the results that other blocks, or calls outside, read."""
    loop = interface.loop
    carried = {slot.position for slot in interface.of("carried")}
    last, adds = loop.groups[-1], interface.adds
    for position in range(len(last.nodes)):
        if last.nodes[position] in adds:
            continue
        read_of = [g for g in loop.groups if _read_outside(graph, loop, g, position, served)]
        if position in carried or read_of == [last]:
            interface.carried.append(position)
        if any(group is not last for group in read_of):
            interface.listed.append(position)


def _served(found: dict[Loop, Interface]) -> dict[fx.Node, set[fx.Node]]:
    """For each saved value the later calls of its own block, which find it in the saved list."""
    served: dict[fx.Node, set[fx.Node]] = {}
    for loop, interface in found.items():
        for slot in interface.of("saved"):
            for node, group in zip(slot.nodes, loop.groups, strict=True):
                served.setdefault(node, set()).update(group.nodes)
    return served


def _read_outside(
    graph: Graph, loop: Loop, group: Group, position: int, served: dict[fx.Node, set[fx.Node]]
) -> bool:
    """Whether a call that the block does not serve itself reads a value of the block.

    The block serves its own calls, the next block (a carried value), and its own later phases (a
    saved value); it also puts away its own gradients and new buffers.
    """
    node = group.nodes[position]
    at = loop.groups.index(group)
    following = set(loop.groups[at + 1].nodes) if at + 1 < len(loop.groups) else set()
    readers = set(node.users) - set(group.nodes) - served.get(node, set()) - following
    if graph.fx.output_node() in readers and _is_own_result(graph, node, group, loop.run):
        readers.discard(graph.fx.output_node())
    return any(reader.op == "output" or not ends_step(graph, reader) for reader in readers)


def _is_own_result(graph: Graph, node: fx.Node, group: Group, run: Run) -> bool:
    """Whether the step gives a value back only as gradients, or new buffers, of this very block."""
    outputs = graph.outputs
    if run.is_called:
        return False
    names = [name for name, n in (*outputs.grads.items(), *outputs.buffers.items()) if n is node]
    if node in (outputs.loss, *outputs.results.values(), *outputs.sent.values()):
        return False
    return all(has(group.layer, name, run.elsewhere) for name in names) and all(
        writable_in(graph, group, name) for name, n in outputs.buffers.items() if n is node
    )


def writable_in(graph: Graph, group: Group, buffer: str) -> bool:
    """Whether a block may overwrite a buffer when it ends: no call outside reads the old value, or
    a view of it.
    """
    inside, same = set(group.nodes), [graph.buffers[buffer]]
    for node in same:
        readers = set(node.users) - {graph.fx.output_node()}
        if not readers <= inside:
            return False
        same += [reader for reader in readers if viewed(reader, reader.args) is node]
    return True
