"""Replace dropout and noise that torch draws inside of an op by a draw that takes a generator."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from partc.graph import Graph, is_call, picked, value
from partc.graph.draws import draws_numbers
from partc.graph.graph_edits import call_before, drop_dead, replace_by

aten = torch.ops.aten


def open_dropout(graph: Graph) -> None:
    """``native_dropout(x, p)`` becomes ``x * bernoulli(x, 1 - p) / (1 - p)`` and the mask of it."""
    for node in list(graph.calls()):
        if is_call(node, aten.native_dropout.default) and draws_numbers(node):
            x, p = node.args[:2]
            assert isinstance(p, float | int)
            drawn = call_before(node, aten.bernoulli.p, x, 1 - p)
            scaled = call_before(node, aten.mul.Tensor, x, drawn)
            if p < 1:
                scaled = call_before(node, aten.div.Scalar, scaled, 1 - p)
            mask = call_before(node, aten._to_copy.default, drawn, dtype=torch.bool)
            for user in list(node.users):
                assert user.target is operator.getitem
                replace_by(user, (scaled, mask)[picked(user)[1]])
    drop_dead(graph)


def rrelu_noise(node: fx.Node, x: Any, noise: Any, lower: float, upper: float) -> fx.Node:
    """The slopes of a training rrelu: drawn where ``x`` is at most 0, and 1 elsewhere."""
    drawn = call_before(node, aten.uniform.default, noise, lower, upper)
    below = call_before(node, aten.le.Scalar, x, 0)
    one = call_before(node, aten.full.default, [], 1.0, dtype=value(drawn).dtype)
    return call_before(node, aten.where.self, below, drawn, one)
