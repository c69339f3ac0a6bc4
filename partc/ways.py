"""The ways in which a plan's step may be printed: the fastest first, the least memory last."""

from __future__ import annotations

from collections.abc import Iterator

from partc.cost.memory_limit import Peak
from partc.key_readers import keep_local
from partc.lowering import to_local_graph
from partc.passes.overlap.order_step import order_step
from partc.passes.overlap.prefetch import prefetches
from partc.passes.runner import State, run
from partc.passes.stages.schedule_stages import stage_ways
from partc.printing import noted_pieces


def printed_peaks(way: State) -> list[Peak]:
    """The peaks of a way's program, which is printed once."""
    if "cost" not in way.made:
        run(way, "print_step", "cost_pipeline")
    peaks: list[Peak] = way.made["cost"].peaks()
    return peaks


def compile_stage(state: State) -> Iterator[State]:
    """The rest of ``compile`` for one stage, up to the account of its memory: every rank runs the
    same role. The step as it is fastest, and as it needs less memory, the least last.
    """
    state.made["joint"] = state.graph
    to_local_graph(state)
    keep_local(state)
    run(state, "check_plan")
    for way in order_step(state):
        run(way, "tidy", "record_events")
        way.plan = noted_pieces(way.plan, [way.graph])
        (tape,) = way.made["tapes"].values()
        for prefetch in prefetches(way.plan, tape, way.mesh):
            each = way.beside()
            each.plan = way.plan.changed(prefetch=prefetch)
            yield run(each, "choose_messages", "account_step")


def compile_pipeline(state: State) -> Iterator[State]:
    """The rest of ``compile`` for several stages or microbatches, up to the account of memory.

    Every schedule is proved to finish before anything is printed: CheckError or PlanError names who
    would wait for whom.
    """
    state.made["joint"] = state.graph
    to_local_graph(state)
    keep_local(state)
    run(state, "check_plan", "spread_params")
    for stages in stage_ways(state):
        each = stages.state
        each.made["staged"] = stages
        each.plan = noted_pieces(each.plan, each.stages)
        yield run(each, "choose_backend", "account_pipeline")
