"""Kernels that autograd calls with more than a reader needs, as calls of helpers that fill it in.

``aten.native_layer_norm_backward(d_y, x, [64], mean, rstd, w, b, [True, True, True])`` becomes
``layer_norm_backward(d_y, x, mean, rstd, w)``. A call for which a helper would fill in anything
else than stands in the graph keeps the spelling of ``spell.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from partc.codegen.calls.arguments import Call
from partc.codegen.helpers.needed import Helpers
from partc.codegen.repeats.read_sizes import read_sizes
from partc.codegen.text import ATOM, Text
from partc.graph import fake_of
from partc.quoting import literal

aten = torch.ops.aten
Spelled = tuple[str, list[str]] | None  # a helper and its arguments; None for another spelling
SUM = 2  # of ``Reduction``: neither nothing nor the mean
LOSSES = (
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
    aten.soft_margin_loss.default,
)  # fmt: skip
LOSSES_BACKWARD = (
    aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default, aten.binary_cross_entropy_backward.default,
    aten.soft_margin_loss_backward.default,
)  # fmt: skip
IGNORE = -100  # the targets that ``F.nll_loss`` leaves out where a user says nothing


def as_helper(
    node: fx.Node, operand: Callable[[fx.Node], Text], device: str, helpers: Helpers
) -> Text | None:
    """The text of a call by a helper; None for a call that has none."""
    speller = SPELLERS.get(node.target)
    found = speller(Call.of(node, operand, device)) if speller is not None else None
    if found is None:
        return None
    name, arguments = found
    return Text(f"{name if '.' in name else helpers.use(name)}({', '.join(arguments)})")


def _layer_norm_backward(call: Call) -> Spelled:
    if not read_sizes(call.node):
        return None
    operands = ("grad_out", "input", "mean", "rstd", "weight")
    return "layer_norm_backward", [*_of_backward(call, *operands), *_mask(call)]


def _batch_norm_backward(call: Call) -> Spelled:
    fits = call.get("train") is True and call.get("weight") is not None
    operands = ("grad_out", "input", "save_mean", "save_invstd", "weight")
    return ("batch_norm_backward", [*_of_backward(call, *operands), *_mask(call)]) if fits else None


def _group_norm(call: Call) -> Spelled:
    if not read_sizes(call.node):
        return None
    texts = _texts(call, "input", "group", "weight", "bias", "eps")
    return "F.group_norm" if first_alone(call.node) else "group_norm_and_stats", texts


def _group_norm_backward(call: Call) -> Spelled:
    if not read_sizes(call.node):
        return None
    operands = ("grad_out", "input", "group", "mean", "rstd", "weight")
    return "group_norm_backward", [*_of_backward(call, *operands), *_mask(call)]


def _conv_transpose(call: Call) -> Spelled:
    """``F.conv_transpose2d(x, weight, bias, stride=2)``; other convolutions: ``spell.py``."""
    if not call.get("transposed"):
        return None
    operands = [n for n in ("input", "weight", "bias") if call.get(n) is not None]
    dims = fake_of(call.get("input")).dim() - 2
    return f"F.conv_transpose{dims}d", [*_texts(call, *operands), *_of_conv(call)]


def _conv_backward(call: Call) -> Spelled:
    if not read_sizes(call.node):
        return None
    operands = _of_backward(call, "grad_output", "input", "weight")
    transposed = ["transposed=True"] if call.get("transposed") else []
    return "conv_backward", [*operands, *_of_conv(call), *transposed, *_mask(call)]


def _of_conv(call: Call) -> list[str]:
    """A convolution's numbers that are not the usual ones: ``stride=2``."""
    usual = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
    given = {name: call.get(name) for name in usual}
    alike = {name: {*map(literal, n)} if isinstance(n, list | tuple) else {literal(n)}
             for name, n in given.items()}  # fmt: skip
    shown = {
        name: literal(n[0] if isinstance(n, list | tuple) and len(alike[name]) == 1 else n)
        for name, n in given.items()
    }
    return [f"{name}={text}" for name, text in shown.items() if text != literal(usual[name])]


