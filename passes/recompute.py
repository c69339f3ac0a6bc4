"""What the backward computes again instead of keeping it, as ``plan.recompute`` says.

``cheap``: sums, products, casts and views of what is kept anyway cost little time and most of the
activation memory; results of ``exp``, ``tanh`` and the like are kept. ``attention`` (selective
recomputation, Korthikanti et al. 2022, arXiv 2205.05198): also what stands between the projections
of an attention, where it takes few FLOPs per byte. ``block`` (full recomputation, Chen et al. 2016,
arXiv 1604.06174): a block of a stack keeps what enters it. A list of module paths does so for these
modules; the rest is as with ``cheap``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import fx

from partc import collectives, ops
from partc.graph import (
    Graph,
    block_of,
    held,
    is_tensor,
    is_weight,
    results_of,
    tensor_args,
    value,
)
from partc.passes.copy_forward import Copies
from partc.passes.flops import node_flops
from partc.passes.recompute_regions import recompute_regions
from partc.passes.replay_masks import draws_numbers, note_draws
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
    }
)
# An H100 computes 989e12 bf16 FLOP in the time in which it moves 3.35e12 bytes: what takes fewer
# FLOPs per byte is computed again in about the time in which it would be read.
FLOPS_PER_BYTE = 300


def recompute(graph: Graph, plan: Plan) -> Graph:
    """Give the backward of a local graph its own copies of what ``plan`` recomputes, in place.

    Runs before waits are placed. PlanError where a path of the plan names no module that runs.
    """
    if plan.recompute == "none":
        return graph
    recompute_regions(graph, plan)
    inside = _attention_cores(graph) if plan.recompute == "attention" else {}
    draws = note_draws(graph, [n for n in inside if n.target is ops.dropout_mask])
    Copies(graph, _recomputable(graph, inside, draws), block_of, draws).insert()
    return graph


def _recomputable(
    graph: Graph, inside: Collection[fx.Node], draws: Collection[fx.Node]
) -> set[fx.Node]:
    """Forward values that the backward reads and that follow cheaply from what is kept anyway."""
    serves = Copies(graph, (), block_of).serves
    saved = {n for n in graph.calls() if value(n).phase == "F" and _read_backward(n)}
    again: set[fx.Node] = set(draws)

    def at_hand(operand: fx.Node, node: fx.Node) -> bool:
        """Whether the backward has an operand anyway, or computes it again in the same block."""
        kept = operand.op == "placeholder" or operand in saved
        return kept or (operand in again and serves(operand, node))

    for node in graph.calls():
        if value(node).phase != "F" or not (node in inside or _is_cheap(node)):
            continue
        if all(at_hand(operand, node) for operand in tensor_args(node)):
            again.add(node)
    return {n for n in again if n not in saved or _pays(n)}


def _is_cheap(node: fx.Node) -> bool:
    return node.target in _CHEAP and is_tensor(node)


def _pays(node: fx.Node) -> bool:
    """Whether keeping it would cost memory, or it is a view that is written as easily again."""
    return node.target in _VIEWS or held(node).numel() > 1


def _read_backward(node: fx.Node) -> bool:
    return any(u.op == "call_function" and value(u).phase == "B" for u in node.users)


# between projections ------------------------------------------------------------------------------
def _attention_cores(graph: Graph) -> dict[fx.Node, None]:
    """Forward values around products of activations with activations, up to what reads a weight,
    that take few FLOPs per byte.
    """
    calls = [n for n in graph.calls() if value(n).phase == "F" and not _reads_weight(n)]
    free = dict.fromkeys(n for n in calls if _repeats(n))
    products = [n for n in free if node_flops(n)]
    core = {**_reached(products, free, tensor_args), **_reached(products, free, _readers)}
    return {n: None for n in core if node_flops(n) <= FLOPS_PER_BYTE * _num_bytes(n)}


def _reached(
    start: Sequence[fx.Node], free: Collection[fx.Node], near: Callable[[fx.Node], list[fx.Node]]
) -> dict[fx.Node, None]:
    """What is reached from calls within their blocks, themselves among it."""
    found: dict[fx.Node, None] = {}
    todo = list(start)
    while todo:
        node = todo.pop()
        if node not in found:
            found[node] = None
            todo += [n for n in near(node) if n in free and block_of(n) == block_of(node)]
    return found


def _repeats(node: fx.Node) -> bool:
    """Whether a call may be made once more without communication, and gives the same."""
    known = node.target is ops.dropout_mask or not draws_numbers(node)
    return known and node.target not in collectives.COLLECTIVES


def _readers(node: fx.Node) -> list[fx.Node]:
    return list(node.users)


def _reads_weight(node: fx.Node) -> bool:
    return any(is_weight(operand) for operand in tensor_args(node))


def _num_bytes(node: fx.Node) -> int:
    """Bytes of all that a call gives."""
    return sum(int(fake.nbytes) for fake in results_of(node) if fake is not None)
