"""Choose the forward values that the backward recomputes, as ``plan.recompute`` says.

``cheap``: pointwise sums and products, casts, views, activations and layer norms of saved
activations, which take little time and much memory; results of ``exp`` and ``tanh`` are saved.
``attention`` (selective recomputation, Korthikanti et al. 2022, arXiv 2205.05198): also the calls
between an attention's projections that take few FLOPs per byte. ``block`` (full recomputation, Chen
et al. 2016, arXiv 1604.06174): a block saves only the activations that enter it. A list of module
paths: these modules save only what enters them, and all others follow ``cheap``.
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
    is_tensor,
    picked,
    stage_of,
    tensor_args,
    value,
)
from partc.graph.moves import gathers_param
from partc.graph.places import innermost_turn
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
    """Copy the forward calls that ``plan`` recomputes into the backward of a local graph, in place.

    Runs before waits are placed. PlanError where a path of the plan names no module that runs.
    """
    if plan.recompute == "none":
        return graph
    if plan.recompute == "attention":
        recompute_attention(graph)
    elif plan.recompute != "cheap":
        recompute_regions(graph, plan)
    gathered = gathered_again(graph)
    Copies(graph, recomputable(graph, gathered), innermost_turn, twins=gathered).insert()
    return graph


def gathered_again(graph: Graph) -> dict[fx.Node, fx.Node]:
    """Per all-gather of a weight in the forward, the all-gather of that weight in the same block's
    backward: under FSDP the backward gathers a weight again.
    """
    first: dict[object, fx.Node] = {}
    found: dict[fx.Node, fx.Node] = {}
    for node in reversed(list(graph.calls())):  # backward first, to know its gathers
        if gathers_param(node):
            kwargs = tuple(sorted(node.kwargs.items()))
            key = (node.target, *tensor_args(node), kwargs, innermost_turn(node), stage_of(node))
            if value(node).phase == "B":
                first[key] = node
            elif value(node).phase == "F" and key in first:
                found[node] = first[key]
    return found


def recomputable(graph: Graph, gathered: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Forward values that cheap calls can compute in the backward from saved activations, from
    parameters, and from the weights that the backward gathers again (``gathered``).
    """
    serves = Copies(graph, (), innermost_turn).serves
    saved = {n for n in graph.calls() if value(n).phase == "F" and any(_readers(n))}
    own = {n for n in saved if any(serves(n, reader) for reader in _readers(n))}
    again: set[fx.Node] = set()

    def at_hand(operand: fx.Node, node: fx.Node) -> bool:
        """Whether the backward has ``operand`` saved, or recomputes it in the block of ``node``."""
        kept = operand.op == "placeholder" or operand in saved or operand in gathered
        return kept or (operand in again and serves(operand, node))

    for node in graph.calls():
        cheap = value(node).phase == "F" and _is_cheap(node, own)
        if cheap and node in saved and _widens(node):
            # saving bf16 and casting again costs half the bytes
            saved.add(first_operand(node))
            own.add(first_operand(node))
        if cheap and all(at_hand(operand, node) for operand in tensor_args(node)):
            again.add(node)
    return {n for n in again if n not in saved or _pays(n)}


def _is_cheap(node: fx.Node, own: set[fx.Node]) -> bool:
    """Whether a call takes little time; a layer norm only if its block's backward reads its output.

    ``own`` has the values that backwards of their own blocks read. If such a backward reads only a
    layer norm's mean and rstd, then these small results are saved.
    """
    if node.target is operator.getitem:
        return _is_cheap(picked(node)[0], own)
    if node.target is aten.native_layer_norm.default:
        return any(picked(n)[1] == 0 and n in own for n in node.users)
    return node.target in _CHEAP and is_tensor(node)


def _pays(node: fx.Node) -> bool:
    """Whether recomputing saves memory; a single number is saved instead, but views are always
    written again.
    """
    return node.target in _VIEWS or not is_tensor(node) or fake_of(node).numel() > 1


def _widens(node: fx.Node) -> bool:
    """Whether a call casts a value to a dtype of more bytes: bf16 to f32."""
    if node.target is not aten._to_copy.default:
        return False
    return bool(fake_of(node).element_size() > fake_of(first_operand(node)).element_size())


def _readers(node: fx.Node) -> list[fx.Node]:
    """The calls of the backward that read a value of the forward."""
    return [u for u in node.users if u.op == "call_function" and value(u).phase == "B"]
