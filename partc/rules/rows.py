"""Strategies of calls on permuted rows: each rank has sorted its own rows of the batch (MoE).

In the whole graph one sort permutes the whole batch; on a rank a sort permutes the rank's own rows
(see `partc/graph/rows.py`). A call that treats each row by itself may run on such shards. An index
into the rows counts from the rank's first row, and the counts of groups are unfinished sums.
``way_of`` gives the effect of a call on permuted rows; it gives None for a call that would mix two
orders or that depends on a row's place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from partc.graph import ops, results_of, tensor_args, update, value
from partc.graph.rows import RowOrder
from partc.plan.sharding import Layout, R, U, cut
from partc.rules.table import find

aten = torch.ops.aten
QUOTIENTS = (aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode)
Known = Sequence[RowOrder | None]  # the row orders of a call's operands
RowLayout = int | Layout  # the dim of a tensor's rows, or the layout of a tensor without rows


@dataclass(frozen=True)
class RowEffect:
    """The effect of a call on permuted rows: layouts of operands and results, results' orders."""

    ins: tuple[RowLayout, ...]
    outs: tuple[RowLayout, ...]
    rows: tuple[RowOrder | None, ...]

    def layouts(self, known: Known, outer: int) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """The operands' and results' layouts if the batch is sharded with this ``outer`` factor."""
        ins, outs = (
            tuple(
                cut(layout, outer, permuted=rows is not None) if isinstance(layout, int) else layout
                for layout, rows in zip(side, sides_rows, strict=True)
            )
            for side, sides_rows in ((self.ins, known), (self.outs, self.rows))
        )
        return ins, outs


def rows_known(node: fx.Node) -> list[RowOrder | None]:
    """The row orders of a call's operands; None for an operand without one."""
    return [value(operand).rows for operand in tensor_args(node)]


def way_of(node: fx.Node) -> RowEffect | None:
    """The effect of a call on permuted rows; None if the call needs the whole tensors."""
    known = rows_known(node)
    special = _SPECIAL.get(node.target)
    found = None if special is None else special(node, known)
    is_count = any(rows is not None and rows.counted for rows in known)
    if found is not None or is_count or not any(known):
        return found
    return _row_by_row(node, known)


def alike(known: Known) -> tuple[RowOrder | None, ...]:
    """The row orders renumbered from 1 on, so that calls of equal blocks have equal orders."""
    numbers = {0: 0}

    def renumbered(rows: RowOrder) -> RowOrder:
        order, of = (numbers.setdefault(x, len(numbers)) for x in (rows.order, rows.of))
        return replace(rows, order=order, of=of)

    return tuple(None if rows is None else renumbered(rows) for rows in known)


def permuted_layouts(
    node: fx.Node, num: int, seen: Sequence[tuple[int, Layout]]
) -> Iterator[tuple[tuple[Layout, ...], tuple[Layout, ...]]]:
    """The layouts of operands and results that permuted rows allow on ``num`` ranks.

    ``seen`` has layouts whose ``outer`` factors are tried beside ``outer=1``.
    """
    way = way_of(node) if has_rows(node) else None
    if way is None:
        return
    shapes = [tuple(value(operand).shape) for operand in tensor_args(node)]
    shapes += [() if fake is None else tuple(fake.shape) for fake in results_of(node)]
    cuts = [
        shape[layout]
        for layout, shape in zip((*way.ins, *way.outs), shapes, strict=True)
        if isinstance(layout, int)
    ]
    for outer in sorted({1, *(layout.outer for _, layout in seen if layout.kind == "cut")}):
        if all(size % (outer * num) == 0 for size in cuts):
            yield way.layouts(rows_known(node), outer)


def has_rows(node: fx.Node) -> bool:
    """Whether an operand or the result of a call has a row order."""
    return value(node).rows is not None or any(rows_known(node))


