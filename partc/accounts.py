"""What each rank will hold in memory, counted before printing, where there is a limit."""

from __future__ import annotations

from collections.abc import Sequence

from partc.codegen.account.ranks import rank_memories
from partc.codegen.account.step import step_memory
from partc.codegen.files.island import Islands
from partc.cost.memory import state_bytes
from partc.cost.memory_limit import Peak, memory_limits
from partc.cost.stage_cost import num_bytes
from partc.graph import Graph
from partc.graph.folds import likes_of
from partc.passes.overlap.bucket_collectives import BYTES_PER_MB
from partc.passes.stages.schedule_stages import Stages
from partc.plan import Plan
from partc.plan.decided import GLOO
from partc.plan.mesh import Mesh
from partc.reports.pipeline_cost import state_of_rank

OPTIMIZER = "adamw"  # the states that a limit counts


def account_step(
    graph: Graph, plan: Plan, mesh: Mesh, islands: Islands | None = None
) -> dict[str, object]:
    """The peak of every rank's memory in a step of one stage."""
    if memory_limits(mesh, plan.memory_bytes) is None:
        return {"peaks": None}
    found = step_memory(
        graph, prefetch=plan.prefetch, messages=bool(plan.messages), backend=plan.backend or GLOO
    )
    state = state_bytes(graph, OPTIMIZER)
    kept = {
        "parameters": state.params,
        f"optimizer {OPTIMIZER}": state.optimizer,
        "buffers and inputs": state.buffers + state.inputs + _kept_by(islands, [graph]),
    }
    return {"peaks": [_peak("every rank", kept, found.peak, found.at)]}


def account_pipeline(
    plan: Plan, staged: Stages, mesh: Mesh, islands: Islands | None = None
) -> dict[str, object]:
    """The peak of the memory of each pipeline rank."""
    if memory_limits(mesh, plan.memory_bytes) is None:
        return {"peaks": None}
    step, graphs = staged.step, staged.graphs
    ranks = rank_memories(
        graphs, likes_of(staged.state.graph.kept, len(graphs)), step.schedule, step.wiring,
        bucket_bytes=round(plan.bucket_mb * BYTES_PER_MB),
        messages=bool(plan.messages), backend=plan.backend or GLOO,
    )  # fmt: skip
    peaks = []
    for rank, found in enumerate(ranks):
        stages = step.schedule.stages_of(rank)
        state = state_of_rank(graphs, stages, OPTIMIZER)
        kept = {
            "parameters": state.params,
            f"optimizer {OPTIMIZER}": state.optimizer,
            "buffers and inputs": state.buffers_and_inputs
            + _kept_by(islands, [graphs[stage] for stage in stages]),
        }
        peaks.append(_peak(f"pipeline rank {rank}", kept, found.peak, found.at))
    return {"peaks": peaks}


def _peak(rank: str, kept: dict[str, int], live: int, at: str) -> Peak:
    return Peak(rank, sum(kept.values()) + live, tuple(kept.items()), ((f"call {at}", live),))


def _kept_by(islands: Islands | None, graphs: Sequence[Graph]) -> int:
    """The bytes that a rank keeps from one meeting of islands to the next."""
    if islands is None or not any(graph.grads for graph in graphs):
        return 0
    params = {n: p for graph in graphs for n, p in graph.params.items() if n not in islands.frozen}
    return len(islands.how.keeps) * sum(
        graph.times(node) * num_bytes(node)
        for graph in graphs
        for name, node in graph.params.items()
        if params.get(name) is node
    )
