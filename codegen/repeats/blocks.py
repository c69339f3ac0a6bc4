"""Finds the equal blocks of a model: which calls belong to each block, and which blocks to a run.

In: a scheduled graph. Out: its calls in execution order, where each phase of a run of equal blocks
is one item, a ``Loop``: ``embed, Loop(blocks.0 .. 3, F), head, Loop(blocks.3 .. 0, B), ...``.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from partc.codegen.repeats.equal import Equal, Group, Owner, ends_step
from partc.codegen.repeats.numbers import Varied, varied
from partc.codegen.repeats.own_names import is_elsewhere, name_in, own_name
from partc.codegen.repeats.trim import Block, trimmed
from partc.graph import Graph, Phase, collectives, is_backward, is_forward, value
from partc.graph.folds import DEPTHS, layer_path
from partc.graph.moves import gathers_param
from partc.in_order import in_order
from partc.passes.shard.propagate import is_zero
from partc.plan.mesh import MICROBATCH_AXIS

PHASES: tuple[Phase, ...] = ("F", "B", "W")
LATER: tuple[Phase, ...] = ("B", "W")


@dataclass(frozen=True, eq=False)
class Run:
    """Neighbouring blocks of one list that compute the same: ``model.layers.0 .. 7``.

    ``forward`` and ``backward`` have the calls of each block, in the order of the list. ``weights``
    has the weight gradients where a split backward computes them apart. ``layers`` has the paths of
    all blocks, those too that the graph leaves out (``graph.folds``), for which there are no calls.
    ``elsewhere`` has the parameters and buffers of other lists that blocks of this one alone read,
    each block those with its own number: ``norms.3.weight`` for ``blocks.3``. ``numbers`` has the
    numbers in which the blocks differ.
    """

    layers: tuple[str, ...]
    forward: tuple[Group, ...]
    backward: tuple[Group, ...]
    weights: tuple[Group, ...] = ()
    elsewhere: frozenset[str] = frozenset()
    numbers: tuple[Varied, ...] = ()

    def of(self, phase: Phase) -> tuple[Group, ...]:
        return {"F": self.forward, "B": self.backward, "W": self.weights}[phase]


@dataclass(frozen=True, eq=False)
class Loop:
    """One phase of a run, printed as one ``for``: the calls of each block in execution order."""

    run: Run
    phase: Phase
    groups: tuple[Group, ...]


Item = fx.Node | Loop


def arrange(graph: Graph, given_up: Collection[tuple[str, ...]] = ()) -> list[Item]:
    """All calls of a graph in execution order, with one Loop for each phase of a run.

    A run is given up where some other call has to stand between two of its blocks: its calls then
    stand among the others, one by one. The caller names more runs to give up, by their ``layers``,
    in ``given_up``.
    """
    given = set(given_up)
    while True:
        items, stuck = _sorted(graph, _loops(graph, given))
        if not stuck:
            return items
        given.add(stuck[0].run.layers)


# which block a call belongs to --------------------------------------------------------------------
def _loops(graph: Graph, given_up: Collection[tuple[str, ...]]) -> list[Loop]:
    """The loops of all runs but those that are given up.

    Blocks are looked for at the outermost list index first (``h.0`` of ``h.0.experts.2``): calls
    that stand in a loop there are in no inner one.
    """
    loops: list[Loop] = []
    taken: set[fx.Node] = set()
    for depth in DEPTHS:
        owners = _owners(graph, depth, taken)
        for run in _runs(graph, owners, given_up):
            if run.layers in given_up:
                taken |= {n for phase in PHASES for g in run.of(phase) for n in g.nodes}
                continue
            down = bool(run.backward) and _descends(graph, run.backward)
            phases: list[tuple[Phase, tuple[Group, ...]]] = [("F", run.forward)]
            phases += [(p, run.of(p)[::-1] if down else run.of(p)) for p in LATER if run.of(p)]
            loops += [Loop(run, phase, groups) for phase, groups in phases]
            taken |= {n for _, groups in phases for g in groups for n in g.nodes}
    return loops


def _descends(graph: Graph, groups: Sequence[Group]) -> bool:
    """Whether the last block runs first, as in a backward.

    The middle calls of two blocks are compared: first and last calls of a block may stand far from
    it, where a transfer starts early or is waited for late.
    """
    order = {n: i for i, n in enumerate(graph.fx.nodes)}
    first, last = (
        sorted(order[n] for n in g.nodes)[len(g.nodes) // 2] for g in (groups[0], groups[-1])
    )
    return first > last


def _owners(graph: Graph, depth: int, taken: set[fx.Node]) -> dict[fx.Node, Owner]:
    """The block and phase that each call belongs to; calls outside of all blocks are left out."""
    owners: dict[fx.Node, Owner] = {}
    pathless: list[fx.Node] = []
    for node in graph.calls():
        known = value(node)
        layer = layer_path(known.module, depth)
        if node in taken or ends_step(graph, node) or not _recurs(node) or _of_turn(node):
            continue
        if _starts_sum(node):
            continue
        if layer:
            # Weights gathered once per step (phase S) are read by the block's forward method.
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


def _starts_sum(node: fx.Node) -> bool:
    """Whether a call keeps a part of the zeros that a sum over all blocks begins with.

    The zeros are made outside of the blocks, and the block that runs first reads them.
    """
    start = node
    while start.target in collectives.LOCAL:
        start = start.all_input_nodes[0]
    return start is not node and not value(start).module and is_zero(start)


def _of_turn(node: fx.Node) -> bool:
    """Whether a call takes one microbatch out of the batch.

    Such a call stands in no block: the methods of a block do not know the microbatch's number.
    """
    return node.target is collectives.keep_piece and node.kwargs["axis"] == MICROBATCH_AXIS


def _recurs(node: fx.Node) -> bool:
    """Whether a call may belong to a block.

    Calls of the phases S and E run once per step, outside of the loop over microbatches: of these
    only the gathers of a block's weights belong to the block.
    """
    return value(node).phase not in ("S", "E") or (
        layer_path(value(node).module, 1) != "" and _is_whole(node)
    )


def _is_whole(node: fx.Node) -> bool:
    """Whether a call gathers weights, or reads gathered weights alone: a wait, a view, a cast."""
    while len(node.all_input_nodes) == 1 and not gathers_param(node):
        node = node.all_input_nodes[0]
    return node.op == "call_function" and gathers_param(node)


def _join_waits(graph: Graph, owners: dict[fx.Node, Owner]) -> None:
    """Give a wait to the block and phase of the collective that it waits for.

    So a block's method starts and awaits its transfers itself; only the last reductions of
    gradients are awaited by the step.
    """
    for node in graph.calls():
        if node.target is collectives.wait and not ends_step(graph, node):
            start = node.all_input_nodes[0]
            owners.pop(node, None)
            owners |= {node: owners[start]} if start in owners else {}


def _adopt(graph: Graph, pathless: list[fx.Node], owners: dict[fx.Node, Owner]) -> None:
    """Give calls without a module path to a block, where one fits.

    A sum of gradients joins the block of its latest operand. A call of the forward joins the block
    of its readers, if all of them stand in one block.
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
    """Take out of its block each call that reads no block's value and that another block reads.

    A causal mask is made under the path of the first block, say, and read by all of them: the mask
    is computed before the loop.
    """
    for node in graph.calls():
        owner = owners.get(node)
        if owner is None or any(n in owners for n in node.all_input_nodes):
            continue
        if any(owners.get(u, owner)[0] != owner[0] for u in node.users if u.op == "call_function"):
            del owners[node]


