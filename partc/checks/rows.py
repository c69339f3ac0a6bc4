"""Check the notes on rows that a sort has permuted, as in a mixture of experts.

``partc.graph.rows`` explains the notes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import fx

from partc.checks.calls import wrong
from partc.checks.whole_twin import whole_twin
from partc.graph import literals, results_of, tensor_args, value
from partc.graph.rows import RowOrder
from partc.rules.rows import way_of


def check_order(sort: fx.Node, sorted_by: dict[int, Hashable]) -> None:
    """CheckError if two different sorts make the same row order.

    Sorts of the same value count as one, as recomputation repeats a sort. ``sorted_by``: row order
    -> the sort that made it.
    """
    rows, (operand,) = value(sort).rows, tensor_args(sort)
    assert rows is not None
    # a recomputed operand differs in its phase only
    made = (sort.target, literals(sort), replace(value(operand), phase="F"))
    if sorted_by.setdefault(rows.order, made) != made:
        why = f"another sort made the order {rows.order}"
        raise wrong(sort, why, "Number orders by the sorts that make them.")


def check_rows(node: fx.Node, outs: Sequence[fx.Node | None]) -> None:
    """CheckError unless the row orders noted on a call's results follow from its operands."""
    way = way_of(whole_twin(node, outs))
    follows = [None] * len(results_of(node)) if way is None else list(way.rows)
    noted = rows_made(outs)
    if any(rows not in (None, follow) for rows, follow in zip(noted, follows, strict=True)):
        why = f"its rows are noted as {noted}, and its operands make them {follows}"
        raise wrong(node, why, "Note of the results what follows.")


def rows_made(outs: Sequence[fx.Node | None]) -> list[RowOrder | None]:
    """The row order noted on each result, None for an unread result."""
    return [None if out is None else value(out).rows for out in outs]
