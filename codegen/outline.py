"""Calls that several places of a program make alike become one printed function.

In: the items of a step. Out: the items, with one call where the calls of a function stood. What
belongs together is read off the user's code: the calls of one module, or of one line of a function
that a module calls. Functions are told apart by their text alone.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from partc import collectives, ops
from partc.codegen.blocks import Item, Loop, Run, gathers_param
from partc.codegen.body import Body
from partc.codegen.equal import Group
from partc.codegen.helpers import Helpers, Outlined
from partc.codegen.names import Scope, wishes
from partc.codegen.storage import is_view, owner
from partc.codegen.text import NONE, Line, Text, block, wrap
from partc.graph import (
    Graph,
    held,
    is_backward,
    is_forward,
    is_tensor,
    picked,
    set_held,
    shape_of,
    typed,
    update,
    value,
)
from partc.quoting import comment, docstring, identifier

LINES = 3  # a shorter function hides more than it says
ARGUMENTS, RESULTS = 6, 6  # a call with more of them is hard to read


@dataclass(frozen=True, eq=False)
class Place:
    """The calls of one printed function: those between two loops, or of a loop's first block."""

    nodes: tuple[fx.Node, ...]
    loop: Loop | None = None


@dataclass(frozen=True)
class _Home:
    """A module, or a line of a function that it calls, ``depth`` calls inside the user's code."""

    name: str  # of the class or function
    path: str  # of the module
    depth: int
    line: tuple[tuple[str, int], ...] = ()


@dataclass(eq=False)
class Unit:
    """Calls that one call can stand for, where the last of them stands."""

    home: _Home
    place: Place
    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)

    @property
    def is_backward(self) -> bool:
        return any(value(n).forward for n in self.nodes)


def outlined(graph: Graph, items: Sequence[Item], helpers: Helpers) -> list[Item]:
    """The items with calls of new functions, which ``helpers`` then prints."""
    places = list(_places(items))
    units = [unit for place in places for unit in _units(graph, place)]
    alike: dict[object, list[Unit]] = defaultdict(list)
    for unit in units:
        alike[_signature(unit)].append(unit)
    scope = Scope()
    known: dict[tuple[str, fx.Node], str] = {}  # names in a module's forward
    used: set[fx.Node] = set()
    chosen: list[tuple[Outlined, list[Unit]]] = []
    for group in sorted(alike.values(), key=_gain, reverse=True):
        free = _apart(group, used)
        function = _printed(graph, free, helpers, scope, known) if len(free) > 1 else None
        if function is not None:
            chosen.append((function, free))
            used.update(n for unit in free for n in unit.nodes)
    return _rewritten(graph, places, chosen)


def _apart(units: Sequence[Unit], used: Collection[fx.Node]) -> list[Unit]:
    """The units that share no call with an earlier one or with ``used``."""
    seen, kept = set(used), []
    for unit in units:
        if seen.isdisjoint(unit.nodes):
            seen.update(unit.nodes)
            kept.append(unit)
    return kept


def _gain(units: Sequence[Unit]) -> tuple[bool, int, int]:
    """Forwards first; then by how many calls fewer are printed, the innermost name first."""
    first = units[0]
    return not first.is_backward, (len(units) - 1) * len(first.nodes), first.home.depth


def _places(items: Sequence[Item]) -> Iterator[Place]:
    inline: list[fx.Node] = []
    for item in items:
        if isinstance(item, Loop):
            yield Place(tuple(inline))
            run = item.run
            yield Place((run.forward if item.phase == "F" else run.backward)[0].nodes, item)
            inline = []
        else:
            inline.append(item)
    yield Place(tuple(inline))


# what belongs together ----------------------------------------------------------------------------
def _units(graph: Graph, place: Place) -> list[Unit]:
    """The calls of each module and of each line of a function, where one call can replace them."""
    members: dict[tuple[_Home, str, int], list[fx.Node]] = defaultdict(list)
    part = 0
    for node in place.nodes:
        if node.target is collectives.wait and not gathers_param(node.all_input_nodes[0]):
            part += 1  # no work is moved over a wait: it hides what is waited for
        elif _is_movable(node):
            for home in _homes(graph, node):
                members[home, value(node).phase, part].append(node)
    units = []
    for (home, _, _), nodes in members.items():
        for connected in _connected(_core(nodes)):
            unit = Unit(home, place, connected)
            if _placed(unit):
                units.append(unit)
    return units


