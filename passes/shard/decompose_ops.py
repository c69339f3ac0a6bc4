"""Decompose an op that cannot be sharded into simpler ops that can.

Softmax over a sharded dim: ``softmax -> amax, sub, exp, sum, div``, with the max and the sum
all-reduced over the axis, as in Megatron's vocabulary-parallel cross entropy. Batch norm of a
sharded batch: sums over the batch, all-reduced, as in SyncBatchNorm.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from partc.graph import Graph, fake_of, op_word, picked, update, value
from partc.graph.graph_edits import Writer

aten = torch.ops.aten
Results = tuple[Any, ...]  # one node (or None) per result of the decomposed op


def decomposes(node: fx.Node) -> bool:
    """Whether there is a decomposition for this call; of a batch norm's forward in training."""
    if node.target is aten._native_batch_norm_legit_functional.default and not node.args[5]:
        return False
    return node.target in _OPENINGS


def decompose_op(graph: Graph, node: fx.Node) -> fx.Node:
    """Replace a call by the simpler calls it consists of; return the first of these."""
    write = Writer(graph.fx, node, replace(value(node), decomposed_from=op_word(node.target)))
    before = node.prev
    results = _OPENINGS[node.target](write, *node.args, **node.kwargs)
    if len(results) == 1:
        node.replace_all_uses_with(results[0])
    else:
        for user in list(node.users):
            assert user.target is operator.getitem
            result = _cast(write, results[picked(user)[1]], fake_of(user).dtype)
            user.replace_all_uses_with(result)
            graph.fx.erase_node(user)
    graph.fx.erase_node(node)
    return before.next


def _log_softmax(write: Writer, x: fx.Node, dim: int, half_to_float: bool) -> Results:
    """x - max - log(sum(exp(x - max))), of a contiguous x, as the kernels of 2d losses require."""
    if not fake_of(x).is_contiguous():
        x = write(aten.clone.default, x, memory_format=torch.contiguous_format)
    if half_to_float:
        x = write(aten._to_copy.default, x, dtype=torch.float32)
    shifted = write(aten.sub.Tensor, x, write(aten.amax.default, x, [dim], True))
    total = write(aten.sum.dim_IntList, write(aten.exp.default, shifted), [dim], True)
    return (write(aten.sub.Tensor, shifted, write(aten.log.default, total)),)


def _log_softmax_backward(
    write: Writer, d_y: fx.Node, y: fx.Node, dim: int, dtype: torch.dtype
) -> Results:
    """d_y - exp(y) * sum(d_y)."""
    total = write(aten.sum.dim_IntList, d_y, [dim], True)
    d_x = write(aten.sub.Tensor, d_y, write(aten.mul.Tensor, write(aten.exp.default, y), total))
    return (_cast(write, d_x, dtype),)


def _softmax(write: Writer, x: fx.Node, dim: int, half_to_float: bool) -> Results:
    if half_to_float:
        x = write(aten._to_copy.default, x, dtype=torch.float32)
    exp = write(
        aten.exp.default, write(aten.sub.Tensor, x, write(aten.amax.default, x, [dim], True))
    )
    return (write(aten.div.Tensor, exp, write(aten.sum.dim_IntList, exp, [dim], True)),)


def _softmax_backward(
    write: Writer, d_y: fx.Node, y: fx.Node, dim: int, dtype: torch.dtype
) -> Results:
    """(d_y - sum(d_y * y)) * y."""
    inner = write(aten.sum.dim_IntList, write(aten.mul.Tensor, d_y, y), [dim], True)
    d_x = write(aten.mul.Tensor, write(aten.sub.Tensor, d_y, inner), y)
    return (_cast(write, d_x, dtype),)


