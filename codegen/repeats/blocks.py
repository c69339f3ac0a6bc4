"""Finds the equal blocks of a model: which calls belong to each block, and which blocks to a run.

In: a scheduled graph. Out: its calls in execution order, where each phase of a run of equal blocks
is one item, a ``Loop``: ``embed, Loop(blocks.0 .. 3, F), head, Loop(blocks.3 .. 0, B), ...``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import partial

from torch import fx

from partc.codegen.repeats.equal import Equal, Group, Owner
from partc.codegen.repeats.kin import related
from partc.codegen.repeats.nested import nested
from partc.codegen.repeats.numbers import varied
from partc.codegen.repeats.own_names import is_elsewhere, name_in, own_name
from partc.codegen.repeats.owners import blocks_of, layer_of, owners_of
from partc.codegen.repeats.runs import LATER, PHASES, Item, Loop, Run, loop_of
from partc.codegen.repeats.trim import Block, trimmed
from partc.graph import Graph, is_tensor
from partc.graph.folds import DEPTHS, is_number, layer_path
from partc.graph.places import are_worth_a_loop, is_one_call, place_of
from partc.in_order import circles, in_order

GivenUp = Collection[tuple[str, ...]]  # runs by the paths of their blocks


def arrange(graph: Graph, given_up: GivenUp = (), apart: GivenUp | None = None) -> list[Item]:
    """All calls of a graph in execution order, with one Loop for each phase of a run.

    A run is given up where some other call has to stand between two of its blocks: its calls then
    stand among the others, one by one. The caller names more runs to give up, by their ``layers``,
    in ``given_up``. Unless ``apart`` is None blocks that differ in sizes alone share a class, but
    for the runs in ``apart``.
    """
    given = set(given_up)
    while True:
        loops = _loops(graph, given, apart)
        items, stuck = _sorted(graph, loops)
        if not stuck:
            return items
        while stuck:  # all at once, since to look for blocks anew takes long
            given |= {loop.run.layers for loop in stuck}
            loops = [loop for loop in loops if loop.run.layers not in given]
            items, stuck = _sorted(graph, loops)


# equal blocks in lists ----------------------------------------------------------------------------
def _loops(graph: Graph, given_up: GivenUp, apart: GivenUp | None) -> list[Loop]:
    """The loops of all runs but those that are given up.

    Blocks are looked for at the outermost list index first (``h.0`` of ``h.0.experts.2``): calls
    that stand in a loop there are in no inner one.
    """
    runs: list[Run] = []
    taken: set[fx.Node] = set()
    for depth in DEPTHS:
        owners = owners_of(graph, partial(_block_of, depth=depth), taken)
        for run in _runs(graph, owners, given_up):
            taken |= {n for phase in PHASES for g in run.of(phase) for n in g.nodes}
            runs += [] if run.layers in given_up else [run]
    if apart is not None:
        alone = {*given_up, *apart}
        runs = nested(graph, related(graph, runs, taken, alone), alone)
    return [loop for run in runs for loop in _loops_of(graph, run)]


def _block_of(node: fx.Node, depth: int) -> str:
    """The block around a call: a member of a list, or one of several calls of a module."""
    return layer_path(place_of(node), depth)


def _loops_of(graph: Graph, run: Run) -> Iterator[Loop]:
    down = bool(run.backward) and _descends(graph, run.backward)
    yield loop_of(run, "F", run.forward)
    yield from (loop_of(run, p, run.of(p)[::-1] if down else run.of(p)) for p in LATER if run.of(p))


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


def _runs(graph: Graph, owners: dict[fx.Node, Owner], given_up: GivenUp) -> Iterator[Run]:
    """Runs of at least two neighbouring blocks of one list whose phases are all equal.

    The first and the last block may have calls beyond those of the others at their ends, which are
    then left out of the run. A run in ``given_up`` is made again without such blocks.
    """
    blocks = _together(blocks_of(graph, owners))
    equal = Equal(graph, owners)
    while blocks:
        for trims in (True, False):
            found = _from_first(blocks, equal, trims)
            run = _run(graph, owners, found)
            if len(found) == 1 or run.layers not in given_up:
                break
        blocks = blocks[len(found) :]
        if len(found) == 1 or (run.is_called and _is_short(run)) or _calls_more(run):
            continue
        if all(_is_in_turn(loop) for loop in _loops_of(graph, run)):
            yield run


def _together(blocks: Sequence[Block]) -> list[Block]:
    """The blocks with all calls of one module behind the first one."""
    of: dict[str, list[Block]] = {}
    for block in blocks:
        layer = layer_of(block)
        of.setdefault(layer.rpartition(".")[0] if is_one_call(layer) else layer, []).append(block)
    return [block for each in of.values() for block in each]


def _is_short(run: Run) -> bool:
    """Whether calls of a module have fewer lines as they stand than a class and its loops have."""
    first = [node for phase in PHASES for group in run.of(phase)[:1] for node in group.nodes]
    return not are_worth_a_loop(len(run.layers), sum(map(is_tensor, first)))


def _calls_more(run: Run) -> bool:
    """Whether each block of a list calls some module more often than there are blocks.

    As a list of cells does, each of which is called for every time step: the loop that makes the
    text shorter is then that over time steps.
    """
    depth = sum(map(is_number, run.layers[0].split(".")))
    inner = {layer_path(place_of(node), depth + 1) for node in run.forward[0].nodes}
    calls = Counter(path.rpartition(".")[0] for path in inner if path and is_one_call(path))
    return max(calls.values(), default=0) > len(run.layers)


def _is_in_turn(loop: Loop) -> bool:
    """Whether no block of a loop reads what a later one makes.

    As those of a list do that runs twice from its first to its last block: all calls of a block
    would stand in one turn.
    """
    turn_of = {node: turn for turn, group in enumerate(loop.groups) for node in group.nodes}
    return all(
        turn_of.get(operand, 0) <= turn
        for node, turn in turn_of.items() for operand in node.all_input_nodes
    )  # fmt: skip


def _from_first(blocks: Sequence[Block], equal: Equal, trims: bool) -> list[Block]:
    """The blocks from the first one on that equal each other.

    ``trims``: calls at the ends of the first and of the last one may be left out.
    """
    first, *others = blocks
    run = [first]
    for block in others:
        if not _same_list(layer_of(first), layer_of(block)):
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


def _run(graph: Graph, owners: dict[fx.Node, Owner], blocks: Sequence[Block]) -> Run:
    forward, backward, weights = (
        tuple(g for block in blocks if (g := block[phase]) is not None) for phase in PHASES
    )
    names = _with_folded(graph, [layer_of(block) for block in blocks])
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

    The second result has of each circle of items that need each other the loop that comes first.
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
    if len(placed) == len(needs):
        return placed, []
    left = {item: needs[item] for item in needs.keys() - {*placed}}
    stuck = ([each for each in circle if isinstance(each, Loop)] for circle in circles(left))
    return placed, [min(each, key=rank.__getitem__) for each in stuck]
