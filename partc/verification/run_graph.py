"""Run the joint graph of a step on whole tensors, as one device would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from partc.graph import Graph, value


def run_graph(
    graph: Graph,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    *,
    last: fx.Node | None = None,
    before: Callable[[fx.Node], None] = lambda node: None,
) -> dict[str, Any]:
    """One step: ``{"loss": ..., "grads": {...}, "buffers": {...}, "results": {...}}``.

    Parameters, buffers and inputs are given by the user's names. Missing buffers are taken from
    ``graph.constants``; each value is freed after its last use. With ``last`` the run ends at that
    node and gives nothing. ``before`` is called before each call.
    """
    given = {"param": params, "buffer": {**graph.constants, **buffers}, "input": inputs}
    dying = _last_uses(graph.fx)
    env: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in graph.fx.nodes:
            if node.op == "placeholder":
                env[node] = given[value(node).kind][value(node).name].detach()
            elif node.op == "call_function":
                before(node)
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = node.target(*args, **kwargs)
            if node is last:
                return {}
            for dead in dying.get(node, ()):
                del env[dead]
        return dict(fx.map_arg(graph.outputs.as_dict(), env.__getitem__))


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node the values that it is the last to read; itself, if nobody reads it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        for read in node.all_input_nodes:
            last[read] = node
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node, at in last.items():
        if at.op != "output":
            dying.setdefault(at, []).append(node)
    return dying
