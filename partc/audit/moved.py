"""What collectives do to spreads: sums are finished, pieces joined, sums cut into pieces."""

from __future__ import annotations

from typing import Any

import torch.distributed as c10d
from torch import Tensor

from partc.audit.aten_calls import meet
from partc.audit.following import Following, Spreads
from partc.audit.spread import ZERO, M, R, Spread, U, cut


def all_reduce(mode: Following, tensor: Tensor, op: Any, axis: str) -> None:
    """A sum over an axis is finished, in every tensor that lies in this memory."""
    largest = op == c10d.ReduceOp.MAX
    before = M if largest else U
    views = [tensor, *(x for x in mode.aliases(tensor) if meet(x, tensor))]
    for view in views:
        spreads = mode.of(view)
        each = spreads[axis]
        if each is not None and each not in (before, ZERO) and each.kind in ("R", "cut", "U", "M"):
            raise mode.wrong("all_reduce", f"on {axis} its operand is {each}, not {before}")
        mode.note(view, {**spreads, axis: R if each == before else each if each == ZERO else None})


def gather(mode: Following, output: Tensor, input: Tensor, axis: str) -> None:
    """Pieces are joined: the pieces of all ranks lie one after the other."""
    num = mode.axes[axis]
    _check_piece(mode, "all_gather", input, axis)
    mode.forget(output)
    rows = output.shape[1:] == input.shape[1:]
    if rows:
        mode.write([output], [_gathered(mode, mode.of(input), axis)])
    with mode.quietly():
        table = output.view(num, input.numel()) if input.is_contiguous() else None
        parts = []
        for part in getattr(input, "parts_of_audit", [input]):
            if table is not None and part.dim() == 1:
                at = part.storage_offset() - input.storage_offset()
                parts.append((table.narrow(1, at, part.numel()), part))
    for seen, part in parts:
        _check_piece(mode, "all_gather", part, axis)
        mode.write([seen], [_stacked(mode, mode.of(part), axis)])
    output.parts_of_audit = [seen for seen, _ in parts]  # type: ignore[attr-defined]


def _check_piece(mode: Following, what: str, tensor: Tensor, axis: str) -> None:
    each = mode.of(tensor)[axis]
    if each in (U, M, R):
        raise mode.wrong(what, f"on {axis} its operand is {each}, no piece")


def _gathered(mode: Following, spreads: Spreads, axis: str) -> Spreads:
    """The spreads of pieces that lie one after the other on dim 0."""
    each = spreads[axis]
    if each == cut(0):
        return {**spreads, axis: R}
    if each is not None and each.kind == "cut":
        return {**spreads, axis: each.as_kind("rows")}
    return {**spreads, axis: None}


def _stacked(mode: Following, spreads: Spreads, axis: str) -> Spreads:
    """The spreads of a table with a row of flat entries from each rank."""
    moved = {
        a: cut(each.dim + 1, each.outer) if each and each.kind == "cut" else each
        for a, each in spreads.items()
    }
    each = spreads[axis]
    # a row for each rank: the axis is a dim of memory, in front of what it cuts
    return {**moved, axis: each.as_kind("stack") if each and each.kind == "cut" else None}


def scatter(mode: Following, output: Tensor, input: Tensor, axis: str) -> None:
    """A sum is finished, and each rank keeps its piece."""
    each = mode.of(input)[axis]
    num = mode.axes[axis]
    _check_sum(mode, "reduce_scatter", input, axis)
    mode.forget(output)
    if input.shape[1:] == output.shape[1:] and each is not None:
        after = cut(0) if each == U else cut(each.dim, each.outer)
        known = after if each.kind in ("U", "pieces") else None
        mode.write([output], [{**mode.of(input), axis: known}])
    if input.dim() == 2 and input.shape[0] == num and output.dim() == 1:
        parts = []
        with mode.quietly():
            for part in getattr(input, "parts_of_audit", [input]):
                at = part.storage_offset() - input.storage_offset()
                parts.append((output.narrow(0, at, part.shape[1]), part))
        for seen, part in parts:
            _check_sum(mode, "reduce_scatter", part, axis)
            mode.write([seen], [_scattered(mode, mode.of(part), axis)])
        output.parts_of_audit = [seen for seen, _ in parts]  # type: ignore[attr-defined]


def exchange(mode: Following, output: Tensor, input: Tensor, axis: str) -> None:
    """Pieces of an unfinished sum go to the ranks that keep them, to be added up there."""
    before, num = mode.of(input), mode.axes[axis]
    each = before[axis]
    mode.forget(output)
    if input.dim() == 2 and input.shape[0] == num:
        parts = []
        with mode.quietly():
            for part in getattr(input, "parts_of_audit", [input]):
                at = part.storage_offset() - input.storage_offset()
                parts.append((output.narrow(1, at, part.shape[1]), part))
        for seen, part in parts:
            known = mode.of(part)
            mine = Spread("parts") if known[axis] == U else None
            mode.write([seen], [{**known, axis: mine}])
        output.parts_of_audit = [seen for seen, _ in parts]  # type: ignore[attr-defined]
    elif each is not None and each.kind in ("U", "pieces"):
        others = {a: None if x and x.kind == "cut" and x.dim == 0 else x for a, x in before.items()}
        arrived = Spread("arrived", each.dim, each.outer)
        mode.write([output], [{**others, axis: arrived}])


def _check_sum(mode: Following, what: str, tensor: Tensor, axis: str) -> None:
    each = mode.of(tensor)[axis]
    if each is not None and each.kind in ("R", "cut", "M"):
        raise mode.wrong(what, f"on {axis} its operand is {each}, not {U}")


def _scattered(mode: Following, spreads: Spreads, axis: str) -> Spreads:
    """The spreads of this rank's row of a table."""
    found: Spreads = {}
    for a, each in spreads.items():
        if a == axis:
            found[a] = cut(0) if each == U else None
        elif each is not None and each.kind == "cut":
            found[a] = cut(0, each.outer) if each.dim == 1 else None
        else:
            found[a] = each
    return found
