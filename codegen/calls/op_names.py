"""Names that come from an op: ``silu`` of ``aten.silu.default``, ``mean`` of a layer norm."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from partc.codegen.helpers import needed as helpers
from partc.graph import fake_of

PLAIN = {
    "to_copy": "cast", "unsafe_view": "view", "sum": "total", "pow": "power", "slice": "part",
    "cross_entropy_grad": "logits", "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm", "native_batch_norm": "batch_norm",
    "native_batch_norm_legit_functional": "batch_norm", "nll_loss_forward": "loss_sum",
    "nll_loss2d_forward": "loss_sum", "convolution": "conv", "safe_softmax": "softmax",
    "max_pool2d_with_indices": "max_pool2d", "max_pool3d_with_indices": "max_pool3d",
    "linalg_vector_norm": "norm", "binary_cross_entropy_with_logits": "bce_sum",
    "upsample_nearest2d": "upsample", "select_backward": "select",
}  # fmt: skip
VIEWS = {  # say nothing about a value but how it lies
    "reshape", "view", "transpose", "permute", "expand", "unsqueeze", "squeeze", "contiguous",
    "clone", "part", "select", "t",
}  # fmt: skip
RESULTS = {  # names of the results of ops whose schema does not name them
    "native_layer_norm": ("", "mean", "rstd"),
    "native_group_norm": ("", "mean", "rstd"),
    "native_batch_norm": ("", "mean", "rstd"),
    "native_batch_norm_legit_functional": ("", "mean", "rstd", "running_mean", "running_var"),
    "nll_loss_forward": ("", "count"),
    "nll_loss2d_forward": ("", "count"),
    "max_pool2d_with_indices": ("", "indices"),
    "max_pool3d_with_indices": ("", "indices"),
    "adaptive_max_pool2d": ("", "indices"),
    "adaptive_max_pool3d": ("", "indices"),
    "fractional_max_pool2d": ("", "indices"),
    "embedding_bag": ("", "offset2bag", "bag_size", "max_indices"),
    "embedding_bag_forward_only": ("", "offset2bag", "bag_size", "max_indices"),
    "ctc_loss": ("", "log_alpha"),
    "unique2": ("", "inverse_indices", "counts"),
    "var_mean": ("var", "mean"),
}

STATISTICS = {"mean", "rstd"}  # of norms: as many numbers as rows or channels, whatever the model


def op_name(node: fx.Node) -> str:
    """The op's own name: ``silu`` of ``aten.silu.default``, ``attention`` of every fused kernel."""
    target = node.target
    if isinstance(target, helpers.Outlined):
        return target.results[0]
    if target is operator.getitem and isinstance(node.args[0], fx.Node):
        return op_name(node.args[0])
    name = _own_name(target)
    if name.startswith("scaled_dot_product"):
        return "attention"
    return PLAIN.get(name, name)


def _own_name(target: object) -> str:
    """The op's name in ATen, or a function's."""
    schema = getattr(target, "_schema", None)
    name = str(getattr(schema, "name", "") or getattr(target, "__name__", "value"))
    return name.split("::")[-1].strip("_")


def result_name(node: fx.Node) -> str:
    """The name that an op with several results has for this one; "" if it has none."""
    if node.target is not operator.getitem:
        return ""
    index, names = node.args[1], _names_of_results(node.all_input_nodes[0])
    known = isinstance(index, int) and index < len(names) and names[index] != "output"
    return names[index] or "" if known else ""  # type: ignore[index]


def _names_of_results(call: fx.Node) -> Sequence[str | None]:
    if isinstance(call.target, helpers.Outlined):
        return call.target.results
    schema = getattr(call.target, "_schema", None)
    returns = [result.name for result in schema.returns] if schema is not None else []
    return RESULTS.get(_own_name(call.target)) or returns


def constant_name(node: fx.Node) -> str:
    """The name of a number that a program makes a tensor of; "" for other values."""
    schema = getattr(node.target, "_schema", None)
    name = schema.name.split("::")[1] if schema is not None else ""
    if name not in ("scalar_tensor", "full") or tuple(fake_of(node).shape):
        return ""
    number: Any = node.args[0 if name == "scalar_tensor" else 1]
    lowest = -torch.finfo(torch.float32).max
    return {0: "zero", 1: "one", -math.inf: "minus_infinity", lowest: "lowest"}.get(number, "")
