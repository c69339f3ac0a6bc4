"""Find a model's equal blocks: which calls stand in one, and which run one after the other.

In: a scheduled graph. Out: its calls, in an order where a run of equal blocks is one item.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from partc.codegen.repeats.equal import Equal, Group, Owner, ends_step
from partc.graph import Graph, Phase, collectives, is_backward, is_forward, value
from partc.graph.folds import DEPTHS, layer_path
from partc.graph.moves import gathers_param
from partc.in_order import in_order
from partc.plan.mesh import MICROBATCH_AXIS

PHASES: tuple[Phase, ...] = ("F", "B", "W")
LATER: tuple[Phase, ...] = ("B", "W")


@dataclass(frozen=True, eq=False)
class Run:
    """Neighbouring blocks that do the same; the groups of each phase by layer.

    ``weights`` has the weight gradients where they are apart from the backward. ``layers`` names
    the blocks that the graph leaves out as well; they have no groups.
    """

    layers: tuple[str, ...]
    forward: tuple[Group, ...]
    backward: tuple[Group, ...]
    weights: tuple[Group, ...] = ()

    def of(self, phase: Phase) -> tuple[Group, ...]:
        return {"F": self.forward, "B": self.backward, "W": self.weights}[phase]


@dataclass(frozen=True, eq=False)
class Loop:
    """One phase of a run: its groups in the order in which they are executed."""

    run: Run
    phase: Phase
    groups: tuple[Group, ...]


Item = fx.Node | Loop


def arrange(graph: Graph, given_up: Collection[tuple[str, ...]] = ()) -> list[Item]:
    """All calls in execution order, those of equal blocks as Loops.

    A run that cannot be one item, as something else has to happen in its middle, is given up, as
    those in ``given_up`` are: its calls stand in line with the others.
    """
    loops = [loop for loop in _loops(graph) if loop.run.layers not in given_up]
    while True:
        items, stuck = _sorted(graph, loops)
        if not stuck:
            return items
        run = stuck[0].run
        loops = [loop for loop in loops if loop.run is not run]


# which block a call belongs to --------------------------------------------------------------------
def _loops(graph: Graph) -> list[Loop]:
    """The loops of all runs; blocks are looked for at the outermost list index, then further in."""
    loops: list[Loop] = []
    taken: set[fx.Node] = set()
    for depth in DEPTHS:
        owners = _owners(graph, depth, taken)
        for run in _runs(graph, owners):
            down = bool(run.backward) and _descends(graph, run.backward)
            phases: list[tuple[Phase, tuple[Group, ...]]] = [("F", run.forward)]
            phases += [(p, run.of(p)[::-1] if down else run.of(p)) for p in LATER if run.of(p)]
            loops += [Loop(run, phase, groups) for phase, groups in phases]
            taken |= {n for _, groups in phases for g in groups for n in g.nodes}
    return loops


def _descends(graph: Graph, groups: Sequence[Group]) -> bool:
    """Whether the blocks run in reverse, judged by their middle calls: others may stand apart."""
    order = {n: i for i, n in enumerate(graph.fx.nodes)}
    first, last = (
        sorted(order[n] for n in g.nodes)[len(g.nodes) // 2] for g in (groups[0], groups[-1])
    )
    return first > last


def _owners(graph: Graph, depth: int, taken: set[fx.Node]) -> dict[fx.Node, Owner]:
    """The block and phase of each call that has one."""
    owners: dict[fx.Node, Owner] = {}
    pathless: list[fx.Node] = []
    for node in graph.calls():
        known = value(node)
        layer = layer_path(known.module, depth)
        if node in taken or ends_step(graph, node) or not _recurs(node) or _of_turn(node):
            continue
        if layer:
            owners[node] = (layer, "F" if known.phase == "S" else known.phase)
        elif not known.module:
            pathless.append(node)
    _adopt(graph, pathless, owners)
    _hoist(graph, owners)
    _join_waits(graph, owners)
    for node in graph.calls():
        if node.target is operator.getitem:
            producer = node.all_input_nodes[0]
            owners.pop(node, None)
            owners |= {node: owners[producer]} if producer in owners else {}
    return owners


def _of_turn(node: fx.Node) -> bool:
    """Whether a call takes a microbatch's piece: a block's methods do not know which one it is."""
    return node.target is collectives.keep_piece and node.kwargs["axis"] == MICROBATCH_AXIS


def _recurs(node: fx.Node) -> bool:
    """Whether a call runs for every microbatch, or gathers a block's weights for all of them."""
    return value(node).phase not in ("S", "E") or (
        layer_path(value(node).module, 1) != "" and _is_whole(node)
    )


