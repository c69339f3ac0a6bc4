"""Write linears with a bias as a product and an addition while shardings are decided, and join
them again after.

A product cut along its contracted dim is an unfinished sum: the bias is added once it is finished.
"""

from __future__ import annotations

import torch
from torch import fx

from partc.graph import Graph, fake_of, set_fake, set_value, update, value
from partc.graph.graph_edits import Writer

aten = torch.ops.aten


def split_bias(graph: Graph) -> Graph:
    """``linear(x, w, b)`` becomes ``linear(x, w) + b``, in place."""
    for node in list(graph.calls()):
        if node.target is aten.linear.default and len(node.args) == 3 and node.args[2] is not None:
            x, weight, bias = node.args
            write = Writer(graph.fx, node, value(node))
            product = write(aten.linear.default, x, weight)
            total = write(aten.add.Tensor, product, bias)
            for new in (product, total):  # gradients refer to the linear by its name
                update(new, name=value(node).name or node.name)
            node.replace_all_uses_with(total)
            graph.fx.erase_node(node)
    return graph


def fuse_bias(graph: Graph) -> Graph:
    """``linear(x, w) + b`` becomes ``linear(x, w, b)`` where nothing else reads the product, in
    place.
    """
    for node in list(graph.calls()):
        if node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs:
            product, bias = node.args
            if _is_product(product) and _is_bias(bias, product):
                assert isinstance(product, fx.Node)
                with graph.fx.inserting_before(node):
                    joined = graph.fx.call_function(aten.linear.default, (*product.args, bias))
                set_value(joined, value(node))
                set_fake(joined, fake_of(node))
                node.replace_all_uses_with(joined)
                graph.fx.erase_node(node)
                graph.fx.erase_node(product)
    return graph


def _is_product(node: object) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.target is aten.linear.default
        and len(node.args) == 2
        and len(node.users) == 1
        and all(layout.kind == "cut" for _, layout in value(node).sharding.layouts)
    )


def _is_bias(node: object, product: object) -> bool:
    assert isinstance(product, fx.Node)
    return isinstance(node, fx.Node) and tuple(fake_of(node).shape) == tuple(
        fake_of(product).shape[-1:]
    )
