"""A plan that a user has written as a candidate, so that what is near it can be estimated."""

from __future__ import annotations

from partc.errors import PartcError
from partc.graph import Graph
from partc.passes.runner import Table
from partc.passes.search.plans.candidate import RECOMPUTE, Candidate, Data
from partc.passes.search.plans.candidates import WORDS, names_axes, sizes_of
from partc.passes.search.plans.search_plans import Search, Taken, scaling_models_of
from partc.plan import Plan
from partc.plan.mesh import Mesh

SCHEDULES = {"": "1f1b", "1f1b": "1f1b", "zb-h1": "zb-h1"}
SHARDED: dict[str, Data] = {"ddp": "ddp", "zero1": "zero1", "fsdp": "fsdp", "hsdp": "fsdp"}


def by_hand(graph: Graph, mesh: Mesh, plan: Plan, table: Table) -> Taken | None:
    """The candidate that a preset's plan is, among those on the same axes; None where estimates
    do not know its words, or where the step cannot be cut in two for its laws.
    """
    candidate = candidate_of(mesh, plan)
    if candidate is None or graph.loss is None:
        return None
    words = ("", *WORDS) if candidate.tp > 1 else ("",)
    try:
        scaling_models = scaling_models_of(graph, words, RECOMPUTE, table)
    except PartcError:
        return None
    return Taken(Search(mesh, scaling_models, plan.memory_bytes), candidate, searched=False)


def candidate_of(mesh: Mesh, plan: Plan) -> Candidate | None:
    """The candidate that a plan of nothing but a preset's words is, if estimates know them."""
    own = plan.params or plan.inputs or plan.values or plan.gather or plan.scatter
    if own or plan.stages or plan.order or plan.chunks or plan.schedule not in SCHEDULES:
        return None
    again = next((way for way in RECOMPUTE if way == plan.recompute), None)
    if not names_axes(mesh) or mesh.num_ranks == 1 or again is None:
        return None
    pp, replicate, shard, tp = sizes_of(mesh)
    words = plan.preset.split("+")
    tensor = next((word for word in words if word in WORDS), "megatron") if tp > 1 else ""
    data = next((word for word in words if word not in WORDS), "ddp")
    if data not in SHARDED or (replicate > 1) != (data == "hsdp"):
        return None
    return Candidate(
        replicate, shard, tp, pp, plan.microbatches, SHARDED[data], tensor,
        schedule=SCHEDULES[plan.schedule], recompute=again, given=mesh,
    )  # fmt: skip
