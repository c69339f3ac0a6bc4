"""Send sums of gradients over data ranks with fewer bytes, where the plan says so.

    all_reduce_joined([d_w, d_b], dp)
        -->  all_reduce_joined([d_w, d_b], dp, wire="int8", size=256, state=[residual, of_sum])

A sum is compressed if nothing but the optimizer reads it, if it has enough bytes, and if that sends
fewer: other sums, such as that of the loss, stay exact. With error feedback a rank keeps what it
has not sent, and adds it to what it sends in the next step. That is state of the program, in
buffers that the scheme names (``partc/plan/wires.py``); of rounded sums

- ``w_residual@dp`` of this rank's own numbers. It is an unfinished sum, of which every data rank
  has another part, so the buffer has a row for each rank: ``f32[4@dp,8448]``.
- ``w_residual_of_sum@dp`` of the piece that this rank sums up for all: ``f32[4@dp,2112]``.

Where gradients are cut over ``tp`` each piece is summed apart, and the buffers have the pieces side
by side: ``f32[2@dp,16896@tp]``.

All begin as zeros. Where all parameters are sharded over the one data axis, ranks keep pieces of
the sums: reduce-scatters are compressed there too, and nothing is kept of what they lose.

    reduce_scatter(d_w, dp, dim=0)  -->  reduce_scatter(d_w, dp, dim=0, wire="int8", size=256)

Runs behind bucketing, as a bucket is one sum, and before waits are placed.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from partc.cost.bytes import sent_bytes, transfers
from partc.errors import PlanError
from partc.graph import (
    Graph,
    Value,
    collectives,
    fake_of,
    is_tensor,
    set_fake,
    set_value,
    update,
    value,
)
from partc.graph.graph_edits import fake_like
from partc.graph.moves import cut_over, moved, moves, results, wire_of
from partc.passes.overlap.bucket_collectives import BYTES_PER_MB
from partc.passes.overlap.check_compress import refused, summed_axis
from partc.plan import Plan
from partc.plan.compress import Compress
from partc.plan.mesh import Mesh
from partc.plan.sharding import Sharding, cut
from partc.plan.wires import ALIKE, BLOCK, MARK, THRESHOLD, WIRES, Kept

MOST_PLACES = 2**31 - 1
SUMS = (collectives.all_reduce, collectives.all_reduce_joined)
SCATTERED = (collectives.reduce_scatter, collectives.reduce_scatter_joined)


def compress_sums(
    graph: Graph, plan: Plan, mesh: Mesh, stages: Sequence[Graph] = ()
) -> Graph | None:
    """Give the sums of gradients the plan's scheme, and buffers for what that does not send."""
    how = plan.compress
    assert how is not None
    graphs = stages or [graph]
    if plan.stages and not all(each.grads for each in graphs):
        raise refused(
            "a stage has no parameters that are trained", "it sees no sums, and so not whether "
            "those of a step are finite", "Move the stages' beginnings, or leave [compress] out.",
        )  # fmt: skip
    if how.is_direction:
        _check_in_one_stage(graphs, how)
    axis = summed_axis(plan, mesh)
    sums = [[*_sums(each, axis)] for each in graphs]
    chosen = [[node for node in nodes if _is_chosen(node, how)] for nodes in sums]
    one_of_many = bool(plan.stages) and len(graphs) == 1  # a trial of it alone
    if not any(chosen) and not one_of_many:
        raise _nothing_chosen(how, [_bytes(node) for nodes in sums for node in nodes])
    for each, nodes in zip(graphs, chosen, strict=True):
        for node in nodes:
            _compress(each, node, how)
        _take_apart(each)
        each.fx.lint()
    return None if stages else graph


def _check_in_one_stage(graphs: Sequence[Graph], how: Compress) -> None:
    """PlanError for a gradient of which several stages have a part: each would be a direction."""
    times = Counter(name for each in graphs for name in each.grads)
    for name in (name for name, count in times.items() if count > 1):
        raise refused(
            f"several stages have a part of the gradient of {name}",
            f"each part would arrive as a direction in {how.wire}, and their sum is none",
            "Take another wire, or a mesh without pp.",
        )  # fmt: skip


def _nothing_chosen(how: Compress, sizes: Sequence[int]) -> PlanError:
    """The refusal of a scheme by which no sum, of these bytes, is sent."""
    most_mb = max(sizes, default=0) / BYTES_PER_MB
    if most_mb >= how.least_mb:
        entry = WIRES[how.wire].entry  # a sum is filled up to whole blocks, each with its scale
        remedy = f"Write {'another' if entry == BLOCK else 'a smaller'} {entry}" if entry else (
            "Take another wire"
        )  # fmt: skip
        return refused(
            "no sum of gradients is compressed", f"{how.wire} has to send fewer bytes than the "
            "numbers themselves, and by what the table says it sends more",
            f"{remedy}, or leave [compress] out.",
        )  # fmt: skip
    return refused(
        "no sum of gradients is compressed",
        f"the largest has {most_mb:g} MB, and least_mb is {how.least_mb:g}",
        "Write a smaller least_mb, or leave [compress] out.",
    )  # fmt: skip


def _compress(graph: Graph, node: fx.Node, how: Compress) -> None:
    """Give a sum the scheme, in place."""
    node.kwargs = {**node.kwargs, **_named(node, how)}
    update(node, site=_first_param(graph, node))
    if how.keeps_rest:
        assert node.target in SUMS
        node.kwargs = {**node.kwargs, "state": _state(graph, node)}


