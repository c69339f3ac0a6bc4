"""Count the targets of a vocabulary-parallel loss on each rank, without an all-reduce.

    all_reduce(nll_loss_forward(log_p, window(target))[1], axis) --> sum(target >= 0)

With the vocabulary sharded over an axis, ``window(target)`` keeps the targets of this rank's
classes; every rank has all of ``target``. Targets that do not count are negative, or the class that
the window's ``ignore`` names. For several microbatches ``microbatches.py`` counts the targets.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from partc.graph import Graph, collectives, is_call, ops, picked, shape_of, update, value
from partc.graph.graph_edits import call_before, drop_dead
from partc.passes.canonical.open_means import NLL
from partc.plan.sharding import R

aten = torch.ops.aten


def count_whole(graph: Graph) -> Graph:
    """Rewrite, in place, the target count of every loss with the vocabulary sharded on one axis."""
    for node in list(graph.calls()):
        if node.target is operator.getitem and picked(node)[1] == 1:
            _count(graph, node)
    drop_dead(graph)
    return graph


def _count(graph: Graph, node: fx.Node) -> None:
    """Replace one count, the second result of an NLL loss, and the all-reduces behind it."""
    call = picked(node)[0]
    if call.target not in NLL:
        return
    _, targets, weight, *_ = call.args
    if weight is not None or not is_call(targets, ops.window):
        return
    assert isinstance(targets, fx.Node)
    whole, index = targets.all_input_nodes[:2]
    if is_call(whole, ops.window):
        return
    axis = str(index.kwargs["axis"])
    if "ignore" in targets.kwargs:
        valid = call_before(node, aten.ne.Scalar, whole, targets.kwargs["ignore"])
    else:
        valid = call_before(node, aten.ge.Scalar, whole, 0)
    each = call_before(node, aten._to_copy.default, valid, dtype=value(node).dtype)
    count = call_before(node, aten.sum.dim_IntList, each, [*range(len(shape_of(each)))])
    known = value(whole)
    update(valid, shape=known.shape, dtype=torch.bool, sharding=known.sharding)
    update(each, shape=known.shape, dtype=value(node).dtype, sharding=known.sharding)
    update(count, shape=(), dtype=value(node).dtype, name=value(node).name)
    _finish_on(graph, count, axis)
    node.replace_all_uses_with(count)
    for reader in list(count.users):
        _pass_on(graph, reader, axis)


def _pass_on(graph: Graph, sum_over: fx.Node, axis: str) -> None:
    """Drop the all-reduce over ``axis`` behind a count that is whole on every rank of it."""
    if not is_call(sum_over, collectives.all_reduce):
        return
    readers = list(sum_over.users)
    if sum_over.kwargs["axis"] == axis:
        sum_over.replace_all_uses_with(sum_over.all_input_nodes[0])
    else:
        _finish_on(graph, sum_over, axis)
        for reader in readers:
            _pass_on(graph, reader, axis)


def _finish_on(graph: Graph, node: fx.Node, axis: str) -> None:
    update(node, sharding=value(node).sharding.with_(axis, R, graph.mesh))
