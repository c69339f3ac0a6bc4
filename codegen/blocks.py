"""Find a model's equal blocks: which calls stand in a block, and which blocks run one after the other.

In: a scheduled graph. Out: its calls in an order in which every run of equal blocks is one item, a Loop.
"""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from partc import collectives
from partc.codegen.backends import c10d
from partc.codegen.helpers import Helpers
from partc.graph import Graph, Phase, held, value

Owner = tuple[str, Phase]  # a block's module path, and forward or backward
DEPTHS = (1, 2, 3)  # how many list indices deep a block may stand


@dataclass(frozen=True, eq=False)
class Group:
    """The calls of one block in one phase, in order."""

    layer: str
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, eq=False)
class Run:
    """Neighbouring blocks that do the same; ``forward[i]`` and ``backward[i]`` belong to ``layers[i]``."""

    layers: tuple[str, ...]
    forward: tuple[Group, ...]
    backward: tuple[Group, ...]


@dataclass(frozen=True, eq=False)
class Loop:
    """One phase of a run: its groups in the order in which they are executed."""

    run: Run
    phase: Phase
    groups: tuple[Group, ...]


Item = fx.Node | Loop


def arrange(graph: Graph, given_up: Collection[tuple[str, ...]] = ()) -> list[Item]:
    """All calls in execution order, those of equal blocks as Loops.

    A run that cannot be one item, as something else has to happen in its middle, is given up, as those
    in ``given_up`` are: its calls stand in line with the others.
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
    """The loops of all runs; blocks are looked for at the outermost list index first, then further in."""
    loops: list[Loop] = []
    taken: set[fx.Node] = set()
    for depth in DEPTHS:
        owners = _owners(graph, depth, taken)
        for run in _runs(graph, owners):
            phases: list[tuple[Phase, tuple[Group, ...]]] = [("F", run.forward)]
            if run.backward:
                phases.append(
                    ("B", run.backward[::-1] if _descends(graph, run.backward) else run.backward)
                )
            loops += [Loop(run, phase, groups) for phase, groups in phases]
            taken |= {n for _, groups in phases for g in groups for n in g.nodes}
    return loops


def _descends(graph: Graph, groups: Sequence[Group]) -> bool:
    order = {n: i for i, n in enumerate(graph.fx.nodes)}
    return order[groups[0].nodes[0]] > order[groups[-1].nodes[0]]


def layer_path(module: str, depth: int) -> str:
    """The path up to and including its ``depth``-th number, or "".

    >>> layer_path("h.3.mlp.experts.1.fc", 1)
    'h.3'
    """
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[depth - 1] + 1]) if len(numbers) >= depth else ""


def _owners(graph: Graph, depth: int, taken: set[fx.Node]) -> dict[fx.Node, Owner]:
    """The block and phase of each call that has one."""
    owners: dict[fx.Node, Owner] = {}
    pathless: list[fx.Node] = []
    for node in graph.calls():
        known = value(node)
        layer = layer_path(known.module, depth)
        if node in taken or ends_step(graph, node):
            continue
        if layer:
            owners[node] = (layer, known.phase)
        elif not known.module:
            pathless.append(node)
    _adopt(graph, pathless, owners)
    _hoist(graph, owners)
    for node in graph.calls():
        if node.target is operator.getitem:
            producer = node.all_input_nodes[0]
            owners.pop(node, None)
            owners |= {node: owners[producer]} if producer in owners else {}
    _join_waits(graph, owners)
    return owners


def gathers_param(node: fx.Node) -> bool:
    """Whether a collective gathers a parameter as it is stored, so that it may start at any time."""
    return node.target is collectives.all_gather and node.all_input_nodes[0].op == "placeholder"


def _join_waits(graph: Graph, owners: dict[fx.Node, Owner]) -> None:
    """A collective is waited for in the function that starts it."""
    for node in graph.calls():
        if node.target is collectives.wait and not ends_step(graph, node):
            start = node.all_input_nodes[0]
            owners.pop(node, None)
            owners |= {node: owners[start]} if start in owners else {}


def ends_step(graph: Graph, node: fx.Node) -> bool:
    """Whether a node only waits for one parameter's reduced gradient, which the step does at its end."""
    if node.target is not collectives.wait or set(node.users) != {graph.fx.output_node()}:
        return False
    whole = not c10d.after_wait(node.all_input_nodes[0], "", Helpers())
    outputs = graph.outputs
    grads = [n for n in outputs.grads.values() if n is node]
    others = [outputs.loss, *outputs.buffers.values(), *outputs.results.values()]
    return whole and len(grads) == 1 and node not in others


