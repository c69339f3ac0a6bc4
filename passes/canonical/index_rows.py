"""Replace an index that picks elements of each row by ``gather``: ``scores[arange(8), last]``.

Row i of the result depends on row i of ``scores`` alone. ``gather`` shows this to the sharding
rules, which then shard the batch; ``index`` could read any row of the batch. An index that counts
along each dim, as that of a padding mask, reads all elements in order: it is a view.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from partc.graph import Graph, is_call, shape_of, value
from partc.graph.graph_edits import call_before, drop_dead, replace_by

aten = torch.ops.aten
WHOLE_NUMBERS = (torch.int32, torch.int64)
COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step)
Known = dict[tuple[fx.Node, tuple[int, ...]], fx.Node]  # by index and the indexed tensor's shape


def index_rows(graph: Graph) -> None:
    """``x[arange(n), i]`` becomes ``gather``; a write there ``scatter``, or ``scatter_add``.

    ``x[arange(n)[:, None], arange(m)]`` becomes ``x``.
    """
    known: Known = {}  # forward and backward use one index: its gather form is written once
    for node in list(graph.calls()):
        if is_call(node, aten.index.Tensor, aten._unsafe_index.Tensor):
            _read(node, known)
        elif is_call(node, aten.index_put.default, aten._unsafe_index_put.default):
            _write(node, known)
    drop_dead(graph)


def _read(node: fx.Node, known: Known) -> None:
    x: Any = node.args[0]
    order = _dims_in_order(node)
    places = _places(node, x, known) if order is None else None
    if order is not None:
        whole = call_before(node, aten.permute.default, x, order) if order != sorted(order) else x
        replace_by(node, call_before(node, aten.reshape.default, whole, list(shape_of(node))))
    elif places is not None:
        found = call_before(node, aten.gather.default, x, 1, places)
        replace_by(node, call_before(node, aten.reshape.default, found, list(shape_of(node))))


def _write(node: fx.Node, known: Known) -> None:
    """Replace one ``index_put`` of such an index by ``scatter`` or ``scatter_add``."""
    arguments: tuple[Any, ...] = node.args
    x, indices, given = arguments[:3]
    places = _places(node, x, known)
    if places is None:
        return
    shape = [*shape_of(indices[1]), *shape_of(x)[2:]]
    if list(shape_of(given)) != shape:
        given = call_before(node, aten.expand.default, given, shape)
    given = call_before(node, aten.reshape.default, given, list(shape_of(places)))
    adds = len(arguments) > 3 and arguments[3]
    write = aten.scatter_add.default if adds else aten.scatter.src
    replace_by(node, call_before(node, write, x, 1, places, given))


def _dims_in_order(node: fx.Node) -> list[int] | None:
    """The dims of ``x`` as they follow one another in ``x[arange(n)[:, None], arange(m)]``.

    None for an index that reads anything but all elements, each once, dim by dim.
    """
    sizes, indices = shape_of(node.args[0]), list(node.args[1])  # type: ignore[arg-type]
    at = [
        _counts_at(index, size) if isinstance(index, fx.Node) else None
        for index, size in zip(indices, sizes, strict=False)
    ]
    if None in at or len({*at}) < len(at):
        return None
    order = sorted(range(len(at)), key=lambda dim: at[dim])  # type: ignore[arg-type, return-value]
    return [*order, *range(len(at), len(sizes))]


def _counts_at(index: fx.Node, num: int) -> int | None:
    """The dim along which an index is ``arange(num)``, from the end; None if there is none."""
    shape = shape_of(index)
    wide = [dim - len(shape) for dim, size in enumerate(shape) if size != 1]
    if num == 1 or len(wide) != 1 or shape[wide[0]] != num or not _is_arange(index, num):
        return None
    return wide[0]


def _places(node: fx.Node, x: Any, known: Known) -> fx.Node | None:
    """The index of ``x[arange(n), i]`` as ``gather`` reads it; None for any other index."""
    indices: Any = node.args[1]
    if len(indices) != 2 or not all(isinstance(each, fx.Node) for each in indices):
        return None
    rows, wanted = indices
    sizes, shape = shape_of(x), shape_of(wanted)
    fits = value(wanted).dtype in WHOLE_NUMBERS and shape[:1] == sizes[:1]
    if not fits or not _counts(rows, sizes[0], len(shape)):
        return None
    if (wanted, sizes) not in known:
        known[wanted, sizes] = _listed(node, wanted, sizes)
    return known[wanted, sizes]


def _listed(node: fx.Node, wanted: fx.Node, sizes: tuple[int, ...]) -> fx.Node:
    """``wanted`` as the index of ``gather``: no negative places, expanded to the result's shape."""
    below = call_before(node, aten.lt.Scalar, wanted, 0)  # -1 is the last one
    from_end = call_before(node, aten.add.Scalar, wanted, sizes[1])
    wanted = call_before(node, aten.where.self, below, from_end, wanted)
    listed = [sizes[0], prod(shape_of(wanted)[1:])]
    ones = [1] * (len(sizes) - 2)
    wanted = call_before(node, aten.reshape.default, wanted, [*listed, *ones])
    return call_before(node, aten.expand.default, wanted, [*listed, *sizes[2:]])


def _counts(node: Any, num: int, rank: int) -> bool:
    """Whether a tensor is ``arange(num)`` as a column of ``rank`` dims: ``i64[num,1,...]``."""
    return shape_of(node) == (num,) + (1,) * (rank - 1) and _is_arange(node, num)


def _is_arange(node: Any, num: int) -> bool:
    """Whether a tensor is ``arange(num)`` in any shape."""
    while is_call(node, aten.unsqueeze.default, aten.reshape.default, aten._to_copy.default):
        if value(node).dtype not in WHOLE_NUMBERS:
            return False
        node = node.args[0]
    return is_call(node, *COUNTS) and node.args in ((num,), (0, num), (0, num, 1))
