"""Predict the time of a pipeline's training step from its simulated schedule and the optimizer."""

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
    """The predicted step, divided into the phases of the rank that computes longest.

    ``stages``: the time of each stage's phases, for one microbatch. ``trained_bytes``: bytes of
    trainable parameters per pipeline rank. ``flops``: those of one microbatch, summed over one
    rank of every stage.
    """
    schedule, simulated = step.schedule, step.simulated
    rank = max(range(schedule.ranks), key=simulated.busy.__getitem__)
    spent = {name: Spent() for name in ("forward", "backward", "gradients", "waiting")}
    for stage in schedule.stages_of(rank):
        for phase, each in stages[stage].items():
            once = phase in ("S", "E")  # before and after all microbatches
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
    """Seconds of all messages that a rank sends to other stages in one step, hidden or not."""
    schedule, transfer = step.schedule, step.simulated.costs.transfer
    seconds = 0.0
    for boundary, (here, there) in enumerate(pairwise(schedule.rank_of)):
        if here != there:
            sends = (here == rank) + (there == rank and schedule.kinds > {"F"})
            seconds += sends * schedule.microbatches * transfer[boundary]
    return seconds