def _adopt(graph: Graph, pathless: list[fx.Node], owners: dict[fx.Node, Owner]) -> None:
    """Calls without a module path join a block: sums of gradients that of their latest operand, others their readers'."""
    order = {n: i for i, n in enumerate(graph.fx.nodes)}
    for node in pathless:
        if value(node).phase == "B":
            operands = [n for n in node.all_input_nodes if n.op == "call_function"]
            latest = max(operands, key=lambda n: order[n], default=None)
            if latest in owners and owners[latest][1] == "B":
                owners[node] = owners[latest]
    for node in reversed(pathless):
        readers = {owners.get(u) for u in node.users}
        if value(node).phase == "F" and len(readers) == 1 and None not in readers:
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
    layers = sorted({o[0] for o in groups}, key=lambda p: order[_first(groups, p).nodes[0]])
    written = _written(graph)
    keys = {
        layer: tuple(
            _signature(groups[o], written) if (o := (layer, phase)) in groups else None
            for phase in ("F", "B")
        )
        for layer in layers
    }
    start = 0
    for end in range(1, len(layers) + 1):
        if (
            end < len(layers)
            and keys[layers[end]] == keys[layers[start]]
            and _same_list(layers[start], layers[end])
        ):
            continue
        run = tuple(layers[start:end])
        if len(run) > 1 and all((layer, "F") in groups for layer in run):
            backward = tuple(groups[layer, "B"] for layer in run if (layer, "B") in groups)
            yield Run(run, tuple(groups[layer, "F"] for layer in run), backward)
        start = end


def _first(groups: dict[Owner, Group], layer: str) -> Group:
    return groups[layer, "F"] if (layer, "F") in groups else groups[layer, "B"]


def _same_list(a: str, b: str) -> bool:
    return a.rpartition(".")[0] == b.rpartition(".")[0]


def _written(graph: Graph) -> dict[fx.Node, list[str]]:
    """Per node the parameters whose gradient, and the buffers whose new value, it is (through its wait)."""
    found: dict[fx.Node, list[str]] = defaultdict(list)
    outputs = graph.outputs
    for kind, results in (("grad", outputs.grads), ("buffer", outputs.buffers)):
        for name, node in results.items():
            made_by = node.all_input_nodes[0] if ends_step(graph, node) else node
            found[made_by].append(f"{kind} {name}")
    return found


def _signature(group: Group, written: dict[fx.Node, list[str]]) -> tuple[Any, ...]:
    """What a block computes, free of which block it is."""
    number = {node: i for i, node in enumerate(group.nodes)}
    outside: dict[fx.Node, tuple[Any, ...]] = {}

    def known_as(node: fx.Node) -> Any:
        if node in number:
            return ("here", number[node])
        if node not in outside:
            outside[node] = ("outside", len(outside), *_outside(node, group.layer))
        return outside[node]

    return tuple(
        (
            str(node.target),
            _mapped(node.args, known_as),
            _mapped(sorted(node.kwargs.items()), known_as),
            _shapes(held(node)),
            str(value(node).sharding),
            tuple(w.replace(f" {group.layer}.", " ") for w in written.get(node, [])),
        )
        for node in group.nodes
    )


def _mapped(args: Any, known_as: Callable[[fx.Node], Any]) -> Any:
    """Arguments with nodes replaced, hashable."""
    if isinstance(args, fx.Node):
        return known_as(args)
    if isinstance(args, list | tuple):
        return tuple(_mapped(a, known_as) for a in args)
    return repr(args)


def _outside(node: fx.Node, layer: str) -> tuple[Any, ...]:
    """What an operand from outside the block is: a parameter of the block's own by its name there."""
    own = node.op == "placeholder" and value(node).name.startswith(f"{layer}.")
    name = value(node).name.removeprefix(layer) if own else ""
    return (name, _shapes(held(node)), str(value(node).sharding))


def _shapes(fake: Any) -> Any:
    if isinstance(fake, Tensor):
        return (tuple(fake.shape), str(fake.dtype))
    if isinstance(fake, list | tuple):
        return tuple(_shapes(f) for f in fake)
    return repr(fake)


# execution order ----------------------------------------------------------------------------------
@dataclass
class _Order:
    """The calls and loops as one graph of items; ``after`` has the readers of each."""

    item_of: dict[fx.Node, Item]
    rank: dict[Item, int]
    waiting: dict[Item, int] = field(default_factory=lambda: defaultdict(int))
    after: dict[Item, list[Item]] = field(default_factory=lambda: defaultdict(list))


def _sorted(graph: Graph, loops: list[Loop]) -> tuple[list[Item], list[Loop]]:
    """The items in dependency order, nearest to the given one; and the loops that could not be placed."""
    inside = {n: loop for loop in loops for g in loop.groups for n in g.nodes}
    order = _Order({n: inside.get(n, n) for n in graph.calls()}, {})
    for i, node in enumerate(graph.calls()):
        order.rank.setdefault(order.item_of[node], i)
    pairs = {
        (order.item_of[operand], order.item_of[node]): None
        for node in graph.calls()
        for operand in node.all_input_nodes
        if operand in order.item_of and order.item_of[operand] is not order.item_of[node]
    }
    for before, then in pairs:
        order.waiting[then] += 1
        order.after[before].append(then)
    ready = [(rank, item) for item, rank in order.rank.items() if not order.waiting[item]]
    ready.sort(key=lambda pair: pair[0])
    placed: list[Item] = []
    while ready:
        _, item = heapq.heappop(ready)
        placed.append(item)
        for then in order.after[item]:
            order.waiting[then] -= 1
            if not order.waiting[then]:
                heapq.heappush(ready, (order.rank[then], then))
    stuck = [loop for loop in loops if order.waiting[loop]]
    return placed, sorted(stuck, key=order.rank.__getitem__)
