"""Replace the random draw that a recomputation replays by the forward's draw of the same numbers.

``torch.utils.checkpoint`` restores the generator's state, so its recomputation draws the same mask
a second time. One value for both lets later passes decide what is kept and what is recomputed.
"""

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
    """Merge draws with the same generator state, op, arguments, shape and dtype into one value."""
    first: dict[Any, fx.Node] = {}
    for node in list(graph.calls()):
        if node.target not in FILLS or not draw_of(node):
            continue
        plain = tuple(str(a) for a in node.args if not isinstance(a, fx.Node))
        key = (draw_of(node), node.target, plain, shape_of(node), value(node).dtype)
        if first.setdefault(key, node) is not node:
            replace_by(node, first[key])
    drop_dead(graph)
