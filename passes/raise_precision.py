"""Raise every narrower float of a graph to float64, so that two computations agree to 1e-12."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partc.graph import Graph, fake_like, held, run_on_fakes, set_held, update

NARROW = {torch.float32, torch.float16, torch.bfloat16}


def raise_precision(graph: Graph) -> None:
    """``_to_copy(x, dtype=f32)`` becomes ``_to_copy(x, dtype=f64)``; fakes and constants follow."""
    for name, constant in graph.constants.items():
        if constant.dtype in NARROW:
            graph.constants[name] = constant.double()
    for node in graph.fx.nodes:
        if node.op == "placeholder" and held(node).dtype in NARROW:
            set_held(node, fake_like(graph.fx, held(node)).double())
        elif node.op == "call_function":
            node.args, node.kwargs = _raised(node.args), _raised(node.kwargs)
            set_held(node, run_on_fakes(node))
        if isinstance(node.meta.get("val"), Tensor):
            update(node, dtype=held(node).dtype)


def _raised(item: Any) -> Any:
    """An argument with float64 in place of every narrower float dtype."""
    if isinstance(item, torch.dtype):
        return torch.float64 if item in NARROW else item
    if isinstance(item, dict):
        return {key: _raised(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(_raised(value) for value in item)
    return item