def quotient(node: Any) -> tuple[fx.Node, int] | None:
    """The dividend and divisor of ``x // k`` with an integer ``k > 0``; None for other calls."""
    if not isinstance(node, fx.Node) or node.target not in QUOTIENTS:
        return None
    dividend, divisor = node.args[:2]
    rounds = node.kwargs.get("rounding_mode", "floor") == "floor"
    if not isinstance(divisor, int) or divisor < 1 or not rounds:
        return None
    return dividend, divisor  # type: ignore[return-value]


def ascends(sort: fx.Node) -> bool:
    """Whether a sort is ascending."""
    flags = [*sort.args[1:], sort.kwargs.get("descending")]
    return not any(flag is True for flag in flags)


# calls that make, use or undo an order ------------------------------------------------------------
def _sort(node: fx.Node, known: Known) -> RowEffect | None:
    """A sort of the batch's rows makes an order: its values are keys, its indices are places."""
    mine = value(node).rows  # the number of this order
    (rows,) = known
    shape = value(tensor_args(node)[0]).shape
    if mine is None or rows is not None or len(shape) != 1:
        return None
    values = RowOrder("keys" if ascends(node) else "data", mine.order)
    places = RowOrder("places", mine.order, of=0, size=shape[0])
    if node.target in (aten.argsort.default, aten.argsort.stable):
        return RowEffect((0,), (0,), (places,))
    return RowEffect((0,), (0, 0), (values, places))


def _inverse(node: fx.Node, known: Known) -> RowEffect | None:
    (rows,) = known
    if rows is None or rows.kind != "places" or (rows.size,) != tuple(value(node).shape):
        return None
    return RowEffect((0,), (0,), (replace(rows, order=rows.of, of=rows.order),))


