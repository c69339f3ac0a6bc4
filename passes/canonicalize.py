"""Bring a traced graph into the canonical form that rules, passes and emitter know."""

from __future__ import annotations

from partc.graph import Graph, resolve_forward
from partc.passes.cancel_transposes import cancel_transposes
from partc.passes.drop_noops import drop_noops
from partc.passes.fold_dropout import fold_dropout
from partc.passes.fold_linear import fold_linear
from partc.passes.merge_draws import merge_draws
from partc.passes.merge_reshapes import merge_reshapes

PASSES = (
    merge_draws,
    drop_noops,
    fold_dropout,
    cancel_transposes,
    fold_linear,
    merge_reshapes,
    cancel_transposes,
    drop_noops,
)


def canonicalize(graph: Graph) -> None:
    """Apply the passes in order; the graph computes what it did."""
    for rewrite in PASSES:
        rewrite(graph)
    resolve_forward(graph)
    graph.fx.lint()
