"""Let a backward that reads a weight's sizes alone read no weight, so that none is gathered for it.

    conv_backward(d_y, x, all_gather(w), mask=[False, True, True])
    -> conv_backward(d_y, x, empty(w's sizes), mask=[False, True, True])

Kernels read a weight's numbers for the gradient of their input only, and the first convolution of a
network has no such gradient. Of the bias a layer norm's backward reads no number at all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from partc.graph import Graph, fake_of, set_fake, set_value, tensor_args, value
from partc.graph.graph_edits import drop_dead
from partc.graph.moves import gathers_param

aten = torch.ops.aten

WEIGHT: dict[Any, int] = {  # the argument that is read for the gradient of the input alone
    aten.convolution_backward.default: 2,
    aten.native_batch_norm_backward.default: 2,
    aten.native_group_norm_backward.default: 4,
    aten.native_layer_norm_backward.default: 5,
}
BIAS: dict[Any, int] = {aten.native_layer_norm_backward.default: 6}  # what is never read


def spare_weights(graph: Graph) -> Graph:
    """Replace, in place, each gathered weight of which no call reads a number."""
    for gather in list(graph.calls()):
        if gathers_param(gather) and all(_reads_sizes(user, gather) for user in gather.users):
            for reader in list(gather.users):
                reader.replace_input_with(gather, _of_its_sizes(graph, gather, reader))
    drop_dead(graph)
    return graph


def sizes_alone(call: fx.Node) -> list[fx.Node]:
    """The operands of a call of which it reads sizes and dtype alone."""
    if call.target not in WEIGHT:
        return []
    mask: Any = call.args[-1]
    places = [] if mask[0] else [WEIGHT[call.target]]
    places += [BIAS[call.target]] if call.target in BIAS else []
    return [operand for i in places if isinstance(operand := call.args[i], fx.Node)]


def _reads_sizes(call: fx.Node, weight: fx.Node) -> bool:
    """Whether a call reads sizes alone of a weight wherever it reads the weight."""
    return sizes_alone(call).count(weight) == tensor_args(call).count(weight)


def _of_its_sizes(graph: Graph, weight: fx.Node, reader: fx.Node) -> fx.Node:
    """Memory of a weight's sizes right before its reader, of whose phase and stage it is."""
    fake, known = fake_of(weight), value(weight)
    with graph.fx.inserting_before(reader):
        empty = graph.fx.call_function(
            aten.empty.memory_format, ([*fake.shape],), {"dtype": fake.dtype}
        )
    at = replace(value(reader), name="", note="", from_forward=False)
    set_value(empty, replace(at, shape=known.shape, dtype=fake.dtype, sharding=known.sharding))
    set_fake(empty, fake.new_empty(fake.shape))
    return empty
