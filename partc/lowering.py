"""A model in, its joint graph out; a joint graph and a plan in, the complete plan and one rank's
graph, its waits not yet placed, out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor, nn

from partc.graph import Graph
from partc.graph.folds import Fold, Kept
from partc.passes.canonical.canonicalize import canonicalize
from partc.passes.canonical.decompose_custom_ops import decompose_custom_ops
from partc.passes.canonical.fold_layers import Unfolded, confirm, fold_layers
from partc.passes.canonical.functionalize import functionalize
from partc.passes.recompute.choose import recompute
from partc.passes.shard.apply_preset import complete
from partc.passes.shard.count_whole import count_whole
from partc.passes.shard.fuse_loss import fuse_loss
from partc.passes.shard.insert_collectives import insert_collectives
from partc.passes.shard.local_batch_norm import check_statistics, has_batch_norm
from partc.passes.shard.microbatches import count_targets
from partc.passes.shard.propagate import propagate
from partc.passes.shard.split_bias import fuse_bias, split_bias
from partc.passes.stages.assign_stages import assign_stages
from partc.passes.stages.choose_stages import choose_schedule, choose_stages
from partc.plan import Plan
from partc.plan.mesh import layout_mesh
from partc.trace.capture import Objective
from partc.trace.record import Source, keep_known_buffers
from partc.trace.scan_blocks import no_calls


def trace(
    model: nn.Module, inputs: Sequence[Tensor], loss: Objective | None = None, *,
    fold: bool = False, kept: Kept | None = None,
) -> Graph:  # fmt: skip
    """The joint graph of ``loss(model, *inputs)`` and its backward; the model is left as it was.

    Without a loss the model's own result is the loss (or has one as ``.loss``); under
    ``torch.no_grad()`` it is then the forward alone, with every tensor of the result by name.
    With ``fold`` the middle of a stack of equal blocks is left out; ``graph.folds`` says which.
    ``kept`` leaves out what a folded graph has shown to be equal to the rest; Unfolded if the
    backward tells it apart.
    """
    source = Source.of(model, inputs, loss)
    if kept is not None:
        if path := no_calls(model, kept.left_out):
            raise Unfolded(path)
        graph = _functional(source, kept.left_out)
        confirm(graph, kept)
    elif fold:
        graph = _folded(source)
    else:
        graph = _functional(source, ())
    canonicalize(graph)
    return graph


def _folded(source: Source) -> Graph:
    """A folded graph, in which blocks were skipped where their backward is equal too."""
    skipped: Sequence[Fold] = source.spare_blocks()
    while True:
        graph = _functional(source, skipped)
        try:
            fold_layers(graph, skipped)
            return graph
        except Unfolded as unequal:
            skipped = [fold for fold in skipped if not fold.covers(str(unequal))]


def _functional(source: Source, left_out: Sequence[Fold]) -> Graph:
    """The graph without ops that write in place, or ops of the user's own, and some blocks."""
    graph = source.recorded(left_out)
    decompose_custom_ops(graph)
    functionalize(graph)
    keep_known_buffers(graph, source.model, left_out)
    return graph


def localize(graph: Graph, plan: Plan, *, strict: bool = False) -> tuple[Plan, Graph]:
    """Complete a plan for a traced graph and make the local graph, its waits not yet placed."""
    full = staged_plan(graph, plan)
    if full.stages:
        assign_stages(graph, graph.kept.points if graph.kept else full.stages)
    graph.mesh = layout_mesh(graph.mesh, full.microbatches)
    if full.microbatches > 1:
        count_targets(graph)
        full = with_local_statistics(full, graph)
    if full.batch_norm == "local":
        check_statistics(graph, prod(map(graph.mesh.size, full.batch_axes)), full.microbatches)
    warnings = [*full.notes, *_untrained(graph)]
    choices = propagate(graph, full, strict=strict, warnings=warnings)
    full = full.changed(notes=tuple(dict.fromkeys(warnings)))
    local = count_whole(fuse_bias(insert_collectives(graph, full, choices)))
    return full, recompute(local, full)


def _untrained(graph: Graph) -> list[str]:
    """A note of parameters that no step will change; of many the first, as a fold has not all."""
    if not graph.untrained:
        return []
    first, *others = graph.untrained
    names = f"{first} and others have" if others else f"{first} has"
    return [f"{names} no gradient: the loss does not depend on it, so no optimizer changes it"]


def staged_plan(graph: Graph, plan: Plan) -> Plan:
    """A complete plan, with the stages and the schedule of a pipeline; biases stand apart then."""
    split_bias(graph)
    fuse_loss(graph)
    full = choose_schedule(graph, complete(plan, graph, graph.mesh))
    return choose_stages(graph, full)


def with_local_statistics(plan: Plan, graph: Graph) -> Plan:
    """Batch statistics cannot be those of microbatches that have not run yet; the plan says so."""
    if not has_batch_norm(graph):
        return plan
    note = "BatchNorm uses the statistics of each rank's piece of each microbatch, one by one"
    return plan.changed(batch_norm="local", notes=(*plan.notes, note))