def _embedding_grad(call: Call) -> Spelled:
    if call.get("scale_grad_by_freq"):
        return None
    padding = call.get("padding_idx")
    texts = _texts(call, "grad_output", "indices", "num_weights")
    return "embedding_grad", [*texts, *([] if padding == -1 else [f"padding_idx={padding}"])]


def _nll_loss(call: Call) -> Spelled:
    """``F.nll_loss``, or, where the number of targets is read, a helper that gives it too."""
    if call.get("reduction") != SUM:
        return None
    texts = [*_texts(call, "self", "target"), *_of_targets(call)]
    if first_alone(call.node):
        return "F.nll_loss", [*texts, 'reduction="sum"']
    return f"{call.name.removesuffix('_forward')}_and_count", texts


def _nll_loss_backward(call: Call) -> Spelled:
    if call.get("reduction") != SUM:
        return None
    texts = _texts(call, "grad_output", "self", "target", "total_weight")
    return call.name, [*texts, *_of_targets(call)]


def _loss(call: Call) -> Spelled:
    """``F.mse_loss(x, y, reduction="sum")`` and losses like it."""
    if call.get("reduction") != SUM:
        return None
    given = [name for name in call.given if name != "reduction"]
    texts = [*_texts(call, *given[:2]), *[f"{name}={call.text(name)}" for name in given[2:]]]
    return f"F.{call.name}", [*texts, 'reduction="sum"']


def _loss_backward(call: Call) -> Spelled:
    """The gradient of such a loss, by a helper of the kernel's own name."""
    if call.get("reduction") != SUM:
        return None
    given = [name for name in call.given if name != "reduction"]
    texts = [*_texts(call, *given[:3]), *[f"{name}={call.text(name)}" for name in given[3:]]]
    return call.name, texts


def _of_targets(call: Call) -> list[str]:
    """Which targets count for how much, where that is not what ``F.nll_loss`` does untold."""
    weight = [f"weight={call.text('weight')}"] if call.get("weight") is not None else []
    return [*weight, *[f"ignore_index={n}" for n in [call.get("ignore_index")] if n != IGNORE]]


def first_alone(node: fx.Node) -> bool:
    """Whether of a call's results only the first is read."""
    return all(u.target is operator.getitem and u.args[1] == 0 for u in node.users)


def _texts(call: Call, *names: str) -> list[str]:
    return [str(call.text(name)) for name in names]


def _of_backward(call: Call, *names: str) -> list[str]:
    """The texts of a backward's operands; of a weight whose sizes alone are read
    ``x.new_empty(16, 3, 7, 7)``.
    """
    weight, x = call.get("weight"), call.get("input")
    texts = dict(zip(names, _texts(call, *names), strict=True))
    if weight.target is aten.empty.memory_format:
        sizes = literal(tuple(fake_of(weight).shape))
        dtype = fake_of(weight).dtype
        own = "" if dtype == fake_of(x).dtype else f", dtype={dtype}"
        texts["weight"] = f"{call.text('input').at(ATOM)}.new_empty({sizes}{own})"
    return [*texts.values()]


def _mask(call: Call) -> list[str]:
    """Which gradients are not needed: ``d_bias=False``."""
    names = ("d_x", "d_weight", "d_bias")
    masked = zip(names, call.get("output_mask"), strict=True)
    return [f"{name}=False" for name, needed in masked if not needed]


SPELLERS: dict[Any, Callable[[Call], Spelled]] = {
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.convolution.default: _conv_transpose,
    aten.convolution_backward.default: _conv_backward,
    aten.embedding_dense_backward.default: _embedding_grad,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss2d_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.nll_loss2d_backward.default: _nll_loss_backward,
    **dict.fromkeys(LOSSES, _loss),
    **dict.fromkeys(LOSSES_BACKWARD, _loss_backward),
}
