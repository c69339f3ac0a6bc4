"""Bring a traced graph into the canonical form that rules, passes and emitter know."""

from __future__ import annotations

from partc.graph import Graph
from partc.graph.graph_edits import rename_calls
from partc.passes.canonical.cancel_transposes import cancel_transposes
from partc.passes.canonical.drop_noops import drop_noops
from partc.passes.canonical.fold_dropout import fold_dropout
from partc.passes.canonical.fold_linear import fold_linear
from partc.passes.canonical.fold_masks import fold_masks
from partc.passes.canonical.free_fills import free_fills
from partc.passes.canonical.index_rows import index_rows
from partc.passes.canonical.join_scatters import join_scatters
from partc.passes.canonical.merge_draws import merge_draws
from partc.passes.canonical.merge_given import merge_given
from partc.passes.canonical.merge_reshapes import merge_reshapes
from partc.passes.canonical.narrow_expands import narrow_expands
from partc.passes.canonical.open_masks import open_masks
from partc.passes.canonical.open_means import open_means
from partc.passes.canonical.open_strides import open_strides
from partc.passes.canonical.pad_slices import pad_slices
from partc.passes.canonical.squeeze_sums import squeeze_sums
from partc.passes.canonical.unsort_rows import unsort_rows

PASSES = (
    open_strides,
    merge_draws,
    drop_noops,
    fold_dropout,
    fold_masks,
    open_masks,
    open_means,
    pad_slices,
    index_rows,
    join_scatters,
    unsort_rows,
    narrow_expands,
    cancel_transposes,
    fold_linear,
    merge_reshapes,
    squeeze_sums,
    cancel_transposes,
    drop_noops,
    free_fills,
    merge_given,
)


def canonicalize(graph: Graph) -> None:
    """Apply the passes in order; the graph computes what it did."""
    for rewrite in PASSES:
        rewrite(graph)
    rename_calls(graph)
    graph.fx.lint()
