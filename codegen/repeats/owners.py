"""Which block and phase each call of a graph belongs to."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

import torch
from torch import fx

from partc.codegen.repeats.equal import Group, Owner, all_that_end, ends_step
from partc.codegen.repeats.runs import PHASES
from partc.codegen.repeats.trim import Block
from partc.graph import Graph, collectives, is_backward, is_call, is_forward, value
from partc.graph.folds import layer_path
from partc.graph.moves import gathers_param
from partc.graph.places import is_one_call, module_of, takes_piece
from partc.passes.shard.zeros import is_zero
from partc.plan.mesh import MICROBATCH_AXIS

ADD = torch.ops.aten.add.Tensor
NOBODY: Owner = ("", "F")


def owners_of(
    graph: Graph, block_of: Callable[[fx.Node], str], taken: Collection[fx.Node], *,
    looped: bool = True,
) -> dict[fx.Node, Owner]:  # fmt: skip
    """The block and phase that each call belongs to; calls outside of all blocks are left out.

    ``block_of`` gives the block around a call, "" where there is none. Calls in
    ``taken`` belong to others already. ``looped``: what stands between blocks, in the body of a
    loop over them, is part of them.
    """
    owners: dict[fx.Node, Owner] = {}
    pathless: list[fx.Node] = []
    finals, ends = _behind_totals(graph), all_that_end(graph)
    for node in graph.calls():
        known = value(node)
        layer = block_of(node)
        if node in taken or node in ends or not _recurs(node) or _of_turn(node):
            continue
        if _starts_sum(node) or (is_one_call(layer) and (node in finals or _is_shared(node))):
            continue
        if layer:
            # Weights gathered once per step (phase S) are read by the block's forward method.
            owners[node] = (layer, "F" if known.phase == "S" else known.phase)
        elif not known.module:
            pathless.append(node)
    (_adopt if looped else _adopt_sums)(graph, pathless, owners)
    _hoist(graph, owners)
    if not looped:
        _leave_buckets(graph, owners)
        _leave_recomputed(graph, owners)
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


def _behind_totals(graph: Graph) -> set[fx.Node]:
    """What follows from the total gradient of a parameter: its reduction, a cast, a view.

    To the total add all calls of a module, so that nothing behind it belongs to one of them.
    """
    found: set[fx.Node] = set()
    todo = [*graph.grads.values()]
    while todo:
        node = todo.pop()
        joins = node.target in collectives.JOINED
        if node.op == "call_function" and (joins or len(node.all_input_nodes) == 1):
            found.add(node)
            todo += [n for n in node.all_input_nodes if n not in found]
    return found


def _of_turn(node: fx.Node) -> bool:
    """Whether a call takes one microbatch out of the batch.

    Such a call stands in no block: the methods of a block do not know the microbatch's number.
    """
    return node.target is collectives.keep_piece and node.kwargs["axis"] == MICROBATCH_AXIS


def _recurs(node: fx.Node) -> bool:
    """Whether a call may belong to a block.

    Calls of the phases S and E run once per step, outside of the loop over microbatches: of these
    only the gathers of a block's weights belong to the block, and a piece of a weight that one call
    of a module takes.
    """
    if value(node).phase == "S" and value(node).at and takes_piece(node):
        return node.all_input_nodes[0].op == "placeholder"
    return value(node).phase not in ("S", "E") or (
        layer_path(value(node).module, 1) != "" and _is_whole(node)
    )


def _is_shared(node: fx.Node) -> bool:
    """Whether a value is a whole gathered weight, which all calls of a module read; no piece."""
    chain = [node]
    while len(chain[-1].all_input_nodes) == 1 and not gathers_param(chain[-1]):
        chain += chain[-1].all_input_nodes
    return _is_whole(node) and not any(map(takes_piece, chain))


def _is_whole(node: fx.Node) -> bool:
    """Whether a call gathers weights, or reads gathered weights alone: a wait, a view, a cast."""
    while len(node.all_input_nodes) == 1 and not gathers_param(node):
        node = node.all_input_nodes[0]
    return node.op == "call_function" and gathers_param(node)


def takes_weights(node: fx.Node) -> bool:
    """Whether a call gathers weights or waits for them, or stands for the whole step."""
    start = node
    while start.target in (operator.getitem, collectives.wait):
        start = start.all_input_nodes[0]
    return gathers_param(start) or value(node).phase == "S"


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


def _leave_buckets(graph: Graph, owners: dict[fx.Node, Owner]) -> None:
    """Take out of its block each transfer that also moves what other blocks make.

    A bucket of weights or of gradients stands under the path of one module, though it moves those
    of the modules around too: modules of one kind are alike without it.
    """
    for node in graph.calls():
        owner = owners.get(node)
        joins = owner is not None and node.target in collectives.JOINED
        if joins and not all(_is_of(n, owner, owners) for n in node.all_input_nodes):
            del owners[node]


def _is_of(node: fx.Node, owner: Owner | None, owners: Mapping[fx.Node, Owner]) -> bool:
    """Whether a value is made by a block in this phase, or is a parameter of the block."""
    if node.op != "placeholder" or owner is None:
        return owners.get(node) == owner
    return value(node).name.startswith(f"{module_of(owner[0])}.")


def _leave_recomputed(graph: Graph, owners: dict[fx.Node, Owner]) -> None:
    """Take out of its block what the backward computes again for other blocks alone.

    Such as the result of a norm for the gradient of the activation behind it, which comes before
    the gradient of the norm.
    """
    for node in reversed([*graph.calls()]):
        owner = owners.get(node)
        again = owner is not None and value(node).from_forward
        if again and all(owners.get(user) != owner for user in node.users):
            del owners[node]


def _adopt(graph: Graph, pathless: list[fx.Node], owners: dict[fx.Node, Owner]) -> None:
    """Give calls without a module path to a block, where one fits.

    A sum of gradients joins the block of its latest operand. A call of the forward joins the block
    of its readers, if all of them stand in one block.
    """
    order = {n: i for i, n in enumerate(graph.fx.nodes)}
    for node in pathless:
        latest = _latest(node, order) if is_backward(node) else None
        if latest in owners and owners[latest][1] == "B":
            owners[node] = owners[latest]
    for node in reversed(pathless):
        readers = {owners.get(u) for u in node.users}
        if is_forward(node) and len(readers) == 1 and None not in readers:
            owners[node] = next(r for r in readers if r is not None)
    _adopt_pieces(pathless, owners)


def _adopt_pieces(pathless: list[fx.Node], owners: dict[fx.Node, Owner]) -> None:
    """Give a piece of a gradient to the call of a module that alone reads it.

    Such as the gradient of time step ``t``. Where calls read unequal numbers of pieces, as the last
    one that begins with a piece, only pieces that are added to another gradient.
    """
    read: dict[Owner, list[fx.Node]] = defaultdict(list)
    for node in pathless:
        readers = {owners.get(u, NOBODY) for u in node.users}
        if is_backward(node) and takes_piece(node) and len(readers) == 1:
            read[readers.pop()].append(node)
    for owner, pieces in read.items():
        alike = [o for o in {*owners.values()} if _same_module(o, owner)]
        equal = len({len(read.get(o, ())) for o in alike}) == 1
        if is_one_call(owner[0]):
            given = [n for n in pieces if equal or all(is_call(u, ADD) for u in n.users)]
            owners |= dict.fromkeys(given, owner)


def _same_module(a: Owner, b: Owner) -> bool:
    return a[1] == b[1] and a[0].rpartition(".")[0] == b[0].rpartition(".")[0]


def _adopt_sums(graph: Graph, pathless: list[fx.Node], owners: dict[fx.Node, Owner]) -> None:
    """Give a sum of gradients to the block of its latest operand, if that has the others as well.

    It has what it makes and what it reads anyhow. Other calls without a module path stand in the
    model's own code, between blocks: each block is without them what its module is.
    """
    order = {n: i for i, n in enumerate(graph.fx.nodes)}
    reads: dict[Owner, set[fx.Node]] = defaultdict(set)
    for node, owner in owners.items():
        reads[owner].update(node.all_input_nodes)
    for node in pathless:
        latest = _latest(node, order) if is_call(node, ADD) and is_backward(node) else None
        owner = owners.get(latest, ("", "F")) if latest is not None else ("", "F")
        others = {n for n in node.all_input_nodes if owners.get(n) != owner}
        if owner[1] == "B" and others <= reads[owner]:
            owners[node] = owner
            reads[owner].update(node.all_input_nodes)


def _latest(node: fx.Node, order: Mapping[fx.Node, int]) -> fx.Node | None:
    operands = [n for n in node.all_input_nodes if n.op == "call_function"]
    return max(operands, key=lambda n: order[n], default=None)


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


def blocks_of(graph: Graph, owners: Mapping[fx.Node, Owner]) -> list[Block]:
    """The blocks that have calls in the forward, in the order in which these begin."""
    members: dict[Owner, list[fx.Node]] = defaultdict(list)
    for node, owner in owners.items():
        members[owner].append(node)
    order = {n: i for i, n in enumerate(graph.fx.nodes)}
    groups = {o: Group(o[0], tuple(sorted(ns, key=order.__getitem__))) for o, ns in members.items()}
    layers = sorted(
        {layer for layer, phase in groups if phase == "F"},
        key=lambda path: order[groups[path, "F"].nodes[0]],
    )
    return [{phase: groups.get((layer, phase)) for phase in PHASES} for layer in layers]


def layer_of(block: Block) -> str:
    """The module path of a block."""
    return next(group.layer for group in block.values() if group is not None)
