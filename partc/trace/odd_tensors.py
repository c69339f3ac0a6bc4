"""Tensors that are not dense: sparse, quantised, nested, and those of mkldnn.

Programs compute with dense tensors. Parameters, buffers and inputs of another kind, and those that
a step makes, are refused by name; ``odd_constants.py`` computes with constants of another kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from partc.errors import TraceError

WHY = "programs compute with dense tensors"
INSTEAD = {  # what to keep in a model in place of a tensor that is not dense, by its kind
    "sparse": "Keep its indices and values as two dense tensors, rows, cols = "
    "a.coalesce().indices() and a.coalesce().values(): the product a @ x is "
    "x.new_zeros(len(a), x.shape[1]).index_add(0, rows, values[:, None] * x[cols]).",
    "quantised": "Keep x.dequantize(), or its integers with their scale (int_repr, q_scale).",
    "nested": "Keep x.to_padded_tensor(0.0) with a mask of its lengths.",
    "mkldnn": "Keep x.to_dense(): a program takes the kernels of its device.",
}
_INPUTS = {"quantised": "x.dequantize()", "nested": "x.to_padded_tensor(0.0), and its lengths"}
_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)
_SPARSE = (torch.sparse_coo, *_BY_ROWS, *_BY_COLUMNS)


def odd_kind(tensor: Tensor) -> str:
    """The kind of a tensor that is not dense, as a word; "" for a dense one."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout is torch.strided:  # first, as nearly all are
        return "quantised" if tensor.is_quantized else ""
    return "sparse" if tensor.layout in _SPARSE else "mkldnn" if tensor.is_mkldnn else ""


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that say what a tensor of another kind holds."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _BY_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in _BY_COLUMNS:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    if tensor.is_nested:
        return tuple(tensor.unbind())
    return (tensor.dequantize() if tensor.is_quantized else tensor.to_dense(),)


def dense_of(kind: str) -> str:
    """What to pass in place of an input of a kind that is not dense."""
    return f"Pass {_INPUTS.get(kind, 'x.to_dense()')}."


def check_held(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """TraceError for a parameter or buffer that is not dense."""
    for name, tensor in {**params, **buffers}.items():
        if kind := odd_kind(tensor):
            is_constant = kind == "sparse" and not tensor.requires_grad
            attribute = "As a plain attribute, self.a = a, a sparse matrix is a constant. "
            raise TraceError(
                where=name, what=f"this {'parameter' if name in params else 'buffer'} is {kind}",
                why=f"{WHY}, and ranks load and save them",
                do=attribute * is_constant + INSTEAD[kind],
            )  # fmt: skip


def check_recorded(module: fx.GraphModule) -> None:
    """TraceError where the step makes a tensor that is not dense, or has one as a constant."""
    for node in module.graph.nodes:
        found: Any = node.meta.get("val")
        if node.op == "get_attr":
            found = getattr(module, str(node.target), found)
        for tensor in tree_leaves(found):
            if kind := odd_kind(tensor) if isinstance(tensor, Tensor) else "":
                raise TraceError(
                    where=node.meta.get("custom", {}).get("source", ""),
                    what=f"the step computes with a {kind} tensor", why=WHY, do=INSTEAD[kind],
                )  # fmt: skip
