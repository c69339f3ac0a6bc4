"""Ops whose results' spreads do not follow from the letters of a rule alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from partc.audit.flow import Op, Unsound
from partc.audit.spread import (
    OUTSIDE,
    SAME,
    WINDOW,
    ZERO,
    Known,
    M,
    R,
    Shape,
    Spread,
    U,
    cut,
    reshaped,
)
from partc.rules.call import Call, arguments_of, parameters

aten = torch.ops.aten
Own = Callable[[Op, Sequence[Known]], list[Known]]


def _squeezed(op: Op, ins: Sequence[Known]) -> list[Known]:
    """Dims of one entry come or go at the places that the call names."""
    x, name = ins[0], op.name.split(".")[0]
    if x is None or x.kind != "cut":
        return op.flow(ins)
    rank = op.call.rank() + (name == "unsqueeze")
    given = op.call.arguments.get("dim")
    if given is None:
        return [reshaped(x, op.call.shape(0), op.call.results[0] or ())]
    dims = {d % rank for d in ([given] if isinstance(given, int) else given)}
    if name == "unsqueeze":
        (dim,) = dims
        return [cut(x.dim + (dim <= x.dim), x.outer)]
    gone = {d for d in dims if op.call.shape(0)[d] == 1}
    return [None if x.dim in gone else cut(x.dim - sum(d < x.dim for d in gone), x.outer)]


def _masked_fill(op: Op, ins: Sequence[Known]) -> list[Known]:
    """Rows picked with a window, masked where it is another rank's: parts of a sum."""
    x, mask = ins[0], ins[1]
    if x == OUTSIDE and mask == WINDOW:
        return [U if op.call["value"] == 0 else None]
    if x == U and mask in (R, SAME):
        if op.call["value"] != 0:
            raise Unsound("every rank fills a value into its part of a sum")
        return [U]
    return op.flow(ins)


def _rows(op: Op, ins: Sequence[Known]) -> list[Known]:
    """Rows of a table: with a window of indices, right only for this rank's."""
    table, indices = (
        ins[0],
        [each for i, each in enumerate(ins[1:], 1) if op.call.slots[i] is not None],
    )
    if table == cut(0) and indices and set(indices) == {WINDOW}:
        return [OUTSIDE]
    if WINDOW in indices or table == OUTSIDE:
        return [None]
    return op.flow(ins)


def _gather(op: Op, ins: Sequence[Known]) -> list[Known]:
    x, index = ins[0], ins[1]
    if index == WINDOW:
        return [OUTSIDE if x == cut(op.call.dim()) else None]
    return op.flow(ins)


def _nll(op: Op, ins: Sequence[Known]) -> list[Known]:
    if ins[1] == WINDOW:
        num = len(op.call.results)
        return [U if ins[0] == cut(1) else None] * num
    return op.flow(ins)


def _embedding_backward(op: Op, ins: Sequence[Known]) -> list[Known]:
    if ins[1] == WINDOW:
        return [cut(0) if ins[0] in (R, SAME) else None]
    return op.flow(ins)


def _scatter_add(op: Op, ins: Sequence[Known]) -> list[Known]:
    """Into this rank's columns by a window: they stay a piece."""
    if WINDOW in ins[1:]:
        fits = ins[0] == cut(op.call.dim()) and None not in ins
        return [ins[0] if fits else None]
    return op.flow(ins)


