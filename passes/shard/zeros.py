"""Zeros, of which every rank makes the pieces that it reads: no transfer brings them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from partc.graph import Value, collectives, set_fake, set_value, value
from partc.graph.graph_edits import run_fake
from partc.plan.mesh import Mesh
from partc.plan.sharding import Sharding

aten = torch.ops.aten

ZEROS = {aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default}
FILLS = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.scalar_tensor.default: 0,
}  # with what


def is_zero(node: fx.Node) -> bool:
    """Whether a call makes zeros, or keeps a shard of zeros."""
    while node.target in collectives.LOCAL:
        node = node.all_input_nodes[0]
    if node.target in ZEROS:
        return True
    return node.target in FILLS and bool(node.args[FILLS[node.target]] == 0)


def zeros_in(
    graph: fx.Graph, node: fx.Node, sharding: Sharding, reader: Value, mesh: Mesh
) -> fx.Node:
    """A call at the end of a graph that makes this rank's shard of zeros for a reader."""
    known = value(node)
    args = (list(sharding.local_shape(known.shape, mesh) or known.shape),)
    new = graph.call_function(aten.zeros.default, args, {"dtype": known.dtype})
    set_value(new, replace(known, sharding=sharding, phase=reader.phase, stage=reader.stage))
    set_fake(new, run_fake(aten.zeros.default, args, {"dtype": known.dtype}))
    return new