# equal blocks -------------------------------------------------------------------------------------
def _runs(
    graph: Graph, owners: dict[fx.Node, Owner], given_up: Collection[tuple[str, ...]]
) -> Iterator[Run]:
    """Runs of at least two neighbouring blocks of one list whose phases are all equal.

    The first and the last block may have calls beyond those of the others at their ends, which are
    then left out of the run. A run in ``given_up`` is made again without such blocks.
    """
    members: dict[Owner, list[fx.Node]] = defaultdict(list)
    for node, owner in owners.items():
        members[owner].append(node)
    order = {n: i for i, n in enumerate(graph.fx.nodes)}
    groups = {o: Group(o[0], tuple(sorted(ns, key=order.__getitem__))) for o, ns in members.items()}
    layers = sorted(
        {layer for layer, phase in groups if phase == "F"},
        key=lambda p: order[groups[p, "F"].nodes[0]],
    )
    blocks = [{phase: groups.get((layer, phase)) for phase in PHASES} for layer in layers]
    equal = Equal(graph, owners)
    while blocks:
        for trims in (True, False):
            found = _from_first(blocks, equal, trims)
            run = _run(graph, owners, found)
            if len(found) == 1 or run.layers not in given_up:
                break
        blocks = blocks[len(found) :]
        if len(found) > 1:
            yield run


