"""Dropout masks that the backward draws again: the forward leaves the generator's state in place
of the mask.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import fx

from partc.graph import Graph, fake_of, ops, set_fake, set_value, value
from partc.graph.graph_edits import run_fake_of
from partc.plan.sharding import REPLICATED


@dataclass(frozen=True)
class Draw:
    """Where a mask came from: the generator's state before it, and the share of zeros."""

    state: fx.Node
    p: float


def note_draws(graph: Graph, masks: Iterable[fx.Node]) -> dict[fx.Node, Draw]:
    """Let the forward keep the state each mask is drawn from: the new mask nodes, in place.

    ``dropout_mask(x, p) --> drawn_mask(x, p)[0], [1]``
    """
    found: dict[fx.Node, Draw] = {}
    for old in list(masks):
        with graph.fx.inserting_before(old):
            drawn = graph.fx.call_function(ops.drawn_mask, old.args, old.kwargs)
            mask = graph.fx.call_function(operator.getitem, (drawn, 0))
            state = graph.fx.call_function(operator.getitem, (drawn, 1))
        fakes = run_fake_of(graph.fx, ops.drawn_mask, drawn.args, drawn.kwargs)
        known = value(old)
        set_value(drawn, replace(known, shape=(), name=""))
        set_value(mask, known)
        set_value(state, replace(known, shape=(), dtype=torch.uint8, sharding=REPLICATED, name=""))
        for node, fake in ((drawn, fakes), (mask, fake_of(old)), (state, fakes[1])):
            set_fake(node, fake)
        old.replace_all_uses_with(mask)
        graph.fx.erase_node(old)
        p = drawn.args[1]
        assert isinstance(p, float)
        found[mask] = Draw(state, p)
    return found


def draws_numbers(node: fx.Node) -> bool:
    """Whether a call gives something else each time; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return node.target in ops.DRAWS
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def replayed(graph: fx.Graph, mask: fx.Node, draw: Draw) -> fx.Node:
    """The call that draws a mask again, where the graph is being written."""
    fake = fake_of(mask)
    return graph.call_function(ops.same_mask, (draw.state, draw.p, tuple(fake.shape), fake.dtype))
