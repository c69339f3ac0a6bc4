"""Join small collectives into buckets: one all-gather for a block's weights, one reduction for its
gradients.

Every transfer takes time to start, however small it is, so the nine weights of a layer are sent
faster together. A large weight is sent alone: to copy it into a bucket takes longer than to start
a transfer.

What is too large is in the plan, as are the parts in which a block's gradients leave
(``choose_buckets.py``).
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any

from torch import fx

from partc.cost.bytes import put_in_bytes
from partc.graph import (
    Graph,
    Value,
    collectives,
    fake_of,
    first_operand,
    innermost_block,
    set_fake,
    set_value,
    value,
)
from partc.graph.graph_edits import restore_order, run_on_fakes
from partc.graph.moves import cut_over, gathers_param, kind_of
from partc.passes.overlap.share_gathers import stretch_of
from partc.plan import Plan

JOINED = {single: joined for joined, single in collectives.JOINED.items()}
BYTES_PER_MB = 1_000_000

Place = str | int  # a block's path; for a call outside of blocks the number of blocks before it
ReductionChain = tuple[
    tuple[str, str], ...
]  # kinds and axes of the reductions up to the step's end


def bucket_collectives(graph: Graph, plan: Plan) -> Graph:
    """Join transfers of the same kind, axis, dtype and block into buckets of at most the plan's
    ``bucket_mb``, in place; runs before waits are placed.

    ``all_gather(a), all_gather(b) --> all_gather_joined([a, b])[0], [1]`` for parameters of one
    block, or between the same two blocks, and likewise for reductions of gradients. A tensor of
    which more has to be copied than the plan's ``bucket_copy_mb`` is left out, and the gradients of
    a block are reduced in the plan's ``grad_parts``.
    """
    block_in, limit_bytes = stack_block_of(graph), plan.bucket_mb * BYTES_PER_MB
    order = {node: i for i, node in enumerate(graph.calls())}
    gathers, reductions = groups_of(graph, plan)
    gathers, reductions = worth_copying(gathers, plan), worth_copying(reductions, plan)
    groups = [*gathers, *_parts(graph, reductions, plan)]
    for members in [each for group in groups for each in _filled(group, limit_bytes)]:
        if len(members) > 1:
            _join(graph, members, order, block_in)
    # The buckets of two levels of one sum need not have the same members: one may wait for another
    # that was put behind it.
    restore_order(graph)
    graph.fx.lint()
    return graph


Groups = list[list[fx.Node]]


def groups_of(graph: Graph, plan: Plan) -> tuple[Groups, Groups]:
    """The gathers of parameters, and the reductions of gradients, in groups that may share a
    bucket. Sums that are sent with fewer bytes have gradients of one layout.
    """
    block_in, stretches = stack_block_of(graph), stretch_of(graph)
    gathers = [*_gathers(graph, block_in, stretches)]
    at_end = plan.compress is not None
    reductions: Iterable[list[fx.Node]] = _reductions(graph, block_in, stretches, at_end=at_end)
    if plan.compress is not None:
        reductions = (part for nodes in reductions for part in _by_layout(nodes))
    return gathers, [*reductions]


def _by_layout(nodes: Sequence[fx.Node]) -> Iterable[list[fx.Node]]:
    """Reductions apart by the axes over which their gradients are cut."""
    found: dict[tuple[str, ...], list[fx.Node]] = defaultdict(list)
    for node in nodes:
        found[cut_over(node)].append(node)
    return found.values()


# what belongs together ----------------------------------------------------------------------------
def stack_block_of(graph: Graph) -> Callable[[fx.Node], str]:
    """The function from a call to its block: the innermost list member around the call that has a
    sibling with equal parameters.

    Thus entry ``layers.3.mlp.0`` of an ``nn.Sequential`` belongs to the block ``layers.3``. A
    member that has more than such siblings, a table that it looks up for all, is a block too.
    """
    members: dict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for name, node in graph.params.items():
        for path in _entries(name):
            members[path].append((name.removeprefix(path), value(node).shape))
    alike = Counter((path.rpartition(".")[0], *of) for path, of in members.items())
    stack = {p for p, of in members.items() if alike[(p.rpartition(".")[0], *of)] > 1}
    equal: dict[str, set[frozenset[Any]]] = defaultdict(set)
    for path in stack:
        equal[path.rpartition(".")[0]].add(frozenset(members[path]))
    stack |= {p for p, of in members.items() if any(e < {*of} for e in equal[p.rpartition(".")[0]])}
    return lambda node: next(
        (path for path in _entries(value(node).module) if path in stack), innermost_block(node)
    )


def _entries(path: str) -> list[str]:
    """The list members on a path, innermost first: ``h.0.mlp.2.w`` -> ``h.0.mlp.2``, ``h.0``."""
    parts = path.split(".")
    ends = [i for i, part in enumerate(parts, start=1) if part.isdigit()]
    return [".".join(parts[:end]) for end in reversed(ends)]


def _gathers(
    graph: Graph, block_in: Callable[[fx.Node], str], stretches: Mapping[fx.Node, int]
) -> Iterable[list[fx.Node]]:
    """All-gathers of parameters grouped by block, phase, axis and dtype, in parameter order."""
    found: dict[Any, list[fx.Node]] = defaultdict(list)
    order = {node: i for i, node in enumerate(graph.params.values())}
    for node in graph.calls():
        if gathers_param(node):
            block = block_in(node)
            readers = [u for u in first_operand(node).users if u.op == "call_function"]
            of_its_own = value(first_operand(node)).name.startswith(f"{block}.") or (
                block != "" and all(block_in(reader) == block for reader in readers)
            )
            place: Place = block if of_its_own else stretches[node] if not block else node.name
            found[place, value(node).phase, node.kwargs["axis"], fake_of(node).dtype].append(node)
    return [sorted(nodes, key=lambda n: order[first_operand(n)]) for nodes in found.values()]


def _reductions(
    graph: Graph, block_in: Callable[[fx.Node], str], stretches: Mapping[fx.Node, int], *,
    at_end: bool,
) -> Iterable[list[fx.Node]]:  # fmt: skip
    """Reductions of gradients in groups that may share a bucket, in the order of their making.

    Those at a step's end, behind all microbatches, count with ``at_end`` alone: the program else
    makes buckets of them where it runs.
    """
    found: dict[Any, list[fx.Node]] = defaultdict(list)
    ways = ways_out(graph)
    made = {node: first_operand(_first(node, ways)) for node in ways}
    order = {node: i for i, node in enumerate(graph.calls())}
    for node in sorted(ways, key=lambda n: order[made[n]]):
        if value(node).phase == "E" and not at_end:
            continue
        place: Place = block_in(node) or stretches[made[node]]
        found[place, value(node).phase, ways[node], fake_of(node).dtype].append(node)
    return found.values()


def ways_out(graph: Graph) -> dict[fx.Node, ReductionChain]:
    """The reductions at the end of a gradient's path, each with the (kind, axis) chain from it on.

    A reduction counts only if its result is read by nothing but that one gradient.
    """
    outputs = graph.outputs
    others = [*outputs.buffers.values(), *outputs.results.values(), *outputs.sent.values()]
    given = Counter([*outputs.grads.values(), *others])
    grads = {n for n in outputs.grads.values() if given[n] == 1 and n is not outputs.loss}
    ways: dict[fx.Node, ReductionChain] = {}
    for node in reversed(list(graph.calls())):
        reader = next(iter(node.users), None)
        last = node
        if reader is not None and reader.target is collectives.accumulate:
            last, reader = reader, next(iter(reader.users), None)
        ends = last in grads and reader is graph.fx.output_node()
        rest = () if ends else ways.get(reader) if reader is not None else None
        if _finishes(node) and len(node.users) == 1 and rest is not None:
            ways[node] = ((kind_of(node), str(node.kwargs["axis"])), *rest)
    return ways


def _finishes(node: fx.Node) -> bool:
    """Whether a transfer finishes a gradient: an all-reduce, a reduce-scatter, or the last
    all-gather of a hierarchical all-reduce.
    """
    if node.target is collectives.all_reduce:
        return node.kwargs.get("op", "sum") == "sum"
    if node.target is collectives.all_gather:
        total = first_operand(node)
        in_levels = total.target is collectives.all_reduce and _is_piece(first_operand(total))
        return bool(node.kwargs["dim"] == 0 and in_levels)
    return _is_piece(node)


def _is_piece(node: fx.Node) -> bool:
    return node.target is collectives.reduce_scatter


def _first(node: fx.Node, ways: Container[fx.Node]) -> fx.Node:
    """The first reduction of the chain in ``ways`` that ``node`` belongs to."""
    while first_operand(node) in ways:
        node = first_operand(node)
    return node


def leading(node: fx.Node) -> fx.Node:
    """The transfer whose bytes decide the bucket: of a hierarchical all-reduce its reduce-scatter.

    Its all-reduce and all-gather then join the same gradients.
    """
    way = [node, *node.users, *(u for user in node.users for u in user.users)]
    gather = next((n for n in way if n.target is collectives.all_gather), None)
    if gather is None or gathers_param(gather) or not _finishes(gather):
        return node
    return first_operand(first_operand(gather))


def worth_copying(groups: Groups, plan: Plan) -> Groups:
    """Per group the transfers of which no more is copied than the plan allows; none is empty."""
    found = ([node for node in nodes if _is_worth_copying(node, plan)] for nodes in groups)
    return [nodes for nodes in found if nodes]


def _is_worth_copying(node: fx.Node, plan: Plan) -> bool:
    """Of a hierarchical all-reduce its reduce-scatter decides: all three go alone, or none."""
    node = leading(node)
    of_axis = (plan.bucket_copy_mb or {}).get(str(node.kwargs["axis"]), {})
    most_mb = of_axis.get(kind_of(node))
    return most_mb is None or copied_bytes(node) <= most_mb * BYTES_PER_MB


def copied_bytes(node: fx.Node) -> int:
    """Bytes of the copies that a transfer needs in a bucket and does not need alone.

    An all-gather copies the shard into the bucket, and the whole weight out of it if a transfer of
    its own would deliver the weight in one row. A reduce-scatter copies the gradient into the
    bucket. An all-reduce copies nothing: its gradients are computed in the bucket
    (``codegen/calls/joint_grads.py``).
    """
    sent_bytes, arrived_bytes = put_in_bytes(node), int(fake_of(node).nbytes)
    in_a_row = node.kwargs.get("dim") == 0 and node.kwargs.get("outer", 1) == 1
    if node.target is collectives.all_gather:
        return sent_bytes + (arrived_bytes if in_a_row else 0)
    return sent_bytes if node.target is collectives.reduce_scatter and in_a_row else 0


def _filled(nodes: Sequence[fx.Node], limit_bytes: float) -> Iterator[list[fx.Node]]:
    """Fill buckets in order up to the limit, as DDP does; a larger transfer is left out."""
    members: list[fx.Node] = []
    filled = 0
    for node in nodes:
        size = _num_bytes(leading(node))
        if size > limit_bytes:
            continue
        if filled + size > limit_bytes:
            yield members
            members, filled = [], 0
        members.append(node)
        filled += size
    yield members


def _parts(graph: Graph, groups: Groups, plan: Plan) -> Iterator[list[fx.Node]]:
    """Split each group of reductions into parts of about equally many bytes, in the order in which
    the gradients are made.

    ``grad_parts`` counts those of a block's gradients (``largest_forms``); other groups leave in
    parts of that size.
    """
    wanted = plan.grad_parts or {}
    most = {axis: size for axis, (size, _, _) in largest_forms(graph, groups).items()}
    for nodes in groups:
        sizes, axis = [_num_bytes(leading(n)) for n in nodes], leading_axis(nodes)
        share = sum(sizes) / max(most.get(axis, 0), 1)
        parts = wanted.get(axis, 1)
        num = max(1, int(parts * share + 0.5)) if parts > 1 and len(nodes) > 1 else 1
        middles = (end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True))
        number = {n: int(num * at / sum(sizes)) for n, at in zip(nodes, middles, strict=True)}
        yield from (list(part) for _, part in groupby(nodes, key=number.__getitem__))


def largest_forms(graph: Graph, groups: Groups) -> dict[str, tuple[int, int, list[fx.Node]]]:
    """By axis the bytes of a group, the number of blocks with such a one, and the group, for the
    form of groups that has most bytes in all. Forms that several blocks have come first: of the
    others there is little. Groups of one tensor have no parts, and do not count.
    """
    groups = [nodes for nodes in groups if len(nodes) > 1]
    forms = [tuple(map(_form, nodes)) for nodes in groups]
    times: Counter[tuple[Any, ...]] = Counter()
    for nodes, form in zip(groups, forms, strict=True):
        times[form] += graph.times(nodes[0])
    found: dict[str, tuple[int, int, list[fx.Node]]] = {}
    for nodes, form in zip(groups, forms, strict=True):
        size, axis = sum(num_bytes for *_, num_bytes in form), leading_axis(nodes)
        one = size, times[form], nodes
        found[axis] = max(found.get(axis, one), one, key=lambda x: (x[1] > 1, x[0] * x[1]))
    return found


def leading_axis(nodes: Sequence[fx.Node]) -> str:
    """The axis of the transfer whose bytes decide the buckets of a group."""
    return str(leading(nodes[0]).kwargs["axis"])


def _form(node: fx.Node) -> tuple[Any, str, int]:
    """The op, axis and bytes of a reduction, which are the same for equal blocks."""
    return node.target, str(node.kwargs["axis"]), _num_bytes(leading(node))


def _num_bytes(node: fx.Node) -> int:
    """The bytes of a transfer's operand or result, whichever is larger."""
    return max(put_in_bytes(node), int(fake_of(node).nbytes))


