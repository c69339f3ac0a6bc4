"""How many blocks' weights are gathered ahead where a step turns from one loop of blocks to the
next.

One block ahead the network has nothing to do for most of the head and the loss. With two it brings
the block after the next meanwhile, for as much memory as that block's whole weights take.
"""

from __future__ import annotations

from dataclasses import replace

from partc.cost.step_events import StepEvents
from partc.cost.step_walk import step_seconds
from partc.plan import Plan
from partc.plan.mesh import Mesh

MOST = 2  # a block computes for as long as the next one's weights are on their way


def prefetches(plan: Plan, tape: StepEvents, mesh: Mesh) -> tuple[int, ...]:
    """What a plan asks for; else 2 and 1 where two make the step faster, the fallback last.

    0 for plans that gather no blocks' weights.
    """
    if plan.prefetch or not any(run.gathers for run in tape.runs):
        return (plan.prefetch,)
    one_s, two_s = (step_seconds(replace(tape, prefetch=num), mesh) for num in (1, MOST))
    return (MOST, 1) if two_s < one_s else (1,)
