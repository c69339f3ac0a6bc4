"""What the backward computes again instead of keeping it, as ``plan.recompute`` says.

``cheap``: sums, products, casts, views, activations and layer norms of what is kept anyway cost
little time and most of the activation memory; results of ``exp``, ``tanh`` and the like are kept.
``attention`` (selective recomputation, Korthikanti et al. 2022, arXiv 2205.05198): also what stands
between the projections of an attention, where it takes few FLOPs per byte. ``block`` (full
recomputation, Chen et al. 2016, arXiv 1604.06174): a block of a stack keeps what enters it. A list
of module paths does so for these modules; the rest is as with ``cheap``.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx

from partc.graph import (
    Graph,
    fake_of,
    first_operand,
    innermost_block,
    is_tensor,
    picked,
    stage_of,
    tensor_args,
    value,
)
from partc.graph.moves import gathers_param
from partc.passes.recompute.copy_forward import Copies
from partc.passes.recompute.recompute_attention import recompute_attention
from partc.passes.recompute.recompute_regions import recompute_regions
from partc.plan import Plan

aten = torch.ops.aten
_VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.transpose.int,
    aten.t.default,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.select.int,
    aten.slice.Tensor,
)
_CHEAP = frozenset(
    {
        *_VIEWS,
        aten.add.Tensor,
        aten.add.Scalar,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.div.Tensor,
        aten.neg.default,
        aten._to_copy.default,
        aten.silu.default,
        aten.relu.default,
        aten.gelu.default,
        aten.native_layer_norm.default,
    }
)


def recompute(graph: Graph, plan: Plan) -> Graph:
    """Give the backward of a local graph its own copies of what ``plan`` recomputes, in place.

    Runs before waits are placed. PlanError where a path of the plan names no module that runs.
    """
    if plan.recompute == "none":
        return graph
    if plan.recompute == "attention":
        recompute_attention(graph)
    elif plan.recompute != "cheap":
        recompute_regions(graph, plan)
    gathered = gathered_again(graph)
    Copies(graph, recomputable(graph, gathered), innermost_block, twins=gathered).insert()
    return graph


def gathered_again(graph: Graph) -> dict[fx.Node, fx.Node]:
    """Weights that the forward gathers and drops, and the gathers of the same block's backward."""
    first: dict[object, fx.Node] = {}
    found: dict[fx.Node, fx.Node] = {}
    for node in reversed(list(graph.calls())):
        if gathers_param(node):
            kwargs = tuple(sorted(node.kwargs.items()))
            key = (node.target, *tensor_args(node), kwargs, innermost_block(node), stage_of(node))
            if value(node).phase == "B":
                first[key] = node
            elif value(node).phase == "F" and key in first:
                found[node] = first[key]
    return found


def recomputable(graph: Graph, gathered: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Forward values that the backward reads and that follow cheaply from what is kept anyway, and
    from weights that it gathers.
    """
    serves = Copies(graph, (), innermost_block).serves
    saved = {n for n in graph.calls() if value(n).phase == "F" and _read_backward(n)}
    again: set[fx.Node] = set()

    def at_hand(operand: fx.Node, node: fx.Node) -> bool:
        """Whether the backward has an operand anyway, or computes it again in the same block."""
        kept = operand.op == "placeholder" or operand in saved or operand in gathered
        return kept or (operand in again and serves(operand, node))

    for node in graph.calls():
        cheap = value(node).phase == "F" and _is_cheap(node, saved)
        if cheap and node in saved and _widens(node):
            saved.add(first_operand(node))  # keeping it costs less
        if cheap and all(at_hand(operand, node) for operand in tensor_args(node)):
            again.add(node)
    return {n for n in again if n not in saved or _pays(n)}


def _is_cheap(node: fx.Node, saved: set[fx.Node]) -> bool:
    """Whether a call may be made again; of several results the first has to be wanted then."""
    if node.target is operator.getitem:
        return _is_cheap(picked(node)[0], saved)
    if node.target is aten.native_layer_norm.default:
        return any(picked(n)[1] == 0 and n in saved for n in node.users)
    return node.target in _CHEAP and is_tensor(node)


def _pays(node: fx.Node) -> bool:
    """Whether keeping it would cost memory, or it is a view that is written as easily again."""
    return node.target in _VIEWS or not is_tensor(node) or fake_of(node).numel() > 1


def _widens(node: fx.Node) -> bool:
    """Whether a call casts a value to a type that takes more bytes."""
    if node.target is not aten._to_copy.default:
        return False
    return bool(fake_of(node).element_size() > fake_of(first_operand(node)).element_size())


def _read_backward(node: fx.Node) -> bool:
    return any(u.op == "call_function" and value(u).phase == "B" for u in node.users)
