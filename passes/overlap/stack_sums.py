"""Finish sums of one shape in one transfer where all are there before any of them is read.

    all_reduce(a), all_reduce(b) --> totals = all_reduce(stack([a, b])); totals[0], totals[1]

Each transfer takes time to start, which for a few numbers is all the time that it takes. So the two
sums over the batch in the backward of a batch norm, which are independent of each other, are one
transfer. Sums of gradients share transfers too (``bucket_collectives.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from partc.cost.bytes import put_in_bytes
from partc.graph import (
    Graph,
    Value,
    collectives,
    fake_of,
    first_operand,
    is_call,
    set_fake,
    set_value,
    value,
)
from partc.graph.graph_edits import drop_dead, restore_order, run_on_fakes
from partc.graph.places import innermost_turn
from partc.passes.overlap.bucket_collectives import ways_out
from partc.plan.sharding import Layout, R, Sharding

aten = torch.ops.aten
LIMIT_BYTES = 1 << 16  # of each sum: to copy more takes as long as to start a transfer
NAMED = "totals = "  # what programs call the stacked sums
_VIEWS = (aten.view.default, aten.reshape.default)


def stack_sums(graph: Graph) -> Graph:
    """Join small all-reduces of one module, phase, axis, shape and layout, in place."""
    place = {node: i for i, node in enumerate(graph.calls())}
    groups = defaultdict[Any, list[fx.Node]](list)
    for node in _sums(graph):
        groups[_key(node)].append(node)
    for members in groups.values():
        for joined in _independent(members, place):
            _join(graph, joined)
    drop_dead(graph)
    restore_order(graph)
    graph.fx.lint()
    return graph


def _sums(graph: Graph) -> Iterator[fx.Node]:
    """The small all-reduces that computing reads, not those of gradients on their way out."""
    of_grads = ways_out(graph)
    for node in graph.calls():
        reads = all(user.op == "call_function" for user in node.users)
        if is_call(node, collectives.all_reduce) and node not in of_grads and reads:
            made = value(first_operand(node)).kind == "op"
            if made and fake_of(node).dim() and put_in_bytes(node) <= LIMIT_BYTES:
                yield node


def _key(node: fx.Node) -> Any:
    known, fake = value(node), fake_of(node)
    before = value(first_operand(node)).sharding
    at = innermost_turn(node), known.module, known.phase, known.stage
    return (*at, str(node.kwargs), fake.dtype, tuple(fake.shape), before, known.sharding)


def _independent(members: Sequence[fx.Node], place: dict[fx.Node, int]) -> Iterator[list[fx.Node]]:
    """Runs of two or more sums of which none is computed from another one."""
    run: list[fx.Node] = []
    for node in members:
        if run and _reads(node, run, place):
            yield from [run] if len(run) > 1 else []
            run = []
        run.append(node)
    yield from [run] if len(run) > 1 else []


def _reads(node: fx.Node, before: Collection[fx.Node], place: dict[fx.Node, int]) -> bool:
    """Whether a call is computed from one of some calls before it."""
    first = min(place[n] for n in before)
    found, waiting = set[fx.Node](), [node]
    while waiting:
        for read in waiting.pop().all_input_nodes:
            if read in before:
                return True
            if place.get(read, -1) > first and read not in found:
                found.add(read)
                waiting.append(read)
    return False


def _join(graph: Graph, members: Sequence[fx.Node]) -> None:
    """Replace all-reduces by one of their stacked operands, written before the first of them.

    Views that all operands are, are made of the sums, so that stacked values have few dims.
    """
    operands, view = [first_operand(node) for node in members], None
    if _are_alike(operands):
        view, operands = operands[0], [first_operand(node) for node in operands]
    with graph.fx.inserting_before(members[0]):
        stacked = _stack(graph, operands)
        whole = value(stacked).sharding.with_(str(members[0].kwargs["axis"]), R, graph.mesh)
        made = replace(value(stacked), sharding=whole)
        total = _call(graph, members[0].target, (stacked,), made, members[0].kwargs)
        for i, member in enumerate(members):
            member.replace_all_uses_with(_part(graph, member, total, i, view))


def _are_alike(nodes: Sequence[fx.Node]) -> bool:
    """Whether values are the same view of one tensor each, which have the same shape."""
    first = nodes[0]
    return first.target in _VIEWS and all(
        node.target is first.target
        and node.args[1:] == first.args[1:]
        and node.kwargs == first.kwargs
        and len(node.all_input_nodes) == len(node.users) == 1
        and fake_of(first_operand(node)).shape == fake_of(first_operand(first)).shape
        and value(first_operand(node)).sharding == value(first_operand(first)).sharding
        for node in nodes
    )


def _stack(graph: Graph, operands: list[fx.Node]) -> fx.Node:
    known = value(operands[0])
    layouts = {axis: _moved(layout, 1) for axis, layout in known.sharding.layouts}
    made = replace(
        known, shape=(len(operands), *known.shape), name="", torch_line=NAMED,
        sharding=Sharding.of(layouts, graph.mesh),
    )  # fmt: skip
    return _call(graph, aten.stack.default, (operands,), made)


def _part(graph: Graph, member: fx.Node, total: fx.Node, index: int, view: Any) -> fx.Node:
    """One of the stacked sums, in the shape in which the readers of ``member`` read it."""
    known = value(total)
    layouts = {axis: _moved(layout, -1) for axis, layout in known.sharding.layouts}
    made = replace(value(member), shape=known.shape[1:], sharding=Sharding.of(layouts, graph.mesh))
    part = _call(graph, aten.select.int, (total, 0, index), made)
    if view is None:
        return part
    return _call(graph, view.target, (part, *view.args[1:]), value(member))


def _call(
    graph: Graph, target: Any, args: tuple[Any, ...], made: Value,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> fx.Node:  # fmt: skip
    node = graph.fx.call_function(target, args, dict(kwargs))
    set_value(node, made)
    set_fake(node, run_on_fakes(node))
    return node


def _moved(layout: Layout, by: int) -> Layout:
    return replace(layout, dim=layout.dim + by) if layout.kind == "cut" else layout