def _is_movable(node: fx.Node) -> bool:
    """Whether a call needs nothing but its operands."""
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return not (random or _moves(node) or node.target is ops.dropout_mask)


def _moves(node: fx.Node) -> bool:
    """Whether a call is a collective, a wait, or depends on the rank."""
    return getattr(node.target, "__module__", "") == collectives.__name__


def _homes(graph: Graph, node: fx.Node) -> Iterator[_Home]:
    """All that a call is part of."""
    known = value(node)
    parts = known.module.split(".") if known.module else []
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        if path in graph.classes:
            yield _Home(graph.classes[path], path, i)
    for i, (function, _) in enumerate(known.calls):
        if i and function != "forward":
            yield _Home(function, known.module, len(parts) + i, known.calls[: i + 1])


def _snake(name: str) -> str:
    """
    >>> _snake("LlamaRMSNorm")
    'llama_rms_norm'
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return identifier(words.lower())


def _core(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The calls without what only the gradient of a parameter needs.

    That is computed when there is time for it, perhaps far from the others. Nor is the sum with a
    gradient from elsewhere part of a function.
    """
    inside = set(nodes)
    for node in nodes:
        adds = is_backward(node) and node.target is torch.ops.aten.add.Tensor
        if adds and not value(node).forward and not inside.issuperset(node.all_input_nodes):
            inside.discard(node)
    aside: set[fx.Node] = set()
    for node in reversed(nodes):
        if is_backward(node) and all(u in aside or _is_stored(u) for u in node.users):
            aside.add(node)
    inside -= aside
    for node in nodes:  # results stay with their call
        if node.target is operator.getitem:
            (inside.add if node.all_input_nodes[0] in inside else inside.discard)(node)
    return [node for node in nodes if node in inside]


def _is_stored(node: fx.Node) -> bool:
    """Whether a call only moves a value to where the step gives it back."""
    passes = _moves(node) or node.target is operator.getitem
    return node.op == "output" or (passes and all(_is_stored(u) for u in node.users))


