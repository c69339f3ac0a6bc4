"""The predicted step of a pipeline: that of its simulated schedule, and the optimizer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from partc.cost.pipeline_step import Step
from partc.cost.prediction import Prediction, Work, optimizer_time, prediction
from partc.cost.roofline import Spent
from partc.graph import Phase
from partc.plan.mesh import PP, Mesh

_NAMES: dict[Phase, str] = {
    "S": "forward", "F": "forward", "B": "backward", "W": "backward", "E": "gradients"
}  # fmt: skip
BUBBLE = "bubble"  # of the pipeline: waiting for what other ranks compute


def predict_pipeline(
    stages: Sequence[Mapping[Phase, Spent]],
    step: Step,
    trained_bytes: Sequence[int],
    work: Work,
    mesh: Mesh,
    *,
    flops: int,
    optimizer: str,
) -> Prediction:
    """The step as the rank that computes longest spends it.

    ``stages``: what a microbatch of each stage spends; ``trained_bytes``: parameters of each
    pipeline rank; ``flops``: of one microbatch on one rank of every stage.
    """
    schedule, simulated = step.schedule, step.simulated
    rank = max(range(schedule.ranks), key=simulated.busy.__getitem__)
    spent = {name: Spent() for name in ("forward", "backward", "gradients", "waiting")}
    for stage in schedule.stages_of(rank):
        for phase, each in stages[stage].items():
            once = phase in ("S", "E")
            spent[_NAMES[phase]].add(each, 1 if once else schedule.microbatches)
    left = simulated.makespan - simulated.busy[rank] - spent["gradients"].seconds
    transfers = max(0.0, simulated.exposed[rank] - spent["gradients"].seconds)
    exposed = min(transfers, max(0.0, left))
    spent["waiting"] = Spent(
        exposed={BUBBLE: max(0.0, left) - exposed, PP: exposed},
        hidden={PP: max(0.0, _sent_s(step, rank) - transfers)},
    )
    spent["optimizer"] = max(
        (
            optimizer_time(each, mesh.at_place(place).hardware.device, optimizer)
            for place, each in enumerate(trained_bytes)
        ),
        key=lambda each: each.seconds,
    )
    return prediction(spent, work, mesh, flops * schedule.microbatches / schedule.ranks)


def _sent_s(step: Step, rank: int) -> float:
    """How long the messages that a rank sends in a step take."""
    schedule, transfer = step.schedule, step.simulated.costs.transfer
    seconds = 0.0
    for boundary, (here, there) in enumerate(pairwise(schedule.rank_of)):
        if here != there:
            sends = (here == rank) + (there == rank and schedule.kinds > {"F"})
            seconds += sends * schedule.microbatches * transfer[boundary]
    return seconds
