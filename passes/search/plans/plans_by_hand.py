"""A user's preset plan as a candidate, so that plans near it can be estimated and compared."""

from __future__ import annotations

from partc.errors import PartcError
from partc.graph import Graph
from partc.graph.given_back import waits_for_script
from partc.passes.runner import Table
from partc.passes.search.plans.candidate import RECOMPUTE, Candidate, Data
from partc.passes.search.plans.candidates import WORDS, names_axes, sizes_of
from partc.passes.search.plans.search_plans import Search, Taken, scaling_models_of
from partc.plan import Plan
from partc.plan.batch import BATCH, without_axes
from partc.plan.mesh import Mesh

SCHEDULES = {"": "1f1b", "1f1b": "1f1b", "zb-h1": "zb-h1"}
SHARDED: dict[str, Data] = {"ddp": "ddp", "zero1": "zero1", "fsdp": "fsdp", "hsdp": "fsdp"}


def by_hand(graph: Graph, mesh: Mesh, plan: Plan, table: Table) -> Taken | None:
    """The candidate of a preset's plan, with a search over its mesh.

    None if candidates cannot express the plan, if the step has no loss, or if the step cannot be
    sharded over 2 ranks per axis, as reading a scaling model requires.
    """
    candidate = candidate_of(mesh, plan)
    if candidate is None or graph.loss is None:
        return None
    words = ("", *WORDS) if candidate.tp > 1 else ("",)
    try:  # without estimates the plan still compiles: only the comparison is left out
        scaling_models = scaling_models_of(
            graph, words, RECOMPUTE, table, without_axes(plan.inputs)
        )
    except PartcError:
        return None
    turns = not waits_for_script(graph)
    search = Search(mesh, scaling_models, plan.memory_bytes, in_turns=turns)
    return Taken(search, candidate, searched=False)


def candidate_of(mesh: Mesh, plan: Plan) -> Candidate | None:
    """The candidate of a plan that has preset words alone; None if candidates cannot express it."""
    named = any({*cuts} - {BATCH} for cuts in plan.inputs.values())
    own = plan.params or named or plan.values or plan.gather or plan.scatter
    if own or plan.stages or plan.order or plan.virtual_stages or plan.schedule not in SCHEDULES:
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
