"""Choose how many blocks ahead FSDP gathers weights where the step turns from forward to backward.

With one block ahead the network is idle for most of the head and the loss. With two, the block
after the next is gathered meanwhile; this costs the memory of that block's whole weights.
"""

from __future__ import annotations

from dataclasses import replace

from partc.cost.step_events import StepEvents
from partc.cost.step_walk import step_seconds
from partc.plan import Plan
from partc.plan.mesh import Mesh

MOST = 2  # a block computes about as long as a gather takes: a third ahead gains nothing


def prefetches(plan: Plan, step: StepEvents, mesh: Mesh) -> tuple[int, ...]:
    """The numbers of blocks to try, in order; a later one is the fallback for lack of memory.

    The plan's own number if it has one, (0,) if no block's weights are gathered, else (2, 1) or
    (1,), whichever makes the predicted step faster.
    """
    if plan.prefetch or not any(run.gathers for run in step.runs):
        return (plan.prefetch,)
    one_s, two_s = (step_seconds(replace(step, prefetch=num), mesh) for num in (1, MOST))
    return (MOST, 1) if two_s < one_s else (1,)
