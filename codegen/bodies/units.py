"""Which calls belong together in the user's code, so that one call of a function can replace them.

A unit has the calls of one module, or of one line of a function that a module calls.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import fx

from partc.codegen.calls.storage import is_view, owner
from partc.codegen.repeats.numbers import reads_numbers
from partc.codegen.repeats.runs import Item, Loop, with_inner
from partc.graph import (
    Graph,
    collectives,
    fake_of,
    is_backward,
    is_tensor,
    value,
)
from partc.graph.draws import draws_numbers
from partc.graph.moves import gathers_param

LINES = 3  # a function of fewer calls hides more from a reader than it says
ARGUMENTS, RESULTS = 6, 6  # a call with more arguments or results is hard to read


@dataclass(frozen=True, eq=False)
class Place:
    """The calls of one printed method: those of ``step`` between two loops, or of a block's method.

    A block's method is printed from the first block of the ``loop``. Of a block inside of another
    one ``around`` is the place of the outermost block, among whose calls its own are.
    """

    graph: Graph
    nodes: tuple[fx.Node, ...]
    loop: Loop | None = None
    again: bool = False  # whether another place prints the same text for both
    around: Place | None = None

    @property
    def outermost(self) -> Place:
        return self.around or self

    def stretches(self) -> list[list[fx.Node]]:
        """The calls between those of inner blocks, which no call moves over."""
        inner = {n for loop in self.loop.inner for n in loop.group.nodes} if self.loop else set()
        return [
            [*nodes]
            for is_inner, nodes in groupby(self.nodes, key=inner.__contains__)
            if not is_inner
        ]


@dataclass(frozen=True)
class Home:
    """What a unit's function is named after: a module, or a line of a function that it calls.

    ``depth`` counts the modules and functions around it in the user's code.
    """

    name: str  # of the class or function
    path: str  # of the module
    depth: int
    line: tuple[tuple[str, int], ...] = ()


@dataclass(eq=False)
class Unit:
    """Calls (``nodes``) that one call of a function can replace, with their inputs and outputs.

    The one call stands in the place of ``end``, or else of the last node. ``behind`` has calls from
    between the nodes, which move behind the one call.
    """

    home: Home
    place: Place
    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    behind: list[fx.Node] = field(default_factory=list)
    end: fx.Node | None = None

    @property
    def is_backward(self) -> bool:
        return any(value(n).forward for n in self.nodes)

    @property
    def repeats(self) -> bool:
        """Whether these calls recompute forward values in the backward."""
        return not self.is_backward and any(is_backward(n) for n in self.nodes)


def places_of(graph: Graph, items: Sequence[Item], again: bool = False) -> Iterator[Place]:
    """The places of a step in order: calls between loops, and the first block of each loop."""
    inline: list[fx.Node] = []
    for item in items:
        if isinstance(item, Loop):
            yield Place(graph, tuple(inline), again=again)
            run = item.run
            place = Place(graph, run.of(item.phase)[0].nodes, item, again or run.follows)
            yield place
            for inner in with_inner(item.inner):
                same = again or run.follows or inner.run.follows
                yield Place(graph, inner.group.nodes, inner, same, place)
            inline = []
        else:
            inline.append(item)
    yield Place(graph, tuple(inline), again=again)


# what belongs together ----------------------------------------------------------------------------
def units_of(place: Place) -> list[Unit]:
    """The units of a place: calls of one module, or one line of a function, that fit one call."""
    members: dict[tuple[Home, str, int], list[fx.Node]] = defaultdict(list)
    part = 0
    for node in (node for nodes in place.stretches() for node in (None, *nodes)):
        if node is None:
            part += 1
        elif node.target is collectives.wait and not gathers_param(node.all_input_nodes[0]):
            part += 1  # no call moves over a wait: it hides the transfer
        elif is_movable(node):
            for home in _homes(place.graph, node):
                members[home, value(node).phase, part].append(node)
    units = []
    for (home, _, _), nodes in members.items():
        for connected in _connected(_core(nodes)):
            unit = Unit(home, place, connected)
            if _placed(unit):
                units.append(unit)
    return units


def is_movable(node: fx.Node) -> bool:
    """Whether a call depends on its operands alone: no random draw, no rank, no transfer, and no
    number that differs from block to block.
    """
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return not (random or moves(node) or draws_numbers(node) or reads_numbers(node))


def moves(node: fx.Node) -> bool:
    """Whether a call is a collective, a wait, or an op that depends on the rank."""
    return getattr(node.target, "__module__", "") == collectives.__name__


def _homes(graph: Graph, node: fx.Node) -> Iterator[Home]:
    """Every module, and every line of a function, that a call is part of, the outermost first."""
    known = value(node)
    parts = known.module.split(".") if known.module else []
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        if path in graph.classes:
            yield Home(graph.classes[path], path, i)
    for i, (function, _) in enumerate(known.calls):
        if i and function != "forward":
            yield Home(function, known.module, len(parts) + i, known.calls[: i + 1])


def _core(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The calls of a unit without two kinds that a backward function should not have.

    Calls that only a parameter's gradient needs: they may be scheduled far from the others, where
    they hide a transfer. And sums with a gradient that comes from outside of the unit.
    """
    inside = set(nodes)
    for node in nodes:
        adds = is_backward(node) and node.target is torch.ops.aten.add.Tensor
        if adds and not value(node).forward and not inside.issuperset(node.all_input_nodes):
            inside.discard(node)
    aside: set[fx.Node] = set()
    for node in reversed(nodes):
        if is_backward(node) and all(u in aside or is_stored(u) for u in node.users):
            aside.add(node)
    inside -= aside
    for node in nodes:  # results stay with their call
        if node.target is operator.getitem:
            (inside.add if node.all_input_nodes[0] in inside else inside.discard)(node)
    return [node for node in nodes if node in inside]