def _split(op: Op, ins: Sequence[Known]) -> list[Known]:
    """A dim of several parts, each of which is cut: every part is a piece."""
    x, dim = ins[0], op.call.dim()
    num, rank = len(op.call.results), op.call.rank()
    if x is not None and x.kind == "cut" and x.dim == dim < rank:
        equal = len({*op.call.results}) == 1
        return [cut(dim, x.outer // num) if equal and x.outer % num == 0 else None] * num
    return op.flow(ins)


def _product_added(product: Any) -> Own:
    """``addmm`` and alike: a product, and the addition of it."""

    def flow_of(op: Op, ins: Sequence[Known]) -> list[Known]:
        call = op.call
        operands = Op(product, _call(product, call, slice(1, 3), call.results[0]))
        added = aten.add.Tensor
        shapes = (call.shape(0), call.results[0])
        both = replace(_call(added, call, slice(0, 2), call.results[0]), shapes=shapes)
        return Op(added, both).flow([ins[0], *operands.flow(ins[1:3])])

    return flow_of


def _call(target: Any, call: Call, of: slice, result: Shape | None) -> Call:
    """A call of ``target`` with some of the operands of another call."""
    names = [name for name, _, takes_tensors in parameters(target) if takes_tensors]
    slots = call.slots[of]
    arguments = {**arguments_of(target, (), {}), **dict(zip(names, slots, strict=True))}
    return Call(
        target, arguments, slots, call.shapes[of], call.dtypes[of], (result,), call.result_dtypes
    )


def _cat(op: Op, ins: Sequence[Known]) -> list[Known]:
    """Pieces of equal parts behind each other are pieces of the dim that these make up."""
    first, dim = ins[0], op.call.dim()
    alike = len({*ins}) == 1 and len({*op.call.shapes}) == 1
    if alike and first is not None and first.kind == "cut" and first.dim == dim:
        return [cut(dim, first.outer * len(ins))]
    if alike and first in (U, M):
        return [first]
    return [None] if len({*ins}) > 1 else op.flow(ins)


def _expand(op: Op, ins: Sequence[Known]) -> list[Known]:
    """A dim is repeated: a cut dim with one entry here is cut in the repeated one as before."""
    x, new = ins[0], op.call.results[0] or ()
    if x is not None and x.kind == "cut":
        return [cut(x.dim + len(new) - op.call.rank(), x.outer)]
    return [x] if x is not None and x.kind in ("U", "M", "R") else op.flow(ins)


def _summed(op: Op, ins: Sequence[Known]) -> list[Known]:
    """All ranks' parts of this rank's piece of a sum, added up: the sum is finished."""
    x = ins[0]
    if x is None or x.kind != "parts":
        return op.flow(ins)
    dims = op.call.arguments.get("dim")
    alone = dims in (0, [0], (0,)) and not op.call.arguments.get("keepdim")
    return [cut(x.dim, x.outer) if alone else None]


def _filled(spread: Spread) -> Own:
    return lambda op, ins: [spread] * len(op.call.results)


OWN: dict[str, Own] = {
    "masked_fill.Scalar": _masked_fill,
    "index.Tensor": _rows,
    "embedding.default": _rows,
    "gather.default": _gather,
    "nll_loss_forward.default": _nll,
    "embedding_dense_backward.default": _embedding_backward,
    "scatter_add.default": _scatter_add,
    "split.Tensor": _split,
    "cat.default": _cat,
    "expand.default": _expand,
    "sum.dim_IntList": _summed,
    "addmm.default": _product_added(aten.mm.default),
    "addmv.default": _product_added(aten.mv.default),
    "baddbmm.default": _product_added(aten.bmm.default),
    **dict.fromkeys(("unsqueeze.default", "squeeze.dim", "squeeze.dims"), _squeezed),
    **dict.fromkeys(("new_empty.default", "empty_like.default"), _filled(ZERO)),
    **dict.fromkeys(("new_zeros.default", "zeros_like.default"), _filled(ZERO)),
    **dict.fromkeys(("ones_like.default", "full_like.default"), _filled(SAME)),
    **dict.fromkeys(("new_ones.default", "new_full.default"), _filled(SAME)),
}


def flow(op: Op, ins: Sequence[Known]) -> list[Known]:
    """The spreads of a call's results on one axis; ``ins`` has those of its operands by slot.

    Unsound where no whole tensors have these pieces.
    """
    own = OWN.get(op.name)
    return own(op, ins) if own is not None else op.flow(ins)