def _is_whole(node: fx.Node) -> bool:
    """Whether a call gathers weights, or is made of what was gathered alone."""
    while len(node.all_input_nodes) == 1 and not gathers_param(node):
        node = node.all_input_nodes[0]
    return node.op == "call_function" and gathers_param(node)


def _join_waits(graph: Graph, owners: dict[fx.Node, Owner]) -> None:
    """A collective is waited for in the function that starts it."""
    for node in graph.calls():
        if node.target is collectives.wait and not ends_step(graph, node):
            start = node.all_input_nodes[0]
            owners.pop(node, None)
            owners |= {node: owners[start]} if start in owners else {}


def _adopt(graph: Graph, pathless: list[fx.Node], owners: dict[fx.Node, Owner]) -> None:
    """Calls without a module path join a block.

    Sums of gradients join that of their latest operand, others that of all their readers.
    """
    order = {n: i for i, n in enumerate(graph.fx.nodes)}
    for node in pathless:
        if is_backward(node):
            operands = [n for n in node.all_input_nodes if n.op == "call_function"]
            latest = max(operands, key=lambda n: order[n], default=None)
            if latest in owners and owners[latest][1] == "B":
                owners[node] = owners[latest]
    for node in reversed(pathless):
        readers = {owners.get(u) for u in node.users}
        if is_forward(node) and len(readers) == 1 and None not in readers:
            owners[node] = next(r for r in readers if r is not None)


def _hoist(graph: Graph, owners: dict[fx.Node, Owner]) -> None:
    """What depends on no block but is read by several blocks belongs to none of them."""
    for node in graph.calls():
        owner = owners.get(node)
        if owner is None or any(n in owners for n in node.all_input_nodes):
            continue
        if any(owners.get(u, owner)[0] != owner[0] for u in node.users if u.op == "call_function"):
            del owners[node]


# equal blocks -------------------------------------------------------------------------------------
def _runs(graph: Graph, owners: dict[fx.Node, Owner]) -> Iterator[Run]:
    """Runs of at least two neighbouring blocks with equal forwards and equal backwards."""
    members: dict[Owner, list[fx.Node]] = defaultdict(list)
    for node, owner in owners.items():
        members[owner].append(node)
    order = {n: i for i, n in enumerate(graph.fx.nodes)}
    groups = {o: Group(o[0], tuple(sorted(ns, key=order.__getitem__))) for o, ns in members.items()}
    layers = sorted(
        {layer for layer, phase in groups if phase == "F"},
        key=lambda p: order[groups[p, "F"].nodes[0]],
    )
    equal = Equal(graph, owners)
    while layers:
        first, *layers = layers
        run = [[groups.get((first, phase)) for phase in PHASES]]
        while layers and _same_list(first, layers[0]):
            wanted = [groups.get((layers[0], phase)) for phase in PHASES]
            found = [equal.aligned(a, b) for a, b in zip(run[0], wanted, strict=True)]
            if [f is None for f in found] != [a is None for a in run[0]]:
                break
            run.append(found)
            layers = layers[1:]
        if len(run) > 1:
            forward, backward, weights = (
                tuple(g for g in column if g is not None) for column in zip(*run, strict=True)
            )
            names = _with_folded(graph, [g.layer for g in forward])
            yield Run(names, forward, backward, weights)


def _with_folded(graph: Graph, layers: Sequence[str]) -> tuple[str, ...]:
    """The blocks of a run and those between them that the graph leaves out, in order."""
    found: list[str] = []
    for layer in layers:
        folds = [f for f in graph.folds if found[-1:] == [f.like] and layer == f.after]
        found += [f"{fold.path}.{i}" for fold in folds for i in range(fold.first, fold.last + 1)]
        found.append(layer)
    return tuple(found)


def _same_list(a: str, b: str) -> bool:
    return a.rpartition(".")[0] == b.rpartition(".")[0]


# execution order ----------------------------------------------------------------------------------
def _sorted(graph: Graph, loops: list[Loop]) -> tuple[list[Item], list[Loop]]:
    """The items in dependency order, near the given one, and the loops that found no place."""
    item_of: dict[fx.Node, Item] = {n: n for n in graph.calls()}
    item_of |= {n: loop for loop in loops for g in loop.groups for n in g.nodes}
    rank: dict[Item, int] = {}
    needs: dict[Item, dict[Item, None]] = defaultdict(dict)
    for i, node in enumerate(graph.calls()):
        item = item_of[node]
        rank.setdefault(item, i)
        operands = (item_of[operand] for operand in node.all_input_nodes if operand in item_of)
        needs[item] |= dict.fromkeys(operand for operand in operands if operand is not item)
    placed = list(in_order(needs, rank.__getitem__))
    stuck = set(loops).difference(placed)
    return placed, sorted(stuck, key=rank.__getitem__)
