"""Replaces calls of a graph by one of a printed function: ``pow, mean, rsqrt, mul -> rms_norm``."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from partc.codegen.bodies.printed_order import MEMBERS
from partc.codegen.bodies.printed_order import members as names_of
from partc.codegen.bodies.units import Place, Unit
from partc.codegen.calls.moved_names import known_as
from partc.codegen.helpers.needed import Outlined
from partc.codegen.repeats.equal import Group
from partc.codegen.repeats.runs import PHASES, Item, Loop, Run, loop_of, with_inner
from partc.graph import (
    Graph,
    fake_of,
    is_forward,
    is_tensor,
    set_fake,
    set_like,
    shape_of,
    update,
    value,
)


def rewritten(
    graph: Graph, places: Sequence[Place], chosen: Sequence[tuple[Outlined, Sequence[Unit]]]
) -> list[Item]:
    """The items of a step, with a call of its function for each unit, in all blocks of a run.

    ``chosen`` has each function with its units, which are of the first block of a run; the same
    calls of the other blocks are replaced too. The graph is changed.
    """
    cuts: dict[Place, list[tuple[Outlined, Unit]]] = defaultdict(list)
    for function, units in chosen:
        for unit in units:
            cuts[unit.place.outermost].append((function, unit))
    stand_ins: dict[str, str] = {}
    inline: dict[Place, list[fx.Node]] = {}
    groups: dict[Group, Group] = {}
    outermost = [place for place in places if place.around is None]
    for place in outermost:
        if place.loop is None:
            inline[place] = _flat(_replaced(graph, place, place.nodes, cuts[place], stand_ins))
        for group in place.loop.groups if place.loop is not None else ():
            replaced = _replaced(graph, place, group.nodes, cuts[place], stand_ins)
            groups[group] = Group(group.layer, tuple(_flat(replaced)))
            if place.loop is not None and group is place.loop.group:
                groups |= _inner_groups(place.loop, replaced)
    for node in graph.calls():
        if value(node).forward in stand_ins:
            update(node, forward=stand_ins[value(node).forward])
    items: list[Item] = []
    runs: dict[Run, Run] = {}
    for place in outermost:
        if place.loop is None:
            items += inline[place]
        else:
            run = runs.setdefault(place.loop.run, _with_groups(place.loop.run, groups))
            looped = tuple(groups[g] for g in place.loop.groups)
            items.append(loop_of(run, place.loop.phase, looped))
    return items


def _flat(replaced: Mapping[int, Sequence[fx.Node]]) -> list[fx.Node]:
    return [node for here in replaced.values() for node in here]


def _inner_groups(loop: Loop, replaced: Mapping[int, Sequence[fx.Node]]) -> dict[Group, Group]:
    """The blocks inside of a loop's first block, with the new calls in place of the old."""
    at = {node: i for i, node in enumerate(loop.group.nodes)}
    found = {}
    for inner in with_inner(loop.inner):
        nodes = (node for old in inner.group.nodes for node in replaced[at[old]])
        found[inner.group] = Group(inner.group.layer, tuple(nodes))
    return found


def _with_groups(run: Run, groups: dict[Group, Group]) -> Run:
    """A run with the blocks' new calls in place of the old."""
    forward, backward, weights = (tuple(groups[g] for g in run.of(phase)) for phase in PHASES)
    inner = tuple(_with_groups(each, groups) for each in run.inner)
    return replace(run, forward=forward, backward=backward, weights=weights, inner=inner, alike=())


def _replaced(
    graph: Graph, place: Place, nodes: Sequence[fx.Node],
    cuts: Sequence[tuple[Outlined, Unit]], stand_ins: dict[str, str],
) -> dict[int, list[fx.Node]]:  # fmt: skip
    """The calls of one block, ``nodes``, with calls of functions for the units of its place.

    Call i of ``nodes`` does what call i of the place does, which is the first block. The calls that
    come in place of each are known by its position.
    """
    at = {node: i for i, node in enumerate(place.nodes)}
    replaced: dict[int, list[fx.Node]] = {i: [node] for i, node in enumerate(nodes)}
    for function, unit in sorted(cuts, key=lambda cut: at[cut[1].end or cut[1].nodes[-1]]):
        members = [nodes[at[n]] for n in unit.nodes]
        outputs = [nodes[at[n]] for n in unit.outputs]
        call = _called(graph, function, members, outputs, stand_ins)
        end = at[unit.end or unit.nodes[-1]]
        behind = [at[n] for n in unit.behind if at[n] < end]  # later ones stand behind it already
        replaced |= {i: [] for i in (*(at[n] for n in unit.nodes), *behind)}
        replaced[end] = [*call, *(nodes[i] for i in behind)]
    return replaced


def _called(
    graph: Graph, function: Outlined, members: Sequence[fx.Node], outputs: Sequence[fx.Node],
    stand_ins: dict[str, str],
) -> list[fx.Node]:  # fmt: skip
    """Replace ``members`` by one call of a function; return this call and its results' nodes.

    ``stand_ins`` notes by name what takes the place of each forward call, so that the backward's
    ``Value.forward`` can follow.
    """
    inside = set(members)
    reads = dict.fromkeys(n for node in members for n in node.all_input_nodes)
    with graph.fx.inserting_after(max(members)):  # fx compares nodes by their place in the graph
        call = graph.fx.call_function(function, tuple(n for n in reads if n not in inside))
    set_like(call, outputs[0])
    call.meta[MEMBERS] = tuple(name for node in members for name in names_of(node))
    follows = [value(n).forward for n in [outputs[0], *reversed(members)] if value(n).forward]
    follows = [f for f in follows if stand_ins.get(f)] + follows
    update(call, forward=next(iter(follows), ""))
    results = [call]
    if len(outputs) > 1:
        update(call, name="")
        set_fake(call, tuple(fake_of(n) for n in outputs))
        for i, output in reversed(list(enumerate(outputs))):
            with graph.fx.inserting_after(call):
                result = graph.fx.call_function(operator.getitem, (call, i))
            set_like(result, output)
            result.meta.pop(MEMBERS, None)  # it makes nothing: the output may be a call that did
            results.insert(1, result)
    for output, result in zip(outputs, results[-len(outputs) :], strict=True):
        output.replace_all_uses_with(result)
    for node in members if is_forward(call) else ():
        # the gradient of what stands inside follows the call, if it is that of an operand
        near = any(_alike(n, node) for n in node.all_input_nodes if n not in inside)
        stand_ins[known_as(node)] = known_as(call) if near else ""
    for node in sorted(members, reverse=True):  # fx erases no node that another one still reads
        graph.fx.erase_node(node)
    return results


def _alike(a: fx.Node, b: fx.Node) -> bool:
    return is_tensor(a) and is_tensor(b) and shape_of(a) == shape_of(b)