def _connected(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The calls in sets that exchange values, in order."""
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
    """Fill in what a unit reads and gives; False where it cannot stand in one place."""
    _drop_shared_views(unit)
    if len(unit.nodes) < LINES:
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
    """Leave out last views: what a function returns should be memory that nobody else has."""
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


def _signature(unit: Unit) -> tuple[object, ...]:
    """What a unit computes; equal ones may still read differently."""
    number = {node: i for i, node in enumerate([*unit.inputs, *unit.nodes])}
    calls = tuple(
        (
            str(node.target),
            repr(fx.map_arg(node.args, lambda n: number[n])),
            repr(fx.map_arg(node.kwargs, lambda n: number[n])),
            str(held(node).dtype) if is_tensor(node) else "",
        )
        for node in unit.nodes
    )
    return unit.home.name, unit.is_backward, calls, tuple(number[n] for n in unit.outputs)


# the function -------------------------------------------------------------------------------------
def _printed(
    graph: Graph,
    units: list[Unit],
    helpers: Helpers,
    scope: Scope,
    known: dict[tuple[str, fx.Node], str],
) -> Outlined | None:
    """The function of all units whose text is that of the first; the others are dropped."""
    first = units[0]
    wish = wishes(graph, first.home.path, _given(first, known))
    wished = [wish.get(n, "value") for n in [*first.inputs, *first.nodes]]
    written = [_Written.of(graph, unit, wished, helpers) for unit in units]
    units[:] = [u for u, w in zip(units, written, strict=True) if w.code == written[0].code]
    written = [w for w in written if w.code == written[0].code]
    if len(units) < 2 or len(written[0].lines) < LINES:
        return None
    name = scope.fresh(_snake(first.home.name) + ("_backward" if first.is_backward else ""))
    for unit, text in zip(units, written, strict=True):
        names = {n: str(text.names[n]) for n in [*unit.inputs, *unit.nodes] if n in text.names}
        path = unit.home.path
        known |= {(path, n): name for n, name in names.items() if name.isidentifier()}
    function = written[0].function(name, first, [w.lines for w in written])
    helpers.outlined.append(function)
    return function


def _given(unit: Unit, known: dict[tuple[str, fx.Node], str]) -> dict[fx.Node, str]:
    """What runs through a function is ``x`` or ``d_y``; a parameter has its own name."""
    names: dict[fx.Node, str] = {}
    main = "d_y" if unit.is_backward else "x"
    for node in unit.inputs:
        stored = _stored(node)
        if stored is not None:
            own = value(stored).name.removeprefix(f"{unit.home.path}.")
            names[node] = identifier(".".join(own.split(".")[-2:]))
        elif unit.is_backward and (unit.home.path, node) in known:
            names[node] = known[unit.home.path, node]
        elif main not in names.values() and (is_backward(node)) == unit.is_backward:
            names[node] = main
    return names


def _stored(node: fx.Node) -> fx.Node | None:
    """The parameter or buffer that a value is, perhaps gathered."""
    index = 0
    while node.op == "call_function" and (_moves(node) or node.target is operator.getitem):
        index = picked(node)[1] if node.target is operator.getitem else index
        operands = node.all_input_nodes
        node = operands[index] if len(operands) > 1 else operands[0]
    return node if node.op == "placeholder" and value(node).kind in ("param", "buffer") else None


@dataclass
class _Written:
    """The body of a function as one of its units reads."""

    arguments: list[str]
    lines: list[Line]
    names: dict[fx.Node, Text]
    results: tuple[str, ...]

    @classmethod
    def of(cls, graph: Graph, unit: Unit, wished: Sequence[str], helpers: Helpers) -> _Written:
        wish = dict(zip([*unit.inputs, *unit.nodes], wished, strict=True))
        scope = Scope()
        seen = {node: Text(scope.fresh(wish[node])) for node in unit.inputs}
        arguments = [str(text) for text in seen.values()]
        body = Body(
            graph, unit.nodes, wish, scope, helpers, seen, set(unit.outputs),
            device=f"{arguments[0]}.device",
        )  # fmt: skip
        last = unit.nodes[-1]
        bound = last in body.accumulated or last.target is operator.getitem
        ends = last in unit.outputs and not bound  # it needs no name
        order = unit.nodes[:-1] if ends else unit.nodes
        lines = [line for node in order for s in body.one(node) for line in s.lines]
        if ends:
            body.seen[last] = body.expression(last)
        level = NONE if len(unit.outputs) == 1 else NONE + 1
        result = ", ".join(body.text(n).at(level) for n in unit.outputs)
        lines.append(Line(f"return {result}", comment(typed(last)) if ends else ""))
        results = tuple(wish[n] if n is last else str(body.text(n)) for n in unit.outputs)
        return cls(arguments, lines, body.seen, results)

    @property
    def code(self) -> list[str]:
        return [*self.arguments, *(line.code for line in self.lines)]

    def function(self, name: str, unit: Unit, alike: Sequence[Sequence[Line]]) -> Outlined:
        """The text; a line's remark is left out where units differ in it."""
        lines = [
            same[0] if len(set(same)) == 1 else replace(same[0], remark="")
            for same in zip(*alike, strict=True)
        ]
        num = len(unit.outputs)
        result = "Tensor" if num == 1 else f"tuple[{', '.join(['Tensor'] * num)}]"
        typed = ", ".join(f"{argument}: Tensor" for argument in self.arguments)
        way = "Backward" if unit.is_backward else "Forward"
        head = wrap(f"def {name}({typed}) -> {result}:", 0)
        text = [*head, f'    """{way} of `{docstring(unit.home.name)}`."""', block(lines, 1)]
        return Outlined(name, "\n".join(text), self.results)


# calls in their places ----------------------------------------------------------------------------
def _rewritten(
    graph: Graph, places: Sequence[Place], chosen: Sequence[tuple[Outlined, Sequence[Unit]]]
) -> list[Item]:
    """The items of the step with the units of all blocks replaced by calls."""
    cuts: dict[Place, list[tuple[Outlined, Unit]]] = defaultdict(list)
    for function, units in chosen:
        for unit in units:
            cuts[unit.place].append((function, unit))
    stand_ins: dict[str, str] = {}
    inline: dict[Place, list[fx.Node]] = {}
    groups: dict[Group, Group] = {}
    for place in places:
        if place.loop is None:
            inline[place] = _replaced(graph, place, place.nodes, cuts[place], stand_ins)
        for group in place.loop.groups if place.loop is not None else ():
            nodes = _replaced(graph, place, group.nodes, cuts[place], stand_ins)
            groups[group] = Group(group.layer, tuple(nodes))
    for node in graph.calls():
        if value(node).forward in stand_ins:
            update(node, forward=stand_ins[value(node).forward])
    items: list[Item] = []
    runs: dict[Run, Run] = {}
    for place in places:
        if place.loop is None:
            items += inline[place]
        else:
            run = runs.setdefault(place.loop.run, _with_groups(place.loop.run, groups))
            looped = tuple(groups[g] for g in place.loop.groups)
            items.append(Loop(run, place.loop.phase, looped))
    return items


def _with_groups(run: Run, groups: dict[Group, Group]) -> Run:
    forward = tuple(groups[g] for g in run.forward)
    return Run(run.layers, forward, tuple(groups[g] for g in run.backward))


def _replaced(
    graph: Graph, place: Place, nodes: Sequence[fx.Node],
    cuts: Sequence[tuple[Outlined, Unit]], stand_ins: dict[str, str],
) -> list[fx.Node]:  # fmt: skip
    """``nodes``, which do what those of the place do, with calls where its units stood."""
    at = {node: i for i, node in enumerate(place.nodes)}
    replaced: dict[int, list[fx.Node]] = {i: [node] for i, node in enumerate(nodes)}
    for function, unit in sorted(cuts, key=lambda cut: at[cut[1].nodes[-1]]):
        members = [nodes[at[n]] for n in unit.nodes]
        outputs = [nodes[at[n]] for n in unit.outputs]
        call = _called(graph, function, members, outputs, stand_ins)
        replaced |= {at[n]: [] for n in unit.nodes} | {at[unit.nodes[-1]]: call}
    return [node for here in replaced.values() for node in here]


def _called(
    graph: Graph, function: Outlined, members: Sequence[fx.Node], outputs: Sequence[fx.Node],
    stand_ins: dict[str, str],
) -> list[fx.Node]:  # fmt: skip
    """A call in place of some calls, and the results that others read."""
    inside = set(members)
    reads = dict.fromkeys(n for node in members for n in node.all_input_nodes)
    with graph.fx.inserting_after(max(members)):
        call = graph.fx.call_function(function, tuple(n for n in reads if n not in inside))
    call.meta = dict(outputs[0].meta)
    follows = [value(n).forward for n in [outputs[0], *reversed(members)] if value(n).forward]
    follows = [f for f in follows if stand_ins.get(f)] + follows
    update(call, forward=next(iter(follows), ""))
    results = [call]
    if len(outputs) > 1:
        update(call, name="")
        set_held(call, tuple(held(n) for n in outputs))
        for i, output in reversed(list(enumerate(outputs))):
            with graph.fx.inserting_after(call):
                result = graph.fx.call_function(operator.getitem, (call, i))
            result.meta = dict(output.meta)
            results.insert(1, result)
    for output, result in zip(outputs, results[-len(outputs) :], strict=True):
        output.replace_all_uses_with(result)
    for node in members if is_forward(call) else ():
        # the gradient of what stands inside follows the call, if it is that of an operand
        near = any(_alike(n, node) for n in node.all_input_nodes if n not in inside)
        stand_ins[_known_as(node)] = _known_as(call) if near else ""
    for node in sorted(members, reverse=True):
        graph.fx.erase_node(node)
    return results


def _alike(a: fx.Node, b: fx.Node) -> bool:
    return is_tensor(a) and is_tensor(b) and shape_of(a) == shape_of(b)


def _known_as(node: fx.Node) -> str:
    """The name that ``forward`` of a backward call has."""
    return value(node).name or node.name
