"""``random="single-device"``: the whole value is drawn on every rank, which takes its piece.

``dropout_mask(x, p)`` -> ``dropout_mask(expand(0, sizes of x), p)``: no axis cuts what a draw
reads, so none cuts what it gives, and its key has no place and no microbatch. The numbers of the
whole value are then the same under every plan.
"""

from __future__ import annotations

import torch

from partc.graph import Graph, fake_of, first_operand, is_call, shape_of
from partc.graph.draws import draws_of, reads_shape_alone
from partc.graph.graph_edits import call_before, drop_dead

aten = torch.ops.aten


def draw_whole(graph: Graph) -> None:
    """Give every draw that reads no values of its operand one of the same sizes, not cut."""
    for node in draws_of(graph):
        if not node.all_input_nodes or not reads_shape_alone(node):
            continue
        read = first_operand(node)
        if is_call(read, aten.expand.default) and is_call(read.args[0], aten.full.default):
            continue  # by an earlier run
        dtype, device = fake_of(read).dtype, fake_of(read).device
        zero = call_before(node, aten.full.default, [], 0, dtype=dtype, device=device)
        whole = call_before(node, aten.expand.default, zero, list(shape_of(read)))  # no memory
        node.replace_input_with(read, whole)
    drop_dead(graph)