def _take_apart(graph: Graph) -> None:
    """Make exact reduce-scatters behind all microbatches one for each gradient again, in place: the
    program makes buckets of them where it runs.
    """
    joined = collectives.reduce_scatter_joined
    for node in [n for n in graph.calls() if n.target is joined and value(n).phase == "E"]:
        if wire_of(node):
            continue
        for move in (each for each in moves(node) if each.result is not None):
            assert move.result is not None
            with graph.fx.inserting_before(node):
                made = graph.fx.call_function(move.target, (move.operand,), move.kwargs)
            set_value(made, value(move.result))
            set_fake(made, fake_of(move.result))
            move.result.replace_all_uses_with(made)
            graph.fx.erase_node(move.result)
        graph.fx.erase_node(node)


def _is_chosen(node: fx.Node, how: Compress) -> bool:
    """Whether a sum has enough bytes, and fewer of them with the scheme."""
    return _bytes(node) >= how.least_mb * BYTES_PER_MB and _sends_less(node, how)


def _bytes(node: fx.Node) -> int:
    return sum(int(fake_of(x).nbytes) for x in moved(node))


def _named(node: fx.Node, how: Compress) -> dict[str, Any]:
    """The keywords of a sum of a scheme."""
    size = how.size(sum(fake_of(x).numel() for x in moved(node)))
    start = {"start": how.start_step} if how.start_step else {}
    least = {THRESHOLD: how.threshold} if WIRES[how.wire].has_threshold else {}
    return {"wire": how.wire, "size": size, **least, **start}


def _sends_less(node: fx.Node, how: Compress) -> bool:
    """Whether a scheme has something to send of these gradients, and sends fewer bytes. Places in
    them are int32.
    """
    if sum(fake_of(x).numel() for x in moved(node)) > MOST_PLACES:
        return False
    exact, plain = sent_bytes(node), node.kwargs
    node.kwargs = {**plain, **_named(node, how)}
    narrow, each = sent_bytes(node), [size for _, size in transfers(node)]
    node.kwargs = plain
    return narrow < exact and all(each)


def _sums(graph: Graph, axis: str) -> Iterator[fx.Node]:
    """The sums over an axis whose results are gradients that nothing but the optimizer reads.

    Of a rank's pieces of sums only those over the one data axis are on it.
    """
    outputs, end = graph.outputs, graph.fx.output_node()
    times = Counter(outputs.grads.values())
    others = {outputs.loss, *outputs.buffers.values(), *outputs.results.values()}
    for node in graph.calls():
        if node.target not in (*SUMS, *SCATTERED) or node.kwargs.get("op", "sum") != "sum":
            continue
        if node.kwargs["axis"] != axis:
            continue
        ends = [node] if is_tensor(node) else list(node.users)
        picks = all(x is node or x.target is operator.getitem for x in ends)
        last = all({*x.users} == {end} and times[x] == 1 for x in map(_added_up, ends))
        last = last and not {*ends, *map(_added_up, ends)} & others
        floats = all(fake_of(x).is_floating_point() for x in moved(node))
        if picks and last and floats and value(node).phase in ("B", "W", "E"):
            yield node


def _added_up(grad: fx.Node) -> fx.Node:
    """What microbatches add up of a gradient that each sums over ranks; else the gradient."""
    users = [*grad.users]
    return users[0] if [u.target for u in users] == [collectives.accumulate] else grad


def _state(graph: Graph, node: fx.Node) -> list[fx.Node]:
    """The buffers of one sum, as placeholders behind those of the model.

    They are named after the sum's first parameter, which is in no other sum: so programs of other
    batches or losses, which share buffers by name, share those of the same gradients.
    """
    axis, num, size = (node.kwargs[name] for name in ("axis", "num", "size"))
    shapes = [fake_of(x).shape for x in moved(node)]
    kept = WIRES[wire_of(node)].kept(shapes, int(str(num)), int(str(size)))
    param = value(node).site
    return [
        _buffer(graph, f"{param}_{word}{MARK}{axis}", each, node) for word, each in kept.items()
    ]


def _first_param(graph: Graph, node: fx.Node) -> str:
    first = node if is_tensor(node) else results(node, len(moved(node)))[0]
    assert first is not None
    return next(name for name, grad in graph.grads.items() if grad is _added_up(first))


def _buffer(graph: Graph, name: str, kept: Kept, node: fx.Node) -> fx.Node:
    last = [n for n in graph.fx.nodes if n.op == "placeholder" and value(n).kind != "input"][-1]
    with graph.fx.inserting_after(last):
        made = graph.fx.placeholder(name.replace(".", "_").replace(MARK, "_"))
    axis, others = str(node.kwargs["axis"]), cut_over(node)
    cuts = {each: cut(0 if kept.whose == ALIKE else 1) for each in others}
    rows = {} if kept.whose == ALIKE else {axis: cut(0)}
    sharding = Sharding.of({**rows, **cuts}, graph.mesh)
    shape = kept.over(prod(graph.mesh.size(each) for each in others))
    local = sharding.local_shape(shape, graph.mesh)
    assert local is not None
    set_value(made, Value(kind="buffer", shape=shape, name=name, sharding=sharding))
    set_fake(made, fake_like(graph.fx, torch.empty(local, device="meta")))
    return made
