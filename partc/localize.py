"""A traced graph and a plan in; the complete plan and one rank's graph, its waits not yet placed,
out.
"""

from __future__ import annotations

from math import prod

from partc.graph import Graph
from partc.mesh import layout_mesh
from partc.passes.apply_preset import complete
from partc.passes.assign_stages import assign_stages
from partc.passes.choose_stages import choose_schedule, choose_stages
from partc.passes.count_whole import count_whole
from partc.passes.fuse_loss import fuse_loss
from partc.passes.insert_collectives import insert_collectives
from partc.passes.local_batch_norm import check_statistics, has_batch_norm
from partc.passes.microbatches import count_targets
from partc.passes.propagate import propagate
from partc.passes.recompute import recompute
from partc.passes.split_bias import fuse_bias, split_bias
from partc.plan import Plan


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
