"""Replace bags of embeddings that all have as many words by a look-up and a sum.

    embedding_bag(table, i64[24], arange(0, 24, 4)) -> embedding(table, i64[6,4]).sum(1)

The kernel's places are those of the whole batch, so that no rank can call it on a piece of them.
The rules of a look-up shard its batch, its rows and its columns.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from partc.graph import Graph, is_call, shape_of
from partc.graph.graph_edits import call_before, drop_dead, replace_by

aten = torch.ops.aten
FORWARD = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
BACKWARD = (aten._embedding_bag_backward.default, aten._embedding_bag_dense_backward.default)
SUM, MEAN = 0, 1  # torch's numbers of the modes


def open_bags(graph: Graph) -> None:
    """A sum or mean of equally many rows of a table becomes a look-up and a sum, both ways."""
    nodes = list(graph.calls())
    for node in [n for n in nodes if n.target in BACKWARD]:  # it knows its bags by the forward
        _open_backward(node)
    drop_dead(graph)  # what backwards alone have read of their forwards
    for node in [n for n in nodes if n.target in FORWARD]:
        _open_forward(node)
    drop_dead(graph)


def _open_forward(node: fx.Node) -> None:
    size, results = _bag_size(node), list(node.users)
    if size is None or any(user.args[1] != 0 for user in results):
        return
    table, ids = _given(node, "weight"), _given(node, "indices")
    rows = call_before(node, aten.embedding.default, table, _by_bags(node, ids, size))
    total = call_before(node, aten.sum.dim_IntList, rows, [1])
    if _given(node, "mode") == MEAN:
        total = call_before(node, aten.div.Tensor, total, size)
    for user in results:
        replace_by(user, total)


def _open_backward(node: fx.Node) -> None:
    """Every row that a bag has summed gets the bag's gradient."""
    bags: Any = _given(node, "offset2bag")
    forward = bags.args[0] if is_call(bags, operator.getitem) else None
    size = _bag_size(forward) if forward is not None and forward.target in FORWARD else None
    if size is None:
        return
    d_y = _given(node, "grad")
    if _given(node, "mode") == MEAN:
        d_y = call_before(node, aten.div.Tensor, d_y, size)
    num, dim = shape_of(d_y)
    d_y = call_before(node, aten.reshape.default, d_y, [num, 1, dim])
    d_y = call_before(node, aten.expand.default, d_y, [num, size, dim])
    ids = _by_bags(node, _given(node, "indices"), size)
    rows = _given(node, "num_weights")
    args = (d_y, ids, rows, -1, False)
    replace_by(node, call_before(node, aten.embedding_dense_backward.default, *args))


def _by_bags(node: fx.Node, ids: Any, size: int) -> fx.Node:
    return call_before(node, aten.reshape.default, ids, [shape_of(ids)[0] // size, size])


def _bag_size(node: fx.Node) -> int | None:
    """How many rows each bag sums; None if their number differs, or they are not merely summed."""
    ids, places = _given(node, "indices"), _given(node, "offsets")
    plain = (
        _given(node, "mode") in (SUM, MEAN)
        and _given(node, "per_sample_weights") is None
        and _given(node, "padding_idx") == -1
        and not _given(node, "scale_grad_by_freq")
        and not _given(node, "include_last_offset")
    )
    if not plain or len(shape_of(ids)) != 1 or shape_of(places)[0] == 0:
        return None
    size, rest = divmod(shape_of(ids)[0], shape_of(places)[0])
    return size if size and not rest and _steps_by(places, size) else None


def _steps_by(places: fx.Node, size: int) -> bool:
    """Whether offsets are ``0, size, 2 * size, ...``."""
    if places.target not in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        return False
    given: Any = places.args
    start, _, step = {1: (0, *given, 1), 2: (*given, 1), 3: given}[len(given)]
    return (start, step) == (0, size)


def _given(node: fx.Node, name: str) -> Any:
    """An argument of a call, or its default."""
    schema = node.target._schema  # type: ignore[union-attr]
    for position, argument in enumerate(schema.arguments):
        if argument.name == name:
            given = node.args[position : position + 1]
            return given[0] if given else node.kwargs.get(name, argument.default_value)
    raise AssertionError(f"{node.target} has no argument {name}")
