"""Replace flatten, matrix product, unflatten by one op on tensors that keep all their dims.

A linear layer on ``f32[8,64,I]`` is traced as view, addmm, view. Its backward is traced as two
matrix products between views, and for the bias a sum over the flattened rows ``f32[512,O]``. To
shard batch and sequence apart, ``linear`` must see them as two dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from partc.graph import Graph, is_call, ops, shape_of, value
from partc.graph.graph_edits import call_before, drop_dead, replace_by
from partc.passes.canonical.cancel_transposes import order_of

aten = torch.ops.aten


def fold_linear(graph: Graph) -> None:
    """``view(addmm(b, view(x), t(w)))`` becomes ``linear(x, w, b)``; likewise its backward."""
    folds: dict[Any, Callable[[fx.Node], None]] = {
        aten.addmm.default: _fold_addmm,
        aten.mm.default: _fold_mm,
        aten.bmm.default: _fold_bmm,
        aten.sum.dim_IntList: _fold_row_sum,
    }
    for node in list(graph.calls()):
        fold = folds.get(node.target)
        if fold is not None:
            fold(node)
    drop_dead(graph)


# products ------------------------------------------------------------------------------------
def _fold_addmm(node: fx.Node) -> None:
    """``addmm(b, x, t(w)) -> linear(x, w, b)``; without the transpose ``matmul(x, w) + b``."""
    bias, rows, right = (_node(a) for a in node.args)
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    plain = beta == 1 and alpha == 1 and len(shape_of(bias)) == 1
    if plain and is_call(right, aten.t.default) and value(node).phase == "F":
        x = _lifted(node, rows)
        _put(node, call_before(node, aten.linear.default, x, right.args[0], bias))
        return
    x = _lifted(node, rows) if plain else rows
    product = call_before(node, _product_of(x), x, right)
    for factor, operand in ((alpha, product), (beta, bias)):
        if factor != 1:
            scaled = call_before(node, aten.mul.Tensor, operand, factor)
            product, bias = (scaled, bias) if operand is product else (product, scaled)
    _put(node, call_before(node, aten.add.Tensor, product, bias))


def _fold_mm(node: fx.Node) -> None:
    """``mm`` to ``weight_grad`` (backward, ``t`` on the left), ``linear`` or ``matmul``."""
    left, right = (_node(a) for a in node.args)
    if is_call(left, aten.t.default) and value(node).phase == "B":
        _fold_weight_grad(node, _node(left.args[0]), right)
        return
    x = _lifted(node, left)
    if is_call(right, aten.t.default) and value(node).phase == "F":
        _put(node, call_before(node, aten.linear.default, x, right.args[0]))
    elif x is not left:
        _put(node, call_before(node, aten.matmul.default, x, right))


def _fold_weight_grad(node: fx.Node, d_y: fx.Node, x: fx.Node) -> None:
    """``mm(t(view(d_y)), view(x)) -> weight_grad(d_y, x)``; if one operand alone was flattened, the
    other one is given the same leading dims.
    """
    sources = _flat_source(d_y), _flat_source(x)
    leads = {shape_of(s)[:-1] for s in sources if s is not None}
    if len(leads) == 1:
        d_y, x = (
            source or call_before(node, aten.reshape.default, flat, [*lead, shape_of(flat)[-1]])
            for source, flat, lead in zip(sources, (d_y, x), [*leads] * 2, strict=True)
        )
    _put(node, call_before(node, ops.weight_grad, d_y, x))


def _fold_bmm(node: fx.Node) -> None:
    """``bmm(view(a), view(b)) -> matmul(a, b)``, where views joined several batch dims to one.

    So do ``bmm(transpose(view(a), 1, 2), view(b)) -> matmul(transpose(a, 2, 3), b)``: the backward
    reads what the forward's product reads, not a copy that is flat.
    """
    operands = [_node(a) for a in node.args]
    sources = [_batched_source(operand, node) for operand in operands]
    leads = {shape_of(s)[:-2] for s in sources if s is not None}
    if len(leads) != 1:
        return
    (lead,) = leads
    left, right = (
        source or call_before(node, aten.reshape.default, flat, [*lead, *shape_of(flat)[1:]])
        for source, flat in zip(sources, operands, strict=True)
    )
    _put(node, call_before(node, aten.matmul.default, left, right))


def _fold_row_sum(node: fx.Node) -> None:
    """The gradient of a bias: ``sum(view(d_y), [0]) -> sum(d_y, [0, 1])`` for ``f32[8,64,O]``."""
    rows, dims = _node(node.args[0]), node.args[1]
    source = _flat_source(rows)
    if source is not None and dims == [0] and not node.kwargs:
        leading = list(range(len(shape_of(source)) - 1))
        _put(node, call_before(node, aten.sum.dim_IntList, source, leading))


# views ---------------------------------------------------------------------------------------
def _flat_source(node: fx.Node, kept: int = 1) -> fx.Node | None:
    """The tensor whose leading dims a node flattens to one, before its last ``kept`` dims.

    None if the node is no such reshape.
    """
    if not is_call(node, aten.reshape.default):
        return None
    source = _node(node.args[0])
    shape, flat = shape_of(source), shape_of(node)
    flattens = len(shape) > len(flat) == kept + 1 and shape[-kept:] == flat[-kept:]
    return source if flattens and 0 not in shape else None


def _batched_source(matrices: fx.Node, reader: fx.Node) -> fx.Node | None:
    """The matrices with all their batch dims that a product reads with one; None if it has one.

    If they were transposed behind that, a transpose is written before the ``reader``.
    """
    if not is_call(matrices, aten.transpose.int) or order_of(matrices) != [0, 2, 1]:
        return _flat_source(matrices, kept=2)
    source = _flat_source(_node(matrices.args[0]), kept=2)
    if source is None:
        return None
    rows = len(shape_of(source)) - 2
    return call_before(reader, aten.transpose.int, source, rows, rows + 1)


def _lifted(node: fx.Node, rows: fx.Node) -> fx.Node:
    """The left operand of a product with all its dims: those before it was flattened, or those that
    the product's readers give the result.
    """
    source = _flat_source(rows)
    if source is not None:
        return source
    shapes = {shape_of(u) if is_call(u, aten.reshape.default) else () for u in node.users}
    after = shapes.pop() if len(shapes) == 1 else ()
    if len(after) > 2 and after[-1] == shape_of(node)[-1] and 0 not in after:
        return call_before(node, aten.reshape.default, rows, [*after[:-1], shape_of(rows)[-1]])
    return rows


def _product_of(x: fx.Node) -> Any:
    return aten.mm.default if len(shape_of(x)) == 2 else aten.matmul.default


def _put(node: fx.Node, new: fx.Node) -> None:
    """Replace ``node`` by ``new``, reshaped to the shape of ``node``."""
    if shape_of(new) != shape_of(node):
        flat = call_before(node, aten.reshape.default, new, list(shape_of(node)))
        node.replace_all_uses_with(flat)
    replace_by(node, new)


def _node(argument: Any) -> fx.Node:
    assert isinstance(argument, fx.Node)
    return argument
