"""Compares what a traced graph computes with what eager PyTorch computes, on one device.

``check(model, inputs)`` traces a training step and compares loss, gradients and buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from partc.graph import Graph
from partc.lowering import trace
from tests.interpret import run_graph

LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5}  # largest relative error that passes
# The error of a gradient is taken relative to its largest element, or to this part of the largest
# element of all gradients, if that is more: tiny gradients are rounding errors alone.
NOISE = 1e-6


def run(graph: Graph, model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """The loss, gradients and buffers of one step of a graph, on the model's own tensors."""
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return run_graph(graph, params, buffers, dict(zip(graph.inputs, inputs, strict=True)))


def check(
    model: nn.Module, inputs: tuple[Tensor, ...], loss: Callable[..., Tensor] | None = None
) -> Graph:
    """Trace a step, assert that loss, gradients and buffers are those of eager; returns the graph.

    Random ops of both draw from the same seed.
    """
    graph = trace(model, inputs, loss)
    torch.manual_seed(0)
    got = run(graph, model, inputs)
    torch.manual_seed(0)
    expected = loss(model, *inputs) if loss is not None else model(*inputs)
    model.zero_grad()
    expected.backward()
    limit = LIMIT[next(model.parameters()).dtype]
    assert distance(got["loss"], expected, 0.0) < limit
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    largest = max(float(p.grad.abs().max()) for p in params.values() if p.grad is not None)
    assert set(got["grads"]) == set(params)
    for name, param in params.items():
        assert param.grad is not None
        assert distance(got["grads"][name], param.grad, NOISE * largest) < limit, name
    for name, after in got["buffers"].items():
        assert distance(after, model.get_buffer(name), 0.0) < limit, name
    return graph


def distance(a: Tensor, b: Tensor, floor: float) -> float:
    """The largest difference relative to the largest element of ``b``, or to ``floor``."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    scale = max(float(b.detach().abs().max()), floor)
    return float((a - b).detach().abs().max()) / scale if scale else 0.0