def _quotient(node: fx.Node, known: Known) -> RowEffect | None:
    """``places // k``: with ``k`` rows per token, the place of a row becomes that of its token."""
    found, rows = quotient(node), known[0]
    if found is None or rows is None or rows.kind != "places" or rows.of or rows.size % found[1]:
        return None
    layout = rows.dim
    return RowEffect((layout,), (layout,), (replace(rows, size=rows.size // found[1]),))


def _pick(node: fx.Node, known: Known) -> RowEffect | None:
    """``x[places]`` puts the rows of ``x`` into the order of the places."""
    operands = tensor_args(node)
    indices: Any = node.args[1]  # or the dim, of index_select
    is_of_rows = indices == 0 if isinstance(indices, int) else len(indices) == 1
    if not is_of_rows or len(operands) != 2:
        return None
    rows, places = known
    if places is None or places.kind != "places" or len(value(operands[1]).shape) != 1:
        return None
    lies_so = RowOrder("data", places.of) if places.of else None
    if rows != lies_so or value(operands[0]).shape[0] != places.size:
        return None
    return RowEffect((0, 0), (0,), (RowOrder("data", places.order) if places.order else None,))


def _histogram(node: fx.Node, known: Known) -> RowEffect | None:
    """A histogram of sorted keys (expert numbers) counts the rows of each group."""
    rows = known[0]
    bounds = (*node.args[2:4], 0, 0)[:2]  # equal bounds mean: the data's, which differ by rank
    if rows is None or rows.kind != "keys" or bounds[0] == bounds[1]:
        return None
    return RowEffect((rows.dim,), (U,), (RowOrder("counts", rows.order),))


def _copied(node: fx.Node, known: Known) -> RowEffect | None:
    """A cast keeps counts, keys and places, unless it makes places floating numbers."""
    rows, dtype = known[0], value(node).dtype
    if rows is None or rows.kind == "data" or (rows.kind == "places" and dtype.is_floating_point):
        return None
    layout: RowLayout = U if rows.counted else rows.dim
    return RowEffect((layout,), (layout,), (rows,))


def _running_sum(node: fx.Node, known: Known) -> RowEffect | None:
    """The running sum of counts gives the ends of groups."""
    rows = known[0]
    if rows is None or rows.kind != "counts" or len(value(node).shape) != 1:
        return None
    return RowEffect((U,), (U,), (RowOrder("ends", rows.order),))


def _grouped_mm(node: fx.Node, known: Known) -> RowEffect | None:
    """Each row times its group's (expert's) matrix, or for each group a product of two row sets.

    The second is the gradient of the experts' weights: an unfinished sum over the ranks' rows.
    """
    operands = tensor_args(node)
    if len(operands) != 3 or known[2] is None or known[2].kind != "ends":
        return None
    order = known[2].order
    left, right = (RowOrder("data", order, dim) for dim in (1, 0))
    ranks = [len(value(operand).shape) for operand in operands[:2]]
    if ranks == [2, 3] and known[:2] == [right, None]:
        return RowEffect((0, R, U), (0,), (right,))
    if ranks == [2, 2] and known[:2] == [left, right]:
        return RowEffect((1, 0, U), (U,), (None,))
    return None


_SPECIAL: dict[Any, Callable[[fx.Node, Known], RowEffect | None]] = {
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten.argsort.default: _sort,
    aten.argsort.stable: _sort,
    ops.inverse_order: _inverse,
    **dict.fromkeys(QUOTIENTS, _quotient),
    aten.index.Tensor: _pick,
    aten.index_select.default: _pick,
    aten.histc.default: _histogram,
    aten._to_copy.default: _copied,
    aten.cumsum.default: _running_sum,
    aten._grouped_mm.default: _grouped_mm,
}
SORTS = tuple(target for target, way in _SPECIAL.items() if way is _sort)


# all other calls ---------------------------------------------------------------------------------
def _row_by_row(node: fx.Node, known: Known) -> RowEffect | None:
    """The effect of a call that treats each row by itself.

    A call does so if its sharding rule has a letter for the dim of the rows: it may then be sharded
    along the rows at any place.
    """
    from partc.rules.strategy import letter_cut  # it asks this file for its strategies

    entry = find(node.target)
    marked = {i: _as_data(rows) for i, rows in enumerate(known) if rows is not None}
    places = any(rows.kind == "places" for rows in marked.values())
    if entry is None or (places and not entry.moves) or node.target is operator.getitem:
        return None
    found = letter_cut(node, {i: rows.dim for i, rows in marked.items()})
    if found is None or len({replace(rows, dim=0) for rows in marked.values()}) != 1:
        return None
    ins, outs = (tuple(_row_layout(layout) for layout in side) for side in found)
    if {i for i, layout in enumerate(ins) if isinstance(layout, int)} != set(marked):
        return None  # rows of the batch beside rows in another order
    like = next(iter(marked.values()))
    rows = tuple(replace(like, dim=layout) if isinstance(layout, int) else None for layout in outs)
    return RowEffect(ins, outs, rows)


def _as_data(rows: RowOrder) -> RowOrder:
    """The order of a result computed from keys: its rows are data, no keys any more."""
    return replace(rows, kind="data") if rows.kind == "keys" else rows


def _row_layout(layout: Layout) -> RowLayout:
    return layout.dim if layout.kind == "cut" else layout


def mark(graph: fx.Graph) -> None:
    """Set ``Value.rows`` of every node of a graph: its relation to the orders that sorts make."""
    ways: dict[fx.Node, RowEffect] = {}
    order = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is operator.getitem:
            call, index = node.args
            rows = ways[call].rows[index] if call in ways else None
        else:
            if node.target in SORTS:
                order += 1
                _note(node, RowOrder("data", order))
            way = way_of(node) if has_rows(node) else None
            if way is not None:
                ways[node] = way
            elif node.target in SORTS:
                _note(node, None)
            rows = way.rows[0] if way is not None and len(way.rows) == 1 else value(node).rows
        _note(node, rows)


def _note(node: fx.Node, rows: RowOrder | None) -> None:
    if value(node).rows != rows:
        update(node, rows=rows)
