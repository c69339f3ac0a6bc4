"""Let a replayed random draw (recomputation in a checkpoint) be the first draw itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from partc.graph import Graph, draw_of, shape_of, value
from partc.graph.graph_edits import drop_dead, replace_by

aten = torch.ops.aten
FILLS = (  # random ops that read nothing but the shape of a tensor argument
    aten.bernoulli.p, aten.uniform.default, aten.normal_functional.default,
    aten.exponential.default, aten.rand.default, aten.randn.default, aten.randperm.default,
    aten.randint.default, aten.randint.low, aten.rand_like.default, aten.randn_like.default,
    aten.randint_like.default,
)  # fmt: skip


def merge_draws(graph: Graph) -> None:
    """Draws from one state of the generator, of one kind and shape, become one value."""
    first: dict[Any, fx.Node] = {}
    for node in list(graph.calls()):
        if node.target not in FILLS or not draw_of(node):
            continue
        plain = tuple(str(a) for a in node.args if not isinstance(a, fx.Node))
        key = (draw_of(node), node.target, plain, shape_of(node), value(node).dtype)
        if first.setdefault(key, node) is not node:
            replace_by(node, first[key])
    drop_dead(graph)
