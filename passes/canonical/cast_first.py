"""Cast a weight before it is viewed: a shard can be cast where it is stored, a view of one cannot.

``cast(t(w))`` is ``t(cast(w))``, and casts of all the chunks of a fused weight are chunks of one
cast. Autocast casts the weight itself; models that say ``w.t().bfloat16()`` then read alike.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod

import torch
from torch import fx

from partc.graph import Graph, fake_of, first_operand, is_call, shape_of, value
from partc.graph.casts import VIEWS, is_cast
from partc.graph.graph_edits import call_before, drop_dead, replace_by

aten = torch.ops.aten
Chain = list[fx.Node]  # the views between a parameter and a cast, the parameter's first


def cast_first(graph: Graph) -> None:
    """``bf16(t(w)) -> t(bf16(w))`` for a parameter ``w``, where its casts read all of it."""
    found: dict[tuple[fx.Node, torch.dtype, str], dict[fx.Node, Chain]] = defaultdict(dict)
    for node in graph.calls():
        chain = _views_before(node) if is_cast(node) else []
        if chain:
            key = first_operand(chain[0]), fake_of(node).dtype, value(node).phase
            found[key][node] = chain
    order = {node: i for i, node in enumerate(graph.calls())}
    for (param, _, _), chains in found.items():
        if sum(prod(shape_of(cast)) for cast in chains) >= prod(shape_of(param)):
            _move(param, chains, order)
    drop_dead(graph)


def _views_before(cast: fx.Node) -> Chain:
    """The views from a parameter to a cast; none where anything else is computed between them."""
    chain: Chain = []
    node = first_operand(cast)
    while is_call(node, *VIEWS):
        chain.insert(0, node)
        node = first_operand(node)
    return chain if node.op == "placeholder" and value(node).kind == "param" else []


def _move(param: fx.Node, chains: dict[fx.Node, Chain], order: dict[fx.Node, int]) -> None:
    """Write one cast of the parameter, and behind it each view of the chains once."""
    earliest = min((chain[0] for chain in chains.values()), key=order.__getitem__)
    dtype = fake_of(next(iter(chains))).dtype
    moved = {param: call_before(earliest, aten._to_copy.default, param, dtype=dtype)}
    for cast, chain in chains.items():
        for view in chain:
            if view not in moved:
                source = moved[first_operand(view)]
                moved[view] = call_before(view, view.target, source, *view.args[1:], **view.kwargs)
        replace_by(cast, moved[chain[-1]])