# rewriting ----------------------------------------------------------------------------------------
def _join(
    graph: Graph, members: Sequence[fx.Node], order: Mapping[fx.Node, int],
    block_in: Callable[[fx.Node], str],
) -> None:  # fmt: skip
    """Replace transfers by one: all-gathers at the place of the first, reductions of the last."""
    gathers = gathers_param(members[0])
    at = (min if gathers else max)(members, key=order.__getitem__)
    module = block_in(at) or value(at).module
    known = Value(module=module, phase=value(at).phase, stage=value(at).stage)
    with graph.fx.inserting_before(at):
        start = _call(graph, members)
        set_value(start, known)
        set_fake(start, run_on_fakes(start))
        for i, member in enumerate(members):
            pick = graph.fx.call_function(operator.getitem, (start, i))
            set_value(pick, replace(value(member), module=module, at="", source=""))
            set_fake(pick, fake_of(start)[i])
            member.replace_all_uses_with(pick)
    for member in members:
        graph.fx.erase_node(member)


def _call(graph: Graph, members: Sequence[fx.Node]) -> fx.Node:
    kwargs: dict[str, Any] = {k: members[0].kwargs[k] for k in ("axis", "num")}
    if "dim" in members[0].kwargs:
        kwargs["dims"] = [m.kwargs["dim"] for m in members]
        kwargs["outers"] = [m.kwargs.get("outer", 1) for m in members]
    if any("dtype" in m.kwargs for m in members):
        kwargs["dtype"] = fake_of(members[0]).dtype
    single: Any = members[0].target
    joined: Any = JOINED[single]
    return graph.fx.call_function(joined, ([first_operand(m) for m in members],), kwargs)
