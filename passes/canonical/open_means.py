"""Replace means, and losses with ``reduction="mean"``, by a sum and a division by the count.

Ranks that each have a shard can add their sums (``{U:tp}``, then an all-reduce); adding their means
would be wrong. The backward of these losses is rewritten too.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from partc.graph import Graph, shape_of, value
from partc.graph.graph_edits import call_before, drop_dead, replace_by

aten = torch.ops.aten
MEAN, SUM = 1, 2  # torch's codes for a loss's reduction
HALF = (torch.float16, torch.bfloat16)
NLL: dict[Any, Any] = {
    aten.nll_loss_forward.default: aten.nll_loss_backward.default,
    aten.nll_loss2d_forward.default: aten.nll_loss2d_backward.default,
}
ELEMENTWISE: dict[Any, int] = {  # losses whose mean is over all elements -> position of reduction
    aten.mse_loss.default: 2, aten.smooth_l1_loss.default: 2, aten.huber_loss.default: 2,
    aten.binary_cross_entropy.default: 3, aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy_with_logits.default: 4,
}  # fmt: skip
ELEMENTWISE_BACKWARD: dict[Any, int] = {
    aten.mse_loss_backward.default: 3, aten.smooth_l1_loss_backward.default: 3,
    aten.huber_loss_backward.default: 3, aten.binary_cross_entropy_backward.default: 4,
    aten.soft_margin_loss_backward.default: 3,
}  # fmt: skip


def open_means(graph: Graph) -> None:
    """``mean(x)`` becomes ``sum(x) / count``; a mean loss its sum over the number of targets."""
    for node in list(graph.calls()):
        if node.target in (aten.mean.default, aten.mean.dim):
            _open_mean(node)
        elif node.target in NLL:
            _open_nll(node)
        elif node.target in NLL.values():
            _open_nll_backward(node)
        elif node.target in ELEMENTWISE:
            _open_loss(node)
        elif node.target in ELEMENTWISE_BACKWARD:
            _open_loss_backward(node)
    drop_dead(graph)


def _open_mean(node: fx.Node) -> None:
    """``mean(x, dims) -> sum(x, dims) / count``; half precision is summed in float32.

    torch's mean kernel does so too: a float16 sum of many elements would overflow.
    """
    source: Any = node.args[0]
    shape = shape_of(source)
    dims, keep = (
        [*node.args[1:], None, False][:2] if node.target == aten.mean.dim else (None, False)
    )
    reduced: Any = list(range(len(shape))) if dims is None or dims == [] else dims
    wide = {"dtype": torch.float32} if value(source).dtype in HALF else {}
    options = wide or node.kwargs
    kept = (True,) if keep else ()
    total = call_before(node, aten.sum.dim_IntList, source, reduced, *kept, **options)
    mean = call_before(node, aten.div.Tensor, total, prod(shape[d] for d in reduced))
    if value(mean).dtype != value(node).dtype:
        mean = call_before(node, aten._to_copy.default, mean, dtype=value(node).dtype)
    replace_by(node, mean)


def _open_nll(node: fx.Node) -> None:
    """``nll_loss(mean) -> nll_loss(sum)[0] / nll_loss(sum)[1]``.

    The second result is the number of targets that are not ignored, or the sum of their weights.
    """
    scores, targets, weight, reduction, ignored = node.args
    if reduction != MEAN:
        return
    summed = call_before(node, node.target, scores, targets, weight, SUM, ignored)
    loss, count = (call_before(node, operator.getitem, summed, i) for i in (0, 1))
    mean = call_before(node, aten.div.Tensor, loss, count)
    for user in list(node.users):
        replace_by(user, mean if user.args[1] == 0 else count)
    replace_by(node, summed)


def _open_nll_backward(node: fx.Node) -> None:
    d_loss, scores, targets, weight, reduction, ignored, count = node.args
    if reduction != MEAN:
        return
    share = call_before(node, aten.div.Tensor, d_loss, count)
    node.args = (share, scores, targets, weight, SUM, ignored, count)


def _open_loss(node: fx.Node) -> None:
    position = ELEMENTWISE[node.target]
    if _reduction(node, position) != MEAN:
        return
    source: Any = node.args[0]
    args = _with_sum(node.args, position)
    summed = call_before(node, node.target, *args, **node.kwargs)
    replace_by(node, call_before(node, aten.div.Tensor, summed, prod(shape_of(source))))


def _open_loss_backward(node: fx.Node) -> None:
    position = ELEMENTWISE_BACKWARD[node.target]
    if _reduction(node, position) != MEAN:
        return
    d_loss, source = node.args[0], node.args[1]
    share = call_before(node, aten.div.Tensor, d_loss, prod(shape_of(source)))  # type: ignore[arg-type]
    node.args = (share, *_with_sum(node.args, position)[1:])


def _with_sum(args: Sequence[Any], position: int) -> tuple[Any, ...]:
    """The arguments with reduction "sum"; optional arguments before it are filled up with None."""
    before = [*args[:position], *[None] * (position - len(args))]
    return (*before, SUM, *args[position + 1 :])


def _reduction(node: fx.Node, position: int) -> Any:
    return node.args[position] if len(node.args) > position else MEAN