def is_stored(node: fx.Node) -> bool:
    """Whether a node is the step's output, or a transfer (or getitem) that leads only there."""
    passes = moves(node) or node.target is operator.getitem
    return node.op == "output" or (passes and all(is_stored(u) for u in node.users))


def _connected(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The calls as connected components: calls that read one another's results, in order.

    networkx's connected_components gives the same; its import alone takes 0.08 s, which every
    compile would pay for.
    """
    group = {node: {node: None} for node in nodes}
    for node in nodes:
        for operand in node.all_input_nodes:
            if operand in group and group[operand] is not group[node]:
                group[operand].update(group[node])
                for moved in group[node]:
                    group[moved] = group[operand]
    sets = {id(members): members for members in group.values()}
    return [[node for node in nodes if node in members] for members in sets.values()]


# where one call can stand -------------------------------------------------------------------------
def _placed(unit: Unit) -> bool:
    """Fill in a unit's inputs and outputs; False if one call cannot replace the unit.

    That is so where the unit is too small, reads or returns too much, or is read before its last
    call.
    """
    _drop_shared_views(unit)
    if sum(node.target is not operator.getitem for node in unit.nodes) < LINES:
        return False
    inside = set(unit.nodes)
    reads = dict.fromkeys(n for node in unit.nodes for n in node.all_input_nodes)
    unit.inputs = [n for n in reads if n not in inside]
    unit.outputs = [n for n in unit.nodes if set(n.users) - inside]
    if unit.outputs[-1:] == unit.nodes[-1:] and unit.nodes[-1].target is not operator.getitem:
        unit.outputs.insert(0, unit.outputs.pop())  # the main result comes first
    few = 0 < len(unit.inputs) <= ARGUMENTS and 0 < len(unit.outputs) <= RESULTS
    tensors = all(is_tensor(n) for n in [*unit.inputs, *unit.outputs])
    order = {node: i for i, node in enumerate(unit.place.nodes)}
    readers = {u for n in unit.outputs for u in n.users} - inside
    late = all(order.get(u, len(order)) > order[unit.nodes[-1]] for u in readers)
    return few and tensors and late


def _drop_shared_views(unit: Unit) -> None:
    """Drop views at the end of a unit, so that a function returns memory of its own alone."""
    while True:
        inside = set(unit.nodes)
        outputs = [n for n in unit.nodes if set(n.users) - inside]
        homes = [owner(n) for n in outputs]
        shared = {
            node
            for node, home in zip(outputs, homes, strict=True)
            if home is not node and is_view(node) and node.target is not operator.getitem
        }
        if not shared:
            return
        unit.nodes = [n for n in unit.nodes if n not in shared]


def signature(unit: Unit) -> tuple[object, ...]:
    """A key for what a unit computes; units with equal keys may still have different texts."""
    number = {node: i for i, node in enumerate([*unit.inputs, *unit.nodes])}
    calls = tuple(
        (
            str(node.target),
            repr(fx.map_arg(node.args, lambda n: number[n])),
            repr(fx.map_arg(node.kwargs, lambda n: number[n])),
            str(fake_of(node).dtype) if is_tensor(node) else "",
        )
        for node in unit.nodes
    )
    return unit.home.name, unit.is_backward, calls, tuple(number[n] for n in unit.outputs)