def _cast(write: Writer, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if fake_of(x).dtype == dtype else write(aten._to_copy.default, x, dtype=dtype)


def _widened(write: Writer, x: fx.Node) -> fx.Node:
    """A narrow float as float32: kernels of norms compute in it, and round their results alone."""
    narrow = fake_of(x).dtype in (torch.bfloat16, torch.float16)
    return _cast(write, x, torch.float32) if narrow else x


def _others(x: fx.Node) -> list[int]:
    """All dims of a batch-norm operand but dim 1, the channels."""
    return [d for d in range(fake_of(x).dim()) if d != 1]


def _called(name: str, node: fx.Node) -> fx.Node:
    """A value with the name that programs give it."""
    update(node, torch_line=f"{name} = ")
    return node


def _per_channel(write: Writer, stat: fx.Node, like: fx.Node) -> fx.Node:
    """View ``stat`` (one number per channel) so that it broadcasts over ``like``: [1, C, 1, 1]."""
    view = write(aten.view.default, stat, [1, -1, *[1] * (fake_of(like).dim() - 2)])
    if value(view).phase == "B":  # where it may be summed over ranks, and so have a line
        update(view, torch_line=value(stat).torch_line)
    return view


def _batch_stats(write: Writer, x: fx.Node, eps: float) -> tuple[fx.Node, fx.Node, fx.Node, int]:
    """Per channel the mean, the biased variance and 1 / sqrt(variance + eps); then the number of
    values per channel. ``x`` is no narrower than float32.
    """
    count = prod(s for d, s in enumerate(fake_of(x).shape) if d != 1)
    total = write(aten.sum.dim_IntList, x, _others(x))
    mean = _called("mean", write(aten.div.Tensor, total, count))
    centred = _called("centred", write(aten.sub.Tensor, x, _per_channel(write, mean, x)))
    squares = write(aten.sum.dim_IntList, write(aten.mul.Tensor, centred, centred), _others(x))
    var = _called("var", write(aten.div.Tensor, squares, count))
    rstd = _called("rstd", write(aten.rsqrt.default, write(aten.add.Tensor, var, eps)))
    return mean, var, rstd, count


def _normalised(write: Writer, x: fx.Node, mean: fx.Node, rstd: fx.Node) -> fx.Node:
    centred = write(aten.sub.Tensor, x, _per_channel(write, mean, x))
    return write(aten.mul.Tensor, centred, _per_channel(write, rstd, x))


def _moved(write: Writer, running: fx.Node, now: fx.Node, momentum: float) -> fx.Node:
    """The running statistic after this batch: ``(1 - momentum) * running + momentum * now``."""
    running = _cast(write, running, fake_of(now).dtype)
    kept = write(aten.mul.Tensor, running, 1 - momentum)
    return write(aten.add.Tensor, kept, write(aten.mul.Tensor, now, momentum))


def _batch_norm(
    write: Writer, x: fx.Node, weight: Any, bias: Any, running_mean: Any, running_var: Any,
    training: bool, momentum: float, eps: float,
) -> Results:  # fmt: skip
    """Output, mean, rstd, new running mean and variance, with statistics of the whole batch."""
    x = _widened(write, x)
    mean, var, rstd, count = _batch_stats(write, x, eps)
    y = _called("normed", _normalised(write, x, mean, rstd))
    if weight is not None:
        y = write(aten.mul.Tensor, y, _per_channel(write, weight, x))
    if bias is not None:
        y = write(aten.add.Tensor, y, _per_channel(write, bias, x))
    new_mean = new_var = None
    if running_mean is not None:
        unbiased = write(aten.mul.Tensor, var, count / max(count - 1, 1))
        new_mean = _called("running_mean", _moved(write, running_mean, mean, momentum))
        new_var = _called("running_var", _moved(write, running_var, unbiased, momentum))
    return y, mean, rstd, new_mean, new_var


def _batch_norm_backward(
    write: Writer, d_y: fx.Node, x: fx.Node, weight: Any, running_mean: Any, running_var: Any,
    mean: fx.Node, rstd: fx.Node, train: bool, eps: float, mask: list[bool],
) -> Results:  # fmt: skip
    """d_x = weight * rstd * (d_y - sum(d_y) / N - x_hat * sum(d_y * x_hat) / N), then the two sums:
    d_weight = sum(d_y * x_hat) and d_bias = sum(d_y).

    With running statistics, which do not depend on x, d_x = weight * rstd * d_y.
    """
    d_y, x = _widened(write, d_y), _widened(write, x)
    if not train:
        mean, var = _widened(write, running_mean), _widened(write, running_var)
        rstd = write(aten.rsqrt.default, write(aten.add.Tensor, var, eps))
    count = prod(s for d, s in enumerate(fake_of(x).shape) if d != 1)
    x_hat = _called("x_hat", _normalised(write, x, mean, rstd))
    d_bias = write(aten.sum.dim_IntList, d_y, _others(x))
    d_weight = write(aten.sum.dim_IntList, write(aten.mul.Tensor, d_y, x_hat), _others(x))
    d_x = d_y
    if train:
        by_mean = _called("d_y_mean", write(aten.div.Tensor, d_bias, count))
        of_var = _called("d_y_x_hat_mean", write(aten.div.Tensor, d_weight, count))
        d_x = write(aten.sub.Tensor, d_y, _per_channel(write, by_mean, x))
        by_var = write(aten.mul.Tensor, x_hat, _per_channel(write, of_var, x))
        d_x = write(aten.sub.Tensor, d_x, by_var)
    scale = rstd if weight is None else write(aten.mul.Tensor, rstd, weight)
    scale = scale if weight is None else _called("scale", scale)
    return write(aten.mul.Tensor, d_x, _per_channel(write, scale, x)), d_weight, d_bias


_OPENINGS: dict[Any, Callable[..., Results]] = {
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten._softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}
