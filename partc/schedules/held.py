"""How much memory a pipeline rank holds during a step.

Tensors are allocated and freed in program order, as by a caching allocator: the order of a rank's
events alone decides the peak, their times only when it is reached.
"""

from __future__ import annotations

from collections.abc import Sequence

from partc.schedules.programs import COMPUTE, RECEIVE, SEND, SENT, RankProgram
from partc.schedules.step_costs import StepCosts

Curve = list[tuple[float, float]]  # (time, held from then on)


def memory_curve(program: RankProgram, costs: StepCosts, ends: Sequence[float]) -> Curve:
    """Activations, received messages and sends under way that a rank holds, at every change.

    A received message has its memory from the posting of its receive to the end of the action that
    reads it (from then on a stage's input is part of its ``activation``), a sent one from the end
    of its action until its send is waited for. An activation is there from the start of ``F`` to
    the end of ``B`` or ``I``, ``waiting`` from there to the end of ``W``.
    """
    wiring, count = program.wiring, program.wiring.microbatches
    sizes = costs.of_messages(wiring, costs.message) if costs.message else []
    read = _messages_read(program)
    posted: set[int] = set()
    curve: Curve = []
    held = 0.0
    for index, (code, number) in enumerate(program.events):
        if code == COMPUTE:
            row, microbatch = divmod(number, count)
            stage, kind = divmod(row, 4)
            if kind == 0:
                held += costs.activation[stage]
                curve.append((ends[index - 1] if index else 0.0, held))
            held -= _freed(costs, stage, kind)
            source = read[row]
            if source >= 0 and source * count + microbatch in posted:
                held -= sizes[source]
            curve.append((ends[index], held))
        elif sizes and code in (RECEIVE, SEND, SENT):
            if code == RECEIVE:
                posted.add(number)
            held += -sizes[number // count] if code == SENT else sizes[number // count]
            curve.append((ends[index], held))
    return curve


def _freed(costs: StepCosts, stage: int, kind: int) -> float:
    """What an action frees at its end; after I only what W needs is left."""
    activation, waiting = costs.activation[stage], costs.waiting[stage]
    return (0.0, activation, activation - waiting, waiting)[kind]


def _messages_read(program: RankProgram) -> list[int]:
    """The row of the messages that an action reads, by ``4 * stage + kind``; -1 for none."""
    stages = program.wiring.stages
    rows = []
    for stage in range(stages):
        forward = 2 * (stage - 1) if stage > 0 else -1
        backward = 2 * (stage + 1) + 1 if stage + 1 < stages else -1
        rows += [forward, backward, backward, -1]
    return rows