def _from_first(blocks: Sequence[Block], equal: Equal, trims: bool) -> list[Block]:
    """The blocks from the first one on that equal each other.

    ``trims``: calls at the ends of the first and of the last one may be left out.
    """
    first, *others = blocks
    run = [first]
    for block in others:
        if not _same_list(_layer(first), _layer(block)):
            break
        found = equal.all_aligned(run[0], block)
        short = trimmed(first, block) if found is None and trims and len(run) == 1 else None
        if short is not None and (found := equal.all_aligned(short, block)) is not None:
            run = [short]
        if found is None:
            short = trimmed(block, run[0]) if trims else None
            found = equal.all_aligned(run[0], short) if short is not None else None
            return [*run, found] if found is not None else run
        run.append(found)
    return run


def _layer(block: Block) -> str:
    return next(group.layer for group in block.values() if group is not None)


def _run(graph: Graph, owners: dict[fx.Node, Owner], blocks: Sequence[Block]) -> Run:
    forward, backward, weights = (
        tuple(g for block in blocks if (g := block[phase]) is not None) for phase in PHASES
    )
    names = _with_folded(graph, [_layer(block) for block in blocks])
    elsewhere = _elsewhere(graph, forward, owners)
    numbers = varied(names, (forward, backward, weights))
    return Run(names, forward, backward, weights, elsewhere, numbers)


def _elsewhere(
    graph: Graph, groups: Sequence[Group], owners: dict[fx.Node, Owner]
) -> frozenset[str]:
    """The parameters and buffers of other lists that each block of a run has for itself alone."""
    layers = [group.layer for group in groups]
    found: set[str] = set()
    stored = {**graph.params, **graph.buffers}
    for name in stored:
        own = own_name(layers[0], name)
        names = [name_in(layer, own) for layer in layers] if is_elsewhere(own) else []
        if all(_is_read_by(stored.get(n), b, owners) for n, b in zip(names, layers, strict=False)):
            found.update(names)
    return frozenset(found)


def _is_read_by(node: fx.Node | None, layer: str, owners: dict[fx.Node, Owner]) -> bool:
    """Whether a parameter or buffer is there, and calls of one block are all that reads it."""
    readers = [u for u in node.users if u.op == "call_function"] if node is not None else []
    return bool(readers) and all(owners.get(u, ("", "F"))[0] == layer for u in readers)


def _with_folded(graph: Graph, layers: Sequence[str]) -> tuple[str, ...]:
    """The paths of a run's blocks, with those that the graph leaves out between them, in order."""
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
    """The items in an order that respects dependencies and stays near the graph's own order.

    The second result has the loops without a place: they depend on a call that depends on them.
    """
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
